"""The evidence of a comparison in the order in which a page asks for it: method by method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.errors import DataError
from credo.report.evidence import Evidence, Run
from credo.report.scores import (
    TERMS,
    Difference,
    Summary,
    differences,
    is_number,
    score_of,
    summary,
)
from credo.report.style import Look, looks
from credo.report.svg import Mark

KINDS = ("classification", "regression", "dense")


@dataclass(frozen=True)
class Panel:
    """A small figure on the page.

    Args:
        title: What stands above it.
        label: What it shows, in words, for who can't see it.
        svg: The figure.
        method: The key of the method it belongs to; empty if it shows several.
        note: A few words at the right of the title.
        marks: What is said where it is pointed at.
        by_column: Whether pointing shows all methods at one place of the x-axis.
        wide: Whether it wants the width of two.
    """

    title: str
    label: str
    svg: str
    method: str = ""
    note: str = ""
    marks: Sequence[Mark] = ()
    by_column: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Group:
    """Panels under one small heading, which may be folded away."""

    panels: Sequence[Panel]
    title: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A chapter of the page.

    Args:
        name: Its anchor.
        title: Its heading.
        words: What it shows and how to read it, a paragraph each.
        groups: Its figures.
        extra: What its own part of the template needs.
        legend: Whether the methods' colours and shapes are repeated above its figures.
    """

    name: str
    title: str
    words: Sequence[str] = ()
    groups: Sequence[Group] = ()
    extra: Any = None
    legend: bool = False


@dataclass(frozen=True)
class Contest:
    """Runs by method.

    Args:
        evidence: What a comparison left behind.
    """

    evidence: Evidence

    def __post_init__(self) -> None:
        if not self.evidence.runs:
            raise DataError("a page needs at least one run, but the evidence has none")
        if self.evidence.kind not in KINDS:
            raise DataError(
                f"the kind of evidence must be one of {', '.join(KINDS)}, but it is "
                f"{self.evidence.kind!r}"
            )

    @cached_property
    def names(self) -> list[str]:
        """The methods, in the order in which they come first."""
        return list(dict.fromkeys(run.method for run in self.evidence.runs))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Every method's colour and shape."""
        return looks(self.names, keyed=True)

    @cached_property
    def finished(self) -> list[str]:
        """The methods of which at least one run did not fail."""
        return [name for name in self.names if self.runs(name)]

    @property
    def reference(self) -> str | None:
        """The method whose predictions the others' are held against, if there is one."""
        return self.evidence.about.get("reference")

    @property
    def judged(self) -> list[str]:
        """The finished methods but the reference."""
        return [name for name in self.finished if name != self.reference]

    @cached_property
    def seeds(self) -> list[int]:
        """All seeds, in order."""
        return sorted({r.seed for r in self.evidence.runs if r.method != self.reference})

    @property
    def dense(self) -> bool:
        """Whether a test example is an image of which every pixel has a class."""
        return self.evidence.kind == "dense"

    @property
    def unit(self) -> str:
        """What is counted."""
        return "pixels" if self.dense else "examples"

    def runs(self, method: str) -> list[Run]:
        """Its runs that did not fail."""
        return [run for run in self.evidence.runs if run.method == method and run.error is None]

    def failures(self, method: str) -> list[Run]:
        """Its runs that failed."""
        return [run for run in self.evidence.runs if run.method == method and run.error is not None]

    def values(self, method: str, score: str) -> dict[int, float]:
        """The score by seed."""
        return {
            run.seed: float(run.scores[score])
            for run in self.runs(method)
            if is_number(run.scores.get(score))
        }

    def summary(self, method: str, score: str) -> Summary:
        """Mean and standard error of the score over the seeds."""
        return summary(list(self.values(method, score).values()))

    def best(self, score: str) -> str | None:
        """The method with the best mean, if the score has a better end."""
        better = score_of(score).better
        means = {name: better * self.summary(name, score).mean for name in self.judged}
        means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
        return max(means, key=means.__getitem__) if better and len(means) > 1 else None

    @property
    def paired_by(self) -> str:
        """What differences are taken over: seeds, or with a single one the test examples."""
        return "seeds" if len(self.seeds) > 1 else "examples"

    def pairs(self, method: str, other: str, score: str) -> tuple[Any, Any]:
        """Both methods' values, pair by pair; nothing where there are no pairs."""
        if self.paired_by == "seeds":
            mine, theirs = self.values(method, score), self.values(other, score)
            both = [seed for seed in mine if seed in theirs]
            return [mine[seed] for seed in both], [theirs[seed] for seed in both]
        array = TERMS.get(score, "")
        if method in self.has(array) and other in self.has(array):
            mine_, theirs_ = self.arrays(method, array)[0], self.arrays(other, array)[0]
            if mine_.size == theirs_.size:
                return mine_, theirs_
        return list(self.values(method, score).values()), list(self.values(other, score).values())

    def differences(self, others: Sequence[str], base: str, score: str) -> list[Difference]:
        """Paired differences of the others' scores to that of the base."""
        pairs = [self.pairs(other, base, score) for other in others]
        return differences([own for own, _ in pairs], [of_base for _, of_base in pairs])

    def as_good_as(self, best: str, score: str) -> list[str]:
        """Methods whose paired difference to the best has an interval that holds 0.

        Without a correction for their number: it would make more of them look equal.
        """
        others = [name for name in self.judged if name != best]
        gaps = self.differences(others, best, score)
        return [name for name, gap in zip(others, gaps, strict=True) if gap.may_be_none]

    def has(self, *arrays: str) -> list[str]:
        """The finished methods whose runs all have these arrays, none empty."""
        return [
            name
            for name in self.finished
            if all(_holds(run, array) for run in self.runs(name) for array in arrays)
        ]

    def pixels(self, array: str) -> str:
        """The array of single pixels, where predictions are dense and it was kept."""
        single = f"pixel_{array}"
        return single if self.dense and self.has(single) else array

    def arrays(self, method: str, array: str) -> list[NDArray[np.float64]]:
        """An array of every run as floats, flat."""
        return [
            np.asarray(run.arrays[array], dtype=float).ravel()
            for run in self.runs(method)
            if _holds(run, array)
        ]

    def pooled(self, method: str, array: str) -> NDArray[np.float64]:
        """The same, all runs one after the other."""
        return np.concatenate(self.arrays(method, array))


def _holds(run: Run, array: str) -> bool:
    return array in run.arrays and np.size(run.arrays[array]) > 0


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """At most so many indices, evenly spread, the last one included.

    >>> thinned(10, 4)
    array([0, 3, 6, 9])
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
