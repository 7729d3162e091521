"""The learning rule's steps in precisions that are Kronecker products of two factors.

    >>> q = KroneckerGaussian(torch.zeros(4), ((2 * torch.eye(2), torch.eye(2)),))
    >>> curvature = ((torch.eye(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])),)      # as KFAC has it
    >>> left, right = absorb(q, curvature, keep=0.5, gain=1.0).blocks[0]
    >>> torch.kron(left, right)[:2, :2]                                             # ½·2·I + H
    tensor([[3.0000, 1.0000],
            [1.0000, 3.0000]])

Reference: Martens & Grosse, "Optimizing neural networks with Kronecker-factored approximate
curvature", 2015 (arXiv:1503.05671).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.rule.families.gaussian import absorb, absorb_positive
from credo.rule.families.kronecker_gaussian import KroneckerGaussian, factor_root
from credo.rule.families.structured_gaussian import (
    KroneckerCurvature,
    check_dense_or_diagonal,
    near_covariance,
    near_precision,
)
from credo.types import Vector

_BlockCurvature: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What a block gets: (a, b, a, b) dense, (a, b) its diagonal, or the pair (A', B')."""

_MAX_SWEEPS = 1000


@absorb.register
def _(
    q: KroneckerGaussian, curvature: Tensor | KroneckerCurvature, keep: float, gain: float
) -> KroneckerGaussian:
    r"""The same mean with keep·S + gain·H, brought towards the structure by one sweep.

    H is (P,), (P, P) symmetric, of which blocks off the diagonal are ignored, or a pair
    (A', B') for each block. With T = keep·S + gain·H and partial traces over B's and A's index,

        A⁺ = Tr_B[T(I ⊗ B⁻¹)]/b  = keep·A + (gain/b)·Tr_B[H(I ⊗ B⁻¹)]
        B⁺ = Tr_A[T(A⁺⁻¹ ⊗ I)]/a = keep·(tr AA⁺⁻¹/a)·B + (gain/a)·Tr_A[H(A⁺⁻¹ ⊗ I)]

    Each line is the rule's step in the exponential family that one factor makes while the other
    is held, and the exact minimum of KL(N(m, S⁻¹)‖N(m, T⁻¹)) over that factor. tr AA⁺⁻¹/a takes
    from B the part of the decay that A has taken, so that none counts twice: the step is exact
    whenever T is a Kronecker product (H = cS, A' ⊗ B, A ⊗ B'), agrees to first order in
    the gain with the natural gradient over both factors, and with keep = 1 − gain it rests
    where, and only where, KL(N(m, S⁻¹)‖N(m, H⁻¹)) is stationary.
    """
    inverses = (right for _, right in q.inverses())
    parts = zip(q.blocks, inverses, _block_curvatures(q, curvature), strict=True)
    blocks = []
    for index, ((left, right), right_inverse, block) in enumerate(parts):
        a, b = len(left), len(right)
        new_left = keep * left + gain / b * _trace_right(block, right_inverse)
        left_inverse = torch.cholesky_inverse(factor_root(new_left, "new left", index))
        share = keep * (left * left_inverse).sum() / a
        blocks.append((new_left, share * right + gain / a * _trace_left(block, left_inverse)))
    return KroneckerGaussian(q.mean, _symmetric(blocks))


@absorb_positive.register
def _(
    q: KroneckerGaussian,
    curvature: Tensor | KroneckerCurvature,
    rate: float,
    temperature: float = 1.0,
) -> KroneckerGaussian:
    r"""The same mean, and factors that are positive definite for any symmetric H and any rate.

    With G = H − temperature·S, its natural gradient over both factors is X ⊗ B + A ⊗ Y where

        X = Tr_B[G(I ⊗ B⁻¹)]/b        Y = Tr_A[G(A⁻¹ ⊗ I)]/a − (tr GS⁻¹/ab)·B

    (the change of scale, which either factor could take, is A's), and each factor takes the
    improved step: A + ρX + ½ρ²XA⁻¹X, B + ρY + ½ρ²YB⁻¹Y. Exact, as the dense formula has it,
    where H = A' ⊗ B; elsewhere it agrees to first order in ρ. H as for ``absorb``.
    """
    parts = zip(
        q.blocks,
        q.roots,
        q.inverses(),
        _block_curvatures(q, curvature),
        strict=True,
    )
    blocks = []
    for (left, right), (left_root, right_root), (left_inverse, right_inverse), block in parts:
        along_left = _trace_right(block, right_inverse) / len(right) - temperature * left
        along_right = _trace_left(block, left_inverse) / len(left) - temperature * right
        common = (along_left * left_inverse).sum() / len(left)
        new_left = _retract(left, left_root, rate * along_left)
        new_right = _retract(right, right_root, rate * (along_right - common * right))
        blocks.append((new_left, new_right))
    return KroneckerGaussian(q.mean, _symmetric(blocks))


@near_precision.register
def _(q: KroneckerGaussian, mean: Vector, precision: Tensor) -> KroneckerGaussian:
    """The S with the least KL(N(m, S⁻¹)‖N(m, T⁻¹)) to the dense T."""
    return KroneckerGaussian(mean, _nearest_products(q, precision, q.blocks))


@near_covariance.register
def _(q: KroneckerGaussian, mean: Vector, covariance: Tensor) -> KroneckerGaussian:
    """The S with the least KL(N(m, C)‖N(m, S⁻¹)) to the dense C: maximum likelihood.

    The same minimum as for a precision, with S⁻¹ for S and C for T.
    """
    factors = _nearest_products(q, covariance, q.inverses())
    invert = torch.cholesky_inverse
    return KroneckerGaussian(
        mean,
        _symmetric(
            (invert(factor_root(left, "left", i)), invert(factor_root(right, "right", i)))
            for i, (left, right) in enumerate(factors)
        ),
    )


def _nearest_products(
    q: KroneckerGaussian, dense: Tensor, start: Iterable[tuple[Tensor, Tensor]]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """The Kronecker products nearest to the diagonal blocks of ``dense``, as factors.

    Sweeps as in ``absorb`` with keep = 0, each of which lowers the divergence, until nothing
    moves by more than rounding. One sweep finds a product exactly from anywhere, so at a member
    the last sweep, the one that is differentiated, has the derivative of the limit.
    """
    nearest = []
    for index, ((_, right), block) in enumerate(
        zip(start, _block_curvatures(q, dense), strict=True)
    ):
        with torch.no_grad():
            for _ in range(_MAX_SWEEPS):
                before = right
                _, right = _sweep(block, right, index)
                settled = 64 * torch.finfo(right.dtype).eps * right.abs().max()
                if (right - before).abs().max() <= settled:
                    break
        nearest.append(_sweep(block, right, index))
    return _symmetric(nearest)


def _block_curvatures(
    q: KroneckerGaussian, curvature: Tensor | KroneckerCurvature
) -> list[_BlockCurvature]:
    if isinstance(curvature, tuple):
        given = tuple((tuple(left.shape), tuple(right.shape)) for left, right in curvature)
        expected = tuple(((a, a), (b, b)) for a, b in q.shapes)
        if given != expected:
            raise DataError(
                "KroneckerGaussian: a curvature in factors must have one pair for each block, "
                f"of shapes {expected}; got {given}"
            )
        return list(curvature)
    check_dense_or_diagonal(q, curvature)
    if curvature.dim() == 1:
        return list(q.split(curvature))
    blocks: list[_BlockCurvature] = []
    start = 0
    for a, b in q.shapes:
        place = slice(start, start + a * b)
        blocks.append(curvature[place, place].reshape(a, b, a, b))
        start += a * b
    return blocks


def _sweep(block: _BlockCurvature, right: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Both factors in turn, each the best for the other: one step to the nearest product."""
    right_inverse = torch.cholesky_inverse(factor_root(right, "right", index))
    left = _trace_right(block, right_inverse) / len(right)
    left_inverse = torch.cholesky_inverse(factor_root(left, "left", index))
    return left, _trace_left(block, left_inverse) / len(left)


def _trace_right(block: _BlockCurvature, weight: Tensor) -> Tensor:
    """Tr_B[H(I ⊗ W)], (a, a), for a symmetric W (b, b)."""
    if isinstance(block, tuple):
        return block[0] * (block[1] * weight).sum()
    if block.dim() == 2:
        return torch.diag(block @ weight.diagonal())
    return torch.einsum("ikjl,kl->ij", block, weight)


def _trace_left(block: _BlockCurvature, weight: Tensor) -> Tensor:
    """Tr_A[H(W ⊗ I)], (b, b), for a symmetric W (a, a)."""
    if isinstance(block, tuple):
        return block[1] * (block[0] * weight).sum()
    if block.dim() == 2:
        return torch.diag(weight.diagonal() @ block)
    return torch.einsum("ikjl,ij->kl", block, weight)


def _retract(matrix: Tensor, root: Tensor, change: Tensor) -> Tensor:
    """M + X + ½XM⁻¹X, written ½[M + (M + X)M⁻¹(M + X)] so that rounding can't break it."""
    whitened = torch.linalg.solve_triangular(root, matrix + change, upper=False)
    return 0.5 * (matrix + whitened.mT @ whitened)


def _symmetric(blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((0.5 * (left + left.mT), 0.5 * (right + right.mT)) for left, right in blocks)
