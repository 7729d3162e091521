"""What is drawn inside one pair of axes: the same in a figure of several panels and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credo.report.style import BLUE, GREY, PALE, VERMILLION, Look, faint_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORMAL_95 = 1.959963984540054
HALVES = ([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
"""Ticks of a share."""


class ReliabilityBins(Protocol):
    """What `credo.metrics.reliability` returns: mean confidence and accuracy of each bin."""

    @property
    def edges(self) -> NDArray[np.float64]:
        """Edges (bins + 1,)."""
        ...

    @property
    def confidence(self) -> NDArray[np.float64]:
        """Mean confidence (bins,), NaN where the bin is empty."""
        ...

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Accuracy (bins,), NaN where the bin is empty."""
        ...

    @property
    def count(self) -> NDArray[np.int64]:
        """Number of examples (bins,)."""
        ...

    @property
    def error(self) -> float:
        """Expected calibration error."""
        ...


class Retention(Protocol):
    """What `credo.metrics.retention` returns: the score of those kept, and two references."""

    @property
    def fractions(self) -> NDArray[np.float64]:
        """Shares kept (n,)."""
        ...

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Mean score of those kept (n,)."""
        ...

    @property
    def oracle(self) -> NDArray[np.float64]:
        """The same by the best ranking (n,)."""
        ...


@dataclass(frozen=True)
class Line:
    """A method's curve.

    Args:
        look: Colour, dots and dashes.
        x: Where (T,).
        y: Mean over seeds (T,).
        spread: Half the width of the band around it (T,), or none.
    """

    look: Look
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    spread: NDArray[np.float64] | None = None


def line_over_seeds(look: Look, x: ArrayLike, runs: ArrayLike, error: bool = False) -> Line:
    """Mean of runs (seeds, T) with ± 1 standard deviation (or standard error) between them."""
    values = np.atleast_2d(np.asarray(runs, dtype=float))
    spread = None
    if len(values) > 1:
        spread = values.std(0, ddof=1) / (np.sqrt(len(values)) if error else 1.0)
    return Line(look, np.asarray(x, dtype=float), values.mean(0), spread)


def draw_lines(axes: Axes, lines: Sequence[Line], dots: int = 12) -> None:
    """Curves with their bands, and about so many dots on each, whose shapes tell them apart."""
    for line in lines:
        gid = line.look.key or None
        if line.spread is not None:
            axes.fill_between(
                line.x, line.y - line.spread, line.y + line.spread, color=line.look.colour,
                alpha=0.14, linewidth=0, gid=gid,
            )  # fmt: skip
        axes.plot(
            line.x, line.y, color=line.look.colour, linestyle=line.look.linestyle, linewidth=1.7,
            marker=line.look.marker, markersize=5.2, markeredgecolor="white", markeredgewidth=0.5,
            markevery=max(1, len(line.x) // dots) if len(line.x) > dots else None, gid=gid,
        )  # fmt: skip
    faint_grid(axes)


def reliability_panel(
    axes: Axes, diagram: ReliabilityBins, colour: str = BLUE, seeds: int = 1
) -> None:
    """Dots of accuracy over confidence with 95 % whiskers, and the diagonal.

    ``count`` is over all seeds; the whiskers know that these are the same test examples.
    """
    filled = diagram.count > 0
    confidence, accuracy = diagram.confidence[filled], diagram.accuracy[filled]
    low, high = wilson_interval(accuracy, diagram.count[filled] / seeds)
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.vlines(confidence, low, high, color=colour, linewidth=1.2, alpha=0.45, clip_on=False)
    shares = diagram.count[filled] / diagram.count.sum()
    axes.scatter(confidence, accuracy, 14 + 80 * np.sqrt(shares), color=colour, clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_yticks(*HALVES)


def share_bars(axes: Axes, diagram: ReliabilityBins) -> None:
    """How many of the examples are in each bin."""
    shares = diagram.count / max(1, diagram.count.sum())
    axes.bar(
        diagram.edges[:-1], shares, np.diff(diagram.edges), align="edge",
        color=PALE, edgecolor="white", linewidth=0.8,
    )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
    axes.set_yticks([0, 1], ["0", "all"])
    axes.set_xticks(*HALVES)


def wilson_interval(
    share: NDArray[np.float64], count: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ends of the 95 % interval of a proportion seen in ``count`` trials (Wilson 1927).

    >>> low, high = wilson_interval(np.array([1.0]), np.array([3]))
    >>> low.round(2), high.round(2)
    (array([0.44]), array([1.]))
    """
    z2 = NORMAL_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = np.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return centre - NORMAL_95 * half, centre + NORMAL_95 * half


def histogram_shares(values: ArrayLike, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of the values between the edges; what lies beyond counts at the end."""
    # the entropy of equal probabilities may exceed ln C by rounding
    inside = np.clip(np.asarray(values, dtype=float).ravel(), edges[0], edges[-1])
    return np.histogram(inside, edges)[0] / max(1, inside.size)


def histogram_panel(
    axes: Axes, pair: Sequence[ArrayLike], edges: NDArray[np.float64], names: Sequence[str]
) -> None:
    """Two histograms as shares, the known in blue and the foreign in vermillion with a dash."""
    dashes = ("solid", (0, (4, 1.5)))
    for values, label, colour, dash in zip(pair, names, (BLUE, VERMILLION), dashes, strict=True):
        shares = histogram_shares(values, edges)
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
        axes.stairs(shares, edges, color=colour, linewidth=1.4, label=label, linestyle=dash)
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    faint_grid(axes)


def coverage_of_intervals(
    error: ArrayLike, std: ArrayLike, levels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Share of targets inside the central Gaussian intervals of these levels.

    >>> coverage_of_intervals([0.0, 1.0, 3.0], [1.0, 1.0, 1.0], np.array([0.5, 0.9]))
    array([0.33333333, 0.66666667])
    """
    from scipy.stats import norm

    distance = np.abs(np.asarray(error, dtype=float)) / np.asarray(std, dtype=float)
    return (distance.ravel()[:, None] <= norm.ppf(0.5 + levels / 2)).mean(0)


def scatter_panel(
    axes: Axes, target: ArrayLike, mean: ArrayLike, std: ArrayLike, colour: str = BLUE
) -> None:
    """Predicted means with ± 1 std over what came true, and the diagonal."""
    true, guess, wide = (np.asarray(a, dtype=float).ravel() for a in (target, mean, std))
    ends = [float(min(true.min(), guess.min())), float(max(true.max(), guess.max()))]
    axes.plot(ends, ends, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.vlines(true, guess - wide, guess + wide, color=colour, linewidth=0.8, alpha=0.25)
    axes.scatter(true, guess, 9, color=colour, alpha=0.75, linewidths=0)
