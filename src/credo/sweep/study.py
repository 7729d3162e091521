r"""A study: what is searched, what a trial computes, and which of its numbers counts.

<folder>/<label>-<key>/     one trial: see `credo.trials.attempt`; its ``config.json`` has the
                            study's name, the trial's number, the seed and the settings
         space.json         the space searched last
         trials.csv, trials.jsonl    all trials in one table: see `credo.sweep.table`

Trial i of a random search is a function of (seed, i) alone, so asking for more trials goes on where
fewer ended. A failed trial, one whose objective is not finite included, is recorded and costs
nothing but itself.

    >>> from credo.sweep import Space, Study, Uniform, run_study
    >>> def bowl(settings, seed, folder):
    ...     return {"loss": (settings["x"] - 1) ** 2}
    >>> study = Study("bowl", "A parabola.", Space({"x": Uniform(-3, 3)}), bowl, objective="loss")
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     findings = run_study(study, 7, folder, sampler="grid", jobs=1, isolated=False,
    ...                       progress=False)
    >>> findings.best.trial["settings"]
    {'x': 1.0}
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import joblib

from credo import storage
from credo import workers as engines
from credo.checks import Count, checked
from credo.display import Display, Displayed
from credo.errors import DataError, NonFiniteError
from credo.sweep import table
from credo.sweep.samplers import SamplerName, make_sampler
from credo.sweep.space import Space
from credo.train.progress import Bar, progress_bar
from credo.trials import Outcome, run_many
from credo.types import Json

Direction = Literal["minimize", "maximize"]

SECONDS_BETWEEN_TABLES = 10.0
SHOWN = 10
"""The best trials that a notebook shows."""


@checked
@dataclass(frozen=True)
class Study:
    """What is searched: a function of settings, and the number of its result that is to be good.

    Args:
        name: What the sweep is called.
        about: In a sentence, what is searched and why.
        space: The settings that may be tried.
        run: From settings, seed and folder to numbers by name.
        objective: The number that counts.
        direction: Whether it is to be small or large.
    """

    name: str
    about: str
    space: Space
    run: Callable[[Json, int, Path], Json]
    objective: str
    direction: Direction = "minimize"


@dataclass(repr=False)
class Findings(Displayed):
    """The outcomes of a sweep in the order of its trials; `best` is the one to keep.

    Args:
        study: What was searched.
        outcomes: Of all trials, in their order.
    """

    study: Study
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def best(self) -> Outcome | None:
        """The trial with the best objective; None while none is finished."""
        return next(iter(self.ranked()), None)

    @property
    def failed(self) -> list[Outcome]:
        """The trials that have an error instead of a result."""
        return [o for o in self.outcomes if o.result is None]

    def ranked(self) -> list[Outcome]:
        """The finished trials, best first."""
        sign = 1 if self.study.direction == "minimize" else -1
        finished = [o for o in self.outcomes if o.result is not None]
        return sorted(finished, key=lambda o: sign * value_of(self.study, o))

    def _display(self) -> Display:
        ranked, objective = self.ranked(), self.study.objective
        best = f", best {objective} {value_of(self.study, ranked[0]):.4g}" if ranked else ""
        failed = f", {len(self.failed)} without a result" if self.failed else ""
        return Display(
            f"Findings of {self.study.name!r}: {len(self.outcomes)} trials{failed}{best}",
            'findings.best.trial["settings"], findings.ranked()',
            rows=[
                [
                    str(outcome.trial["number"]),
                    f"{value_of(self.study, outcome):.4g}",
                    *map(_short, outcome.trial["settings"].values()),
                ]
                for outcome in ranked[:SHOWN]
            ],
            header=("trial", objective, *ranked[0].trial["settings"]) if ranked else (),
        )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def value_of(study: Study, outcome: Outcome) -> float:
    """The objective of a finished trial.

    Args:
        study: What was searched.
        outcome: A trial that is finished.
    """
    assert outcome.result is not None
    return float(outcome.result[study.objective])


@checked
def run_study(
    study: Study,
    trials: Count,
    folder: str | Path,
    *,
    sampler: SamplerName = "random",
    engine: engines.EngineName = "local",
    jobs: Count | None = None,
    seed: int = 0,
    isolated: bool = True,
    progress: bool = True,
) -> Findings:
    """Run the study's trials, those not finished yet, and return all of them.

    Args:
        study: What is searched.
        trials: How many settings are tried.
        folder: Where everything is kept; see the module.
        sampler: "random", "grid" (at most ``trials`` points) or "optuna".
        engine: "local" processes, "ray" or "dask".
        jobs: Trials at a time; None is one per core.
        seed: Of the sampler and of every trial, so that trials differ by their settings alone.
        isolated: False with ``jobs=1`` saves the start of a worker process; a trial that dies then
            ends the sweep.
        progress: Whether to show a progress bar.
    """
    folder = Path(folder)
    source = make_sampler(sampler, study.space, study.direction, trials, seed)
    jobs = jobs or joblib.cpu_count()
    findings = Findings(study)
    standing = _Standing(study, folder)
    text = json.dumps(study.space.to_json(), indent=2) + "\n"
    storage.write_atomically(folder / "space.json", text.encode())
    try:
        with (
            progress_bar(progress, source.trials, "running", counted=True) as bar,
            engines.start(engine, jobs, isolated),
        ):
            while proposed := source.ask(jobs):
                first = len(findings.outcomes)
                batch = [
                    {"study": study.name, "number": first + i, "seed": seed, "settings": settings}
                    for i, settings in enumerate(proposed)
                ]
                outcomes = run_many(
                    partial(run_trial, study), batch, jobs, folder, _label, progress=False,
                    engine=engine, isolated=isolated,
                    notice=lambda outcome: _tell(bar, standing.note(outcome)),
                )  # fmt: skip
                findings.outcomes += outcomes
                source.tell([None if o.result is None else value_of(study, o) for o in outcomes])
    finally:
        table.rebuild(folder)
    return findings


def run_trial(study: Study, trial: Json, folder: Path | None) -> Json:
    """One trial, in any process: the study's numbers, and the seconds they took."""
    assert folder is not None
    started = time.monotonic()
    result = study.run(trial["settings"], trial["seed"], folder)
    value = result.get(study.objective)
    if not isinstance(value, int | float):
        raise DataError(f"the trial returned no number {study.objective!r}, but {sorted(result)}")
    if not math.isfinite(value):
        raise NonFiniteError(f"the objective {study.objective} is {value}")
    return {**result, "seconds": time.monotonic() - started}


def _label(trial: Json) -> str:
    return f"trial-{trial['number']:04d}"


def _tell(bar: Bar, text: str) -> str:
    bar.advance(text)
    return text


@dataclass
class _Standing:
    """The best so far, for the bar; and the table, renewed now and then."""

    study: Study
    folder: Path
    best: Outcome | None = None
    failed: int = 0
    written_at: float = -math.inf

    def note(self, outcome: Outcome) -> str:
        """Take an outcome in; the bar's text."""
        if outcome.result is None:
            self.failed += 1
        elif self.best is None or self._better(outcome, self.best):
            self.best = outcome
        if time.monotonic() - self.written_at > SECONDS_BETWEEN_TABLES:
            table.rebuild(self.folder)
            self.written_at = time.monotonic()
        parts = [f"{self.study.name}: no trial finished yet"]
        if self.best is not None:
            value = value_of(self.study, self.best)
            number = self.best.trial["number"]
            parts = [f"best {self.study.objective} {value:.5g} (trial {number})"]
        return " · ".join([*parts, *([f"{self.failed} failed"] if self.failed else [])])

    def _better(self, outcome: Outcome, than: Outcome) -> bool:
        ours, theirs = value_of(self.study, outcome), value_of(self.study, than)
        return ours < theirs if self.study.direction == "minimize" else ours > theirs
