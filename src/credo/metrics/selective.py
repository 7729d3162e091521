r"""Predicting only when sure: how good the rest is as uncertain examples are handed over.

Referral, as doctors do it: the k most certain of n examples are kept, the others go to an expert.

    curve(k/n) = measure of the k examples of least uncertainty           k = 1 … n

`retention` takes any score of single examples; `referral` takes probabilities and labels, and
measures the kept examples by accuracy, NLL or (of two classes) AUROC. Two references stand beside
a curve: *random*, what an uninformative uncertainty gives, and *oracle*, which hands over what is
worst. `referral_costs` puts a price on both errors and referrals:

    cost(k/n) = [error_cost · Σ_{kept} loss_i + referral_cost · (n − k)] / n

With calibrated probabilities and loss 0 or 1 the best rule refers where 1 − max p exceeds
referral_cost/error_cost (Chow, 1970), so a threshold can be had without data; `referral_costs`
finds the one that was best on data, calibrated or not. Choose it on held-out examples and read its
cost off others, by `ReferralCosts.at`.

References: Chow, "On optimum recognition error and reject tradeoff", 1970; Geifman & El-Yaniv,
"Selective classification for deep neural networks", 2017 (arXiv:1705.08500); Filos et al., "A
systematic comparison of Bayesian deep learning robustness in diabetic retinopathy tasks", 2019
(arXiv:1912.10481).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np

from credo.checks import NotNegative, Share, checked
from credo.errors import DataError
from credo.metrics._inputs import (
    FloatArray,
    IntArray,
    Labelled,
    Values,
    as_floats,
    labelled,
    require_same_shape,
)
from credo.metrics.scoring import SMALLEST_PROBABILITY

Measure = Literal["accuracy", "nll", "auroc"]


@dataclass(frozen=True)
class RetentionCurve:
    """A measure of the k most certain of n examples, k = 1 … n, between two references.

    Args:
        fractions: k/n, (n,).
        accuracy: The measure of the k examples of least uncertainty, (n,): the mean score, or what
            ``measure`` says; NaN where it has no meaning (AUROC of a single class).
        oracle: The same where the worst examples are handed over first, (n,). No uncertainty can do
            better by accuracy, NLL or a score; for AUROC it is a reference, not a bound.
        random: What an uninformative uncertainty gives on average, (n,).
        measure: What is measured: "score", "accuracy", "nll" or "auroc".
    """

    fractions: FloatArray
    accuracy: FloatArray
    oracle: FloatArray
    random: FloatArray
    measure: str = "score"

    @property
    def values(self) -> FloatArray:
        """The curve, whatever it measures."""
        return self.accuracy

    @property
    def lower_is_better(self) -> bool:
        """Whether a good curve lies low: that of the NLL."""
        return self.measure == "nll"

    @property
    def area(self) -> float:
        """Mean of the curve over the fractions; one minus it is the area under risk–coverage.

        AUROC has none where the kept examples are of one class; these fractions are left out.
        """
        return self._mean(self.accuracy)

    @property
    def oracle_area(self) -> float:
        """Area of the oracle."""
        return self._mean(self.oracle)

    @property
    def random_area(self) -> float:
        """Area without ranking: the measure of all examples."""
        return self._mean(self.random)

    @property
    def gain(self) -> float:
        """Where the area lies between random (0) and oracle (1); NaN where these are the same.

        Negative is an uncertainty that hands over the wrong examples.
        """
        whole = self.oracle_area - self.random_area
        return (self.area - self.random_area) / whole if whole else float("nan")

    @checked
    def at(self, fraction: Share) -> float:
        """The measure when this fraction of the examples is kept, rounded up to whole examples.

        Args:
            fraction: Above 0, up to 1.

        >>> retention([1, 1, 0, 1], [0.1, 0.2, 0.9, 0.4]).at(0.75)
        1.0
        """
        # 0.7·10 is 7.000000000000001 in floating point
        kept = int(np.ceil(fraction * len(self.fractions) * (1 - 1e-12)))
        return float(self.accuracy[max(kept, 1) - 1])

    @staticmethod
    def _mean(values: FloatArray) -> float:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")


@dataclass(frozen=True)
class ReferralCosts:
    """What errors and referrals cost together, by the number k = 0 … n of examples that are kept.

    Args:
        fractions: k/n, (n + 1,).
        cost: Mean cost of an example, (n + 1,). Examples of equal uncertainty count on average.
        oracle: The same where the examples of largest loss are handed over first, (n + 1,).
        random: The same with an uninformative uncertainty, on average, (n + 1,).
        uncertainty: Of the examples in increasing order, (n,).
    """

    fractions: FloatArray
    cost: FloatArray
    oracle: FloatArray
    random: FloatArray
    uncertainty: FloatArray

    @property
    def best_fraction(self) -> float:
        """The share that is kept at the lowest cost that a threshold can reach."""
        return float(self.fractions[self._best])

    @property
    def best_threshold(self) -> float:
        """Keep examples of at most this uncertainty; −inf hands all of them over."""
        return float(self.uncertainty[self._best - 1]) if self._best else float("-inf")

    @property
    def best_cost(self) -> float:
        """The cost there: on the examples it was chosen by, so a little too good."""
        return float(self.cost[self._best])

    @property
    def oracle_cost(self) -> float:
        """The lowest cost that any ranking can reach."""
        return float(self.oracle.min())

    def at(self, threshold: float) -> float:
        """The cost on these examples if those above a threshold are handed over.

        Args:
            threshold: Such as the ``best_threshold`` of other examples.

        >>> costs = referral_costs([0, 0, 1, 0], [0.1, 0.2, 0.9, 0.4], referral_cost=0.1)
        >>> costs.best_threshold, costs.best_cost, costs.at(0.2)
        (0.4, 0.025, 0.05)
        """
        return float(self.cost[np.searchsorted(self.uncertainty, threshold, side="right")])

    @property
    def _best(self) -> int:
        """Of the places where a threshold can lie: behind the last of equal uncertainties."""
        places = np.append(np.append(0, _group_ends(self.uncertainty)), len(self.uncertainty))
        return int(places[np.argmin(self.cost[places])])


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


@checked
def referral(
    probs: Values,
    y: Values,
    uncertainty: Values | None = None,
    measure: Measure = "accuracy",
    ignore_index: int | None = None,
) -> RetentionCurve:
    """Refer the least certain examples: how good are predictions for those that are kept?

    Equal uncertainties count on average over their orders; AUROC, which is no average, is taken
    behind the last of them and drawn straight in between.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        uncertainty: Of each example, in the shape of ``y``; by default the entropy of ``probs``.
        measure: "accuracy", "nll" or, for two classes, "auroc", of P(y = 1) against the labels. The
            oracle hands over errors first, or for the other two what has the least probability of
            its label.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    Raises:
        DataError: The shapes don't fit, or AUROC is asked of more than two classes.

    >>> p, y = [0.9, 0.2, 0.6, 0.3], [1, 0, 0, 1]
    >>> curve = referral(p, y)
    >>> curve.accuracy, curve.area, curve.random_area
    (array([1.        , 1.        , 0.66666667, 0.5       ]), 0.791..., 0.5)
    >>> referral(p, y, measure="auroc").accuracy
    array([ nan, 1.  , 1.  , 0.75])
    """
    data = labelled(probs, y, ignore_index)
    unsure = _uncertainty_of(data, uncertainty, y, ignore_index)
    if measure == "auroc":
        return _auroc_curve(data, unsure)
    likelihood = np.log(data.of_label.clip(SMALLEST_PROBABILITY))
    if measure == "nll":
        curve = retention(likelihood, unsure)
        return RetentionCurve(curve.fractions, -curve.accuracy, -curve.oracle, -curve.random, "nll")
    curve = retention(data.top()[1], unsure)
    return RetentionCurve(curve.fractions, curve.accuracy, curve.oracle, curve.random, "accuracy")


@checked
def referral_costs(
    loss: Values,
    uncertainty: Values,
    error_cost: NotNegative = 1.0,
    referral_cost: NotNegative = 0.1,
) -> ReferralCosts:
    """What it costs to keep the k most certain examples and hand over the others, k = 0 … n.

    Args:
        loss: Of each example that is kept: 1 for an error and 0 else, or any loss.
        uncertainty: Of each example, in the shape of ``loss``.
        error_cost: What a loss of 1 costs.
        referral_cost: What handing over one example costs, whoever looks at it then.

    >>> costs = referral_costs([0, 0, 1, 0], [0.1, 0.2, 0.9, 0.4], error_cost=1, referral_cost=0.2)
    >>> costs.cost, costs.best_fraction
    (array([0.2 , 0.15, 0.1 , 0.05, 0.25]), 0.75)
    """
    losses = as_floats(loss, "loss")
    unsure = as_floats(uncertainty, "uncertainty")
    require_same_shape("uncertainty", unsure, "loss", losses.shape)
    losses, unsure = losses.ravel(), unsure.ravel()
    count = losses.size
    kept = np.arange(count + 1)

    def cost_of(ordered: FloatArray) -> FloatArray:
        errors = np.append(0.0, np.cumsum(ordered))
        return (error_cost * errors + referral_cost * (count - kept)) / count

    return ReferralCosts(
        fractions=kept / count,
        cost=cost_of(_averaged_over_ties(losses, unsure)),
        oracle=cost_of(np.sort(losses)),
        random=cost_of(np.full(count, losses.mean())),
        uncertainty=np.sort(unsure),
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


def _uncertainty_of(
    data: Labelled, uncertainty: Values | None, y: Values, ignore_index: int | None
) -> FloatArray:
    """One number for each example that counts: those given, or the entropy."""
    if uncertainty is None:
        probs = data.probs.clip(SMALLEST_PROBABILITY, 1.0)
        return -(probs * np.log(probs)).sum(1)
    unsure, labels = as_floats(uncertainty, "uncertainty"), as_floats(y, "y")
    require_same_shape("uncertainty", unsure, "y", labels.shape)
    kept = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    return unsure[kept]


def _auroc_curve(data: Labelled, unsure: FloatArray) -> RetentionCurve:
    if data.probs.shape[1] != 2:
        raise DataError(
            f'measure="auroc" is for two classes, and there are {data.probs.shape[1]}: take '
            '"accuracy" or "nll", or give the probability of one class, (B,), with labels of 0 and '
            "1 for it"
        )
    scores, count = data.probs[:, 1], len(data.labels)
    whole = _running_auroc(scores, data.labels, np.zeros(count))
    return RetentionCurve(
        fractions=np.arange(1, count + 1) / count,
        accuracy=_running_auroc(scores, data.labels, unsure),
        oracle=_running_auroc(scores, data.labels, -data.of_label),
        random=np.full(count, whole[-1]),
        measure="auroc",
    )


def _running_auroc(scores: FloatArray, labels: IntArray, unsure: FloatArray) -> FloatArray:
    """AUROC of the k most certain examples: pairs in the right order over all pairs, ties half."""
    order = np.argsort(unsure, kind="stable")
    seen: tuple[list[float], list[float]] = ([], [])
    right = 0.0
    found = np.full(len(order), np.nan)
    ends = set(_group_ends(unsure[order]).tolist()) | {len(order)}
    for count, place in enumerate(order, start=1):
        score, label = float(scores[place]), int(labels[place])
        others = seen[1 - label]
        below, up_to = bisect_left(others, score), bisect_right(others, score)
        right += (below if label else len(others) - up_to) + 0.5 * (up_to - below)
        insort(seen[label], score)
        if count in ends and seen[0] and seen[1]:
            found[count - 1] = right / (len(seen[0]) * len(seen[1]))
    known = np.flatnonzero(~np.isnan(found))
    if len(known):
        between = np.arange(known[0], len(found))
        found[between] = np.interp(between, known, found[known])
    return found


def _group_ends(ordered: FloatArray) -> IntArray:
    """How many there are up to the last of each run of equal values, the last run left out."""
    return np.flatnonzero(ordered[1:] != ordered[:-1]) + 1


def _averaged_over_ties(score: FloatArray, unsure: FloatArray) -> FloatArray:
    """Scores by increasing uncertainty, each replaced by the mean of those that share it."""
    order = np.argsort(unsure, kind="stable")
    score, unsure = score[order], unsure[order]
    starts = np.flatnonzero(np.append(True, unsure[1:] != unsure[:-1]))
    sizes = np.diff(np.append(starts, len(unsure)))
    return np.repeat(np.add.reduceat(score, starts) / sizes, sizes)
