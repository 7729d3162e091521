"""Does a confidence of 80 % come true 80 % of the time? Reliability and calibration errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from credo.checks import Count, checked
from credo.metrics._inputs import (
    FloatArray,
    IntArray,
    Values,
    as_floats,
    labelled,
    probabilities,
    require_same_shape,
    resolution_of,
)


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram draws: bin b holds the examples in (edges[b], edges[b + 1]].

    The first bin also holds its lower edge.

    Args:
        edges: Where the bins begin and end, (bins + 1,).
        confidence: Mean confidence in each bin, (bins,), NaN where there are no examples.
        accuracy: Mean accuracy in each bin, (bins,), NaN where there are no examples.
        count: Examples in each bin, (bins,).
    """

    edges: FloatArray
    confidence: FloatArray
    accuracy: FloatArray
    count: IntArray

    @property
    def error(self) -> float:
        """Expected calibration error Σ_b (n_b / n) |accuracy_b − confidence_b|."""
        filled = self.count > 0
        gaps = np.abs(self.accuracy - self.confidence)[filled]
        return float(gaps @ self.count[filled] / self.count.sum())


@checked
def reliability(
    probs: Values,
    y: Values,
    bins: Count = 15,
    *,
    equal_mass: bool = False,
    ignore_index: int | None = None,
) -> Reliability:
    """Confidence and accuracy of the most probable class, binned by confidence.

    Equal confidences always share a bin, so the order of the examples never matters.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        bins: How many bins.
        equal_mass: Whether bins hold nearly the same number of examples each, instead of dividing
            [0, 1] evenly.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> diagram = reliability([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1], bins=2)
    >>> diagram.count, diagram.accuracy.round(3), diagram.confidence.round(3)
    (array([0, 3]), array([  nan, 0.667]), array([nan, 0.8]))
    """
    data = labelled(probs, y, ignore_index)
    level, hit = data.top()
    if equal_mass:
        edges = _quantile_edges(level, bins)
        return _binned(level, hit, edges, resolution=0.0)
    return _binned(level, hit, _even_edges(bins), data.resolution)


@checked
def reliability_of_confidence(confidence: Values, correct: Values, bins: Count = 15) -> Reliability:
    """`reliability` where only the confidences and whether they were right have been kept.

    Args:
        confidence: Probability of the most probable class, in any shape.
        correct: Whether that class came true, in the shape of ``confidence``.
        bins: How many even bins.

    >>> diagram = reliability_of_confidence([0.9, 0.8, 0.7], [True, False, True], bins=2)
    >>> diagram.count, diagram.accuracy.round(3), diagram.confidence.round(3)
    (array([0, 3]), array([  nan, 0.667]), array([nan, 0.8]))
    """
    level, hit = as_floats(confidence, "confidence"), as_floats(correct, "correct")
    require_same_shape("correct", hit, "confidence", level.shape)
    resolution = resolution_of(confidence)
    return _binned(level.ravel(), hit.ravel() > 0.5, _even_edges(bins), resolution)


@checked
def ece(probs: Values, y: Values, bins: Count = 15, ignore_index: int | None = None) -> float:
    """Expected calibration error over ``bins`` even bins (lo, hi], Σ_b (n_b/n)|acc_b − conf_b|.

    Empty bins count 0. The estimate is biased upwards, as sampling noise has no sign: n perfectly
    calibrated predictions with confidences uniform on [0, 1] score about √(2·bins/(πn))·π/8, at
    15 bins 0.038, 0.012 and 0.0038 for n = 10³, 10⁴ and 10⁵. Compare models at equal n.
    Reference: Guo et al., ICML 2017.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        bins: How many bins.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> round(ece([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]], [0, 0, 0, 1]), 6)
    0.15
    """
    return reliability(probs, y, bins, ignore_index=ignore_index).error


@checked
def ece_floor(probs: Values, bins: Count = 15, draws: Count = 400) -> tuple[float, float]:
    """What `ece` gives on average if these probabilities are exactly right, and its spread.

    Mean and standard deviation over ``draws`` sets of labels from the confidences themselves, with
    a fixed seed. A model whose `ece` is within two standard deviations of its own floor can't be
    told from a calibrated one on that many examples.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        bins: How many bins.
        draws: How many sets of labels are drawn.

    >>> mean, std = ece_floor([[0.9, 0.1]] * 400)      # one bin: E|hits/n − 0.9| = √(2pq/πn)
    >>> round(mean, 2), round((2 * 0.9 * 0.1 / (3.14159 * 400)) ** 0.5, 2)
    (0.01, 0.01)
    """
    table = probabilities(probs)
    level = table.max(axis=1)
    edges, resolution = _even_edges(bins), resolution_of(probs)
    uniform = np.random.default_rng(0).random
    errors = [
        _binned(level, uniform(len(level)) < level, edges, resolution).error for _ in range(draws)
    ]
    return float(np.mean(errors)), float(np.std(errors))


@checked
def adaptive_ece(
    probs: Values, y: Values, bins: Count = 15, ignore_index: int | None = None
) -> float:
    """Expected calibration error over bins of equal mass: the quantiles of the confidence.

    Where nearly all confidences are close to 1, even bins see one bin and these see fifteen.
    Reference: Nixon et al., CVPR workshops 2019.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        bins: How many bins.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> round(adaptive_ece([[0.9, 0.1], [0.6, 0.4]], [0, 0], bins=2), 6)
    0.25
    """
    return reliability(probs, y, bins, equal_mass=True, ignore_index=ignore_index).error


@checked
def classwise_ece(
    probs: Values, y: Values, bins: Count = 15, ignore_index: int | None = None
) -> float:
    """Mean over classes c of the calibration error of p_c against 1[y = c], even bins (lo, hi].

    Unlike `ece` it also judges the probabilities of the classes that were not predicted.
    Reference: Kull et al., NeurIPS 2019.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        bins: How many bins.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> round(classwise_ece([[0.8, 0.2], [0.8, 0.2]], [0, 1]), 6)
    0.3
    """
    data = labelled(probs, y, ignore_index)
    edges = _even_edges(bins)
    errors = [
        _binned(level, data.labels == label, edges, data.resolution).error
        for label, level in enumerate(data.probs.T)
    ]
    return float(np.mean(errors))


def _even_edges(bins: int) -> FloatArray:
    # a quotient rounds k/bins correctly; linspace would miss 3/10 by one unit in the last place
    return np.arange(bins + 1) / bins


def _quantile_edges(level: FloatArray, bins: int) -> FloatArray:
    """Edge k is the ⌈nk/bins⌉-th smallest level, so distinct levels fill the bins evenly."""
    ordered = np.sort(level)
    ranks = -(-len(ordered) * np.arange(1, bins + 1) // bins) - 1
    return np.concatenate([ordered[:1], ordered[ranks]])


def _binned(
    level: FloatArray, hit: npt.NDArray[np.bool_], edges: FloatArray, resolution: float
) -> Reliability:
    """Means of ``level`` and ``hit`` per bin; an edge stored at the input's precision is on it."""
    bins = len(edges) - 1
    upper = edges[1:-1] * (1 + resolution)
    index = np.searchsorted(upper, level, side="left")
    count = np.bincount(index, minlength=bins)
    share = 1.0 / np.where(count > 0, count, np.nan)
    return Reliability(
        edges=edges,
        confidence=np.bincount(index, weights=level, minlength=bins) * share,
        accuracy=np.bincount(index, weights=hit, minlength=bins) * share,
        count=count,
    )
