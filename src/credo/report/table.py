"""The table of a comparison: a row for each method, and one for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from credo.report.contest import Contest, Section
from credo.report.scores import Score, columns_of, score_of


@dataclass(frozen=True)
class Cell:
    """A number.

    Args:
        value: What the column is sorted by; NaN is last.
        text: As it is printed.
        error: Its standard error as it is printed, or nothing.
        beside: Small print below it.
        best: Whether no other mean is better.
        equal: Whether it may differ from the best by chance.
    """

    value: float
    text: str
    error: str = ""
    beside: str = ""
    best: bool = False
    equal: bool = False


@dataclass(frozen=True)
class Row:
    """A method, or one of its runs.

    Args:
        name: The method's.
        key: Its key on the page.
        cells: One for each column; none if it failed altogether.
        seeds: How many of its runs are in it, or which.
        failures: Why runs failed.
    """

    name: str
    key: str
    cells: Sequence[Cell]
    seeds: str = ""
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """What the template draws.

    Args:
        columns: The scores' names and what they are.
        rows: A row for each method.
        every: A row for each run, where there are several seeds.
        marked: Whether cells that may equal the best are marked.
    """

    columns: Sequence[tuple[str, Score]]
    rows: Sequence[Row]
    every: Sequence[Row]
    marked: bool


def table(contest: Contest) -> Section:
    """The table's section."""
    columns = columns_of(contest.evidence.runs)
    best = {name: contest.best(name) for name in columns}
    equals = {
        name: contest.as_good_as(top, name) if top and not score_of(name).price else []
        for name, top in best.items()
    }
    rows = [
        Row(
            method,
            contest.looks[method].key,
            [_cell(contest, method, name, best[name], equals[name]) for name in columns]
            if contest.runs(method)
            else [],
            f"{len(contest.runs(method))} of {len(contest.runs(method)) + len(lost)} runs",
            _reasons(lost),
        )
        for method in contest.names
        for lost in [contest.failures(method)]
    ]
    every = [
        Row(
            run.method,
            contest.looks[run.method].key,
            [
                Cell(value, score_of(name).form.format(value) if math.isfinite(value) else "—")
                for name in columns
                for value in [float(run.scores.get(name, math.nan))]
            ],
            str(run.seed),
            [run.error] if run.error is not None else [],
        )
        for run in contest.evidence.runs
    ]
    several = len(contest.seeds) > 1
    words = []
    if several:
        words.append(
            f"Means over {len(contest.seeds)} seeds, ± the standard error of the mean: how far the "
            "mean would move with other seeds."
        )
    else:
        words.append("One seed: what differs here may be the seed’s doing.")
    marked = any(equals.values())
    if any(best.values()):
        words.append(
            "Bold is the best mean of its column."
            + (" An ≈ marks what may differ from it by chance only." if marked else "")
        )
    shown = [(name, score_of(name)) for name in columns]
    made = Table(shown, rows, every if several else [], marked)
    return Section("table", "The table", [" ".join(words)], extra=made)


def last_records(contest: Contest) -> Section:
    """The same for runs of which each is a method by itself."""
    made = table(contest)
    return replace(
        made,
        title="At the end of training",
        words=["The last record of each run."],
        extra=replace(made.extra, every=()),
    )


def _cell(
    contest: Contest, method: str, name: str, best: str | None, equals: Sequence[str]
) -> Cell:
    form, known = score_of(name).form, contest.summary(method, name)
    beside = ""
    if name == "ece":
        floor = contest.summary(method, "ece_floor")
        beside = f"floor {floor.text('{:.3f}')}" if floor.count else ""
    plain = form if "%" in form else form.replace(" s", "").replace(" MiB", "")
    return Cell(
        known.mean,
        known.text(form),
        known.error_text(plain),
        beside,
        best=method == best and not score_of(name).price,
        equal=method in equals,
    )


def _reasons(lost: Sequence[object]) -> list[str]:
    """Why runs failed, each reason once, with the seeds it stopped."""
    by_reason: dict[str, list[str]] = {}
    for run in lost:
        by_reason.setdefault(str(run.error), []).append(str(run.seed))  # type: ignore[attr-defined]
    return [
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}: {reason}"
        for reason, seeds in by_reason.items()
    ]
