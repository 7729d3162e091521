r"""Exponential families: two coordinate systems for one distribution, and what follows from them.

    q(θ) = h(θ) exp(⟨λ, T(θ)⟩ − A(λ))

=========================== ====================================================================
λ, natural parameters       `natural_parameters`: a tuple of tensors, one for each statistic
μ = E_q T = ∇A(λ)           `expectation_parameters`: a tuple of the same shapes
T, sufficient statistics    `sufficient_statistics`
A, log-partition function   `log_partition`
log h, base measure         `log_base`, 0 in most families
∇_μ H                       `entropy_gradient`, −λ wherever h is constant
=========================== ====================================================================

These are functions of a member q, dispatched on its type: the families that only the rule makes
(`ExponentialFamily`) have them as methods, while for the Gaussians of `credo.families`, which know
nothing of the rule, they are registered by the modules beside this one. A member knows its family:
`with_natural` and `with_expectation` give another member, keep what the family holds fixed (a
covariance, a rank), and refuse parameters that are out of range by name. Several independent
coordinates make one member, so that everything is a sum over them.

    >>> from credo.families import DiagGaussian
    >>> q = DiagGaussian(torch.tensor([2.0]), torch.tensor([0.5]))
    >>> natural_parameters(q)
    (tensor([8.]), tensor([-2.]))
    >>> with_natural(q, (torch.tensor([4.0]), torch.tensor([-2.0]))).mean
    tensor([1.])

Reference: Wainwright & Jordan, "Graphical models, exponential families, and variational inference",
2008.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import singledispatch
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import Gaussian

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


Member: TypeAlias = ExponentialFamily | Gaussian
"""What the learning rule moves: a family of its own, or a Gaussian of the library."""


@singledispatch
def natural_parameters(q: object) -> Parameters:
    """λ of a member q.

    Args:
        q: A member of an exponential family.
    """
    _refuse(q)


@singledispatch
def expectation_parameters(q: object) -> Parameters:
    """μ = E_q T(θ) of a member q.

    Args:
        q: A member of an exponential family.
    """
    _refuse(q)


@singledispatch
def with_natural(q: object, natural: Parameters) -> Any:
    """The member of q's family with these λ; differentiable, out of range is refused.

    Args:
        q: A member of an exponential family.
        natural: λ, one tensor for each statistic.
    """
    _refuse(q)


@singledispatch
def with_expectation(q: object, expectation: Parameters) -> Any:
    """The member of q's family with these μ; differentiable, out of range is refused.

    Args:
        q: A member of an exponential family.
        expectation: μ, one tensor for each statistic.
    """
    _refuse(q)


@singledispatch
def sufficient_statistics(q: object, theta: Tensor) -> Parameters:
    """T(θ): each (..., shape of its parameter).

    Args:
        q: A member of an exponential family.
        theta: Events, (..., event).
    """
    _refuse(q)


@singledispatch
def log_partition(q: object) -> Tensor:
    """A(λ), 0-dim.

    Args:
        q: A member of an exponential family.
    """
    _refuse(q)


@singledispatch
def log_base(q: object, theta: Tensor) -> Tensor:
    """log h(θ), broadcastable to (...): 0 unless the family says otherwise.

    Args:
        q: A member of an exponential family.
        theta: Events, (..., event).
    """
    return theta.new_zeros(())


@singledispatch
def entropy_gradient(q: object) -> Parameters:
    """∇_μ H: −λ, because ∇_μ⟨λ, μ⟩ = λ + (∇_μλ)μ and ∇_μA = (∇_μλ)μ cancel but for λ.

    Args:
        q: A member of an exponential family.
    """
    return tuple(-parameter for parameter in natural_parameters(q))


@singledispatch
def parameter_names(q: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the natural and the expectation parameters are called in an error.

    Args:
        q: A member of an exponential family.
    """
    _refuse(q)


@natural_parameters.register
def _(q: ExponentialFamily) -> Parameters:
    return q.natural


@expectation_parameters.register
def _(q: ExponentialFamily) -> Parameters:
    return q.expectation


@with_natural.register
def _(q: ExponentialFamily, natural: Parameters) -> ExponentialFamily:
    return q.with_natural(natural)


@with_expectation.register
def _(q: ExponentialFamily, expectation: Parameters) -> ExponentialFamily:
    return q.with_expectation(expectation)


@sufficient_statistics.register
def _(q: ExponentialFamily, theta: Tensor) -> Parameters:
    return q.statistics(theta)


@log_partition.register
def _(q: ExponentialFamily) -> Tensor:
    return q.log_partition()


@log_base.register
def _(q: ExponentialFamily, theta: Tensor) -> Tensor:
    return q.log_base(theta)


@parameter_names.register
def _(q: ExponentialFamily) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return q.natural_names, q.expectation_names


def _refuse(q: object) -> NoReturn:
    raise UnsupportedError(
        f"{type(q).__name__} is not an exponential family that the learning rule knows: take a "
        "Gaussian of credo.families or a family of credo.rule.families"
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
