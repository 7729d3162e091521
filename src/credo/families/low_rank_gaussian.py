"""The Gaussian whose precision is of low rank plus a diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points, refuse_unless
from credo.families.full_gaussian import positive_cholesky
from credo.families.structured_gaussian import StructuredGaussian
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class LowRankGaussian(StructuredGaussian):
    r"""N(m, S⁻¹) with S = UUᵀ + diag(d).

        S⁻¹ = D⁻¹ − D⁻¹U C⁻¹ UᵀD⁻¹        ln|S| = ln|C| + Σ ln d        C = I + UᵀD⁻¹U = LLᵀ

    U is ``factor`` (P, r) with 1 ≤ r ≤ P, d is ``diagonal`` (P,), positive. Everything is
    O(P r²) in time and O(P r) in memory; L (r, r) is computed once in the life of a precision.

    A draw needs P normals and no eigenvectors: with V = D⁻½U,

        R = D⁻½(I − V L⁻ᵀ(L + I)⁻¹Vᵀ)    has    RRᵀ = D⁻½(I + VVᵀ)⁻¹D⁻½ = S⁻¹

    Args:
        mean: m, (P,).
        factor: U, (P, r) with 1 ≤ r ≤ P.
        diagonal: d, (P,), positive.

    >>> q = LowRankGaussian(torch.zeros(2), torch.tensor([[1.0], [1.0]]), torch.ones(2))
    >>> q.dense_precision()
    tensor([[2., 1.],
            [1., 2.]])
    >>> q.variance
    tensor([0.6667, 0.6667])

    Reference: Mishkin, Kunstner, Nielsen, Schmidt & Khan, "SLANG: Fast structured covariance
    approximations for Bayesian deep learning with natural gradient", 2018 (arXiv:1811.04504).
    """

    mean: Vector
    factor: Tensor
    diagonal: Vector

    _fields: ClassVar[str] = "mean, factor, diagonal"

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, factor=self.factor, diagonal=self.diagonal)
        if self.mean.dim() != 1 or self.diagonal.shape != self.mean.shape:
            raise DataError(
                "LowRankGaussian: mean and diagonal must be (P,), got "
                f"{tuple(self.mean.shape)} and {tuple(self.diagonal.shape)}"
            )
        check_rows("factor", self.factor, self.size)
        if not 1 <= self.rank <= self.size:
            raise DataError(
                f"LowRankGaussian: factor must be (P, r) with 1 ≤ r ≤ P = {self.size}, got "
                f"{tuple(self.factor.shape)}"
            )
        refuse_unless(self.diagonal > 0, self.diagonal, "LowRankGaussian", "diagonal", "positive")
        _ = self.inner_cholesky

    @cached_property
    def inner_cholesky(self) -> Tensor:
        """L of C = I + UᵀD⁻¹U = LLᵀ, (r, r)."""
        inner = self.factor.mT @ (self.factor / self.diagonal.unsqueeze(-1))
        return positive_cholesky(
            inner + self._identity(self.rank), "LowRankGaussian: I + factorᵀ diagonal⁻¹ factor"
        )

    @property
    def rank(self) -> int:
        """r, the number of columns of the factor."""
        return self.factor.shape[-1]

    @property
    def variance(self) -> Vector:
        """The diagonal of S⁻¹: (1 − ‖L⁻¹v‖²)/d with v a weight's row of V."""
        scaled = self.factor / self.diagonal.sqrt().unsqueeze(-1)
        share = (
            torch.linalg.solve_triangular(self.inner_cholesky, scaled.mT, upper=False)
            .square()
            .sum(0)
        )
        # Where the share is 1 but for rounding, the variance given all other weights, 1/S_ii,
        # is the better bound.
        least = 1 / (1 + scaled.square().sum(-1))
        return torch.maximum(1 - share, least) / self.diagonal

    def multiply(self, vector: Vector) -> Vector:
        """UUᵀv + dv: (..., P) → (..., P)."""
        check_points(vector, self.size)
        return vector * self.diagonal + (vector @ self.factor) @ self.factor.mT

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v by Woodbury's identity: (..., P) → (..., P)."""
        check_points(vector, self.size)
        scaled = vector / self.diagonal
        inside = torch.cholesky_solve(
            (scaled @ self.factor).unsqueeze(-1), self.inner_cholesky
        ).squeeze(-1)
        return scaled - inside @ self.factor.mT / self.diagonal

    def log_det(self) -> Tensor:
        """2 Σ ln L_ii + Σ ln d."""
        return 2 * self.inner_cholesky.diagonal().log().sum() + self.diagonal.log().sum()

    def dense_precision(self) -> Tensor:
        """UUᵀ + diag(d)."""
        self.refuse_beyond_dense()
        return self.factor @ self.factor.mT + torch.diag(self.diagonal)

    def dense_covariance(self) -> Tensor:
        """D⁻¹ − D⁻¹U C⁻¹ UᵀD⁻¹."""
        self.refuse_beyond_dense()
        scaled = self.factor / self.diagonal.unsqueeze(-1)
        half = torch.linalg.solve_triangular(self.inner_cholesky, scaled.mT, upper=False)
        return torch.diag(1 / self.diagonal) - half.mT @ half

    # --- inside -----------------------------------------------------------------------------------

    def _identity(self, size: int) -> Tensor:
        return torch.eye(size, dtype=self.mean.dtype, device=self.mean.device)

    def _colour(self, eps: Tensor) -> Tensor:
        """D⁻½(I − V L⁻ᵀ(L + I)⁻¹Vᵀ)ε."""
        check_points(eps, self.size)
        root, scale = self.inner_cholesky, self.diagonal.rsqrt()
        inside = ((eps * scale) @ self.factor).unsqueeze(-1)
        inside = torch.linalg.solve_triangular(
            root + self._identity(self.rank), inside, upper=False
        )
        inside = torch.linalg.solve_triangular(root.mT, inside, upper=True).squeeze(-1)
        return scale * (eps - scale * (inside @ self.factor.mT))

    def _trace_ratio(self, other: Self) -> Tensor:
        """Σ d' diag(S⁻¹) + tr(U'ᵀS⁻¹U')."""
        columns = other.factor.mT
        return (other.diagonal * self.variance).sum() + (columns * self.solve(columns)).sum()


def check_rows(name: str, factor: Tensor, size: int) -> None:
    """Raise `DataError` unless ``factor`` is (size, k), all of it finite."""
    if factor.dim() != 2 or factor.shape[0] != size:
        raise DataError(
            f"LowRankGaussian: {name} must have {size} rows, one for each weight, got "
            f"shape {tuple(factor.shape)}"
        )
    if not bool(torch.isfinite(factor).all()):
        raise DataError(f"LowRankGaussian: {name} has values that are not finite")
