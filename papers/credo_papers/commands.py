"""What `credo list`, `credo run` and `credo claims` do."""

from __future__ import annotations

from json import dumps
from pathlib import Path

import joblib
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from credo.errors import CredoError, DataError
from credo.report.style import house_style
from credo.sweep import Outcome, run_many
from credo.types import Json
from credo_papers import ledger
from credo_papers.experiment import PRESETS, mean_and_error, summarise
from credo_papers.registry import EXPERIMENTS, find
from credo_papers.run_progress import watched

RUNS = "runs"
"""The folder of local runs unless another is given."""

COLOURS = {"reproduced": "green", "not reproduced": "red", "inconclusive": "yellow"}


def list_experiments(short: bool = False, json: bool = False) -> None:
    """Print every experiment with its claim and the ledger's verdict if it has one.

    Args:
        short: A line each instead: verdict, what it needs, and how long the quick preset takes.
        json: The rows of the ledger as JSON, with ``presets``, ``needs`` and ``minutes``.
    """
    verdicts = ledger.committed()
    rows = [
        (verdicts.get(e.id) or ledger.row_without_run(e))
        | {"presets": list(e.presets), "needs": list(e.needs), "minutes": e.minutes}
        for e in EXPERIMENTS.values()
    ]
    if json:
        print(dumps(rows, indent=2, ensure_ascii=False))
    elif short:
        Console().print(_short_table(rows))
    else:
        table = Table("experiment, verdict", "claim", show_lines=True)
        for r in rows:
            table.add_row(f"{r['id']}\n{_coloured(r['verdict'])}", escape(r["claim"]))
        Console().print(table)


def _short_table(rows: list[Json]) -> Table:
    table = Table(
        *(Column(heading, no_wrap=True) for heading in ("experiment", "verdict", "needs")),
        Column("quick", justify="right", no_wrap=True),
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="quick: about how long one seed takes on one core",
    )
    for r in rows:
        duration = duration_in_words(60 * r["minutes"])
        table.add_row(r["id"], _coloured(r["verdict"]), " ".join(r["needs"]), duration)
    return table


def duration_in_words(seconds: float) -> str:
    """Rounded to what a person wants to know.

    >>> duration_in_words(6), duration_in_words(90), duration_in_words(2400)
    ('10 s', '1.5 min', '40 min')
    """
    if seconds < 60:
        return f"{max(10, round(seconds, -1)):.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes >= 10 else f"{minutes:.2g} min"


def run(
    name: str,
    preset: str = "quick",
    seeds: int = 3,
    folder: str | Path = RUNS,
    jobs: int | None = None,
) -> Json:
    """Run an experiment with seeds 0, 1, …, print what came out, and return the verdict's row.

    Everything is kept in ``<folder>/<name>/<preset>``: one folder per seed, the figures, and
    ``verdict.json``. Seeds that are finished are not run again, and unfinished ones resume. A seed
    that fails is reported and left out.

    Args:
        name: The experiment's id.
        preset: "quick" or "paper".
        seeds: How many seeds to repeat it with.
        folder: Where runs are kept.
        jobs: Processes to use at once; by default one for each core.

    Raises:
        CredoError: All seeds failed; the message says why the first did.
    """
    experiment = find(name)
    if preset not in PRESETS:
        raise DataError(f"preset={preset!r} is unknown; choose from {', '.join(PRESETS)}")
    if seeds < 1:
        raise DataError(f"seeds={seeds} must be at least 1")
    place = Path(folder) / experiment.id / preset
    trials = [
        {"experiment": experiment.id, "seed": seed, "settings": experiment.scale(preset)}
        for seed in range(seeds)
    ]
    jobs = min(jobs or joblib.cpu_count(), seeds)
    seconds = 60 * experiment.minutes if preset == "quick" else None
    with watched(place, seeds, jobs, experiment.presets[preset].epochs, seconds) as notice:
        outcomes = run_many(
            _run_trial, trials, jobs, place, _folder_of_seed, progress=False, notice=notice
        )
    finished = [o for o in outcomes if o.result is not None]
    if not finished:
        raise CredoError(f"{experiment.id} failed with every seed; the first: {outcomes[0].error}")
    results = [o.result for o in finished if o.result is not None]
    verdict = experiment.check(results)
    entry = ledger.row(experiment, preset, [o.trial["seed"] for o in finished], verdict)
    with house_style():
        figures = experiment.figures(results, place)
    ledger.write(place / "verdict.json", entry)
    _print_run(entry, results, outcomes, figures)
    return entry


def claims(json: bool = False, folder: str | Path = RUNS) -> None:
    """Print the committed verdicts together with those of local runs, which win.

    Args:
        json: Print the rows as JSON instead of a table.
        folder: Where the local runs are.
    """
    entries = ledger.committed() | ledger.local(folder)
    rows = [entries[id] for id in sorted(entries)]
    if json:
        print(dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(Column("claim, verdict, scale", max_width=28), "in words", show_lines=True)
    for r in rows:
        kind = " (a theorem)" if r["theorem"] else " (ours)" if r["ours"] else ""
        facts = f"[bold]{r['id']}[/]{kind}\n{_qualified(r)}\n[dim]{_scale_in_words(r)}[/]"
        table.add_row(facts, escape(r["claim"]))
    Console().print(table)


def _folder_of_seed(trial: Json) -> str:
    return f"seed-{trial['seed']}"


def _run_trial(trial: Json, folder: Path | None) -> Json:
    """One seed of an experiment; a function of JSON so that any process can run it."""
    if folder is None:
        raise DataError("an experiment's trial needs a folder to keep its run in")
    experiment = find(trial["experiment"])
    settings = experiment.presets[trial["settings"]["preset"]]
    return experiment.run_one(settings, trial["seed"], folder)


def _print_run(
    entry: Json, results: list[Json], outcomes: list[Outcome], figures: list[Path]
) -> None:
    console = Console()
    table = Table("quantity", "mean ± s.e.", title=f"{entry['id']}, {_scale_in_words(entry)}")
    for name, mean in summarise(results).items():
        if name.endswith("_se"):
            continue
        _, error = mean_and_error([float(r[name]) for r in results])
        table.add_row(name, f"{mean:.5g}" + (f" ± {error:.2g}" if len(results) > 1 else ""))
    console.print(table)
    console.print(escape(entry["claim"]))
    console.print(f"Verdict: {_qualified(entry)}")
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(f"[red]seed {outcome.trial['seed']} failed:[/] {escape(outcome.error)}")
    for path in figures:
        console.print(f"figure: {path}")


def _qualified(entry: Json) -> str:
    """The verdict; one that does not come from the paper's setting says so."""
    preset = entry["scale"]["preset"]
    qualification = "" if preset == "paper" else f" (preset {preset})"
    return _coloured(entry["verdict"]) + qualification


def _coloured(verdict: str | None) -> str:
    return f"[{COLOURS.get(verdict or '', 'dim')}]{verdict or 'not run yet'}[/]"


def _scale_in_words(entry: Json) -> str:
    scale = entry["scale"]
    count = len(entry["seeds"])
    words = [f"{count} seed{'s' if count > 1 else ''}", str(scale["net"])]
    if scale["num_data"]:
        words.append(f"{scale['num_data']:,} examples")
    if scale["epochs"]:
        words.append(f"{scale['epochs']} epochs")
    return ", ".join([*words, *(["local run"] if scale.get("run") else [])])
