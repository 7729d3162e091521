"""Figures of predictions and their uncertainty, from numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from credo.errors import DataError
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
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 3.1
"""Inches of each of several panels side by side."""

NORMAL_95 = 1.959963984540054


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


def reliability_diagrams(bins: Mapping[str, ReliabilityBins]) -> Figure:
    """Accuracy against confidence, one panel per method; below, where the confidences lie.

    On the diagonal a method keeps its promises; below it, it is overconfident. Whiskers are 95 %
    Wilson intervals and larger dots are fuller bins: three examples say little, and look it.

    Args:
        bins: What `credo.metrics.reliability` gives, by the name of the method.

    >>> from credo.metrics import reliability
    >>> figure = reliability_diagrams({"MAP": reliability([[0.9, 0.1], [0.3, 0.7]], [0, 1])})
    >>> len(figure.axes)
    2
    """
    _require(bins, "reliability_diagrams needs at least one method's bins")
    with house_style():
        figure = blank_figure(PANEL_WIDTH * len(bins), 4.2)
        panels = figure.subplots(
            2, len(bins), sharex=True, sharey="row", squeeze=False, height_ratios=[4, 1]
        )
        for (name, diagram), upper, lower in zip(bins.items(), *panels, strict=True):
            _reliability_panel(upper, diagram)
            upper.set_title(name)
            shares = diagram.count / max(1, diagram.count.sum())
            lower.bar(
                diagram.edges[:-1], shares, np.diff(diagram.edges), align="edge",
                color=PALE, edgecolor="white", linewidth=0.8,
            )  # fmt: skip
            lower.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
            lower.set_yticks([0, 1], ["0", "all"])
            lower.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
        panels[0, 0].set_ylabel("accuracy")
        panels[1, 0].set_ylabel("share")
        figure.align_ylabels(panels[:, 0])
        return figure


def _reliability_panel(axes: Axes, diagram: ReliabilityBins) -> None:
    filled = diagram.count > 0
    confidence, accuracy = diagram.confidence[filled], diagram.accuracy[filled]
    low, high = wilson_interval(accuracy, diagram.count[filled])
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.vlines(confidence, low, high, color=BLUE, linewidth=1.2, alpha=0.45, clip_on=False)
    shares = diagram.count[filled] / diagram.count.sum()
    axes.scatter(confidence, accuracy, 14 + 80 * np.sqrt(shares), color=BLUE, clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    axes.text(0.97, 0.05, f"ECE {diagram.error:.3f}", ha="right", transform=axes.transAxes)


def wilson_interval(
    share: NDArray[np.float64], count: NDArray[np.int64]
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


def entropy_histograms(
    entropies: Mapping[str, tuple[ArrayLike, ArrayLike]],
    most: float,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    notes: Mapping[str, str] | None = None,
    bins: int = 24,
) -> Figure:
    """Predictive entropy of known and of foreign inputs, one panel per method.

    Args:
        entropies: For each method the entropies (nats) inside and outside.
        most: The greatest possible entropy, ln C.
        names: What the two kinds of inputs are called in the legend.
        notes: Short texts for the panels, such as an AUROC, by method.
        bins: Number of bars from 0 to ``most``.

    >>> figure = entropy_histograms({"MAP": ([0.1, 0.2], [0.9, 1.8])}, most=2.3)
    >>> figure.axes[0].get_title(loc="left")
    'MAP'
    """
    _require(entropies, "entropy_histograms needs at least one method's entropies")
    edges = np.linspace(0, most, bins + 1)
    with house_style():
        figure = blank_figure(PANEL_WIDTH * len(entropies), 2.9)
        panels = figure.subplots(1, len(entropies), sharey=True, squeeze=False)[0]
        for axes, (name, pair) in zip(panels, entropies.items(), strict=True):
            for values, label, colour in zip(pair, names, (BLUE, VERMILLION), strict=True):
                # the entropy of equal probabilities may exceed ln C by rounding
                inside = np.clip(np.asarray(values, dtype=float), 0, most)
                shares = np.histogram(inside, edges)[0] / max(1, inside.size)
                axes.stairs(shares, edges, fill=True, color=colour, alpha=0.3)
                axes.stairs(shares, edges, color=colour, linewidth=1.4, label=label)
            axes.set_title(name)
            axes.set(xlim=(0, most), xlabel="predictive entropy (nats)")
            faint_grid(axes)
            if notes and name in notes:
                axes.text(0.97, 0.92, notes[name], ha="right", transform=axes.transAxes)
        panels[0].set_ylabel("share of inputs")
        _legend_below(figure, panels[0])
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


def _legend_below(figure: Figure, axes: Axes) -> None:
    """One legend under all panels, where it hides nothing, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    inches = 0.6 + 0.07 * max(map(len, names))
    columns = max(1, min(len(names), int(figure.get_figwidth() / inches)))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def _require(things: Mapping[str, object], message: str) -> None:
    if not things:
        raise DataError(f"{message}, but got none")
