r"""The Gaussian with a dense precision as an exponential family.

λ = (Sm, −½S)      T(θ) = (θ, θθᵀ)      μ = (m, S⁻¹ + mmᵀ)
A(λ) = ½mᵀSm − ½ln|S| + ½P ln 2π
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credo.families import FullGaussian
from credo.families.base import check_points
from credo.families.full_gaussian import positive_cholesky, solve_with
from credo.rule.families import exponential
from credo.rule.families.gaussian import (
    EXPECTATION_NAMES,
    NATURAL_NAMES,
    absorb,
    absorb_positive,
    check_dense_or_diagonal,
)


@exponential.natural_parameters.register
def _(q: FullGaussian) -> exponential.Parameters:
    return q.precision @ q.mean, -0.5 * q.precision


@exponential.expectation_parameters.register
def _(q: FullGaussian) -> exponential.Parameters:
    return q.mean, torch.addr(q.covariance, q.mean, q.mean)


@exponential.with_natural.register
def _(q: FullGaussian, natural: exponential.Parameters) -> FullGaussian:
    """Only the symmetric part of a matrix counts."""
    exponential.check_parameters(natural, (q.mean, q.precision), NATURAL_NAMES, "FullGaussian")
    slope, minus_half_precision = natural
    precision = -(minus_half_precision + minus_half_precision.mT)
    factor = positive_cholesky(precision, "FullGaussian: precision (−2 times the natural one)")
    mean = solve_with(factor, slope.unsqueeze(-1)).squeeze(-1)
    return FullGaussian.of_factor(mean, precision, factor)


@exponential.with_expectation.register
def _(q: FullGaussian, expectation: exponential.Parameters) -> FullGaussian:
    """Only the symmetric part of a matrix counts."""
    exponential.check_parameters(
        expectation, (q.mean, q.precision), EXPECTATION_NAMES, "FullGaussian"
    )
    mean, second_moment = expectation
    covariance = 0.5 * (second_moment + second_moment.mT) - torch.outer(mean, mean)
    what = "FullGaussian: second moment − mean·meanᵀ, the covariance,"
    factor = positive_cholesky(covariance, what)
    return _with_precision(mean, torch.cholesky_inverse(factor))


@exponential.sufficient_statistics.register
def _(q: FullGaussian, theta: Tensor) -> exponential.Parameters:
    check_points(theta, q.size)
    return theta, theta.unsqueeze(-1) * theta.unsqueeze(-2)


@exponential.log_partition.register
def _(q: FullGaussian) -> Tensor:
    squared_norm = (q.mean @ q.cholesky).square().sum()
    half_log_det = q.cholesky.diagonal().log().sum()
    return 0.5 * squared_norm - half_log_det + 0.5 * q.size * math.log(2 * math.pi)


@absorb.register
def _(q: FullGaussian, curvature: Tensor, keep: float, gain: float) -> FullGaussian:
    """Exactly; one pass over the matrix, and one factorisation, which is the check of it."""
    check_dense_or_diagonal(q, curvature)
    if curvature.dim() == 1:
        precision = q.precision * keep
        precision.diagonal().add_(curvature, alpha=gain)
    elif keep == 1.0 - gain:
        precision = torch.lerp(q.precision, curvature, gain)
    else:
        precision = (q.precision * keep).add_(curvature, alpha=gain)
    return _with_precision(q.mean, precision)


@absorb_positive.register
def _(q: FullGaussian, curvature: Tensor, rate: float, temperature: float = 1.0) -> FullGaussian:
    """GS⁻¹G = WᵀW with W = L⁻¹G."""
    check_dense_or_diagonal(q, curvature)
    dense = curvature if curvature.dim() == 2 else torch.diag(curvature)
    change = dense - temperature * q.precision
    whitened = torch.linalg.solve_triangular(q.cholesky, change, upper=False)
    first_order = q.precision + rate * change
    precision = torch.addmm(first_order, whitened.mT, whitened, alpha=0.5 * rate * rate)
    return _with_precision(q.mean, precision)


def _with_precision(mean: Tensor, precision: Tensor) -> FullGaussian:
    factor = positive_cholesky(precision, "FullGaussian: precision")
    return FullGaussian.of_factor(mean, precision, factor)
