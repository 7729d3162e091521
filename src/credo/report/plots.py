"""Figures of predictions and their uncertainty, from numpy arrays.

Panels stand beside each other until a row is full, then below: `COLUMNS` of them, or as many as
``columns`` says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credo.checks import Count, check
from credo.errors import DataError
from credo.report.panels import (
    HALVES,
    ReliabilityBins,
    Retention,
    coverage_of_intervals,
    draw_lines,
    histogram_panel,
    line_over_seeds,
    reliability_panel,
    scatter_panel,
    share_bars,
)
from credo.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PALE,
    VERMILLION,
    blank_figure,
    coloured,
    faint_grid,
    house_style,
    looks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 3.1
"""Inches of each of several panels side by side."""

TITLE_WIDTH = 32
"""Letters of a title that a panel has room for."""

COLUMNS = 4
"""Panels in a row: a page's width, at sizes that can be read."""


def reliability_diagrams(bins: Mapping[str, ReliabilityBins], columns: Count = COLUMNS) -> Figure:
    """Accuracy against confidence, one panel per method; below, where the confidences lie.

    On the diagonal a method keeps its promises; below it, it is overconfident. Whiskers are 95 %
    Wilson intervals and larger dots are fuller bins: three examples say little, and look it.

    Args:
        bins: What `credo.metrics.reliability` gives, by the name of the method.
        columns: Panels in a row; the rest follow below.

    >>> from credo.metrics import reliability
    >>> figure = reliability_diagrams({"MAP": reliability([[0.9, 0.1], [0.3, 0.7]], [0, 1])})
    >>> len(figure.axes)
    2
    """
    _require(bins, "reliability_diagrams needs at least one method's bins")
    with house_style():
        figure, panels = _panels(len(bins), columns, 4.2, heights=(4, 1))
        uppers, lowers = panels
        for (name, diagram), upper, lower in zip(bins.items(), uppers, lowers, strict=True):
            reliability_panel(upper, diagram)
            _title(upper, name)
            upper.text(
                0.97, 0.05, f"ECE {diagram.error:.3f}", ha="right", transform=upper.transAxes
            )
            share_bars(lower, diagram)
            upper.set(xlim=(0, 1))
            upper.set_xticks(HALVES[0], [""] * len(HALVES[0]))
        _label_rows(uppers, columns, "accuracy")
        _label_rows(lowers, columns, "share")
        figure.align_ylabels()
        return figure


def entropy_histograms(
    entropies: Mapping[str, tuple[ArrayLike, ArrayLike]],
    most: float,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    notes: Mapping[str, str] | None = None,
    bins: Count = 24,
    columns: Count = COLUMNS,
) -> Figure:
    """Predictive entropy of known and of foreign inputs, one panel per method.

    Args:
        entropies: For each method the entropies (nats) inside and outside.
        most: The greatest possible entropy, ln C.
        names: What the two kinds of inputs are called in the legend.
        notes: Short texts for the panels, such as an AUROC, by method.
        bins: Number of bars from 0 to ``most``.
        columns: Panels in a row; the rest follow below.

    >>> figure = entropy_histograms({"MAP": ([0.1, 0.2], [0.9, 1.8])}, most=2.3)
    >>> figure.axes[0].get_title(loc="left")
    'MAP'
    """
    _require(entropies, "entropy_histograms needs at least one method's entropies")
    edges = np.linspace(0, most, bins + 1)
    with house_style():
        figure, (panels,) = _panels(len(entropies), columns, 2.7)
        for axes, (name, pair) in zip(panels, entropies.items(), strict=True):
            histogram_panel(axes, pair, edges, names)
            _title(axes, name)
            axes.set_xlabel("predictive entropy (nats)")
            if notes and name in notes:
                axes.text(0.97, 0.92, notes[name], ha="right", transform=axes.transAxes)
        _label_rows(panels, columns, "share of inputs")
        _legend_below(figure, panels[0])
        return figure


def retention_curves(
    curves: Mapping[str, Retention | Sequence[Retention]],
    ylabel: str = "accuracy of those kept",
    *,
    risk: bool = False,
) -> Figure:
    """How good are the examples that a method is most certain of, share by share?

    The dotted line is the best ranking that the first method's predictions allow. Several curves
    of one method, one for each seed, become their mean and a band of ± 1 standard deviation.

    Args:
        curves: What `credo.metrics.retention` gives, one or one for each seed, by method.
        ylabel: What the score is.
        risk: Draw one minus the score, on a logarithmic scale: the error rate of those kept.

    >>> from credo.metrics import retention
    >>> figure = retention_curves({"VI": retention([1, 1, 0, 1], [0.1, 0.2, 0.9, 0.4])})
    >>> len(figure.axes[0].lines)
    2
    """
    _require(curves, "retention_curves needs at least one method's curve")
    with house_style():
        figure = blank_figure(5.6, 3.9)
        axes = figure.subplots()
        look = looks(curves)
        for name, given in curves.items():
            seeds: Sequence[Any] = given if isinstance(given, Sequence) else [given]
            scores = np.stack([_risk(curve.accuracy, risk) for curve in seeds])
            draw_lines(axes, [line_over_seeds(look[name], seeds[0].fractions, scores)])
            axes.lines[-1].set_label(name)
        best: Any = next(iter(curves.values()))
        best = best[0] if isinstance(best, Sequence) else best
        axes.plot(
            best.fractions, _risk(best.oracle, risk), color=GREY, linewidth=1,
            linestyle=(0, (1, 2)), label="best possible",
        )  # fmt: skip
        axes.set(xlabel="share kept", ylabel="error rate of those kept" if risk else ylabel)
        axes.set_xlim(0, 1)
        axes.set_yscale("log" if risk else "linear")
        _legend_below(figure, axes)
        return figure


def _risk(scores: NDArray[np.float64], risk: bool) -> NDArray[np.float64]:
    # no errors have no logarithm, and the line ends there
    return np.where(scores < 1, 1 - scores, np.nan) if risk else scores


def shift_curves(
    scores: Mapping[str, Mapping[str, ArrayLike]],
    ylabel: str,
    columns: Count = COLUMNS,
) -> Figure:
    """A score over the severity of a shift, one panel for each shift, one line for each method.

    Args:
        scores: By shift and method, the runs (seeds, severities) or one run (severities,), of which
            the first severity is 0: the examples as they are.
        ylabel: What the score is.
        columns: Panels in a row; the rest follow below.

    >>> figure = shift_curves({"rotation": {"MAP": [0.9, 0.7], "VI": [0.9, 0.8]}}, "accuracy")
    >>> figure.axes[0].get_title(loc="left")
    'rotation'
    """
    _require(scores, "shift_curves needs at least one shift")
    look = looks(dict.fromkeys(name for methods in scores.values() for name in methods))
    with house_style():
        figure, (panels,) = _panels(len(scores), columns, 2.7)
        for axes, (shift, methods) in zip(panels, scores.items(), strict=True):
            for name, runs in methods.items():
                severities = np.arange(np.asarray(runs).shape[-1])
                draw_lines(axes, [line_over_seeds(look[name], severities, runs)])
                axes.lines[-1].set_label(name)
                axes.set_xticks(severities)
            _title(axes, shift)
            axes.set_xlabel("severity")
        _label_rows(panels, columns, ylabel)
        _legend_below(figure, panels[0])
        return figure


def interval_calibration(predictions: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """How many targets are inside intervals that should hold so many? Regression's reliability.

    The intervals are mean ± z·std, as for a Gaussian; below the diagonal they are too narrow.
    Reference: Kuleshov, Fenner & Ermon, "Accurate uncertainties for deep learning using calibrated
    regression", 2018 (arXiv:1807.00263).

    Args:
        predictions: For each method the errors (target − mean) and the predicted stds, (N,) each.

    >>> figure = interval_calibration({"VI": ([0.1, -0.3, 0.2], [0.2, 0.2, 0.2])})
    >>> figure.axes[0].get_xlabel()
    'level of the interval'
    """
    _require(predictions, "interval_calibration needs at least one method's predictions")
    levels = np.linspace(0, 1, 41)[1:-1]
    look = looks(predictions)
    with house_style():
        figure = blank_figure(4.2, 4.2)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        for name, (error, std) in predictions.items():
            inside = coverage_of_intervals(error, std, levels)
            draw_lines(axes, [line_over_seeds(look[name], levels, inside)])
            axes.lines[-1].set_label(name)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set(xlabel="level of the interval", ylabel="share of targets inside")
        axes.set_xticks(*HALVES)
        axes.set_yticks(*HALVES)
        _legend_below(figure, axes)
        return figure


def predicted_against_true(
    predictions: Mapping[str, tuple[ArrayLike, ArrayLike]],
    target: ArrayLike,
    columns: Count = COLUMNS,
) -> Figure:
    """Predicted means ± 1 std over what came true, one panel per method.

    Args:
        predictions: For each method the means and the stds, (N,) each.
        target: What came true, (N,).
        columns: Panels in a row; the rest follow below.

    >>> figure = predicted_against_true({"VI": ([0.1, 0.9], [0.2, 0.2])}, [0.0, 1.0])
    >>> figure.axes[0].get_title(loc="left")
    'VI'
    """
    _require(predictions, "predicted_against_true needs at least one method's predictions")
    with house_style():
        figure, (panels,) = _panels(len(predictions), columns, 2.9)
        for axes, (name, (mean, std)) in zip(panels, predictions.items(), strict=True):
            scatter_panel(axes, target, mean, std)
            _title(axes, name)
            axes.set_xlabel("true")
        _label_rows(panels, columns, "predicted")
        return figure


def image_grid(
    images: ArrayLike,
    probs: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str],
    columns: int = 5,
) -> Figure:
    """Images (N, H, W), each with the probabilities (N, C) it was given and its label (N,).

    The true class's bar is green; if another class is likelier, that one is vermillion.

    Args:
        images: Grey values from 0 to 1, (N, H, W).
        probs: What was predicted for them, (N, C).
        labels: The true classes, (N,).
        classes: The classes' names.
        columns: Images beside each other.

    >>> figure = image_grid(np.zeros((1, 8, 8)), [[0.2, 0.8]], [1], ["cat", "dog"])
    >>> len(figure.axes)
    2
    """
    images, probs, labels = np.asarray(images), np.asarray(probs), np.asarray(labels)
    if images.ndim != 3 or not len(images) == len(probs) == len(labels) > 0:
        raise DataError(
            f"image_grid needs images (N, H, W) with N probabilities and labels, N ≥ 1, but got "
            f"{images.shape}, {probs.shape} and {labels.shape}"
        )
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    with house_style():
        figure = blank_figure(1.85 * columns, 2.75 * rows)
        cells = figure.subfigures(rows, columns, squeeze=False, wspace=0.03, hspace=0.04).ravel()
        for cell, image, given, label in zip(cells, images, probs, labels, strict=False):
            picture, bars = cell.subplots(2, 1, height_ratios=[2.6, 1])
            picture.imshow(image, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            picture.set(xticks=[], yticks=[])
            picture.spines[:].set(visible=True, color=PALE)
            says = int(given.argmax())
            picture.set_title(
                f"{classes[label]}, taken for {classes[says]}" if says != label
                else f"{classes[label]}, recognised",
                fontsize=9.5, fontweight="normal", loc="center",
            )  # fmt: skip
            colours = [PALE] * len(classes)
            colours[says] = VERMILLION
            colours[label] = GREEN
            bars.bar(range(len(classes)), given, color=colours, width=0.82)
            bars.set(ylim=(0, 1), yticks=[], xlim=(-0.6, len(classes) - 0.4))
            bars.set_xticks(range(len(classes)), list(classes), fontsize=8)
            bars.tick_params(length=0)
            bars.spines["left"].set_visible(False)
            bars.text(
                says, given[says] + 0.06, f"{given[says]:.0%}", ha="center", fontsize=8, color=BLACK
            )
        return figure


def regression_band(
    x: ArrayLike,
    mean: ArrayLike,
    epistemic_std: ArrayLike,
    std: ArrayLike,
    observed: tuple[ArrayLike, ArrayLike] | None = None,
    truth: ArrayLike | None = None,
) -> Figure:
    """Mean ± 2 standard deviations along x (N,): what more data would remove, and all of it.

    Args:
        x: Inputs, in order.
        mean: Predicted means.
        epistemic_std: The part of the standard deviation that more data would remove.
        std: All of it, noise included.
        observed: Training inputs and targets, to be drawn as dots.
        truth: The true function at x, if it is known.

    >>> x = np.linspace(0, 1, 5)
    >>> figure = regression_band(x, x, 0.1 + 0 * x, 0.2 + 0 * x, observed=([0.5], [0.4]))
    >>> len(figure.axes)
    1
    """
    x, mean, std = np.asarray(x), np.asarray(mean), np.asarray(std)
    epistemic = np.asarray(epistemic_std)
    if not x.shape == mean.shape == std.shape == epistemic.shape or x.ndim != 1:
        raise DataError(
            "regression_band needs x, mean, epistemic_std and std of one shape (N,), but got "
            f"{x.shape}, {mean.shape}, {epistemic.shape} and {std.shape}"
        )
    with house_style():
        figure = blank_figure(7.6, 3.9)
        axes = figure.subplots()
        axes.fill_between(
            x, mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.15, linewidth=0,
            label="± 2 std, all uncertainty",
        )  # fmt: skip
        axes.fill_between(
            x, mean - 2 * epistemic, mean + 2 * epistemic, color=BLUE, alpha=0.35, linewidth=0,
            label="± 2 std, epistemic",
        )  # fmt: skip
        axes.plot(x, mean, color=BLUE, label="predictive mean")
        if truth is not None:
            axes.plot(
                x, np.asarray(truth), color=GREY, linewidth=1.2, linestyle="--", label="truth"
            )
        if observed is not None:
            axes.plot(
                *map(np.asarray, observed), "o", color=BLACK, markersize=2.8, label="training data"
            )
        axes.set(xlim=(x.min(), x.max()), xlabel="x", ylabel="y")
        _legend_below(figure, axes)
        return figure


def curves(
    x: ArrayLike,
    series: Mapping[str, ArrayLike],
    xlabel: str,
    ylabel: str,
    *,
    logx: bool = False,
    logy: bool = False,
) -> Figure:
    """Lines over x (T,), each the mean of its runs (seeds, T) with a band of ± 1 std between them.

    A series may be a single run (T,); it has no band. The standard deviation divides by seeds − 1.

    Args:
        x: Where the values were taken, (T,).
        series: Runs (seeds, T) by name.
        xlabel: What x is.
        ylabel: What the values are.
        logx: Logarithmic x.
        logy: Logarithmic values.

    >>> figure = curves([1, 2, 3], {"VI": [[3, 2, 1], [5, 3, 1]]}, "epoch", "loss")
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [4.0, 2.5, 1.0]
    """
    _require(series, "curves needs at least one series")
    x = np.asarray(x)
    with house_style():
        figure = blank_figure(5.6, 3.6)
        axes = figure.subplots()
        for name, colour in coloured(series):
            runs = np.atleast_2d(np.asarray(series[name], dtype=float))
            if runs.ndim != 2 or runs.shape[1:] != x.shape:
                raise DataError(
                    f"the series {name!r} has shape {runs.shape}, which should be (seeds, T) with "
                    f"the T = {len(x)} of x"
                )
            mean = runs.mean(0)
            axes.plot(x, mean, color=colour, label=name)
            if len(runs) > 1:
                std = runs.std(0, ddof=1)
                axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_xscale("log" if logx else "linear")
        axes.set_yscale("log" if logy else "linear")
        axes.margins(x=0.01)
        faint_grid(axes)
        _legend_below(figure, axes)
        return figure


def _panels(
    count: int, columns: int, height: float, heights: Sequence[float] = (1,)
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of so many panels, row by row, each of so many axes above one another.

    Returns the figure and, from top to bottom of a panel, the axes of all panels.
    """
    check("columns", columns, Count)
    columns, parts = min(columns, count), len(heights)
    rows = -(-count // columns)
    figure = blank_figure(PANEL_WIDTH * columns, height * rows + 0.3 * (parts == 1))
    grid = figure.subplots(
        rows * parts, columns, squeeze=False, height_ratios=list(heights) * rows,
        sharey=parts == 1,
    )  # fmt: skip
    of_parts = [list(grid[part::parts].ravel()) for part in range(parts)]
    for axes in of_parts:
        for unused in axes[count:]:
            unused.remove()
    return figure, [axes[:count] for axes in of_parts]


def _label_rows(panels: Sequence[Axes], columns: int, label: str) -> None:
    """Axes that share their values say what these are once in a row."""
    for axes in panels[::columns]:
        axes.set_ylabel(label)


def _title(axes: Axes, name: str) -> None:
    """A name as it is: a dollar sign in it begins no formula, and a long one has several lines."""
    axes.set_title(textwrap.fill(name, TITLE_WIDTH), parse_math=False)


def _legend_below(figure: Figure, axes: Axes) -> None:
    """One legend under all panels, where it hides nothing, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    inches = 0.6 + 0.07 * max(map(len, names))
    columns = max(1, min(len(names), int(figure.get_figwidth() / inches)))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _require(things: Mapping[str, object], message: str) -> None:
    if not things:
        raise DataError(f"{message}, but got none")
