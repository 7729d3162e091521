"""The Gaussian whose precision is diagonal, block by block, in a basis that is a Kronecker product.

It is what KFAC plus a prior is exactly: A ⊗ B + δI has no Kronecker factors, but it has the
eigenvectors of A ⊗ B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from credo.errors import DataError, FileFormatError
from credo.families.base import check_floating, check_points, refuse_unless
from credo.families.structured_gaussian import StructuredGaussian
from credo.types import Json, Vector


class EigenBlock(NamedTuple):
    """The precision (U ⊗ V) diag(s) (U ⊗ V)ᵀ of a block of a×b weights.

    U, "left", is (a, a) and V, "right", (b, b), their columns orthonormal; None stands for the
    identity and takes no memory. s, "values", is (a, b), positive.

    Args:
        left: U, (a, a), or None for the identity.
        right: V, (b, b), or None for the identity.
        values: s, (a, b), positive.
    """

    left: Tensor | None
    right: Tensor | None
    values: Tensor

    @classmethod
    def of_factors(cls, left: Tensor, right: Tensor, shift: Tensor | float) -> EigenBlock:
        """A ⊗ B + δI, exactly; A and B symmetric, δ the ``shift``.

        What rounding makes of a zero eigenvalue may be negative: it counts as zero.

        Args:
            left: A, (a, a), symmetric.
            right: B, (b, b), symmetric.
            shift: δ, what is added to every eigenvalue.
        """
        left_values, left_vectors = torch.linalg.eigh(left)
        right_values, right_vectors = torch.linalg.eigh(right)
        product = torch.outer(left_values.clamp(min=0), right_values.clamp(min=0))
        return cls(left_vectors.contiguous(), right_vectors.contiguous(), product + shift)

    def into(self, matrix: Tensor) -> Tensor:
        """UᵀMV: weights (..., a, b) seen in the basis.

        Args:
            matrix: M, (..., a, b).
        """
        turned = matrix if self.left is None else self.left.mT @ matrix
        return turned if self.right is None else turned @ self.right

    def out_of(self, matrix: Tensor) -> Tensor:
        """UMVᵀ: back from the basis.

        Args:
            matrix: M, (..., a, b).
        """
        turned = matrix if self.left is None else self.left @ matrix
        return turned if self.right is None else turned @ self.right.mT

    def squared(self) -> EigenBlock:
        """Entries of U and V squared: how much of each direction each weight has."""
        left = None if self.left is None else self.left.square()
        return EigenBlock(left, None if self.right is None else self.right.square(), self.values)

    def dense(self, values: Tensor) -> Tensor:
        """(U ⊗ V) diag(values) (U ⊗ V)ᵀ, (ab, ab).

        Args:
            values: Eigenvalues, (a, b).
        """
        a, b = values.shape
        basis = torch.kron(_or_identity(self.left, a, values), _or_identity(self.right, b, values))
        return (basis * values.reshape(-1)) @ basis.mT


@dataclass(frozen=True, eq=False)
class EigenKroneckerGaussian(StructuredGaussian):
    r"""N(m, S⁻¹) with S = blockdiag((U ⊗ V) diag(s) (U ⊗ V)ᵀ), one `EigenBlock` for each block.

        S vec(M) = vec(U (s ∘ UᵀMV) Vᵀ)        ln|S| = Σ ln s        Var = (U∘U) s⁻¹ (V∘V)ᵀ

    A block's weights are an a×b matrix M, row-major in the flat vector; the blocks follow each
    other and cover it, P = Σab. With s_ij = α_i β_j + δ this is the Kronecker product of two
    factors with eigenvalues α and β, plus a prior's precision δ: see `EigenBlock.of_factors`.

    Args:
        mean: m, (P,).
        blocks: One `EigenBlock` for each block of weights, in their order.

    >>> A, B = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0]])
    >>> q = EigenKroneckerGaussian(torch.zeros(2), (EigenBlock.of_factors(A, B, shift=1.0),))
    >>> q.dense_precision().round(decimals=4)
    tensor([[7., 3.],
            [3., 7.]])
    >>> q.variance
    tensor([0.1750, 0.1750])

    Reference: George, Laurent, Bouthillier, Ballas & Vincent, "Fast approximate natural gradient
    descent in a Kronecker-factored eigenbasis", 2018 (arXiv:1806.03884).
    """

    mean: Vector
    blocks: tuple[EigenBlock, ...]

    _fields: ClassVar[str] = "mean, blocks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(EigenBlock(*block) for block in self.blocks))
        _check_blocks(self.mean, self.blocks)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(a, b) of each block."""
        return tuple((block.values.shape[0], block.values.shape[1]) for block in self.blocks)

    @property
    def variance(self) -> Vector:
        """(U∘U) s⁻¹ (V∘V)ᵀ, block by block."""
        return _join([block.squared().out_of(1 / block.values) for block in self.blocks])

    def multiply(self, vector: Vector) -> Vector:
        """vec(U (s ∘ UᵀMV) Vᵀ) of every block: (..., P) → (..., P)."""
        parts = zip(self.split(vector), self.blocks, strict=True)
        return _join([block.out_of(block.into(matrix) * block.values) for matrix, block in parts])

    def solve(self, vector: Vector) -> Vector:
        """vec(U (s⁻¹ ∘ UᵀMV) Vᵀ) of every block: (..., P) → (..., P)."""
        parts = zip(self.split(vector), self.blocks, strict=True)
        return _join([block.out_of(block.into(matrix) / block.values) for matrix, block in parts])

    def log_det(self) -> Tensor:
        """Σ ln s."""
        return torch.stack([block.values.log().sum() for block in self.blocks]).sum()

    def dense_precision(self) -> Tensor:
        """blockdiag((U ⊗ V) diag(s) (U ⊗ V)ᵀ)."""
        self.refuse_beyond_dense()
        return torch.block_diag(*(block.dense(block.values) for block in self.blocks))

    def dense_covariance(self) -> Tensor:
        """The same with s⁻¹."""
        self.refuse_beyond_dense()
        return torch.block_diag(*(block.dense(1 / block.values) for block in self.blocks))

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` has the same blocks."""
        super().check_same_family(other)
        if isinstance(other, EigenKroneckerGaussian) and other.shapes != self.shapes:
            raise DataError(
                "two members of EigenKroneckerGaussian have blocks of different shapes: "
                f"{self.shapes} and {other.shapes}"
            )

    def split(self, vector: Tensor) -> list[Tensor]:
        """(..., P) as one (..., a, b) for each block.

        Args:
            vector: (..., P).
        """
        check_points(vector, self.size)
        pieces = vector.split([a * b for a, b in self.shapes], dim=-1)
        return [
            piece.unflatten(-1, shape) for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def part(self, place: slice) -> EigenKroneckerGaussian:
        """The distribution of the weights at ``place``, which are one block or several whole ones.

        Args:
            place: Where they are in the flat vector.
        """
        starts = itertools.accumulate((a * b for a, b in self.shapes), initial=0)
        found = [
            block
            for start, block in zip(starts, self.blocks, strict=False)
            if place.start <= start < place.stop
        ]
        mean = self.mean[place]
        if sum(block.values.numel() for block in found) != len(mean):
            raise DataError(
                f"the weights from {place.start} to {place.stop} are not whole blocks of this "
                f"EigenKroneckerGaussian, whose blocks are {self.shapes}"
            )
        return EigenKroneckerGaussian(mean, tuple(found))

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """``mean``, ``values.0``, ``left.0``, ``right.0``, … plus JSON; identities are absent."""
        tensors = {"mean": self.mean.detach().contiguous()}
        for index, block in enumerate(self.blocks):
            for name, tensor in block._asdict().items():
                if tensor is not None:
                    tensors[f"{name}.{index}"] = tensor.detach().contiguous()
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
        indices = range(count) if isinstance(count, int) and count < len(tensors) else range(0)
        required = {"mean", *(f"values.{index}" for index in indices)}
        allowed = required | {f"{side}.{index}" for side in ("left", "right") for index in indices}
        if not indices or not required <= tensors.keys() <= allowed:
            raise FileFormatError(
                f"a stored {cls.__name__} of {count!r} blocks has the tensors mean, values.0, "
                f"left.0, right.0, …; got {sorted(tensors)}"
            )
        # Cloned, because products round by a tensor's alignment, and a file's is not that of pack.
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        blocks = tuple(
            EigenBlock(own.get(f"left.{index}"), own.get(f"right.{index}"), own[f"values.{index}"])
            for index in indices
        )
        try:
            if not bool(torch.isfinite(tensors["mean"]).all()):
                raise DataError("mean has values that are not finite")
            q = cls(tensors["mean"], blocks)
        except DataError as error:
            raise FileFormatError(
                f"the tensors of a stored {cls.__name__} don't fit: {error}"
            ) from error
        if q.size != size:
            raise FileFormatError(
                f"a stored {cls.__name__} says size {size!r} but its tensors have {q.size}"
            )
        return q

    # --- inside -----------------------------------------------------------------------------------

    def _colour(self, eps: Tensor) -> Tensor:
        """U (s^−½ ∘ E) Vᵀ."""
        parts = zip(self.split(eps), self.blocks, strict=True)
        return _join([block.out_of(matrix * block.values.rsqrt()) for matrix, block in parts])

    def _trace_ratio(self, other: Self) -> Tensor:
        """Σ (s⁻¹) ∘ [(UᵀU')² s' (V'ᵀV)²]."""
        traces = []
        for mine, its in zip(self.blocks, other.blocks, strict=True):
            a, b = mine.values.shape
            one = _or_identity(its.left, a, its.values), _or_identity(its.right, b, its.values)
            left = one[0] if mine.left is None else mine.left.mT @ one[0]
            right = one[1] if mine.right is None else mine.right.mT @ one[1]
            traces.append((left.square() @ its.values @ right.square().mT / mine.values).sum())
        return torch.stack(traces).sum()


def _or_identity(basis: Tensor | None, size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device) if basis is None else basis


def _join(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.flatten(start_dim=-2) for matrix in matrices], dim=-1)


def _check_blocks(mean: Tensor, blocks: tuple[EigenBlock, ...]) -> None:
    """Raise `DataError` unless bases are orthonormal, values positive, and all cover the mean."""
    check_floating(mean=mean)
    covered = 0
    for index, block in enumerate(blocks):
        what = f"values of block {index}"
        check_floating(**{"mean": mean, what: block.values})
        if block.values.dim() != 2 or not block.values.numel():
            raise DataError(
                f"EigenKroneckerGaussian: {what} must be (a, b), got shape "
                f"{tuple(block.values.shape)}"
            )
        refuse_unless(block.values > 0, block.values, "EigenKroneckerGaussian", what, "positive")
        for side, size in (("left", block.values.shape[0]), ("right", block.values.shape[1])):
            _check_basis(getattr(block, side), f"{side} basis of block {index}", size, mean)
        covered += block.values.numel()
    if mean.dim() != 1 or covered != len(mean):
        raise DataError(
            "EigenKroneckerGaussian: the blocks must cover the mean (P,), P = Σ ab, but they cover "
            f"{covered} weights and the mean has shape {tuple(mean.shape)}"
        )


def _check_basis(basis: Tensor | None, what: str, size: int, mean: Tensor) -> None:
    if basis is None:
        return
    check_floating(**{"mean": mean, what: basis})
    if basis.shape != (size, size):
        raise DataError(
            f"EigenKroneckerGaussian: {what} must be ({size}, {size}), got shape "
            f"{tuple(basis.shape)}"
        )
    product = (basis.mT @ basis).detach()
    product.diagonal().sub_(1)
    error = float(product.abs().max())
    # Not ≤: an undefined entry must not pass.
    if not error <= math.sqrt(torch.finfo(basis.dtype).eps):
        raise DataError(
            f"EigenKroneckerGaussian: the columns of the {what} must be orthonormal, but their "
            f"products are off by up to {error:.3g}"
        )
