"""The Gaussian whose precision is, block by block, a Kronecker product of two factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from credo.autodiff.layer_jacobians import KronCovariance
from credo.errors import DataError, FileFormatError
from credo.families import register
from credo.families.base import check_floating, check_points
from credo.families.full_gaussian import positive_cholesky
from credo.families.structured_gaussian import KroneckerCurvature, StructuredGaussian
from credo.posterior.covariance import TiledCovariance, WeightCovariance, weight_covariance
from credo.types import Json, Vector

_BlockCurvature: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What a block gets: (a, b, a, b) dense, (a, b) its diagonal, or the pair (A', B')."""


@register
@dataclass(frozen=True, eq=False)
class KroneckerGaussian(StructuredGaussian):
    r"""N(m, S⁻¹) with S = blockdiag(A ⊗ B), one pair of factors for each block of weights.

        S vec(M) = vec(AMB)        S⁻¹ = A⁻¹ ⊗ B⁻¹        ln|S| = b ln|A| + a ln|B|

    A block's weights are an a×b matrix M, row-major in the flat vector; the blocks follow each
    other and cover it, P = Σab. A, "left", is (a, a) and B, "right", (b, b): ``blocks`` holds the
    pairs. Each must be symmetric positive definite. A and B are known up to a number, cA and B/c.

    >>> q = KroneckerGaussian(torch.zeros(4), ((2 * torch.eye(2), torch.eye(2)),))
    >>> q.variance
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    >>> curvature = ((torch.eye(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])),)      # as KFAC has it
    >>> left, right = q.absorb(curvature, keep=0.5, gain=1.0).blocks[0]
    >>> torch.kron(left, right)[:2, :2]                                             # ½·2·I + H
    tensor([[3.0000, 1.0000],
            [1.0000, 3.0000]])

    Reference: Martens & Grosse, "Optimizing neural networks with Kronecker-factored approximate
    curvature", 2015 (arXiv:1503.05671).
    """

    mean: Vector
    blocks: tuple[tuple[Tensor, Tensor], ...]

    _fields: ClassVar[str] = "mean, blocks"

    def __post_init__(self) -> None:
        _check_blocks(self.mean, self.blocks)
        _ = self._roots

    @cached_property
    def _roots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The Cholesky factors of A and B, block by block."""
        named = enumerate(self.blocks)
        return tuple((_root(a, "left", i), _root(b, "right", i)) for i, (a, b) in named)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(a, b) of each block."""
        return tuple((len(left), len(right)) for left, right in self.blocks)

    @property
    def variance(self) -> Vector:
        """diag(A⁻¹) ⊗ diag(B⁻¹), block by block."""
        parts = (torch.outer(a.diagonal(), b.diagonal()) for a, b in self._inverses())
        return torch.cat([part.reshape(-1) for part in parts])

    def multiply(self, vector: Vector) -> Vector:
        """vec(AMB) of every block: (..., P) → (..., P)."""
        parts = zip(self._split(vector), self.blocks, strict=True)
        return _join([left @ matrix @ right for matrix, (left, right) in parts])

    def solve(self, vector: Vector) -> Vector:
        """vec(A⁻¹MB⁻¹) of every block: (..., P) → (..., P)."""
        parts = zip(self._split(vector), self._roots, strict=True)
        return _join(
            [
                torch.cholesky_solve(torch.cholesky_solve(matrix, left).mT, right).mT
                for matrix, (left, right) in parts
            ]
        )

    def log_det(self) -> Tensor:
        """Σ b ln|A| + a ln|B|."""
        halves = [
            len(right) * left.diagonal().log().sum() + len(left) * right.diagonal().log().sum()
            for left, right in self._roots
        ]
        return 2 * torch.stack(halves).sum()

    def dense_precision(self) -> Tensor:
        """blockdiag(A ⊗ B)."""
        self._refuse_beyond_dense()
        return torch.block_diag(*(torch.kron(left, right) for left, right in self.blocks))

    def dense_covariance(self) -> Tensor:
        """blockdiag(A⁻¹ ⊗ B⁻¹)."""
        self._refuse_beyond_dense()
        return torch.block_diag(*(torch.kron(left, right) for left, right in self._inverses()))

    def absorb(self, curvature: Tensor | KroneckerCurvature, keep: float, gain: float) -> Self:
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
        inverses = (right for _, right in self._inverses())
        parts = zip(self.blocks, inverses, self._block_curvatures(curvature), strict=True)
        blocks = []
        for index, ((left, right), right_inverse, block) in enumerate(parts):
            a, b = len(left), len(right)
            new_left = keep * left + gain / b * _trace_right(block, right_inverse)
            left_inverse = torch.cholesky_inverse(_root(new_left, "new left", index))
            share = keep * (left * left_inverse).sum() / a
            blocks.append((new_left, share * right + gain / a * _trace_left(block, left_inverse)))
        return type(self)(self.mean, _symmetric(blocks))

    def absorb_positive(
        self, curvature: Tensor | KroneckerCurvature, rate: float, temperature: float = 1.0
    ) -> Self:
        r"""The same mean, and factors that are positive definite for any symmetric H and any rate.

        With G = H − temperature·S, its natural gradient over both factors is X ⊗ B + A ⊗ Y where

            X = Tr_B[G(I ⊗ B⁻¹)]/b        Y = Tr_A[G(A⁻¹ ⊗ I)]/a − (tr GS⁻¹/ab)·B

        (the change of scale, which either factor could take, is A's), and each factor takes the
        improved step: A + ρX + ½ρ²XA⁻¹X, B + ρY + ½ρ²YB⁻¹Y. Exact, as the dense formula has it,
        where H = A' ⊗ B; elsewhere it agrees to first order in ρ. H as for ``absorb``.
        """
        parts = zip(
            self.blocks,
            self._roots,
            self._inverses(),
            self._block_curvatures(curvature),
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
        return type(self)(self.mean, _symmetric(blocks))

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` has the same blocks."""
        super().check_same_family(other)
        if isinstance(other, KroneckerGaussian) and other.shapes != self.shapes:
            raise DataError(
                "two members of KroneckerGaussian have blocks of different shapes: "
                f"{self.shapes} and {other.shapes}"
            )

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """``mean`` and ``left.0``, ``right.0``, ``left.1``, … plus JSON."""
        tensors = {"mean": self.mean.detach().contiguous()}
        for index, (left, right) in enumerate(self.blocks):
            tensors[f"left.{index}"] = left.detach().contiguous()
            tensors[f"right.{index}"] = right.detach().contiguous()
        return tensors, {"type": type(self).__name__, "size": self.size, "blocks": len(self.blocks)}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], meta: Json) -> Self:
        """The inverse of ``pack``; what can't have come from it is a `FileFormatError`."""
        count, size = meta.get("blocks"), meta.get("size")
        if not isinstance(size, int) or size < 1:
            raise FileFormatError(
                f"a stored {cls.__name__} must say its size as a positive integer, got {size!r}"
            )
        # The number of tensors bounds the count before names are made from it.
        if not isinstance(count, int) or 2 * count + 1 != len(tensors):
            raise FileFormatError(
                f"a stored KroneckerGaussian has its mean and two factors for each of its "
                f"{count!r} blocks; got {sorted(tensors)}"
            )
        names = [(f"left.{index}", f"right.{index}") for index in range(count)]
        if set(tensors) != {"mean", *(name for pair in names for name in pair)}:
            raise FileFormatError(
                f"a stored KroneckerGaussian has the tensors mean, left.0, right.0, …; got "
                f"{sorted(tensors)}"
            )
        try:
            if not bool(torch.isfinite(tensors["mean"]).all()):
                raise DataError("mean has values that are not finite")
            q = cls(
                tensors["mean"], tuple((tensors[left], tensors[right]) for left, right in names)
            )
        except DataError as error:
            raise FileFormatError(
                f"the tensors of a stored KroneckerGaussian don't fit: {error}"
            ) from error
        if q.size != size:
            raise FileFormatError(
                f"a stored KroneckerGaussian says size {size!r} but its tensors have {q.size}"
            )
        return q

    # --- inside -----------------------------------------------------------------------------------

    def _inverses(self) -> list[tuple[Tensor, Tensor]]:
        invert = torch.cholesky_inverse
        return [(invert(left), invert(right)) for left, right in self._roots]

    def _split(self, vector: Tensor) -> list[Tensor]:
        """(..., P) as one (..., a, b) for each block."""
        check_points(vector, self.size)
        pieces = vector.split([a * b for a, b in self.shapes], dim=-1)
        return [
            piece.unflatten(-1, shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def _colour(self, eps: Tensor) -> Tensor:
        """L⁻ᵀEK⁻¹ with A = LLᵀ and B = KKᵀ."""
        triangular = torch.linalg.solve_triangular
        parts = zip(self._split(eps), self._roots, strict=True)
        return _join(
            [
                triangular(right, triangular(left.mT, matrix, upper=True), upper=False, left=False)
                for matrix, (left, right) in parts
            ]
        )

    def _trace_ratio(self, other: Self) -> Tensor:
        """Σ tr(A'A⁻¹) tr(B'B⁻¹)."""
        parts = zip(self._inverses(), other.blocks, strict=True)
        return torch.stack(
            [
                (left * left_inverse).sum() * (right * right_inverse).sum()
                for (left_inverse, right_inverse), (left, right) in parts
            ]
        ).sum()

    def _near_precision(self, mean: Vector, precision: Tensor) -> Self:
        """The S with the least KL(N(m, S⁻¹)‖N(m, T⁻¹)) to the dense T."""
        return type(self)(mean, self._nearest_products(precision, self.blocks))

    def _near_covariance(self, mean: Vector, covariance: Tensor) -> Self:
        """The S with the least KL(N(m, C)‖N(m, S⁻¹)) to the dense C: maximum likelihood.

        The same minimum as for a precision, with S⁻¹ for S and C for T.
        """
        factors = self._nearest_products(covariance, self._inverses())
        invert = torch.cholesky_inverse
        return type(self)(
            mean,
            _symmetric(
                (invert(_root(left, "left", i)), invert(_root(right, "right", i)))
                for i, (left, right) in enumerate(factors)
            ),
        )

    def _nearest_products(
        self, dense: Tensor, start: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """The Kronecker products nearest to the diagonal blocks of ``dense``, as factors.

        Sweeps as in ``absorb`` with keep = 0, each of which lowers the divergence, until nothing
        moves by more than rounding. One sweep finds a product exactly from anywhere, so at a member
        the last sweep, the one that is differentiated, has the derivative of the limit.
        """
        nearest = []
        for index, ((_, right), block) in enumerate(
            zip(start, self._block_curvatures(dense), strict=True)
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

    def _block_curvatures(self, curvature: Tensor | KroneckerCurvature) -> list[_BlockCurvature]:
        if isinstance(curvature, tuple):
            given = tuple((tuple(left.shape), tuple(right.shape)) for left, right in curvature)
            expected = tuple(((a, a), (b, b)) for a, b in self.shapes)
            if given != expected:
                raise DataError(
                    "KroneckerGaussian: a curvature in factors must have one pair for each block, "
                    f"of shapes {expected}; got {given}"
                )
            return list(curvature)
        self._check_dense_or_diagonal(curvature)
        if curvature.dim() == 1:
            return list(self._split(curvature))
        blocks: list[_BlockCurvature] = []
        start = 0
        for a, b in self.shapes:
            place = slice(start, start + a * b)
            blocks.append(curvature[place, place].reshape(a, b, a, b))
            start += a * b
        return blocks


_MAX_SWEEPS = 1000


def _sweep(block: _BlockCurvature, right: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Both factors in turn, each the best for the other: one step to the nearest product."""
    right_inverse = torch.cholesky_inverse(_root(right, "right", index))
    left = _trace_right(block, right_inverse) / len(right)
    left_inverse = torch.cholesky_inverse(_root(left, "left", index))
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


def _root(factor: Tensor, side: str, index: int) -> Tensor:
    return positive_cholesky(factor, f"KroneckerGaussian: {side} factor of block {index}")


def _symmetric(blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((0.5 * (left + left.mT), 0.5 * (right + right.mT)) for left, right in blocks)


def _join(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten(start_dim=-2) for matrix in matrices], dim=-1)


def _check_blocks(mean: Tensor, blocks: tuple[tuple[Tensor, Tensor], ...]) -> None:
    """Raise `DataError` unless the factors are square, symmetric, and cover the mean."""
    check_floating(mean=mean)
    if not blocks or any(len(block) != 2 for block in blocks):
        raise DataError(
            "KroneckerGaussian: blocks must be pairs of a left and a right factor, one pair for "
            f"each block; got {[len(block) for block in blocks]} factors"
        )
    covered = 0
    for index, (left, right) in enumerate(blocks):
        for side, factor in (("left", left), ("right", right)):
            what = f"{side} factor of block {index}"
            check_floating(**{"mean": mean, what: factor})
            if factor.dim() != 2 or factor.shape[0] != factor.shape[1] or not len(factor):
                raise DataError(
                    f"KroneckerGaussian: {what} must be a square matrix, got shape "
                    f"{tuple(factor.shape)}"
                )
            size = factor.diagonal().detach().abs().sqrt()
            asymmetry = (factor - factor.mT).detach().abs()
            tolerance = math.sqrt(torch.finfo(factor.dtype).eps)
            if bool((asymmetry > tolerance * torch.outer(size, size)).any()):
                raise DataError(f"KroneckerGaussian: {what} must be symmetric")
        covered += len(left) * len(right)
    if mean.dim() != 1 or covered != len(mean):
        raise DataError(
            f"KroneckerGaussian: the blocks must cover the mean (P,), P = Σ ab, but they cover "
            f"{covered} weights and the mean has shape {tuple(mean.shape)}"
        )


@weight_covariance.register
def _(q: KroneckerGaussian) -> WeightCovariance:
    return TiledCovariance(
        [
            KronCovariance(
                _inverse_root(left), _inverse_root(right), left.new_ones(len(left), len(right))
            )
            for left, right in q.blocks
        ]
    )


def _inverse_root(matrix: Tensor) -> Tensor:
    """L⁻ᵀ with LLᵀ = matrix."""
    one = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), one, upper=False).mT
