"""What Gaussians with a structured precision share.

`StructuredGaussian` has everything that follows from products, solves, a root and a determinant
of the precision S.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points
from credo.families.gaussian import CorrelatedGaussian
from credo.types import Vector

MAX_DENSE = 4096
"""Up to how many weights a structured Gaussian shows its dense parameters: 134 MB in float64."""


class StructuredGaussian(CorrelatedGaussian):
    """N(m, S⁻¹) whose S is known by what it does: see the abstract methods.

    Nothing but ``dense_precision`` and ``dense_covariance`` makes a (P, P) matrix.
    """

    _fields: ClassVar[str]

    @abstractmethod
    def multiply(self, vector: Vector) -> Vector:
        """Sv: (..., P) → (..., P).

        Args:
            vector: v, (..., P).
        """

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
    def _log_units(self) -> float:
        return 0.5 * self.size * math.log(2 * math.pi)

    def _squared_norm(self, vector: Vector) -> Tensor:
        return (vector * self.multiply(vector)).sum(-1)

    def refuse_beyond_dense(self) -> None:
        """Raise `DataError` if a (P, P) matrix would take more memory than anyone means."""
        if self.size > MAX_DENSE:
            gigabytes = self.size**2 * self.mean.element_size() / 1e9
            raise DataError(
                f"the dense matrices of this {type(self).__name__} over {self.size} weights are of "
                f"{gigabytes:.3g} GB each, and are shown up to {MAX_DENSE} weights only; use its "
                f"fields ({self._fields}), multiply and solve"
            )
