"""The Gaussian whose covariance never changes: only its mean is a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points, refuse_unless
from credo.families.diag_gaussian import DiagGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian import Gaussian
from credo.noise import NoiseSource
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class FixedGaussian(Gaussian):
    r"""N(m, S⁻¹) with the precision S held fixed: only the mean is a parameter.

    m is ``mean`` (P,). S is ``precision``: a number (then expanded to (P,) without taking memory),
    its diagonal (P,), or dense (P, P). The entropy is the same for all members.

    Args:
        mean: m, (P,).
        precision: S: a number, its diagonal (P,), or (P, P); positive definite.

    >>> q = FixedGaussian(torch.tensor([1.0, 2.0]), precision=torch.tensor(5.0))
    >>> gradient = torch.tensor([10.0, 10.0])
    >>> q.with_mean(q.mean - 0.5 * q.solve(gradient)).mean        # a step of gradient descent
    tensor([0., 1.])
    """

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

    def kl(self, other: Self) -> Tensor:
        """½(m − m')ᵀS(m − m'); 0-dim."""
        self.check_same_family(other)
        difference = self.mean - other.mean
        return 0.5 * (self.multiply(difference) * difference).sum()

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

    def with_mean(self, mean: Vector) -> Self:
        """The same precision around another mean, at no cost."""
        moved = self._gaussian.with_mean(mean)
        q = object.__new__(type(self))
        object.__setattr__(q, "mean", moved.mean)
        object.__setattr__(q, "precision", self.precision)
        q.__dict__["_gaussian"] = moved
        return q

    def multiply(self, vector: Vector) -> Vector:
        """Sv, (P,).

        Args:
            vector: v, (P,).
        """
        return self.precision @ vector if self.precision.dim() == 2 else self.precision * vector

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P)."""
        if self.precision.dim() == 2:
            return self._gaussian.solve(vector)
        check_points(vector, self.size)
        return vector / self.precision
