"""Scores of single predictions, averaged: proper scoring rules, accuracy, coverage."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erf
from torch import Tensor

from credo.errors import DataError
from credo.metrics._inputs import (
    FloatArray,
    Values,
    as_array,
    as_floats,
    labelled,
    probabilities,
    require_same_shape,
)

SMALLEST_PROBABILITY = 1e-12


def accuracy(probs: Values, y: Values, ignore_index: int | None = None) -> float:
    """Fraction of examples whose most probable class is the label; the first class wins ties.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> accuracy([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1])
    0.6666666666666666
    """
    return float(labelled(probs, y, ignore_index).top()[1].mean())


def nll(probs: Values, y: Values, ignore_index: int | None = None) -> float:
    """Negative log-likelihood per example, −mean_i ln p_i,y_i, with p clipped at 1e-12.

    C equal probabilities score ln C.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions. Of a
            posterior its predictive p̄, the average over samples.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> round(nll([[0.5, 0.5]], [1]), 6)
    0.693147
    """
    of_label = labelled(probs, y, ignore_index).of_label
    return float(-np.log(np.clip(of_label, SMALLEST_PROBABILITY, 1.0)).mean())


def gibbs_nll(sample_probs: Values, y: Values, ignore_index: int | None = None) -> float:
    """Loss expected of one posterior sample, mean_k −mean_i ln p_k,i,y_i.

    By Jensen's inequality at least the `nll` of the averaged probabilities. Texts that report the
    sum over examples have B times this value.

    Args:
        sample_probs: Probabilities with the samples first: (S, B, C), or (S, B) for P(y = 1), or
            (S, B, C, H, W).
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> samples = np.array([[[0.9, 0.1]], [[0.5, 0.5]]])
    >>> round(gibbs_nll(samples, [0]), 4), round(nll(samples.mean(0), [0]), 4)
    (0.3993, 0.3567)
    """
    shape = as_array(sample_probs, "sample_probs").shape
    if len(shape) < 2:
        raise DataError(f"sample_probs needs samples first, (S, B, C) or (S, B), got {shape}.")
    samples = sample_probs if isinstance(sample_probs, Tensor) else np.asarray(sample_probs)
    return float(np.mean([nll(one, y, ignore_index) for one in samples]))


def brier(probs: Values, y: Values, ignore_index: int | None = None) -> float:
    """Brier score mean_i Σ_c (p_i,c − 1[y_i = c])², from 0 to 2; C equal probabilities 1 − 1/C.

    This is the sum over all classes: for two classes twice mean (p − y)².
    Reference: Brier, Monthly Weather Review 78, 1950.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> round(brier([[0.25, 0.25, 0.25, 0.25]], [2]), 6)
    0.75
    """
    data = labelled(probs, y, ignore_index)
    error = data.probs.copy()
    error[np.arange(len(error)), data.labels] -= 1
    return float(np.einsum("nc,nc->", error, error) / len(error))


def confidence(probs: Values) -> float:
    """Mean probability of the most probable class, mean_i max_c p_i,c.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.

    >>> round(confidence([[0.9, 0.1], [0.4, 0.6]]), 6)
    0.75
    """
    return float(probabilities(probs).max(axis=1).mean())


def rmse(mean: Values, y: Values) -> float:
    """Root mean squared error √mean (y − mean)² over all entries; the shapes must agree.

    Args:
        mean: Predicted means.
        y: The targets, in the shape of ``mean``.

    >>> rmse([1.0, 2.0], [4.0, 6.0]) == math.sqrt(12.5)
    True
    """
    error = _residuals(mean, y)
    return math.sqrt(float(np.square(error).mean()))


def gaussian_nll(mean: Values, std: Values, y: Values) -> float:
    """−mean ln N(y; mean, std²) = mean [½ ln 2π + ln std + ½((y − mean)/std)²].

    Args:
        mean: Predicted means.
        std: Predicted standard deviations, in the shape of ``mean``, or one for all.
        y: The targets, in the shape of ``mean``.

    >>> round(gaussian_nll([0.0], [1.0], [0.0]), 6)
    0.918939
    """
    error = _residuals(mean, y)
    scale = _positive_scale(std, error.shape)
    density = 0.5 * np.square(error / scale) + np.log(scale)
    return float(density.mean() + 0.5 * math.log(2 * math.pi))


def crps_gaussian(mean: Values, std: Values, y: Values) -> float:
    """Continuous ranked probability score of N(mean, std²), in the units of ``y``.

    The mean over examples of ∫ (F(t) − 1[t ≥ y])² dt, which for a Gaussian is
    std · [z(2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (y − mean)/std. It tends to |y − mean| as std → 0.
    Reference: Gneiting & Raftery, JASA 102, 2007.

    Args:
        mean: Predicted means.
        std: Predicted standard deviations, in the shape of ``mean``, or one for all.
        y: The targets, in the shape of ``mean``.

    >>> round(crps_gaussian([0.0], [1.0], [0.0]), 6)
    0.233695
    """
    error = _residuals(mean, y)
    scale = _positive_scale(std, error.shape)
    z = error / scale
    twice_density = math.sqrt(2 / math.pi) * np.exp(-0.5 * np.square(z))
    cumulative = erf(z / math.sqrt(2))
    return float((error * cumulative + scale * (twice_density - 1 / math.sqrt(math.pi))).mean())


def crps_mixture(mean: Values, std: Values, y: Values) -> FloatArray:
    """Continuous ranked probability score of each target under an equal mixture of Gaussians.

    With A(m, s) = E|N(m, s²)| = m(2Φ(m/s) − 1) + 2sφ(m/s) it is exact:

        (1/S) Σ_k A(y − mean_k, std_k) − (1/2S²) Σ_kl A(mean_k − mean_l, √(std_k² + std_l²))

    One component gives `crps_gaussian`. The cost is S² for each target.
    Reference: Grimit, Gneiting, Berrocal & Johnson, QJRMS 132, 2006.

    Args:
        mean: The components' means, (S, …) for ``y`` of shape (…).
        std: Their standard deviations, in the shape of ``mean``, or one for all.
        y: The targets.

    >>> crps_mixture([[0.0], [0.0]], 1.0, [0.0]).round(6)
    array([0.233695])
    """
    centre, targets = as_floats(mean, "mean"), as_floats(y, "y")
    require_same_shape("one component", centre[0] if centre.ndim else centre, "y", targets.shape)
    scale = np.broadcast_to(_positive_scale(std, centre.shape), centre.shape)
    count = len(centre)
    score = _mean_distance(targets - centre, scale).mean(axis=0)
    for k in range(count):
        pairs = _mean_distance(centre[k] - centre[k:], np.hypot(scale[k], scale[k:]))
        # every pair but that of a component with itself stands for two
        score -= (pairs.sum(axis=0) - 0.5 * pairs[0]) / count**2
    return score


def crps(samples: Values, y: Values, *, fair: bool = False) -> float:
    """Continuous ranked probability score from draws: mean_i [E|X − y| − ½ E|X − X′|].

    By default X and X′ run over all S² pairs: the exact score of the empirical distribution, never
    negative, |x − y| at S = 1. Sorting makes the cost S ln S. Reference: Ferro, QJRMS 140, 2014.

    Args:
        samples: The draws, (S, B), or (S, …) for ``y`` of shape (…).
        y: The targets.
        fair: Leave out the S pairs of a draw with itself: an unbiased estimate of the score of the
            distribution the draws came from, comparable between different S; it needs S ≥ 2.

    >>> crps([[0.0], [2.0]], [1.0]), crps([[0.0], [2.0]], [1.0], fair=True)
    (0.5, 0.0)
    """
    draws, targets = as_floats(samples, "samples"), as_floats(y, "y")
    require_same_shape("one sample", draws[0] if draws.ndim else draws, "y", targets.shape)
    size = draws.shape[0] if draws.ndim > targets.ndim else 0
    if size < 1 + fair:
        raise DataError(
            f"samples need the draws first, (S, B) with S ≥ {1 + fair}, got shape {draws.shape}."
        )
    deviations = np.sort(draws - targets, axis=0)
    # Σ_{i<j} (x_(j) − x_(i)) counts the r-th smallest draw r − 1 times up and S − r times down
    weights = 2.0 * np.arange(1, size + 1) - size - 1
    spread = np.tensordot(weights, deviations, axes=1) / (size * (size - fair))
    return float((np.abs(deviations).mean(axis=0) - spread).mean())


def mean_iou(probs: Values, y: Values, ignore_index: int | None = None) -> float:
    """Intersection over union of predicted and true places of a class, averaged over the classes.

    Classes that are neither predicted nor true anywhere have none and are left out.
    Reference: Everingham et al., "The PASCAL visual object classes challenge", IJCV 88, 2010.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        y: The classes that came true: (B,), or (B, …) for dense predictions.
        ignore_index: A label that marks missing truth; examples that have it are left out.

    >>> mean_iou([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]], [0, 1, 1])
    0.5
    """
    data = labelled(probs, y, ignore_index)
    classes = data.probs.shape[1]
    predicted = data.probs.argmax(axis=1)
    both = np.bincount(data.labels[predicted == data.labels], minlength=classes)
    either = (
        np.bincount(predicted, minlength=classes)
        + np.bincount(data.labels, minlength=classes)
        - both
    )
    return float((both[either > 0] / either[either > 0]).mean())


def coverage(lower: Values, upper: Values, y: Values) -> float:
    """Fraction of targets inside their interval, ends included; ends may be infinite.

    Args:
        lower: Lower ends of the intervals, in the shape of ``y``.
        upper: Upper ends of the intervals, in the shape of ``y``.
        y: The targets.

    >>> coverage([0.0, 0.0], [1.0, 1.0], [1.0, 1.5])
    0.5
    """
    low = as_floats(lower, "lower", finite=False)
    high = as_floats(upper, "upper", finite=False)
    targets = as_floats(y, "y")
    require_same_shape("lower", low, "y", targets.shape)
    require_same_shape("upper", high, "y", targets.shape)
    crossed = low > high
    if crossed.any():
        raise DataError(f"lower exceeds upper in {int(crossed.sum())} intervals; swap them.")
    return float(((low <= targets) & (targets <= high)).mean())


def _mean_distance(location: FloatArray, scale: FloatArray) -> FloatArray:
    """E|X| of X ~ N(location, scale²)."""
    z = location / scale
    density = math.sqrt(2 / math.pi) * np.exp(-0.5 * np.square(z))
    return location * erf(z / math.sqrt(2)) + scale * density


def _residuals(mean: Values, y: Values) -> FloatArray:
    location, targets = as_floats(mean, "mean"), as_floats(y, "y")
    require_same_shape("mean", location, "y", targets.shape)
    return targets - location


def _positive_scale(std: Values, shape: tuple[int, ...]) -> FloatArray:
    scale = as_floats(std, "std")
    if scale.ndim:
        require_same_shape("std", scale, "y", shape)
    if scale.min() <= 0:
        raise DataError(
            f"std must be positive, found {scale.min():.4g}; pass standard deviations, not "
            "variances or their logarithms."
        )
    return scale
