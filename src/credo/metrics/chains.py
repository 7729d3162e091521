r"""Have Markov chains met, and how many independent draws are they worth?

Both functions take draws of shape (chains, draws, ...) and answer for each quantity in the trailing
dimensions. They look at ranks: pooled draws are replaced by the normal quantiles of their ranks,
z = Φ⁻¹((rank − 3/8)/(S + 1/4)), so that nothing needs a finite variance. Chains are cut in halves,
so that a single one that drifts is noticed too; of an odd number of draws the middle one is left
out.

Reference: Vehtari, Gelman, Simpson, Carpenter & Bürkner, "Rank-normalization, folding, and
localization", Bayesian Analysis 2021.
"""

from __future__ import annotations

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import ndtri

from credo.errors import DataError
from credo.metrics._inputs import FloatArray, Values, as_floats

FEWEST_DRAWS = 4
"""Halves of two draws are the shortest that have a variance."""


def r_hat(draws: Values) -> float | FloatArray:
    r"""Rank-normalised split R̂: √(var⁺/W), 1 where all chains sample the same distribution.

    W is the mean variance within the half-chains of N draws, B/N the variance of their means, and
    var⁺ = (N − 1)/N·W + B/N. It is computed of z and of the folded |draw − median|, which tells
    chains that differ in their spread; the larger one counts. Below about 1.01 is good, above 1.05
    is not. A quantity that never changes has R̂ = 1, chains that stick to different values have ∞.

    Args:
        draws: Draws (chains, draws, ...) of one quantity or more.

    >>> rng = np.random.default_rng(0)
    >>> bool(r_hat(rng.normal(size=(4, 500))) < 1.01)
    True
    >>> r_hat([[0, 0, 0, 0], [1, 1, 1, 1]])
    inf
    """
    halves = _halves(draws)
    folded = np.abs(halves - np.median(halves, axis=(0, 1)))
    return _one_or_all(np.maximum(_split_r_hat(_normal_ranks(halves)),
                                  _split_r_hat(_normal_ranks(folded))))  # fmt: skip


def effective_sample_size(draws: Values) -> float | FloatArray:
    r"""Bulk effective sample size: S/τ, the independent draws that tell the mean of z as well.

    τ = 1 + 2Σ_t ρ_t with the autocorrelations of all chains together,
    ρ_t = 1 − (W − mean_c cov_c(t))/var⁺, so chains that have not met count for little. The sum ends
    where Geyer's pairs ρ_{2t} + ρ_{2t+1} turn negative, and pairs are made to decrease. Chains may
    do better than independent draws, by a factor of log₁₀ S at most. A quantity that never changes
    counts as S.

    Args:
        draws: Draws (chains, draws, ...) of one quantity or more.

    >>> rng = np.random.default_rng(0)
    >>> size = effective_sample_size(rng.normal(size=(4, 500)))
    >>> bool(1700 < size < 2300)
    True
    """
    z = _normal_ranks(_halves(draws))
    chains, length = z.shape[:2]
    within, total = _variances(z)
    moving = total > 0
    spread = np.where(moving, total, 1.0)
    rho = 1.0 - (within - _autocovariance(z).mean(0)) / spread
    rho[0] = 1.0
    pairs = rho[: length // 2 * 2].reshape(length // 2, 2, *rho.shape[1:]).sum(1)
    # Every pair after the first negative one is noise.
    pairs = np.where(np.cumsum(pairs < 0, axis=0) > 0, 0.0, pairs)
    tau = 2.0 * np.minimum.accumulate(pairs, axis=0).sum(0) - 1.0
    count = chains * length
    size = count / np.maximum(tau, 1.0 / np.log10(count))
    return _one_or_all(np.where(moving, size, float(count)))


def _halves(draws: Values) -> FloatArray:
    """(2·chains, draws//2, ...)."""
    array = as_floats(draws, "draws")
    if array.ndim < 2 or array.shape[1] < FEWEST_DRAWS:
        raise DataError(
            f"draws must be (chains, draws, ...) with at least {FEWEST_DRAWS} draws of each chain, "
            f"got shape {array.shape}"
        )
    half = array.shape[1] // 2
    return np.concatenate([array[:, :half], array[:, -half:]])


def _normal_ranks(values: FloatArray) -> FloatArray:
    from scipy.stats import rankdata  # a second of importing, which only samplers should pay

    flat = values.reshape(values.shape[0] * values.shape[1], -1)
    ranks = rankdata(flat, axis=0)
    normal: FloatArray = ndtri((ranks - 0.375) / (len(flat) + 0.25))
    return normal.reshape(values.shape)


def _variances(z: FloatArray) -> tuple[FloatArray, FloatArray]:
    """W and var⁺."""
    length = z.shape[1]
    within = z.var(1, ddof=1).mean(0)
    return within, (length - 1) / length * within + z.mean(1).var(0, ddof=1)


def _split_r_hat(z: FloatArray) -> FloatArray:
    within, total = _variances(z)
    moving = within > 0
    stuck = np.where(total > 0, np.inf, 1.0)
    ratio: FloatArray = np.sqrt(np.where(moving, total, 1.0) / np.where(moving, within, 1.0))
    return np.where(moving, ratio, stuck)


def _autocovariance(z: FloatArray) -> FloatArray:
    """cov(t) of each chain at all lags, divided by N − 1 so that cov(0) is the variance."""
    length = z.shape[1]
    size = next_fast_len(2 * length, real=True)
    spectrum = np.fft.rfft(z - z.mean(1, keepdims=True), size, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    covariance: FloatArray = np.fft.irfft(power, size, axis=1)[:, :length] / (length - 1)
    return covariance


def _one_or_all(values: FloatArray) -> float | FloatArray:
    return float(values) if np.ndim(values) == 0 else values
