r"""Exponential families: two coordinate systems for one distribution, and what follows from them.

    q(θ) = h(θ) exp(⟨λ, T(θ)⟩ − A(λ))

========================== ====================================================================
λ, natural parameters      ``q.natural``: a tuple of tensors, one for each sufficient statistic
μ = E_q T = ∇A(λ)          ``q.expectation``: a tuple of the same shapes
T, sufficient statistics   ``q.statistics(theta)``
A, log-partition function  ``q.log_partition()``
log h, base measure        ``q.log_base(theta)``, 0 in most families
H = A − ⟨λ, μ⟩ − E log h   ``q.entropy()``
∇_μ H                      ``q.entropy_gradient()``, −λ wherever h is constant
========================== ====================================================================

A member knows its family: ``q.with_natural(λ)`` and ``q.with_expectation(μ)`` give another member,
keep what the family holds fixed (a covariance, a rank), and refuse parameters that are out of range
by name. Several independent coordinates make one member, so that everything is a sum over them.

Reference: Wainwright & Jordan, "Graphical models, exponential families, and variational inference",
2008; FORMULAS E.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import DataError

Parameters: TypeAlias = tuple[Tensor, ...]
"""Natural or expectation parameters, or gradients with respect to them: one tensor a statistic."""


class ExponentialFamily(ABC):
    """A member of an exponential family; see the module's docstring for the symbols."""

    natural_names: ClassVar[tuple[str, ...]]
    """What each natural parameter is called in an error."""

    expectation_names: ClassVar[tuple[str, ...]]
    """What each expectation parameter is called in an error."""

    @property
    @abstractmethod
    def natural(self) -> Parameters:
        """λ."""

    @property
    @abstractmethod
    def expectation(self) -> Parameters:
        """μ = E_q T(θ)."""

    @abstractmethod
    def with_natural(self, natural: Parameters) -> Self:
        """The member of the same family with these λ; differentiable, out of range is refused."""

    @abstractmethod
    def with_expectation(self, expectation: Parameters) -> Self:
        """The member of the same family with these μ; differentiable, out of range is refused."""

    @abstractmethod
    def statistics(self, theta: Tensor) -> Parameters:
        """T(θ) of events (..., event): each (..., shape of its parameter)."""

    @abstractmethod
    def log_partition(self) -> Tensor:
        """A(λ), 0-dim."""

    @abstractmethod
    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, event)."""

    def log_base(self, theta: Tensor) -> Tensor:
        """log h(θ), broadcastable to (...)."""
        return theta.new_zeros(())

    def log_prob(self, theta: Tensor) -> Tensor:
        """⟨λ, T(θ)⟩ − A + log h(θ): (..., event) → (...)."""
        pairing = inner(self.statistics(theta), self.natural)
        return pairing - self.log_partition() + self.log_base(theta)

    def entropy(self) -> Tensor:
        """A − ⟨λ, μ⟩ where log h = 0; a family with a base measure says its own. 0-dim, in nats."""
        return self.log_partition() - inner(self.expectation, self.natural)

    def entropy_gradient(self) -> Parameters:
        """∇_μ H: −λ, because ∇_μ⟨λ, μ⟩ = λ + (∇_μλ)μ and ∇_μA = (∇_μλ)μ cancel but for λ."""
        return tuple(-parameter for parameter in self.natural)

    def kl(self, other: Self) -> Tensor:
        """KL(self‖other) = A(λ') − A(λ) − ⟨λ' − λ, μ⟩, the Bregman divergence of A; 0-dim."""
        self.check_same_family(other)
        difference = tuple(b - a for a, b in zip(self.natural, other.natural, strict=True))
        gap = other.log_partition() - self.log_partition()
        return gap - inner(self.expectation, difference)

    def check_same_family(self, other: object) -> None:
        """Raise `DataError` unless ``other`` is of the same family and shape."""
        if type(other) is not type(self):
            raise DataError(
                f"expected another {type(self).__name__}, got a {type(other).__name__}: natural "
                "parameters of different families can't be added or compared"
            )
        here, there = (tuple(tuple(p.shape) for p in q.natural) for q in (self, other))
        if here != there:
            raise DataError(
                f"two members of {type(self).__name__} have parameters of different shapes: "
                f"{here} and {there}"
            )


def inner(values: Parameters, parameters: Parameters) -> Tensor:
    """⟨·, ·⟩ summed over the dimensions of the parameters: values may have leading dimensions."""
    return torch.stack(
        torch.broadcast_tensors(
            *(
                (v * p).flatten(start_dim=v.dim() - p.dim()).sum(-1) if p.dim() else v * p
                for v, p in zip(values, parameters, strict=True)
            )
        )
    ).sum(0)


def check_parameters(
    given: Parameters, expected: Parameters, names: tuple[str, ...], family: str
) -> None:
    """Raise `DataError` unless ``given`` has the number, shapes and finiteness of ``expected``."""
    if not isinstance(given, tuple) or len(given) != len(expected):
        count = len(given) if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise DataError(f"{family} has the parameters {', '.join(names)}, in a tuple; got {count}")
    for name, value, like in zip(names, given, expected, strict=True):
        if value.shape != like.shape:
            raise DataError(
                f"{family}: {name} must have shape {tuple(like.shape)}, got {tuple(value.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"{family}: {name} has values that are not finite")


def refuse_unless(valid: Tensor, value: Tensor, family: str, name: str, requirement: str) -> None:
    """Raise `DataError` naming the first entry of ``value`` where ``valid`` is False.

    >>> refuse_unless(torch.tensor([True, True]), torch.ones(2), "Gamma", "rate", "positive")
    """
    if bool(valid.all()):
        return
    where = tuple(torch.nonzero(~valid)[0].tolist())
    at = f"entry {list(where)} is" if where else "it is"
    raise DataError(f"{family}: {name} must be {requirement}, but {at} {value[where].item():.6g}")
