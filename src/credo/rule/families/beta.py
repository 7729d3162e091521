"""The Beta distribution: a probability, conjugate to successes and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor

from credo.families.base import check_count, refuse_unless
from credo.rule.families.dirichlet import Dirichlet
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    check_parameters,
)
from credo.rule.families.special import (
    check_events,
    check_positive,
    dirichlet_concentration,
    sample_log_gamma,
)


@dataclass(frozen=True, eq=False)
class Beta(ExponentialFamily):
    """p(x) ∝ x^{a−1}(1 − x)^{b−1} on (0, 1); ``a`` and ``b`` are (...) and positive.

    λ = (a − 1, b − 1), T = (ln x, ln(1 − x)), μ = (ψ(a) − ψ(a + b), ψ(b) − ψ(a + b)),
    A = ln B(a, b). It is the Dirichlet with two classes, coordinate by coordinate.

    >>> q = Beta(torch.tensor([1.0]), torch.tensor([3.0]))
    >>> q.mean, q.variance
    (tensor([0.2500]), tensor([0.0375]))
    """

    a: Tensor
    b: Tensor

    natural_names = ("a minus one", "b minus one")
    expectation_names = ("mean of ln x", "mean of ln(1 − x)")

    def __post_init__(self) -> None:
        check_positive("Beta", a=self.a, b=self.b)

    @property
    def pair(self) -> Dirichlet:
        """The Dirichlet distribution of (x, 1 − x)."""
        return Dirichlet(torch.stack((self.a, self.b), -1))

    @property
    def natural(self) -> Parameters:
        """(a − 1, b − 1)."""
        return self.a - 1, self.b - 1

    @property
    def expectation(self) -> Parameters:
        """(ψ(a) − ψ(a + b), ψ(b) − ψ(a + b))."""
        (expected_logs,) = self.pair.expectation
        first, second = expected_logs.unbind(-1)
        return first, second

    def with_natural(self, natural: Parameters) -> Self:
        """a = λ₁ + 1 and b = λ₂ + 1, both positive."""
        check_parameters(natural, self.natural, self.natural_names, "Beta")
        for value, name in zip(natural, self.natural_names, strict=True):
            refuse_unless(value.detach() > -1, value, "Beta", name, "greater than −1")
        first, second = natural
        return type(self)(first + 1, second + 1)

    def with_expectation(self, expectation: Parameters) -> Self:
        """Solve ψ(a) − ψ(a + b) = μ₁, ψ(b) − ψ(a + b) = μ₂; exp μ₁ + exp μ₂ ≥ 1 is refused."""
        check_parameters(expectation, self.natural, self.expectation_names, "Beta")
        expected_logs = torch.stack(expectation, -1)
        total = expected_logs.detach().double().exp().sum(-1)
        first, second = self.expectation_names
        what = f"exp({first}) + exp({second})"
        refuse_unless(total < 1 - 1e-14, total, "Beta", what, "less than 1")
        a, b = dirichlet_concentration(expected_logs).unbind(-1)
        return type(self)(a, b)

    @property
    def mean(self) -> Tensor:
        """a/(a + b)."""
        return self.a / (self.a + self.b)

    @property
    def variance(self) -> Tensor:
        """m(1 − m)/(a + b + 1) with the mean m."""
        total = self.a + self.b
        return self.mean * (self.b / total) / (total + 1)

    def statistics(self, theta: Tensor) -> Parameters:
        """(ln x, ln(1 − x)) of x strictly between 0 and 1."""
        check_events(theta, tuple(self.a.shape), "Beta")
        inside = (theta.detach() > 0) & (theta.detach() < 1)
        refuse_unless(inside, theta, "Beta", "x", "strictly between 0 and 1")
        return theta.log(), torch.log1p(-theta)

    def log_partition(self) -> Tensor:
        """Σ ln Γ(a) + ln Γ(b) − ln Γ(a + b)."""
        return self.pair.log_partition()

    def entropy(self) -> Tensor:
        """That of the Dirichlet over (x, 1 − x), whose density is over x alone too."""
        return self.pair.entropy()

    def kl(self, other: Self) -> Tensor:
        """KL(self‖other), that of the Dirichlets over (x, 1 − x)."""
        self.check_same_family(other)
        return self.pair.kl(other.pair)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """(n, ...), differentiable in a and b, kept away from 0 and 1 by rounding's last step."""
        check_count(n)
        successes, failures = (sample_log_gamma(c, n, generator) for c in (self.a, self.b))
        limits = torch.finfo(self.a.dtype)
        inside = torch.sigmoid(successes - failures).clamp(limits.tiny, 1 - limits.eps)
        return inside.to(self.a.dtype)
