"""What every Gaussian N(m, S⁻¹) can do, whatever the structure of S.

A structure (diagonal, dense, low rank plus diagonal, Kronecker) is one class that solves with S,
draws, and knows its densities and divergences. What the learning rule asks beside that, natural and
expectation parameters and curvature mixed into S, is in `credo.rule.families`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import Family, check_count
from credo.noise import NoiseSource
from credo.types import Vector


class Gaussian(Family):
    """N(m, S⁻¹) over flat vectors (P,) with some structure of the precision S."""

    @abstractmethod
    def with_mean(self, mean: Vector) -> Self:
        """The same precision around another mean.

        Args:
            mean: The new mean, (P,).
        """

    @abstractmethod
    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P).

        Args:
            vector: v, (..., P).
        """

    @abstractmethod
    def kl(self, other: Self) -> Tensor:
        """KL(self‖other) between two members of one family, 0-dim, in nats.

        Args:
            other: A member of the same family, over as many weights.
        """

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` is of the same family and over as many weights.

        Args:
            other: What should be such a member.
        """
        if not isinstance(other, type(self)) or other.size != self.size:
            size = f" over {other.size} weights" if isinstance(other, type(self)) else ""
            raise DataError(
                f"expected another {type(self).__name__} over {self.size} weights, got a "
                f"{type(other).__name__}{size}"
            )


class CorrelatedGaussian(Gaussian):
    """A Gaussian whose draws are m + Rε for some root RRᵀ = S⁻¹ that a subclass applies."""

    @abstractmethod
    def _colour(self, eps: Tensor) -> Tensor:
        """Rε: (..., P) → (..., P)."""

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """m + Rε with RRᵀ = S⁻¹, differentiable in mean and structure: (n, P)."""
        check_count(n)
        eps = torch.randn(
            n, self.size, generator=generator, dtype=self.mean.dtype, device=self.mean.device
        )
        return self.mean + self._colour(eps)

    def draw_(self, out: Tensor, eps: Tensor) -> Tensor:
        """Write m + R·eps into ``out`` and return it, without a graph.

        ``out`` and ``eps`` are (..., P) and may be the same tensor.

        Args:
            out: Where the draws go, (..., P).
            eps: Standard normals, (..., P).
        """
        with torch.no_grad():
            return torch.add(self.mean, self._colour(eps), out=out)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``."""
        check_count(n)
        eps = torch.empty_like(out)
        for index in range(n):
            yield self.draw_(out, noise.draw(eps, index))
