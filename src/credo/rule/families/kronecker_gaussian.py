"""The Gaussian whose precision is, block by block, a Kronecker product of two factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from credo.autodiff.layer_jacobians import KronCovariance
from credo.errors import DataError, FileFormatError
from credo.families import register
from credo.families.base import check_floating, check_points
from credo.families.full_gaussian import positive_cholesky
from credo.families.structured_gaussian import StructuredGaussian
from credo.posterior.covariance import TiledCovariance, WeightCovariance, weight_covariance
from credo.types import Json, Vector


@register
@dataclass(frozen=True, eq=False)
class KroneckerGaussian(StructuredGaussian):
    r"""N(m, S⁻¹) with S = blockdiag(A ⊗ B), one pair of factors for each block of weights.

        S vec(M) = vec(AMB)        S⁻¹ = A⁻¹ ⊗ B⁻¹        ln|S| = b ln|A| + a ln|B|

    A block's weights are an a×b matrix M, row-major in the flat vector; the blocks follow each
    other and cover it, P = Σab. A and B are known up to a number, cA and B/c.

    Args:
        mean: m, (P,).
        blocks: For each block its pair (A, B): A, "left", is (a, a) and B, "right", (b, b), both
            symmetric positive definite.

    >>> q = KroneckerGaussian(torch.zeros(4), ((2 * torch.eye(2), torch.eye(2)),))
    >>> q.variance
    tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Reference: Martens & Grosse, "Optimizing neural networks with Kronecker-factored approximate
    curvature", 2015 (arXiv:1503.05671).
    """

    mean: Vector
    blocks: tuple[tuple[Tensor, Tensor], ...]

    _fields: ClassVar[str] = "mean, blocks"

    def __post_init__(self) -> None:
        _check_blocks(self.mean, self.blocks)
        _ = self.roots

    @cached_property
    def roots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The Cholesky factors of A and B, block by block."""
        named = enumerate(self.blocks)
        return tuple((factor_root(a, "left", i), factor_root(b, "right", i)) for i, (a, b) in named)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(a, b) of each block."""
        return tuple((len(left), len(right)) for left, right in self.blocks)

    @property
    def variance(self) -> Vector:
        """diag(A⁻¹) ⊗ diag(B⁻¹), block by block."""
        parts = (torch.outer(a.diagonal(), b.diagonal()) for a, b in self.inverses())
        return torch.cat([part.reshape(-1) for part in parts])

    def multiply(self, vector: Vector) -> Vector:
        """vec(AMB) of every block: (..., P) → (..., P)."""
        parts = zip(self.split(vector), self.blocks, strict=True)
        return _join([left @ matrix @ right for matrix, (left, right) in parts])

    def solve(self, vector: Vector) -> Vector:
        """vec(A⁻¹MB⁻¹) of every block: (..., P) → (..., P)."""
        parts = zip(self.split(vector), self.roots, strict=True)
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
            for left, right in self.roots
        ]
        return 2 * torch.stack(halves).sum()

    def dense_precision(self) -> Tensor:
        """blockdiag(A ⊗ B)."""
        self.refuse_beyond_dense()
        return torch.block_diag(*(torch.kron(left, right) for left, right in self.blocks))

    def dense_covariance(self) -> Tensor:
        """blockdiag(A⁻¹ ⊗ B⁻¹)."""
        self.refuse_beyond_dense()
        return torch.block_diag(*(torch.kron(left, right) for left, right in self.inverses()))

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

    def inverses(self) -> list[tuple[Tensor, Tensor]]:
        """A⁻¹ and B⁻¹ of each block."""
        invert = torch.cholesky_inverse
        return [(invert(left), invert(right)) for left, right in self.roots]

    def split(self, vector: Tensor) -> list[Tensor]:
        """(..., P) as one (..., a, b) for each block."""
        check_points(vector, self.size)
        pieces = vector.split([a * b for a, b in self.shapes], dim=-1)
        return [
            piece.unflatten(-1, shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def _colour(self, eps: Tensor) -> Tensor:
        """L⁻ᵀEK⁻¹ with A = LLᵀ and B = KKᵀ."""
        triangular = torch.linalg.solve_triangular
        parts = zip(self.split(eps), self.roots, strict=True)
        return _join(
            [
                triangular(right, triangular(left.mT, matrix, upper=True), upper=False, left=False)
                for matrix, (left, right) in parts
            ]
        )

    def _trace_ratio(self, other: Self) -> Tensor:
        """Σ tr(A'A⁻¹) tr(B'B⁻¹)."""
        parts = zip(self.inverses(), other.blocks, strict=True)
        return torch.stack(
            [
                (left * left_inverse).sum() * (right * right_inverse).sum()
                for (left_inverse, right_inverse), (left, right) in parts
            ]
        ).sum()


def factor_root(factor: Tensor, side: str, index: int) -> Tensor:
    """The Cholesky factor of a block's left or right factor, or a refusal that names it."""
    return positive_cholesky(factor, f"KroneckerGaussian: {side} factor of block {index}")


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
