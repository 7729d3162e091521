r"""Gaussians with a structured precision as curved exponential families.

A structured precision makes a *curved* sub-family of the dense Gaussian: its members' natural
parameters (Sm, −½S) don't fill a linear space. So a member shows the parameters and statistics of
the dense Gaussian, (P,) and (P, P), refused beyond `MAX_DENSE` weights, and parameters that are not
on the structure are projected onto it, by `near_precision` and `near_covariance` of each structure.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any, TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_points
from credo.families.full_gaussian import positive_cholesky
from credo.families.structured_gaussian import StructuredGaussian
from credo.rule.families import gaussian
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
from credo.rule.families.gaussian import EXPECTATION_NAMES, NATURAL_NAMES
from credo.types import Vector

KroneckerCurvature: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""One pair (A', B') for each block: H = blockdiag(A' ⊗ B'), never formed."""


@singledispatch
def near_precision(q: StructuredGaussian, mean: Vector, precision: Tensor) -> Any:
    """The member that stands for N(mean, precision⁻¹); exact and differentiable at members.

    Args:
        q: A member, whose structure is kept.
        mean: (P,).
        precision: (P, P), positive definite.
    """
    raise NotImplementedError(type(q).__name__)


@singledispatch
def near_covariance(q: StructuredGaussian, mean: Vector, covariance: Tensor) -> Any:
    """The member that stands for N(mean, covariance); exact and differentiable at members.

    Args:
        q: A member, whose structure is kept.
        mean: (P,).
        covariance: (P, P), positive definite.
    """
    raise NotImplementedError(type(q).__name__)


@natural_parameters.register
def _(q: StructuredGaussian) -> Parameters:
    return q.multiply(q.mean), -0.5 * q.dense_precision()


@expectation_parameters.register
def _(q: StructuredGaussian) -> Parameters:
    return q.mean, torch.addr(q.dense_covariance(), q.mean, q.mean)


@with_natural.register
def _(q: StructuredGaussian, natural: Parameters) -> Any:
    """The mean is that of the dense Gaussian. Only the symmetric part of a matrix counts."""
    _check_ambient(q, natural, NATURAL_NAMES)
    slope, minus_half_precision = natural
    precision = -(minus_half_precision + minus_half_precision.mT)
    what = f"{type(q).__name__}: precision (−2 times the natural one)"
    root = positive_cholesky(precision, what)
    mean = torch.cholesky_solve(slope.unsqueeze(-1), root).squeeze(-1)
    return near_precision(q, mean, precision)


@with_expectation.register
def _(q: StructuredGaussian, expectation: Parameters) -> Any:
    """Only the symmetric part of a matrix counts."""
    _check_ambient(q, expectation, EXPECTATION_NAMES)
    mean, second_moment = expectation
    covariance = 0.5 * (second_moment + second_moment.mT) - torch.outer(mean, mean)
    what = f"{type(q).__name__}: second moment − mean·meanᵀ, the covariance,"
    positive_cholesky(covariance, what)
    return near_covariance(q, mean, covariance)


@sufficient_statistics.register
def _(q: StructuredGaussian, theta: Tensor) -> Parameters:
    check_points(theta, q.size)
    q.refuse_beyond_dense()
    return theta, theta.unsqueeze(-1) * theta.unsqueeze(-2)


@log_partition.register
def _(q: StructuredGaussian) -> Tensor:
    squared_norm = (q.mean * q.multiply(q.mean)).sum(-1)
    return 0.5 * squared_norm - 0.5 * q.log_det() + 0.5 * q.size * math.log(2 * math.pi)


def check_dense_or_diagonal(q: StructuredGaussian, curvature: Tensor) -> None:
    """Raise `DataError` unless a curvature is (P,) or (P, P) and finite.

    Args:
        q: The Gaussian that is to take it.
        curvature: H.
    """
    gaussian.check_dense_or_diagonal(q, curvature)
    if not bool(torch.isfinite(curvature).all()):
        raise DataError(f"{type(q).__name__}: the curvature has values that are not finite")


def _check_ambient(q: StructuredGaussian, given: Parameters, names: tuple[str, ...]) -> None:
    q.refuse_beyond_dense()
    # Only the shape is asked for: no memory is taken.
    matrix = q.mean.new_empty(()).expand(q.size, q.size)
    check_parameters(given, (q.mean, matrix), names, type(q).__name__)
