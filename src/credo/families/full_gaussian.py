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
from credo.families.exponential import Parameters, check_parameters
from credo.families.gaussian import CorrelatedGaussian
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class FullGaussian(CorrelatedGaussian):
    r"""N(m, S⁻¹) with any positive definite precision S.

        λ = (Sm, −½S)      T(θ) = (θ, θθᵀ)      μ = (m, S⁻¹ + mmᵀ)
        A(λ) = ½mᵀSm − ½ln|S| + ½P ln 2π

    m is ``mean`` (P,) and S is ``precision`` (P, P). The constructor refuses a precision that is
    not symmetric or not positive definite, so that a mistake shows where it is made. The factor L
    of S = LLᵀ is computed once in the life of a precision, and whatever keeps the precision keeps
    it. Memory is 2P² numbers.

    >>> q = FullGaussian(torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    >>> q.variance
    tensor([0.6667, 0.6667])
    >>> q.log_prob(q.mean)
    tensor(-1.2886)
    >>> q.absorb(torch.tensor([1.0, 1.0]), keep=0.5, gain=1.0).precision
    tensor([[2.0000, 0.5000],
            [0.5000, 2.0000]])
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
    def _trusted(cls, mean: Vector, precision: Tensor, factor: Tensor | None = None) -> Self:
        """Without the checks of the constructor but that of definiteness, unless L is at hand."""
        q = object.__new__(cls)
        object.__setattr__(q, "mean", mean)
        object.__setattr__(q, "precision", precision)
        if factor is None:
            factor = positive_cholesky(precision, "FullGaussian: precision")
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

        The formula of every exponential family says the same, but cancels where the means are many
        standard deviations from zero.
        """
        self.check_same_family(other)
        # With L' the factor of S': tr S'S⁻¹ = ‖L⁻¹L'‖² (Frobenius).
        ratio = torch.linalg.solve_triangular(self.cholesky, other.cholesky, upper=False)
        squared_distance = ((self.mean - other.mean) @ other.cholesky).square().sum()
        trace = ratio.square().sum() - self.size
        return 0.5 * (trace + squared_distance) - ratio.diagonal().log().sum()

    # --- the exponential family -------------------------------------------------------------------

    @property
    def natural(self) -> Parameters:
        """(Sm, −½S)."""
        return self.precision @ self.mean, -0.5 * self.precision

    @property
    def expectation(self) -> Parameters:
        """(m, S⁻¹ + mmᵀ)."""
        return self.mean, torch.addr(self.covariance, self.mean, self.mean)

    def with_natural(self, natural: Parameters) -> Self:
        """The Gaussian with these λ; only the symmetric part of a matrix counts."""
        check_parameters(
            natural, (self.mean, self.precision), self.natural_names, type(self).__name__
        )
        slope, minus_half_precision = natural
        precision = -(minus_half_precision + minus_half_precision.mT)
        factor = positive_cholesky(precision, "FullGaussian: precision (−2 times the natural one)")
        mean = _solve(factor, slope.unsqueeze(-1)).squeeze(-1)
        return self._trusted(mean, precision, factor)

    def with_expectation(self, expectation: Parameters) -> Self:
        """The Gaussian with these μ; only the symmetric part of a matrix counts."""
        check_parameters(
            expectation, (self.mean, self.precision), self.expectation_names, type(self).__name__
        )
        mean, second_moment = expectation
        covariance = 0.5 * (second_moment + second_moment.mT) - torch.outer(mean, mean)
        what = "FullGaussian: second moment − mean·meanᵀ, the covariance,"
        factor = positive_cholesky(covariance, what)
        return self._trusted(mean, torch.cholesky_inverse(factor))

    def statistics(self, theta: Tensor) -> Parameters:
        """(θ, θθᵀ): (..., P) and (..., P, P)."""
        check_points(theta, self.size)
        return theta, theta.unsqueeze(-1) * theta.unsqueeze(-2)

    def log_partition(self) -> Tensor:
        """½mᵀSm − ½ln|S| + ½P ln 2π."""
        squared_norm = (self.mean @ self.cholesky).square().sum()
        return 0.5 * squared_norm - self._half_log_det + 0.5 * self.size * math.log(2 * math.pi)

    # --- the learning rule ------------------------------------------------------------------------

    def with_mean(self, mean: Vector) -> Self:
        """The same precision, and its factor, around another mean."""
        check_floating(mean=mean, precision=self.precision)
        if mean.shape != self.mean.shape:
            raise DataError(f"mean must be ({self.size},), got shape {tuple(mean.shape)}")
        return self._trusted(mean, self.precision, self.cholesky)

    def absorb(self, curvature: Tensor, keep: float, gain: float) -> Self:
        """The same mean with precision keep·S + gain·H, exactly; H is (P,) or (P, P) symmetric.

        One pass over the matrix and one factorisation, which is the check that the result is
        positive definite.
        """
        self._check_curvature(curvature)
        if curvature.dim() == 1:
            precision = self.precision * keep
            precision.diagonal().add_(curvature, alpha=gain)
        elif keep == 1.0 - gain:
            precision = torch.lerp(self.precision, curvature, gain)
        else:
            precision = (self.precision * keep).add_(curvature, alpha=gain)
        return self._trusted(self.mean, precision)

    def absorb_positive(self, curvature: Tensor, rate: float, temperature: float = 1.0) -> Self:
        """The same mean with precision S + ρG + ½ρ²GS⁻¹G, where G = H − temperature·S.

        H is (P,) or (P, P) symmetric. GS⁻¹G = WᵀW with W = L⁻¹G.
        """
        self._check_curvature(curvature)
        dense = curvature if curvature.dim() == 2 else torch.diag(curvature)
        change = dense - temperature * self.precision
        whitened = torch.linalg.solve_triangular(self.cholesky, change, upper=False)
        first_order = self.precision + rate * change
        precision = torch.addmm(first_order, whitened.mT, whitened, alpha=0.5 * rate * rate)
        return self._trusted(self.mean, precision)

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P)."""
        check_points(vector, self.size)
        columns = vector.reshape(-1, self.size).mT
        return _solve(self.cholesky, columns).mT.reshape(vector.shape)

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

    def _check_curvature(self, curvature: Tensor) -> None:
        if curvature.shape not in (self.mean.shape, self.precision.shape):
            raise DataError(
                f"the curvature must be ({self.size},) or ({self.size}, {self.size}), got shape "
                f"{tuple(curvature.shape)}"
            )


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


def _solve(factor: Tensor, columns: Tensor) -> Tensor:
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
