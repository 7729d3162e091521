"""The Gaussian with a dense precision matrix: exact for linear models, and for small networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points
from credo.families.gaussian import CorrelatedGaussian
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class FullGaussian(CorrelatedGaussian):
    r"""N(m, S⁻¹) with any positive definite precision S.

    m is ``mean`` (P,) and S is ``precision`` (P, P). The constructor refuses a precision that is
    not symmetric or not positive definite, so that a mistake shows where it is made. The factor L
    of S = LLᵀ is computed once in the life of a precision, and whatever keeps the precision keeps
    it. Memory is 2P² numbers.

    Args:
        mean: m, (P,).
        precision: S, (P, P), symmetric positive definite.

    >>> q = FullGaussian(torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    >>> q.variance
    tensor([0.6667, 0.6667])
    >>> q.log_prob(q.mean)
    tensor(-1.2886)
    """

    mean: Vector
    precision: Tensor

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, precision=self.precision)
        if self.mean.dim() != 1 or self.precision.shape != 2 * self.mean.shape:
            raise DataError(
                "FullGaussian: mean must be (P,) and precision (P, P), got "
                f"{tuple(self.mean.shape)} and {tuple(self.precision.shape)}"
            )
        _ = self.cholesky
        _check_symmetric(self.precision)

    @classmethod
    def of_factor(cls, mean: Vector, precision: Tensor, factor: Tensor) -> Self:
        """N(mean, precision⁻¹) whose Cholesky factor L is at hand: nothing is checked again.

        Args:
            mean: m, (P,).
            precision: S, (P, P), symmetric.
            factor: L, lower triangular (P, P), with S = LLᵀ.
        """
        q = object.__new__(cls)
        object.__setattr__(q, "mean", mean)
        object.__setattr__(q, "precision", precision)
        q.__dict__["cholesky"] = factor
        return q

    @cached_property
    def cholesky(self) -> Tensor:
        """L with S = LLᵀ, lower triangular (P, P)."""
        return positive_cholesky(self.precision, "FullGaussian: precision")

    @property
    def covariance(self) -> Tensor:
        """S⁻¹, (P, P); computed anew at each call."""
        return torch.cholesky_inverse(self.cholesky)

    @property
    def variance(self) -> Vector:
        """The diagonal of S⁻¹: the squared columns of L⁻¹, summed."""
        one = torch.eye(self.size, dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, one, upper=False).square().sum(0)

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight by itself, (P,)."""
        return self.variance.sqrt()

    def log_prob(self, w: Vector) -> Tensor:
        """−½‖Lᵀ(w − m)‖² + ½ln|S| − ½P ln 2π."""
        check_points(w, self.size)
        squared_distance = ((w - self.mean) @ self.cholesky).square().sum(-1)
        return self._half_log_det - 0.5 * squared_distance - 0.5 * self.size * math.log(2 * math.pi)

    def grad_log_prob(self, w: Vector) -> Tensor:
        """S(m − w)."""
        check_points(w, self.size)
        return (self.mean - w) @ self.precision

    def entropy(self) -> Tensor:
        """½P ln 2πe − ½ln|S|."""
        return 0.5 * self.size * math.log(2 * math.pi * math.e) - self._half_log_det

    def kl(self, other: Self) -> Tensor:
        """½[tr S'S⁻¹ − P + (m − m')ᵀS'(m − m')] − ½ln|S'S⁻¹|, S' and m' those of ``other``; 0-dim.

        The general formula of exponential families says the same, but cancels where the means are
        many standard deviations from zero.
        """
        self.check_same_family(other)
        # With L' the factor of S': tr S'S⁻¹ = ‖L⁻¹L'‖² (Frobenius).
        ratio = torch.linalg.solve_triangular(self.cholesky, other.cholesky, upper=False)
        squared_distance = ((self.mean - other.mean) @ other.cholesky).square().sum()
        trace = ratio.square().sum() - self.size
        return 0.5 * (trace + squared_distance) - ratio.diagonal().log().sum()

    def with_mean(self, mean: Vector) -> Self:
        """The same precision, and its factor, around another mean."""
        check_floating(mean=mean, precision=self.precision)
        if mean.shape != self.mean.shape:
            raise DataError(f"mean must be ({self.size},), got shape {tuple(mean.shape)}")
        return self.of_factor(mean, self.precision, self.cholesky)

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P)."""
        check_points(vector, self.size)
        columns = vector.reshape(-1, self.size).mT
        return solve_with(self.cholesky, columns).mT.reshape(vector.shape)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _half_log_det(self) -> Tensor:
        """½ln|S|."""
        return self.cholesky.diagonal().log().sum()

    def _colour(self, eps: Tensor) -> Tensor:
        """L⁻ᵀε: rows x with xᵀL = εᵀ, (..., P)."""
        rows = eps.reshape(-1, self.size)
        solution = torch.linalg.solve_triangular(self.cholesky, rows, upper=False, left=False)
        return solution.reshape(eps.shape)


def positive_cholesky(matrix: Tensor, what: str) -> Tensor:
    """L with LLᵀ = matrix; a matrix that is not positive definite is refused as ``what``.

    >>> positive_cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "it")
    Traceback (most recent call last):
        ...
    credo.errors.DataError: it must be positive definite, but its smallest eigenvalue is -1 ...
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    # An undefined or infinite entry of the lower triangle shows on the diagonal of its row.
    if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()):
        return factor
    if not bool(torch.isfinite(matrix).all()):
        raise DataError(f"{what} has values that are not finite")
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    raise DataError(
        f"{what} must be positive definite, but its smallest eigenvalue is "
        f"{eigenvalues[0].item():.6g} (its largest {eigenvalues[-1].item():.6g})"
    )


def solve_with(factor: Tensor, columns: Tensor) -> Tensor:
    """L⁻ᵀL⁻¹B. Not by torch.cholesky_solve, whose copy of the factor takes longer than this."""
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def _check_symmetric(precision: Tensor) -> None:
    """Refuse what differs from its transpose by more than rounding, next to √(S_ii S_jj)."""
    size = precision.diagonal().detach().sqrt()
    difference = (precision - precision.mT).detach().abs()
    tolerance = math.sqrt(torch.finfo(precision.dtype).eps)
    if bool((difference <= tolerance * torch.outer(size, size)).all()):
        return
    i, j = divmod(int(difference.nan_to_num(math.inf).argmax()), len(precision))
    raise DataError(
        f"FullGaussian: precision must be symmetric, but its entries [{i}, {j}] and [{j}, {i}] are "
        f"{precision[i, j].item():.6g} and {precision[j, i].item():.6g}"
    )
