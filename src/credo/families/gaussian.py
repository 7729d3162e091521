r"""What every Gaussian N(m, S⁻¹) can do for the learning rule, whatever the structure of S.

    λ = (Sm, −½S)        μ = (m, S⁻¹ + mmᵀ)

The rule in Gaussian form touches S in two ways only: it mixes curvature into it, and it solves with
it. So a structure (diagonal, dense, low rank plus diagonal, Kronecker) is one class with these two
operations. A structure that is not closed under addition projects the mixture back onto itself, and
says so in the docstring of ``absorb``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from credo.families.base import Family
from credo.families.exponential import ExponentialFamily
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
