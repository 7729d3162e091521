r"""The Gaussian with independent weights as an exponential family.

λ = (m/σ², −½/σ²)      T(θ) = (θ, θ²)      μ = (m, σ² + m²)      all (P,)
"""

from __future__ import annotations

import math

from torch import Tensor

from credo.errors import DataError
from credo.families import DiagGaussian
from credo.families.base import check_points, refuse_unless
from credo.rule.families.exponential import (
    Parameters,
    check_parameters,
    expectation_parameters,
    log_partition,
    natural_parameters,
    sufficient_statistics,
    with_expectation,
    with_natural,
)
from credo.rule.families.gaussian import (
    EXPECTATION_NAMES,
    NATURAL_NAMES,
    absorb,
    absorb_positive,
)
from credo.types import Vector


@natural_parameters.register
def _(q: DiagGaussian) -> Parameters:
    precision = q.precision
    return precision * q.mean, -0.5 * precision


@expectation_parameters.register
def _(q: DiagGaussian) -> Parameters:
    return q.mean, q.variance + q.mean.square()


@with_natural.register
def _(q: DiagGaussian, natural: Parameters) -> DiagGaussian:
    check_parameters(natural, (q.mean, q.scale), NATURAL_NAMES, "DiagGaussian")
    slope, minus_half_precision = natural
    precision = -2 * minus_half_precision
    _refuse_unless_positive(precision, "precision (−2 times the natural one)")
    return DiagGaussian(slope / precision, precision.rsqrt())


@with_expectation.register
def _(q: DiagGaussian, expectation: Parameters) -> DiagGaussian:
    check_parameters(expectation, (q.mean, q.scale), EXPECTATION_NAMES, "DiagGaussian")
    mean, second_moment = expectation
    variance = second_moment - mean.square()
    _refuse_unless_positive(variance, "second moment − mean², the variance,")
    return DiagGaussian(mean, variance.sqrt())


@sufficient_statistics.register
def _(q: DiagGaussian, theta: Tensor) -> Parameters:
    check_points(theta, q.size)
    return theta, theta.square()


@log_partition.register
def _(q: DiagGaussian) -> Tensor:
    """Σ ½m²/σ² + ln σ, and ½P ln 2π."""
    log_volume = q.scale.log().sum() + 0.5 * q.size * math.log(2 * math.pi)
    return 0.5 * (q.mean / q.scale).square().sum() + log_volume


@absorb.register
def _(q: DiagGaussian, curvature: Tensor, keep: float, gain: float) -> DiagGaussian:
    """keep/σ² + gain·h, where h (P,) is the curvature's diagonal.

    The first precision that is not positive and finite is refused.
    """
    _check_curvature(q, curvature)
    return _with_precision(q, (keep * q.precision).add_(curvature, alpha=gain))


@absorb_positive.register
def _(q: DiagGaussian, curvature: Tensor, rate: float, temperature: float = 1.0) -> DiagGaussian:
    """With s = 1/σ² and h (P,), elementwise: at least s/2, whatever h and ρ."""
    _check_curvature(q, curvature)
    precision = q.precision
    change = rate * (curvature - temperature * precision)
    return _with_precision(q, precision + change + 0.5 * change.square() / precision)


def _with_precision(q: DiagGaussian, precision: Vector) -> DiagGaussian:
    _refuse_unless_positive(precision, "precision")
    return DiagGaussian(q.mean, precision.rsqrt())


def _check_curvature(q: DiagGaussian, curvature: Tensor) -> None:
    if curvature.shape == 2 * q.mean.shape:
        raise DataError(
            f"a DiagGaussian has independent weights and can't hold a curvature "
            f"({q.size}, {q.size}): give its diagonal, curvature.diagonal(), or use "
            "FullGaussian"
        )
    if curvature.shape != q.mean.shape:
        raise DataError(f"the curvature must be ({q.size},), got shape {tuple(curvature.shape)}")


def _refuse_unless_positive(value: Tensor, name: str) -> None:
    valid = (value > 0) & (value < math.inf)
    refuse_unless(valid, value, "DiagGaussian", name, "positive and finite")
