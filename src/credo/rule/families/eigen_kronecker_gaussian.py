"""The learning rule's steps in a Kronecker-factored eigenbasis.

With U and V held, the members of `EigenKroneckerGaussian` are an exponential family of their own,
in s: the rule's steps take the diagonal of H in the basis, which is the member nearest to the
mixture (George, Laurent, Bouthillier, Ballas & Vincent, "Fast approximate natural gradient descent
in a Kronecker-factored eigenbasis", 2018, arXiv:1806.03884).
"""

from __future__ import annotations

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families import EigenKroneckerGaussian
from credo.rule.families.gaussian import absorb, absorb_positive
from credo.rule.families.structured_gaussian import (
    KroneckerCurvature,
    check_dense_or_diagonal,
    near_covariance,
    near_precision,
)
from credo.types import Vector


@absorb.register
def _(
    q: EigenKroneckerGaussian, curvature: Tensor | KroneckerCurvature, keep: float, gain: float
) -> EigenKroneckerGaussian:
    """Of keep·S + gain·H the diagonal in the basis is kept.

    H is (P,), (P, P) symmetric, or a pair (A', B') for each block. That diagonal is the exact
    minimum of KL(N(m, S⁻¹)‖N(m, T⁻¹)) over s, T being the mixture.
    """
    parts = zip(q.blocks, _in_basis(q, curvature), strict=True)
    return _with_values(q, q.mean, [keep * block.values + gain * h for block, h in parts])


@absorb_positive.register
def _(
    q: EigenKroneckerGaussian,
    curvature: Tensor | KroneckerCurvature,
    rate: float,
    temperature: float = 1.0,
) -> EigenKroneckerGaussian:
    """s + ρg + ½ρ²g²/s with g = h − temperature·s, h the diagonal of H in the basis."""
    values = []
    for block, h in zip(q.blocks, _in_basis(q, curvature), strict=True):
        step = rate * (h - temperature * block.values)
        # ½[s + (s + ρg)²/s], so that rounding can't break it.
        values.append(0.5 * (block.values + (block.values + step).square() / block.values))
    return _with_values(q, q.mean, values)


@near_precision.register
def _(q: EigenKroneckerGaussian, mean: Vector, precision: Tensor) -> EigenKroneckerGaussian:
    """The s with the least KL(N(m, S⁻¹)‖N(m, T⁻¹)) to the dense T: its diagonal."""
    return _with_values(q, mean, _in_basis(q, precision))


@near_covariance.register
def _(q: EigenKroneckerGaussian, mean: Vector, covariance: Tensor) -> EigenKroneckerGaussian:
    """The s with the least KL(N(m, C)‖N(m, S⁻¹)) to the dense C: its diagonal, inverted."""
    return _with_values(q, mean, [1 / c for c in _in_basis(q, covariance)])


def _with_values(
    q: EigenKroneckerGaussian, mean: Vector, values: list[Tensor]
) -> EigenKroneckerGaussian:
    blocks = zip(q.blocks, values, strict=True)
    return EigenKroneckerGaussian(mean, tuple(block._replace(values=new) for block, new in blocks))


def _in_basis(q: EigenKroneckerGaussian, curvature: Tensor | KroneckerCurvature) -> list[Tensor]:
    """The diagonal of (U ⊗ V)ᵀH(U ⊗ V) of every block, (a, b)."""
    if isinstance(curvature, tuple):
        return _factors_in_basis(q, curvature)
    check_dense_or_diagonal(q, curvature)
    if curvature.dim() == 1:
        weights = (block.squared() for block in q.blocks)
        return [w.into(h) for w, h in zip(weights, q.split(curvature), strict=True)]
    diagonals, start = [], 0
    for block, (a, b) in zip(q.blocks, q.shapes, strict=True):
        place = slice(start, start + a * b)
        # One row of H after the other as a matrix of weights, then the columns.
        rows = block.into(curvature[place, place].reshape(a * b, a, b)).reshape(a * b, a * b)
        both = block.into(rows.mT.reshape(a * b, a, b)).reshape(a * b, a * b)
        diagonals.append(both.diagonal().reshape(a, b))
        start += a * b
    return diagonals


def _factors_in_basis(q: EigenKroneckerGaussian, curvature: KroneckerCurvature) -> list[Tensor]:
    given = tuple((tuple(left.shape), tuple(right.shape)) for left, right in curvature)
    expected = tuple(((a, a), (b, b)) for a, b in q.shapes)
    if given != expected:
        raise DataError(
            "EigenKroneckerGaussian: a curvature in factors must have one pair for each block, "
            f"of shapes {expected}; got {given}"
        )
    return [
        torch.outer(_diagonal_in(block.left, left), _diagonal_in(block.right, right))
        for block, (left, right) in zip(q.blocks, curvature, strict=True)
    ]


def _diagonal_in(basis: Tensor | None, matrix: Tensor) -> Tensor:
    """The diagonal of WᵀMW."""
    return matrix.diagonal() if basis is None else (basis * (matrix @ basis)).sum(0)
