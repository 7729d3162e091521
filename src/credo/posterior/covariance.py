"""JΣJᵀ for every family that has a covariance Σ, by the cheapest way that its structure allows.

==========================  ======================================================================
family                      how
==========================  ======================================================================
`Delta`                     zero
`DiagGaussian`              layer by layer, from what passes the layer
`EigenKroneckerGaussian`    the same, in the eigenvectors of the factors
`LowRankGaussian`           J D⁻¹ Jᵀ − (JW)(JW)ᵀ: the diagonal, and as many products as the rank
`FullGaussian`, others      J itself, (B, K, P)
==========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import TypeAlias

import torch
from torch import Tensor

from credo.autodiff.jacobian_blocks import KronCovariance
from credo.autodiff.jacobians import Jacobians
from credo.errors import UnsupportedError
from credo.families import (
    Delta,
    DiagGaussian,
    Family,
    FixedGaussian,
    FullGaussian,
    Gaussian,
    LowRankGaussian,
)
from credo.families.eigen_kronecker_gaussian import EigenKroneckerGaussian

OutputCovariance: TypeAlias = Callable[[Jacobians, Tensor | None], Tensor]
"""Jacobians, and cotangents (R, B, ...) or None for all outputs → JΣJᵀ, (B, R, R)."""

WITHOUT_ROWS = (
    Delta,
    DiagGaussian,
    LowRankGaussian,
    EigenKroneckerGaussian,
)
"""Whose Σ is a structure that layers share, so that J is not formed."""


@singledispatch
def output_covariance(q: Family) -> OutputCovariance:
    """J ↦ JΣJᵀ for the covariance Σ of q.

    >>> from credo.network import bind, select
    >>> net = torch.nn.Linear(2, 1)
    >>> flat = bind(net)
    >>> q = DiagGaussian(torch.zeros(3), torch.tensor(0.1))
    >>> jacobians = Jacobians.at(net, flat, select(flat.segments), torch.tensor([[3.0, 0.0]]))
    >>> output_covariance(q)(jacobians, None)
    tensor([[[0.1000]]])
    """
    raise UnsupportedError(
        f"the linearised predictive needs a Gaussian over the weights, and a "
        f'{type(q).__name__} is none. Predict with at="samples".'
    )


@output_covariance.register
def _(q: Gaussian) -> OutputCovariance:
    def covariance(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
        rows = output_rows(jacobians, directions)
        return q.solve(rows) @ rows.mT

    return covariance


@output_covariance.register
def _(q: FullGaussian) -> OutputCovariance:
    def covariance(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
        rows = output_rows(jacobians, directions)
        columns = rows.flatten(0, 1).mT
        white = torch.linalg.solve_triangular(q.cholesky, columns, upper=False)
        half = white.mT.unflatten(0, rows.shape[:2])
        return half @ half.mT

    return covariance


@output_covariance.register
def _(q: FixedGaussian) -> OutputCovariance:
    if q.precision.dim() == 2:
        return output_covariance(FullGaussian(q.mean, q.precision))
    return output_covariance(DiagGaussian(q.mean, q.scale))


@output_covariance.register
def _(q: Delta) -> OutputCovariance:
    def covariance(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
        outputs = jacobians.outputs
        count = jacobians.num_outputs if directions is None else len(directions)
        return outputs.new_zeros(len(outputs), count, count)

    return covariance


@output_covariance.register
def _(q: DiagGaussian) -> OutputCovariance:
    variance = q.variance
    return lambda jacobians, directions: jacobians.variance_diag(variance, directions)


@output_covariance.register
def _(q: LowRankGaussian) -> OutputCovariance:
    taken = low_rank_reduction(q)

    def covariance(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
        along = jacobians.times(taken, directions)
        return jacobians.variance_diag(1 / q.diagonal, directions) - along @ along.mT

    return covariance


@output_covariance.register
def _(q: EigenKroneckerGaussian) -> OutputCovariance:
    return in_tiles(covariance_tiles(q))


def in_tiles(tiles: list[KronCovariance]) -> OutputCovariance:
    """JΣJᵀ of a Σ that is made of tiles."""
    return lambda jacobians, directions: jacobians.kron_variance(tiles, directions)


def low_rank_reduction(q: LowRankGaussian) -> Tensor:
    """W, (P, r), of Σ = D⁻¹ − WWᵀ: W = D⁻¹U L⁻ᵀ with LLᵀ = I + UᵀD⁻¹U."""
    scaled = q.factor / q.diagonal.unsqueeze(-1)
    inner = q.factor.mT @ scaled
    one = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    root = torch.linalg.cholesky(inner + one)
    return torch.linalg.solve_triangular(root, scaled.mT, upper=False).mT


def covariance_tiles(q: EigenKroneckerGaussian) -> list[KronCovariance]:
    """Σ, block by block."""
    return [KronCovariance(b.left, b.right, 1 / b.values) for b in q.blocks]


def output_rows(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
    """cᵀJ, (B, R, P)."""
    if directions is None:
        return jacobians.rows()
    return jacobians.pull(directions).movedim(0, 1)
