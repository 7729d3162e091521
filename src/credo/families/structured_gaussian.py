r"""What Gaussians with a structured precision share.

A structured precision makes a *curved* sub-family of the dense Gaussian: its members' natural
parameters (Sm, −½S) don't fill a linear space. `StructuredGaussian` is what such families share:
everything that follows from products, solves, a root and a determinant of S, and the dense ambient
parameters, projected back onto the structure.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points
from credo.families.exponential import Parameters, check_parameters
from credo.families.full_gaussian import positive_cholesky
from credo.families.gaussian import CorrelatedGaussian
from credo.types import Vector

MAX_DENSE = 4096
"""Up to how many weights a structured Gaussian shows its dense parameters: 134 MB in float64."""

KroneckerCurvature: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""One pair (A', B') for each block: H = blockdiag(A' ⊗ B'), never formed."""


class StructuredGaussian(CorrelatedGaussian):
    """N(m, S⁻¹) whose S is known by what it does: see the abstract methods.

    ``natural``, ``expectation`` and ``statistics`` are those of the dense Gaussian, (P,) and
    (P, P), and refused beyond `MAX_DENSE` weights; nothing else needs a (P, P) matrix.
    """

    _fields: ClassVar[str]

    @abstractmethod
    def multiply(self, vector: Vector) -> Vector:
        """Sv: (..., P) → (..., P)."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """ln|S|, 0-dim."""

    @abstractmethod
    def dense_precision(self) -> Tensor:
        """S as (P, P), refused beyond `MAX_DENSE` weights."""

    @abstractmethod
    def dense_covariance(self) -> Tensor:
        """S⁻¹ as (P, P), refused beyond `MAX_DENSE` weights."""

    @abstractmethod
    def _trace_ratio(self, other: Self) -> Tensor:
        """tr(S'S⁻¹), S' that of ``other``; 0-dim."""

    @abstractmethod
    def _near_precision(self, mean: Vector, precision: Tensor) -> Self:
        """The member that stands for N(mean, precision⁻¹); exact and differentiable at members."""

    @abstractmethod
    def _near_covariance(self, mean: Vector, covariance: Tensor) -> Self:
        """The member that stands for N(mean, covariance); exact and differentiable at members."""

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight by itself, (P,)."""
        return self.variance.sqrt()

    def log_prob(self, w: Vector) -> Tensor:
        """−½(w − m)ᵀS(w − m) + ½ln|S| − ½P ln 2π."""
        check_points(w, self.size)
        return -0.5 * self._squared_norm(w - self.mean) + 0.5 * self.log_det() - self._log_units

    def grad_log_prob(self, w: Vector) -> Tensor:
        """S(m − w)."""
        check_points(w, self.size)
        return self.multiply(self.mean - w)

    def entropy(self) -> Tensor:
        """½P ln 2πe − ½ln|S|."""
        return 0.5 * self.size + self._log_units - 0.5 * self.log_det()

    def kl(self, other: Self) -> Tensor:
        """½[tr S'S⁻¹ − P + (m − m')ᵀS'(m − m') + ln|S| − ln|S'|], of ``other``'s S' and m'."""
        self.check_same_family(other)
        distance = other._squared_norm(self.mean - other.mean)
        log_ratio = self.log_det() - other.log_det()
        return 0.5 * (self._trace_ratio(other) - self.size + distance + log_ratio)

    def with_mean(self, mean: Vector) -> Self:
        """The same precision, and its factorisation, around another mean."""
        check_floating(mean=mean, precision=self.mean)
        if mean.shape != self.mean.shape:
            raise DataError(f"mean must be ({self.size},), got shape {tuple(mean.shape)}")
        moved = copy.copy(self)
        object.__setattr__(moved, "mean", mean)
        return moved

    @property
    def natural(self) -> Parameters:
        """(Sm, −½S) of the dense Gaussian."""
        return self.multiply(self.mean), -0.5 * self.dense_precision()

    @property
    def expectation(self) -> Parameters:
        """(m, S⁻¹ + mmᵀ) of the dense Gaussian."""
        return self.mean, torch.addr(self.dense_covariance(), self.mean, self.mean)

    def with_natural(self, natural: Parameters) -> Self:
        """The member for these dense λ; one that is not on the structure is projected.

        The mean is that of the dense Gaussian. Only the symmetric part of a matrix counts.
        """
        self._check_ambient(natural, self.natural_names)
        slope, minus_half_precision = natural
        precision = -(minus_half_precision + minus_half_precision.mT)
        what = f"{type(self).__name__}: precision (−2 times the natural one)"
        root = positive_cholesky(precision, what)
        mean = torch.cholesky_solve(slope.unsqueeze(-1), root).squeeze(-1)
        return self._near_precision(mean, precision)

    def with_expectation(self, expectation: Parameters) -> Self:
        """The member for these dense μ; one that is not on the structure is projected.

        Only the symmetric part of a matrix counts.
        """
        self._check_ambient(expectation, self.expectation_names)
        mean, second_moment = expectation
        covariance = 0.5 * (second_moment + second_moment.mT) - torch.outer(mean, mean)
        what = f"{type(self).__name__}: second moment − mean·meanᵀ, the covariance,"
        positive_cholesky(covariance, what)
        return self._near_covariance(mean, covariance)

    def statistics(self, theta: Tensor) -> Parameters:
        """(θ, θθᵀ): (..., P) and (..., P, P)."""
        check_points(theta, self.size)
        self._refuse_beyond_dense()
        return theta, theta.unsqueeze(-1) * theta.unsqueeze(-2)

    def log_partition(self) -> Tensor:
        """½mᵀSm − ½ln|S| + ½P ln 2π."""
        return 0.5 * self._squared_norm(self.mean) - 0.5 * self.log_det() + self._log_units

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` is of the same family and over as many weights."""
        if not isinstance(other, type(self)) or other.size != self.size:
            size = f" over {other.size} weights" if isinstance(other, type(self)) else ""
            raise DataError(
                f"expected another {type(self).__name__} over {self.size} weights, got a "
                f"{type(other).__name__}{size}"
            )

    @property
    def _log_units(self) -> float:
        return 0.5 * self.size * math.log(2 * math.pi)

    def _squared_norm(self, vector: Vector) -> Tensor:
        return (vector * self.multiply(vector)).sum(-1)

    def _check_ambient(self, given: Parameters, names: tuple[str, ...]) -> None:
        self._refuse_beyond_dense()
        # Only the shape is asked for: no memory is taken.
        matrix = self.mean.new_empty(()).expand(self.size, self.size)
        check_parameters(given, (self.mean, matrix), names, type(self).__name__)

    def _refuse_beyond_dense(self) -> None:
        if self.size > MAX_DENSE:
            gigabytes = self.size**2 * self.mean.element_size() / 1e9
            raise DataError(
                f"the dense natural and expectation parameters of this {type(self).__name__} over "
                f"{self.size} weights are matrices of {gigabytes:.3g} GB each, and are shown up to "
                f"{MAX_DENSE} weights only; use its fields ({self._fields}), solve and absorb"
            )

    def _check_dense_or_diagonal(self, curvature: Tensor) -> None:
        if curvature.shape not in ((self.size,), (self.size, self.size)):
            raise DataError(
                f"{type(self).__name__}: the curvature must be ({self.size},) or "
                f"({self.size}, {self.size}), got shape {tuple(curvature.shape)}"
            )
        if not bool(torch.isfinite(curvature).all()):
            raise DataError(f"{type(self).__name__}: the curvature has values that are not finite")
