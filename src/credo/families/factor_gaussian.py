"""The Gaussian whose covariance is of low rank plus a diagonal."""

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
class FactorGaussian(StructuredGaussian):
    r"""N(m, Σ) with Σ = FFᵀ + diag(v): the Gaussian of factor analysis, and SWAG's.

        S = Σ⁻¹ = D⁻¹ − D⁻¹F C⁻¹ FᵀD⁻¹      ln|Σ| = ln|C| + Σ ln v      C = I + FᵀD⁻¹F = LLᵀ

    F is ``factor`` (P, r), of any r ≥ 1; D = diag(v), v is ``diagonal`` (P,), positive. It is to
    the covariance what `LowRankGaussian` is to the precision. Everything is O(P r²) in time and
    O(P r) in memory; L (r, r) is computed once in the life of a covariance.

    A draw needs P normals: with V = D⁻½F,

        R = D½(I + V(I + L)⁻¹Vᵀ)    has    RRᵀ = D½(I + VVᵀ)D½ = Σ

    Args:
        mean: m, (P,).
        factor: F, (P, r).
        diagonal: v, (P,), positive.

    >>> q = FactorGaussian(torch.zeros(2), torch.tensor([[1.0], [1.0]]), torch.ones(2))
    >>> q.dense_covariance()
    tensor([[2., 1.],
            [1., 2.]])

    Reference: Maddox, Garipov, Izmailov, Vetrov & Wilson, "A simple baseline for Bayesian
    uncertainty in deep learning", 2019 (arXiv:1902.02476).
    """

    mean: Vector
    factor: Tensor
    diagonal: Vector

    _fields: ClassVar[str] = "mean, factor, diagonal"

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, factor=self.factor, diagonal=self.diagonal)
        if self.mean.dim() != 1 or self.diagonal.shape != self.mean.shape:
            raise DataError(
                "FactorGaussian: mean and diagonal must be (P,), got "
                f"{tuple(self.mean.shape)} and {tuple(self.diagonal.shape)}"
            )
        if self.factor.dim() != 2 or len(self.factor) != self.size or not self.factor.shape[1]:
            raise DataError(
                f"FactorGaussian: factor must be (P, r) with P = {self.size} and r ≥ 1, got "
                f"{tuple(self.factor.shape)}"
            )
        if not bool(torch.isfinite(self.factor.sum())):  # many times as fast as to look at each
            finite = torch.isfinite(self.factor)
            refuse_unless(finite, self.factor, "FactorGaussian", "factor", "finite")
        refuse_unless(self.diagonal > 0, self.diagonal, "FactorGaussian", "diagonal", "positive")
        _ = self.inner_cholesky

    @cached_property
    def inner_cholesky(self) -> Tensor:
        """L of C = I + FᵀD⁻¹F = LLᵀ, (r, r)."""
        # Of D⁻½F, because 1/v may be beyond the largest number where √v is small.
        scaled = self.factor / self.diagonal.sqrt().unsqueeze(-1)
        inner = scaled.mT @ scaled
        one = torch.eye(self.rank, dtype=inner.dtype, device=inner.device)
        return positive_cholesky(inner + one, "FactorGaussian: I + factorᵀ diagonal⁻¹ factor")

    @property
    def rank(self) -> int:
        """r, the number of columns of the factor."""
        return self.factor.shape[-1]

    @property
    def variance(self) -> Vector:
        """v and the squared length of a weight's row of F."""
        return self.diagonal + self.factor.square().sum(-1)

    def multiply(self, vector: Vector) -> Vector:
        """Sv by Woodbury's identity: (..., P) → (..., P)."""
        check_points(vector, self.size)
        scaled = vector / self.diagonal
        inside = torch.cholesky_solve(
            (scaled @ self.factor).unsqueeze(-1), self.inner_cholesky
        ).squeeze(-1)
        return scaled - inside @ self.factor.mT / self.diagonal

    def solve(self, vector: Vector) -> Vector:
        """Σv: (..., P) → (..., P)."""
        check_points(vector, self.size)
        return vector * self.diagonal + (vector @ self.factor) @ self.factor.mT

    def log_det(self) -> Tensor:
        """ln|S| = −2 Σ ln L_ii − Σ ln v."""
        return -2 * self.inner_cholesky.diagonal().log().sum() - self.diagonal.log().sum()

    def dense_precision(self) -> Tensor:
        """D⁻¹ − D⁻¹F C⁻¹ FᵀD⁻¹."""
        self.refuse_beyond_dense()
        half = self._reduction()
        return torch.diag(1 / self.diagonal) - half @ half.mT

    def dense_covariance(self) -> Tensor:
        """FFᵀ + diag(v)."""
        self.refuse_beyond_dense()
        return self.factor @ self.factor.mT + torch.diag(self.diagonal)

    # --- inside -----------------------------------------------------------------------------------

    def _reduction(self) -> Tensor:
        """W = D⁻¹F L⁻ᵀ, (P, r), of S = D⁻¹ − WWᵀ."""
        scaled = self.factor / self.diagonal.unsqueeze(-1)
        return torch.linalg.solve_triangular(self.inner_cholesky, scaled.mT, upper=False).mT

    def _colour(self, eps: Tensor) -> Tensor:
        """D½(I + V(I + L)⁻¹Vᵀ)ε."""
        check_points(eps, self.size)
        scale = self.diagonal.sqrt()
        one = torch.eye(self.rank, dtype=scale.dtype, device=scale.device)
        inside = ((eps / scale) @ self.factor).unsqueeze(-1)
        inside = torch.linalg.solve_triangular(self.inner_cholesky + one, inside, upper=False)
        return scale * eps + inside.squeeze(-1) @ self.factor.mT

    def _trace_ratio(self, other: Self) -> Tensor:
        """tr(S'Σ) = Σ diag(Σ)/v' − tr(W'ᵀΣW')."""
        columns = other._reduction().mT
        return (self.variance / other.diagonal).sum() - (columns * self.solve(columns)).sum()
