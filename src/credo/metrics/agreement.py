r"""How near predictions are to a reference's, such as those of long Markov chains.

    agreement          mean_i 1[argmax_c p_ic = argmax_c p'_ic]
    total variation    mean_i ½ Σ_c |p_ic − p'_ic|
    Wasserstein-2      mean_i (∫₀¹ (F_i⁻¹(u) − F'_i⁻¹(u))² du)^½

None of them looks at labels: a method may agree with the truth more often than its reference does.
They say how well it approximates the posterior it claims to.

References: Izmailov, Vikram, Hoffman & Wilson, "What are Bayesian neural network posteriors really
like?", 2021 (arXiv:2104.14421); Wilson et al., "Evaluating approximate inference in Bayesian deep
learning", 2022 (PMLR 176; the first two for classes, the last one for regression).
"""

from __future__ import annotations

import numpy as np

from credo.errors import DataError
from credo.metrics._inputs import FloatArray, Values, as_floats, probabilities, require_same_shape


def agreement(probs: Values, reference_probs: Values) -> float:
    """Share of examples with the same most probable class; the first class wins ties.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        reference_probs: Those of the reference, in the same layout.

    >>> agreement([[0.9, 0.1], [0.4, 0.6]], [[0.6, 0.4], [0.7, 0.3]])
    0.5
    """
    rows, others = _both(probs, reference_probs)
    return float((rows.argmax(axis=1) == others.argmax(axis=1)).mean())


def total_variation(probs: Values, reference_probs: Values) -> float:
    """Mean total variation ½ Σ_c |p_c − p'_c|, from 0 to 1.

    The largest difference that the two give to any event; for two classes |p − p'|.

    Args:
        probs: Probabilities (B, C), or (B,) for P(y = 1), or (B, C, …) for dense predictions.
        reference_probs: Those of the reference, in the same layout.

    >>> round(total_variation([[0.9, 0.1], [0.4, 0.6]], [[0.6, 0.4], [0.4, 0.6]]), 6)
    0.15
    """
    rows, others = _both(probs, reference_probs)
    return float(0.5 * np.abs(rows - others).sum(axis=1).mean())


def w2(samples: Values, reference_samples: Values) -> float:
    """Wasserstein-2 distance of the predictive marginals, averaged over inputs and outputs.

    In one dimension the optimal plan joins equal quantiles, so that sorted draws are enough: of S
    draws each the distance is (mean_s (x_(s) − x'_(s))²)^½, and unequal numbers of draws are
    compared as the step functions that their quantiles are. In the units of the targets. Two sets
    of S draws of one distribution are apart by some σ/√S: compare with what two halves of the
    reference have.

    Args:
        samples: Draws of the predictive, draws first: (S, B) or (S, B, …).
        reference_samples: Draws of the reference's, (S', B) or (S', B, …).

    >>> w2([[0.0], [2.0]], [[1.0], [3.0]])
    1.0
    """
    ours, theirs = as_floats(samples, "samples"), as_floats(reference_samples, "reference_samples")
    for name, draws in (("samples", ours), ("reference_samples", theirs)):
        if draws.ndim < 2:
            raise DataError(f"{name} need the draws first, (S, B), got shape {draws.shape}.")
    require_same_shape("one of samples", ours[0], "one of reference_samples", theirs.shape[1:])
    ours, theirs = (np.sort(draws.reshape(len(draws), -1), axis=0) for draws in (ours, theirs))
    if len(ours) == len(theirs):
        squares = np.square(ours - theirs).mean(axis=0)
    else:
        squares = _unequal(ours, theirs)
    return float(np.sqrt(squares).mean())


def _unequal(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    """∫ (F⁻¹ − F'⁻¹)², exactly: both are constant between the multiples of 1/S and of 1/S'."""
    sizes = len(ours), len(theirs)
    edges = np.unique(np.concatenate([np.arange(size + 1) / size for size in sizes]))
    # Rounding may split an edge that both have; a piece of width 1e-16 weighs nothing.
    middles, widths = 0.5 * (edges[1:] + edges[:-1]), np.diff(edges)
    first, second = (np.minimum((middles * s).astype(np.int64), s - 1) for s in sizes)
    squares: FloatArray = np.square(ours[first] - theirs[second]) * widths[:, None]
    return squares.sum(axis=0)


def _both(probs: Values, reference_probs: Values) -> tuple[FloatArray, FloatArray]:
    rows, others = probabilities(probs), probabilities(reference_probs)
    require_same_shape("probs", rows, "reference_probs", others.shape)
    return rows, others
