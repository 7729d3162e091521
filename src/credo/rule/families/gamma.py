"""The Gamma distribution: conjugate to precisions and to rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor

from credo.families.base import check_count, refuse_unless
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    check_parameters,
)
from credo.rule.families.special import (
    check_events,
    check_positive,
    digamma_minus_log,
    gamma_shape,
    sample_log_gamma,
    stirling_remainder,
)


@dataclass(frozen=True, eq=False)
class Gamma(ExponentialFamily):
    """p(x) = b^a x^{a−1} e^{−bx}/Γ(a) with ``shape`` a and ``rate`` b, both (...) and positive.

    λ = (a − 1, −b), T = (ln x, x), μ = (ψ(a) − ln b, a/b), A = ln Γ(a) − a ln b. Coordinates are
    independent, events are (...).

    >>> q = Gamma(torch.tensor([2.0]), torch.tensor([4.0]))
    >>> q.mean, q.variance
    (tensor([0.5000]), tensor([0.1250]))
    >>> q.with_expectation(q.expectation).rate
    tensor([4.0000])
    """

    shape: Tensor
    rate: Tensor

    natural_names = ("shape minus one", "minus the rate")
    expectation_names = ("mean of ln x", "mean of x")

    def __post_init__(self) -> None:
        check_positive("Gamma", shape=self.shape, rate=self.rate)

    @property
    def natural(self) -> Parameters:
        """(a − 1, −b)."""
        return self.shape - 1, -self.rate

    @property
    def expectation(self) -> Parameters:
        """(ψ(a) − ln b, a/b)."""
        return self.mean_log, self.mean

    def with_natural(self, natural: Parameters) -> Self:
        """a = λ₁ + 1 and b = −λ₂, both positive."""
        check_parameters(natural, self.natural, self.natural_names, "Gamma")
        above, minus_rate = natural
        names = self.natural_names
        refuse_unless(above.detach() > -1, above, "Gamma", names[0], "greater than −1")
        refuse_unless(minus_rate.detach() < 0, minus_rate, "Gamma", names[1], "negative")
        return type(self)(above + 1, -minus_rate)

    def with_expectation(self, expectation: Parameters) -> Self:
        """Solve ln a − ψ(a) = ln μ₂ − μ₁, which Jensen's inequality makes positive; b = a/μ₂.

        The right side is about 1/(2a), so that many digits of a large shape are lost.
        """
        check_parameters(expectation, self.natural, self.expectation_names, "Gamma")
        mean_log, mean = expectation
        return type(self)(*shape_and_rate(mean_log, mean, "Gamma", self.expectation_names))

    @property
    def mean(self) -> Tensor:
        """a/b."""
        return self.shape / self.rate

    @property
    def mean_log(self) -> Tensor:
        """E ln x = ψ(a) − ln b."""
        return self.mean.log() + digamma_minus_log(self.shape)

    @property
    def variance(self) -> Tensor:
        """a/b²."""
        return self.mean / self.rate

    def statistics(self, theta: Tensor) -> Parameters:
        """(ln x, x) of positive x."""
        check_events(theta, tuple(self.shape.shape), "Gamma")
        refuse_unless(theta.detach() > 0, theta, "Gamma", "x", "positive")
        return theta.log(), theta

    def log_partition(self) -> Tensor:
        """Σ ln Γ(a) − a ln b."""
        return (torch.lgamma(self.shape) - self.shape * self.rate.log()).sum()

    def entropy(self) -> Tensor:
        """A − ⟨λ, μ⟩ with Stirling's formula taken out of ln Γ and ln a out of ψ: they cancel.

        ½ ln(2πa) − ln b + R(a) + (1 − a)δ(a), summed; see `credo.rule.families.special`.
        """
        a = self.shape
        terms = 0.5 * a.log() - self.rate.log() + stirling_remainder(a)
        terms = terms + (1 - a) * digamma_minus_log(a)
        return terms.sum() + 0.5 * math.log(2 * math.pi) * a.numel()

    def kl(self, other: Self) -> Tensor:
        """KL(self‖other), as the entropy without large terms that cancel.

        a′(r − 1 − ln r) + ½ ln(a/a′) + (a − a′)δ(a) + R(a′) − R(a), where ′ means ``other`` and r
        is the ratio of the means, E x/E′x.
        """
        self.check_same_family(other)
        a, a_other = self.shape, other.shape
        ratio = self.mean / other.mean
        terms = a_other * (ratio - 1 - ratio.log()) + 0.5 * (a / a_other).log()
        terms = terms + (a - a_other) * digamma_minus_log(a)
        return (terms + stirling_remainder(a_other) - stirling_remainder(a)).sum()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """(n, ...), differentiable in shape and rate; what underflows is the smallest number."""
        check_count(n)
        logs = sample_log_gamma(self.shape, n, generator) - self.rate.double().log()
        return positive_exp(logs, self.shape.dtype)


def shape_and_rate(
    mean_log: Tensor, mean: Tensor, family: str, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """The Gamma's (a, b) at E ln x and E x, called ``names`` in an error of ``family``."""
    refuse_unless(mean.detach() > 0, mean, family, names[1], "positive")
    # In float64, because the difference of two float32 numbers would be what they are rounded by.
    log_gap = mean.double().log() - mean_log.double()
    jensen = f"less than the log of the {names[1]}, by Jensen's inequality"
    refuse_unless(log_gap.detach() > 0, mean_log, family, names[0], jensen)
    shape = gamma_shape(log_gap)
    return shape.to(mean.dtype), (shape / mean.double()).to(mean.dtype)


def positive_exp(logs: Tensor, dtype: torch.dtype) -> Tensor:
    """exp in ``dtype``, kept between its smallest normal and its largest number."""
    limits = torch.finfo(dtype)
    margin = 1e-9  # so that rounding can't undo it
    return logs.clamp(math.log(limits.tiny) + margin, math.log(limits.max) - margin).exp().to(dtype)
