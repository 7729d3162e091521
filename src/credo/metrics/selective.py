"""Predicting only when sure: how accuracy grows as uncertain examples are handed over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credo.metrics._inputs import FloatArray, Values, as_floats, labelled, require_same_shape


@dataclass(frozen=True)
class RetentionCurve:
    """Mean score of the k most certain of n examples, k = 1 … n, between two references.

    Args:
        fractions: k/n, (n,).
        accuracy: Mean score of the k examples of least uncertainty, (n,).
        oracle: The same ranked by the score itself, (n,): no uncertainty can do better.
        random: What an uninformative uncertainty gives on average, (n,).
    """

    fractions: FloatArray
    accuracy: FloatArray
    oracle: FloatArray
    random: FloatArray

    @property
    def area(self) -> float:
        """Mean of the curve over the fractions; one minus it is the area under risk–coverage."""
        return float(self.accuracy.mean())

    @property
    def oracle_area(self) -> float:
        """Area of the best possible ranking."""
        return float(self.oracle.mean())

    @property
    def random_area(self) -> float:
        """Area without ranking: the mean score of all examples."""
        return float(self.random.mean())


def retention(correct_or_score: Values, uncertainty: Values) -> RetentionCurve:
    """Keep the fraction of examples one is most certain about: how good are those?

    Examples of equal uncertainty are kept in random order, and the curve is the mean over these
    orders. Reference: Geifman & El-Yaniv, NeurIPS 2017.

    Args:
        correct_or_score: 1 or 0 for right or wrong, or any score of which more is better (minus the
            squared error).
        uncertainty: Of each example, in the shape of ``correct_or_score``.

    >>> curve = retention([1, 1, 0, 1], [0.1, 0.2, 0.9, 0.4])
    >>> curve.accuracy, curve.area
    (array([1.  , 1.  , 1.  , 0.75]), 0.9375)
    >>> curve.oracle_area, curve.random_area
    (0.9375, 0.75)
    """
    score = as_floats(correct_or_score, "correct_or_score")
    unsure = as_floats(uncertainty, "uncertainty")
    require_same_shape("uncertainty", unsure, "correct_or_score", score.shape)
    score, unsure = score.ravel(), unsure.ravel()
    kept = np.arange(1, score.size + 1)
    return RetentionCurve(
        fractions=kept / score.size,
        accuracy=np.cumsum(_averaged_over_ties(score, unsure)) / kept,
        oracle=np.cumsum(np.sort(score)[::-1]) / kept,
        random=np.full(score.size, score.mean()),
    )


def accuracy_vs_confidence(
    probs: Values, y: Values, thresholds: Values, ignore_index: int | None = None
) -> FloatArray:
    """Accuracy on the examples with max_c p_c ≥ t, for each t of ``thresholds``; NaN if none.

    Reference: Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017, section 3.6.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        thresholds: The confidences t.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> accuracy_vs_confidence([[0.9, 0.1], [0.6, 0.4]], [0, 1], [0.5, 0.7, 0.95])
    array([0.5, 1. , nan])
    """
    data = labelled(probs, y, ignore_index)
    level, hit = data.top()
    order = np.argsort(level)
    hits_above = np.append(np.cumsum(hit[order][::-1])[::-1], 0)
    # a confidence of 0.9 stored in float32 reaches the threshold 0.9
    limits = as_floats(thresholds, "thresholds") * (1 - data.resolution)
    first = np.searchsorted(level[order], limits, side="left")
    kept = len(level) - first
    return hits_above[first] / np.where(kept > 0, kept, np.nan)


def _averaged_over_ties(score: FloatArray, unsure: FloatArray) -> FloatArray:
    """Scores by increasing uncertainty, each replaced by the mean of those that share it."""
    order = np.argsort(unsure, kind="stable")
    score, unsure = score[order], unsure[order]
    starts = np.flatnonzero(np.append(True, unsure[1:] != unsure[:-1]))
    sizes = np.diff(np.append(starts, len(unsure)))
    return np.repeat(np.add.reduceat(score, starts) / sizes, sizes)
