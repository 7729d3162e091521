"""Sections of a page about predicted classes: calibration, selective prediction, foreign data."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from credo.report.contest import Contest, Group, Panel, Section, thinned
from credo.report.panels import (
    HALVES,
    Line,
    ReliabilityBins,
    draw_lines,
    histogram_panel,
    histogram_shares,
    line_over_seeds,
    reliability_panel,
    share_bars,
)
from credo.report.style import GREY
from credo.report.svg import Mark, inline_svg, marks_at, page_style, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 101
"""More than a panel has room for."""


def calibration(contest: Contest) -> Section | None:
    """Reliability diagrams."""
    from credo.metrics import reliability_of_confidence

    level, hit = contest.pixels("confidence"), contest.pixels("correct")
    names = contest.has(level, hit)
    if contest.evidence.kind == "regression" or not names:
        return None
    panels = []
    for name in names:
        bins = reliability_of_confidence(contest.pooled(name, level), contest.pooled(name, hit))
        panels.append(_reliability(contest, name, bins))
    several = len(contest.seeds) > 1
    words = (
        "Each dot is a bin of predictions with similar confidence: on the dotted diagonal they "
        "come true as often as they say, below it the method is too sure, above it too modest. "
        "Whiskers are 95 % intervals (Wilson) for that many examples"
        + (", counted once although all seeds are pooled" if several else "")
        + "; larger dots hold more predictions, and the bars below show how many.",
    )
    return Section("calibration", "Is the confidence right?", words, [Group(panels)])


def _reliability(contest: Contest, name: str, bins: ReliabilityBins) -> Panel:
    look, seeds = contest.looks[name], len(contest.runs(name))
    with page_style():
        figure, axes = panel(height=290, bottom=92)
        reliability_panel(axes, bins, look.colour, seeds)
        axes.set(xlim=(0, 1), ylabel="accuracy")
        axes.set_xticks(HALVES[0], [""] * 5)
        below = figure.add_axes((50 / 340, 42 / 290, 280 / 340, 34 / 290))
        share_bars(below, bins)
        most = float(bins.count.max() / bins.count.sum())
        below.set_ylim(0, most)
        below.set_yticks([0, most], ["", f"{most:.0%}"])
        filled = bins.count > 0
        counts = np.maximum(1, bins.count[filled] // seeds)
        heads = [f"confidence {value:.2f}" for value in bins.confidence[filled]]
        texts = [
            f"accuracy {value:.2f}, {count:,} {contest.unit}"
            for value, count in zip(bins.accuracy[filled], counts, strict=True)
        ]
        marks = marks_at(axes, bins.confidence[filled], bins.accuracy[filled], heads, texts)
        svg = inline_svg(figure, f"reliability-{look.key}")
    error = contest.summary(name, "ece")
    note = f"ECE {error.mean:.3f}" if error.count else f"ECE {bins.error:.3f}"
    gap = float((bins.confidence - bins.accuracy)[filled] @ bins.count[filled] / bins.count.sum())
    lean = "too sure" if gap > 0 else "too modest"
    label = (
        f"Reliability of {name}: {note}; on average {lean} by {abs(gap):.3f}. "
        + "; ".join(f"{head}: {text}" for head, text in zip(heads, texts, strict=True))
        + "."
    )
    return Panel(name, label, svg, look.key, note, marks)


def selective(contest: Contest) -> Section | None:
    """Accuracy and error rate of those kept, the most certain first."""
    from credo.metrics import retention

    names = contest.has("correct", "entropy")
    if contest.evidence.kind == "regression" or not names:
        return None
    kept: dict[str, NDArray[np.float64]] = {}
    best = np.empty(0)
    for name in names:
        curves = [
            retention(correct, entropy)
            for correct, entropy in zip(
                contest.arrays(name, "correct"), contest.arrays(name, "entropy"), strict=True
            )
        ]
        at = thinned(len(curves[0].fractions), CURVE_POINTS)
        fractions = curves[0].fractions[at]
        kept[name] = np.stack([curve.accuracy[at] for curve in curves])
        reached = np.stack([curve.oracle[at] for curve in curves]).mean(0)
        best = reached if best.size == 0 else np.maximum(best, reached)
    lines = [
        line_over_seeds(contest.looks[name], fractions, values, error=True)
        for name, values in kept.items()
    ]
    percent = [f"{fraction:.0%} kept" for fraction in fractions]
    panels = [
        _selective_panel(lines, best, percent, risk=False),
        _selective_panel(lines, best, percent, risk=True),
    ]
    words = (
        "If only the predictions with the least entropy are kept and the rest are handed to "
        "somebody else, how good are those kept? A useful uncertainty makes the accuracy rise to "
        "the left, and the error rate fall. The dotted line is the best ranking that any of these "
        "methods’ mistakes allow; a level line is an uncertainty that knows nothing.",
        "The other figure is the same as an error rate, on a logarithmic scale where it spans more "
        "than a factor of ten: a curve ends where no mistake is left."
        + (" Bands are ± 1 standard error over the seeds." if len(contest.seeds) > 1 else ""),
    )
    return Section(
        "selective", "Does it know when it is wrong?", words, [Group(panels)], legend=True
    )


def _selective_panel(
    lines: list[Line], best: NDArray[np.float64], percent: list[str], risk: bool
) -> Panel:
    with page_style():
        figure, axes = panel(width=420, height=270, left=58)
        if risk:
            lines = [
                Line(line.look, line.x, np.where(line.y < 1, 1 - line.y, np.nan)) for line in lines
            ]
        draw_lines(axes, lines, dots=10)
        shown = np.where(best < 1, 1 - best, np.nan) if risk else best
        axes.plot(lines[0].x, shown, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        axes.set(xlim=(0, 1.01), xlabel="share of predictions kept")
        axes.set_ylabel("error rate of those kept" if risk else "accuracy of those kept")
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0", "20%", "40%", "60%", "80%", "100%"])
        low, high = np.nanmin(_all(lines)), np.nanmax(_all(lines))
        axes.set_yscale("log" if risk and high > 10 * low else "linear")
        _percent_axis(axes)
        marks: list[Mark] = []
        for line in lines:
            at = thinned(len(line.x), 41)
            texts = [f"{value:.2%}" for value in line.y[at]]
            heads = [percent[index] for index in at]
            marks += marks_at(axes, line.x[at], line.y[at], heads, texts, line.look.key)
        svg = inline_svg(figure, "risk" if risk else "retention")
    title = "Error rate of those kept" if risk else "Accuracy of those kept"
    label = f"{title} over the share of predictions kept, a line for each method."
    return Panel(title, label, svg, marks=marks, by_column=True, wide=True)


def _all(lines: list[Line]) -> NDArray[np.float64]:
    # a method without mistakes has no error rate above 0
    return np.concatenate([[1.0], *(line.y for line in lines)])


def _percent_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axes.yaxis.set_minor_formatter("")


def foreign(contest: Contest) -> Section | None:
    """Entropy of test examples and of foreign ones."""
    names = contest.has("entropy", "ood_entropy")
    if not names:
        return None
    everything = [contest.pooled(name, key) for name in names for key in ("entropy", "ood_entropy")]
    most = float(max(values.max() for values in everything))
    if contest.evidence.classes:
        most = float(np.log(len(contest.evidence.classes)))
    edges = np.linspace(0, max(most, 1e-6), 25)
    panels = []
    for name in names:
        pair = contest.pooled(name, "entropy"), contest.pooled(name, "ood_entropy")
        panels.append(_histogram(contest, name, pair, edges))
    words = (
        "Foreign inputs belong to none of the classes, so a method that knows what it does not "
        "know is uncertain about them. Filled blue with a whole line: the test examples; "
        "vermillion with a dashed line: the foreign ones. The less they overlap, the better the "
        "two can be told apart by the entropy alone (AUROC 1: always; 0.5: guessing).",
    )
    return Section("foreign", "Does it notice foreign data?", words, [Group(panels)])


def _histogram(
    contest: Contest,
    name: str,
    pair: tuple[NDArray[np.float64], NDArray[np.float64]],
    edges: NDArray[np.float64],
) -> Panel:
    look = contest.looks[name]
    with page_style():
        figure, axes = panel(height=215)
        histogram_panel(axes, pair, edges, ("test", "foreign"))
        axes.set(xlabel="predictive entropy (nats)", ylabel="share of inputs")
        axes.set_ylim(bottom=0)
        _percent_axis(axes)
        axes.locator_params(axis="y", nbins=5)
        inside, outside = (histogram_shares(values, edges) for values in pair)
        centres = (edges[1:] + edges[:-1]) / 2
        heads = [f"entropy {low:.2f}–{high:.2f}" for low, high in itertools.pairwise(edges)]
        texts = [f"test {a:.1%}, foreign {b:.1%}" for a, b in zip(inside, outside, strict=True)]
        marks = marks_at(axes, centres, np.maximum(inside, outside), heads, texts)
        svg = inline_svg(figure, f"entropy-{look.key}")
    auroc = contest.summary(name, "ood_auroc")
    note = f"AUROC {auroc.mean:.3f}" if auroc.count else ""
    label = (
        f"Entropy of {name}: median {np.median(pair[0]):.2f} nats on test examples, "
        f"{np.median(pair[1]):.2f} on foreign ones{'; ' + note if note else ''}."
    )
    return Panel(name, label, svg, look.key, note, marks, by_column=True)
