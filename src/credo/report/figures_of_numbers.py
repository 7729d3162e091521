"""Sections of a page about predicted numbers: intervals, errors, what the widths are good for."""

from __future__ import annotations

import numpy as np

from credo.report.contest import Contest, Group, Panel, Section, thinned
from credo.report.panels import (
    HALVES,
    coverage_of_intervals,
    draw_lines,
    histogram_panel,
    line_over_seeds,
    scatter_panel,
)
from credo.report.style import GREY
from credo.report.svg import Mark, inline_svg, marks_at, page_style, panel

LEVELS = np.linspace(0, 1, 41)[1:-1]
POINTS = 400
"""Of a scatter plot: more make it a blot, and the page slow."""


def intervals(contest: Contest) -> Section | None:
    """How many targets are inside intervals that should hold so many."""
    names = contest.has("error", "std")
    if contest.evidence.kind != "regression" or not names:
        return None
    lines = []
    for name in names:
        inside = [
            coverage_of_intervals(error, std, LEVELS)
            for error, std in zip(
                contest.arrays(name, "error"), contest.arrays(name, "std"), strict=True
            )
        ]
        lines.append(line_over_seeds(contest.looks[name], LEVELS, np.stack(inside), error=True))
    with page_style():
        figure, axes = panel(width=400, height=340)
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        draw_lines(axes, lines, dots=10)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set(xlabel="level of the interval", ylabel="share of targets inside")
        axes.set_xticks(*HALVES)
        axes.set_yticks(*HALVES)
        marks: list[Mark] = []
        heads = [f"{level:.0%} interval" for level in LEVELS]
        for line in lines:
            texts = [f"holds {value:.1%}" for value in line.y]
            marks += marks_at(axes, LEVELS, line.y, heads, texts, line.look.key)
        svg = inline_svg(figure, "intervals")
    nine = int(np.abs(LEVELS - 0.9).argmin())
    found = "; ".join(f"{name} {line.y[nine]:.0%}" for name, line in zip(names, lines, strict=True))
    label = f"Share of targets inside predicted intervals. Of the 90 % interval: {found}."
    words = (
        "An interval that should hold 90 % of the targets holds how many? On the dotted diagonal "
        "the widths are right, below it the intervals are too narrow (too sure), above it too "
        "wide. The intervals are mean ± z·std, as for a Gaussian: a method whose predictions are "
        "far from Gaussian may be better than it looks here.",
    )
    shown = Panel("Calibration of intervals", label, svg, marks=marks, by_column=True, wide=True)
    return Section("calibration", "Are the intervals right?", words, [Group([shown])], legend=True)


def predicted_against_true(contest: Contest) -> Section | None:
    """A dot for each example."""
    names = contest.has("mean", "std")
    targets = contest.evidence.targets
    if contest.evidence.kind != "regression" or not names or targets is None:
        return None
    true = np.asarray(targets, dtype=float).ravel()
    at = thinned(true.size, POINTS)
    panels = []
    for name in names:
        look = contest.looks[name]
        mean, std = (contest.arrays(name, key)[0] for key in ("mean", "std"))
        if mean.size != true.size:
            continue
        with page_style():
            figure, axes = panel(height=270)
            scatter_panel(axes, true[at], mean[at], std[at], look.colour)
            axes.set(xlabel="true", ylabel="predicted")
            heads = [f"true {value:.3g}" for value in true[at]]
            texts = [f"predicted {m:.3g} ± {s:.2g}" for m, s in zip(mean[at], std[at], strict=True)]
            marks = marks_at(axes, true[at], mean[at], heads, texts)
            svg = inline_svg(figure, f"scatter-{look.key}")
        error = float(np.sqrt(np.mean((mean - true) ** 2)))
        label = (
            f"Predicted against true values of {name}: root mean squared error {error:.3g}, mean "
            f"predicted standard deviation {std.mean():.3g}."
        )
        panels.append(Panel(name, label, svg, look.key, f"RMSE {error:.3g}", marks))
    if not panels:
        return None
    words = (
        "A dot for each test example (first seed"
        + (f"; {len(at)} of {true.size:,}" if len(at) < true.size else "")
        + "), on the dotted diagonal if it was predicted exactly; the line through it is ± 1 "
        "predicted standard deviation, which should reach the diagonal two times in three.",
    )
    return Section("scatter", "Predicted against true", words, [Group(panels)])


def selective(contest: Contest) -> Section | None:
    """Error of those kept, the narrowest predictions first."""
    from credo.metrics import retention

    names = contest.has("error", "std")
    if contest.evidence.kind != "regression" or not names:
        return None
    lines = []
    for name in names:
        curves = [
            retention(-np.square(error), std)
            for error, std in zip(
                contest.arrays(name, "error"), contest.arrays(name, "std"), strict=True
            )
        ]
        at = thinned(len(curves[0].fractions), 101)
        errors = np.stack([np.sqrt(-curve.accuracy[at]) for curve in curves])
        fractions = curves[0].fractions[at]
        lines.append(line_over_seeds(contest.looks[name], fractions, errors, error=True))
    with page_style():
        figure, axes = panel(width=420, height=270, left=58)
        draw_lines(axes, lines, dots=10)
        axes.set(xlim=(0, 1.01), xlabel="share of predictions kept", ylabel="RMSE of those kept")
        axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0", "20%", "40%", "60%", "80%", "100%"])
        marks: list[Mark] = []
        for line in lines:
            at = thinned(len(line.x), 41)
            heads = [f"{share:.0%} kept" for share in line.x[at]]
            texts = [f"{value:.3g}" for value in line.y[at]]
            marks += marks_at(axes, line.x[at], line.y[at], heads, texts, line.look.key)
        svg = inline_svg(figure, "retention")
    label = "Error of the predictions kept over the share kept, a line for each method."
    words = (
        "If only the predictions with the smallest standard deviation are kept, how large is their "
        "error? A useful uncertainty makes the curve fall to the left; a level line is a "
        "standard deviation that knows nothing, as every method with one noise for all inputs and "
        "no epistemic part has it.",
    )
    shown = Panel("RMSE of those kept", label, svg, marks=marks, by_column=True, wide=True)
    return Section(
        "selective", "Does it know when it is wrong?", words, [Group([shown])], legend=True
    )


def foreign(contest: Contest) -> Section | None:
    """Predicted standard deviation of test examples and of foreign ones."""
    names = contest.has("std", "ood_std")
    if contest.evidence.kind != "regression" or not names:
        return None
    everything = np.concatenate(
        [contest.pooled(name, key) for name in names for key in ("std", "ood_std")]
    )
    edges = np.linspace(0, float(np.quantile(everything, 0.99)) or 1.0, 25)
    panels = []
    for name in names:
        look = contest.looks[name]
        pair = contest.pooled(name, "std"), contest.pooled(name, "ood_std")
        with page_style():
            figure, axes = panel(height=215)
            histogram_panel(axes, pair, edges, ("test", "foreign"))
            axes.set(xlabel="predicted standard deviation", ylabel="share of inputs")
            axes.set_ylim(bottom=0)
            svg = inline_svg(figure, f"width-{look.key}")
        label = (
            f"Predicted standard deviation of {name}: median {np.median(pair[0]):.3g} on test "
            f"examples, {np.median(pair[1]):.3g} on foreign ones."
        )
        panels.append(Panel(name, label, svg, look.key))
    words = (
        "Far from what was seen in training the predictions should be wider. Filled blue with a "
        "whole line: the test examples; vermillion with a dashed line: the foreign ones.",
    )
    return Section("foreign", "Does it notice foreign data?", words, [Group(panels)])
