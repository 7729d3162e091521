r"""The Gaussian of fixed precision as an exponential family: the rule in it is gradient descent.

    λ = Sm      T(θ) = θ      μ = m      A(λ) = ½mᵀSm      log h(θ) = log N(θ; 0, S⁻¹)

The base measure h is not constant and the entropy is, so ∇_μH = 0, not −λ. The learning rule
becomes preconditioned gradient descent, m − ρS⁻¹∇.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credo.families import FixedGaussian
from credo.families.base import check_points
from credo.rule.families.exponential import (
    Parameters,
    check_parameters,
    entropy_gradient,
    expectation_parameters,
    log_base,
    log_partition,
    natural_parameters,
    parameter_names,
    sufficient_statistics,
    with_expectation,
    with_natural,
)
from credo.rule.families.gaussian import absorb, absorb_positive

_NATURAL_NAMES = ("precision times mean",)
_EXPECTATION_NAMES = ("mean",)


@parameter_names.register
def _(q: FixedGaussian) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _NATURAL_NAMES, _EXPECTATION_NAMES


@natural_parameters.register
def _(q: FixedGaussian) -> Parameters:
    return (q.multiply(q.mean),)


@expectation_parameters.register
def _(q: FixedGaussian) -> Parameters:
    return (q.mean,)


@with_natural.register
def _(q: FixedGaussian, natural: Parameters) -> FixedGaussian:
    check_parameters(natural, (q.mean,), _NATURAL_NAMES, "FixedGaussian")
    return q.with_mean(q.solve(natural[0]))


@with_expectation.register
def _(q: FixedGaussian, expectation: Parameters) -> FixedGaussian:
    check_parameters(expectation, (q.mean,), _EXPECTATION_NAMES, "FixedGaussian")
    return q.with_mean(expectation[0])


@sufficient_statistics.register
def _(q: FixedGaussian, theta: Tensor) -> Parameters:
    check_points(theta, q.size)
    return (theta,)


@log_partition.register
def _(q: FixedGaussian) -> Tensor:
    return 0.5 * (q.multiply(q.mean) * q.mean).sum()


@log_base.register
def _(q: FixedGaussian, theta: Tensor) -> Tensor:
    return q.with_mean(torch.zeros_like(q.mean)).log_prob(theta)


@entropy_gradient.register
def _(q: FixedGaussian) -> Parameters:
    """0, because the entropy depends on S alone."""
    return (torch.zeros_like(q.mean),)


@absorb.register
def _(q: FixedGaussian, curvature: Any, keep: float, gain: float) -> FixedGaussian:
    """This Gaussian itself: the precision is fixed, so every curvature projects onto it."""
    return q


@absorb_positive.register
def _(q: FixedGaussian, curvature: Any, rate: float, temperature: float = 1.0) -> FixedGaussian:
    """This Gaussian itself: the precision is fixed, so every curvature projects onto it."""
    return q
