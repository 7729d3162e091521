"""The Gaussian whose covariance never changes: the learning rule in it is gradient descent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points
from credo.families.diag_gaussian import DiagGaussian
from credo.families.exponential import Parameters, check_parameters, refuse_unless
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian import Gaussian
from credo.noise import NoiseSource
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class FixedGaussian(Gaussian):
    r"""N(m, S⁻¹) with the precision S held fixed: only the mean is a parameter.

        λ = Sm      T(θ) = θ      μ = m      A(λ) = ½mᵀSm      log h(θ) = log N(θ; 0, S⁻¹)

    m is ``mean`` (P,). S is ``precision``: a number (then expanded to (P,) without taking memory),
    its diagonal (P,), or dense (P, P). The base measure h is not constant and the entropy is, so
    ∇_μH = 0, not −λ. The learning rule becomes preconditioned gradient descent, m − ρS⁻¹∇:

    >>> q = FixedGaussian(torch.tensor([1.0, 2.0]), precision=torch.tensor(5.0))
    >>> gradient, curvature = torch.tensor([10.0, 10.0]), torch.tensor([3.0, 3.0])
    >>> q = q.absorb(curvature, keep=0.5, gain=0.5)
    >>> q.with_mean(q.mean - 0.5 * q.solve(gradient)).mean
    tensor([0., 1.])
    """

    natural_names = ("precision times mean",)
    expectation_names = ("mean",)

    mean: Vector
    precision: Tensor

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, precision=self.precision)
        vector, matrix = self.mean.shape, 2 * self.mean.shape
        if self.mean.dim() != 1 or self.precision.shape not in (torch.Size(()), vector, matrix):
            raise DataError(
                "FixedGaussian: mean must be (P,) and precision a number, (P,) or (P, P); got "
                f"{tuple(self.mean.shape)} and {tuple(self.precision.shape)}"
            )
        if self.precision.dim() < 2:
            valid = (self.precision > 0) & (self.precision < math.inf)
            refuse_unless(
                valid, self.precision, "FixedGaussian", "precision", "positive and finite"
            )
            object.__setattr__(self, "precision", self.precision.expand(vector))
        _ = self._gaussian

    @cached_property
    def _gaussian(self) -> DiagGaussian | FullGaussian:
        """The same distribution in the family that has its structure."""
        if self.precision.dim() == 2:
            return FullGaussian(self.mean, self.precision)
        if self.precision.stride() == (0,):
            return DiagGaussian(self.mean, self.precision[0].rsqrt())
        return DiagGaussian(self.mean, self.precision.rsqrt())

    @property
    def variance(self) -> Vector:
        """The diagonal of S⁻¹."""
        return self._gaussian.variance

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight, (P,)."""
        return self._gaussian.scale

    def log_prob(self, w: Vector) -> Tensor:
        """−½(w − m)ᵀS(w − m) + ½ln|S| − ½P ln 2π."""
        return self._gaussian.log_prob(w)

    def grad_log_prob(self, w: Vector) -> Tensor:
        """S(m − w)."""
        return self._gaussian.grad_log_prob(w)

    def entropy(self) -> Tensor:
        """½P ln 2πe − ½ln|S|, the same for every member."""
        return self._gaussian.entropy()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """m + S^{−½}ε, differentiable in the mean: (n, P)."""
        return self._gaussian.sample(n, generator)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``."""
        return self._gaussian.walk(n, noise, out)

    # --- the exponential family -------------------------------------------------------------------

    @property
    def natural(self) -> Parameters:
        """(Sm,)."""
        if self.precision.dim() == 2:
            return (self.precision @ self.mean,)
        return (self.precision * self.mean,)

    @property
    def expectation(self) -> Parameters:
        """(m,)."""
        return (self.mean,)

    def with_natural(self, natural: Parameters) -> Self:
        """The Gaussian around S⁻¹λ."""
        check_parameters(natural, (self.mean,), self.natural_names, type(self).__name__)
        return self.with_mean(self.solve(natural[0]))

    def with_expectation(self, expectation: Parameters) -> Self:
        """The Gaussian around μ."""
        check_parameters(expectation, (self.mean,), self.expectation_names, type(self).__name__)
        return self.with_mean(expectation[0])

    def statistics(self, theta: Tensor) -> Parameters:
        """(θ,)."""
        check_points(theta, self.size)
        return (theta,)

    def log_partition(self) -> Tensor:
        """½mᵀSm."""
        return 0.5 * (self.natural[0] * self.mean).sum()

    def log_base(self, theta: Tensor) -> Tensor:
        """log N(θ; 0, S⁻¹): (..., P) → (...)."""
        return self._gaussian.with_mean(torch.zeros_like(self.mean)).log_prob(theta)

    def entropy_gradient(self) -> Parameters:
        """0, because the entropy depends on S alone."""
        return (torch.zeros_like(self.mean),)

    def kl(self, other: Self) -> Tensor:
        """½(m − m')ᵀS(m − m'); 0-dim."""
        self.check_same_family(other)
        difference = self.with_mean(self.mean - other.mean)
        return difference.log_partition()

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` has the same size and the same fixed precision."""
        super().check_same_family(other)
        assert isinstance(other, FixedGaussian)
        if self.precision is not other.precision and not torch.equal(
            self.precision, other.precision
        ):
            raise DataError(
                "two FixedGaussians hold different precisions, so they are of different families"
            )

    # --- the learning rule ------------------------------------------------------------------------

    def with_mean(self, mean: Vector) -> Self:
        """The same precision around another mean, at no cost."""
        moved = self._gaussian.with_mean(mean)
        q = object.__new__(type(self))
        object.__setattr__(q, "mean", moved.mean)
        object.__setattr__(q, "precision", self.precision)
        q.__dict__["_gaussian"] = moved
        return q

    def absorb(self, curvature: Tensor, keep: float, gain: float) -> Self:
        """This Gaussian itself: the precision is fixed, so every curvature projects onto it."""
        return self

    def absorb_positive(self, curvature: Tensor, rate: float, temperature: float = 1.0) -> Self:
        """This Gaussian itself: the precision is fixed, so every curvature projects onto it."""
        return self

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P)."""
        if self.precision.dim() == 2:
            return self._gaussian.solve(vector)
        check_points(vector, self.size)
        return vector / self.precision
