r"""What every Gaussian N(m, S⁻¹) can do for the learning rule, whatever the structure of S.

    λ = (Sm, −½S)        μ = (m, S⁻¹ + mmᵀ)

The rule in Gaussian form touches S in two ways only: it mixes curvature into it, and it solves with
it. So a structure (diagonal, dense, low rank plus diagonal, Kronecker) is one class with these two
operations. A structure that is not closed under addition projects the mixture back onto itself, and
says so in the docstring of ``absorb``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor

from credo.families.base import Family, check_count
from credo.families.exponential import ExponentialFamily
from credo.noise import NoiseSource
from credo.types import Vector


class Gaussian(Family, ExponentialFamily):
    """N(m, S⁻¹) over flat vectors (P,) with some structure of the precision S."""

    natural_names: ClassVar[tuple[str, ...]] = ("precision times mean", "minus half the precision")
    expectation_names: ClassVar[tuple[str, ...]] = ("mean", "second moment")

    @abstractmethod
    def with_mean(self, mean: Vector) -> Self:
        """The same precision around another mean."""

    @abstractmethod
    def absorb(self, curvature: Tensor, keep: float, gain: float) -> Self:
        """The same mean with precision keep·S + gain·H, projected onto the structure of S.

        ``curvature`` H is (P,) for its diagonal or (P, P) symmetric. A precision that is not
        positive definite is refused with a `DataError`.
        """

    @abstractmethod
    def absorb_positive(self, curvature: Tensor, rate: float, temperature: float = 1.0) -> Self:
        """The same mean with precision S + ρG + ½ρ²GS⁻¹G, where G = H − temperature·S.

        The second-order term is the Riemannian retraction of Lin, Schmidt & Khan (2020,
        arXiv:2002.10060): with R = S^½, S⁺ = ½R[I + (I + ρR⁻¹GR⁻¹)²]R is positive definite for
        any symmetric H and any rate.
        """

    @abstractmethod
    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v: (..., P) → (..., P)."""


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
        """
        with torch.no_grad():
            return torch.add(self.mean, self._colour(eps), out=out)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``."""
        check_count(n)
        eps = torch.empty_like(out)
        for index in range(n):
            yield self.draw_(out, noise.draw(eps, index))
