"""What `credo sweep` does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from credo.errors import CredoError, DataError, FileFormatError
from credo.sweep import Findings, Space, Study, run_study
from credo.sweep.samplers import SamplerName
from credo.sweep.study import value_of
from credo.workers import EngineName
from credo_papers.studies import find_study

SHOWN = 5
"""How many of the best trials are printed."""


def sweep(
    name: str,
    trials: int,
    engine: EngineName = "local",
    jobs: int | None = None,
    sampler: SamplerName = "random",
    folder: str | Path = "runs",
    seed: int = 0,
    space: str | Path | None = None,
) -> Findings:
    """Run a study's trials in ``<folder>/<name>``, print the best, and return all of them.

    ``space`` is a JSON file whose parameters take the place of the study's own. If all trials
    fail, a `CredoError` says why.
    """
    study = find_study(name)
    if space is not None:
        study = replace(study, space=narrowed(study, Path(space)))
    place = Path(folder) / study.name
    findings = run_study(study, trials, place, sampler=sampler, engine=engine, jobs=jobs, seed=seed)
    if findings.best is None:
        raise CredoError(f"{name} failed in every trial; the first: {findings.outcomes[0].error}")
    _print(findings, place)
    return findings


def narrowed(study: Study, path: Path) -> Space:
    """The study's space with the parameters of a file in the place of its own."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} can't be read as JSON: {error}") from error
    given = Space.from_json(content).parameters
    strangers = sorted(set(given) - set(study.space.parameters))
    if strangers:
        raise DataError(
            f"{path} has parameters that {study.name} does not: {', '.join(strangers)}. It has "
            f"{', '.join(study.space.parameters)}"
        )
    return Space({**study.space.parameters, **given})


def _print(findings: Findings, place: Path) -> None:
    study, console = findings.study, Console()
    names = list(study.space.parameters)
    failed, total = len(findings.failed), len(findings.outcomes)
    title = f"{study.name}: best of {total - failed} trials"
    table = Table("trial", study.objective, *names, title=title)
    for outcome in findings.ranked()[:SHOWN]:
        settings = [_short(outcome.trial["settings"][name]) for name in names]
        value = f"{value_of(study, outcome):.5g}"
        table.add_row(str(outcome.trial["number"]), value, *settings)
    console.print(escape(study.about))
    console.print(table)
    if failed:
        first = findings.failed[0]
        console.print(
            f"[red]{failed} of {total} trials failed;[/] trial {first.trial['number']}: "
            f"{escape(str(first.error))}"
        )
    console.print(f"all trials: {place / 'trials.csv'}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))
