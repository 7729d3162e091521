"""The Normal–Gamma distribution: an unknown mean and precision, conjugate to normal data."""

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
from credo.rule.families.gamma import Gamma, shape_and_rate
from credo.rule.families.special import check_events, check_fields, check_positive


@dataclass(frozen=True, eq=False)
class NormalGamma(ExponentialFamily):
    r"""τ ~ Gamma(``shape`` a, ``rate`` b), x | τ ~ N(``mean`` m, 1/(cτ)), ``count`` c; each (...).

    ============= =========================================
    T             (ln τ, τ, τx, τx²)
    λ             (a − ½, −b − ½cm², cm, −½c)
    μ             (ψ(a) − ln b, a/b, ma/b, 1/c + m²a/b)
    A             ln Γ(a) − a ln b − ½ ln c + ½ ln 2π
    ============= =========================================

    Events are (..., 2) with x in [..., 0] and τ in [..., 1]. c counts the observations that m is
    worth: n data points add n to c and n/2 to a.

    >>> one = torch.ones(1)
    >>> q = NormalGamma(mean=2 * one, count=4 * one, shape=3 * one, rate=one)
    >>> q.variance, q.precision.mean
    (tensor([0.1250]), tensor([3.]))
    """

    mean: Tensor
    count: Tensor
    shape: Tensor
    rate: Tensor

    natural_names = (
        "shape minus a half",
        "minus the rate minus half of count times squared mean",
        "count times mean",
        "minus half the count",
    )
    expectation_names = ("mean of ln τ", "mean of τ", "mean of τx", "mean of τx²")

    def __post_init__(self) -> None:
        positive = {"count": self.count, "shape": self.shape, "rate": self.rate}
        check_fields("NormalGamma", mean=self.mean, **positive)
        check_positive("NormalGamma", **positive)
        mean = self.mean.detach()
        refuse_unless(torch.isfinite(mean), mean, "NormalGamma", "mean", "finite")

    @property
    def precision(self) -> Gamma:
        """The distribution of τ."""
        return Gamma(self.shape, self.rate)

    @property
    def variance(self) -> Tensor:
        """The variance of x, b/(c(a − 1)): x is Student's t; infinite where a ≤ 1."""
        finite = self.rate / (self.count * (self.shape - 1))
        return torch.where(self.shape > 1, finite, math.inf)

    @property
    def natural(self) -> Parameters:
        """(a − ½, −b − ½cm², cm, −½c)."""
        pull = self.count * self.mean
        return self.shape - 0.5, -self.rate - 0.5 * pull * self.mean, pull, -0.5 * self.count

    @property
    def expectation(self) -> Parameters:
        """(ψ(a) − ln b, a/b, ma/b, 1/c + m²a/b)."""
        precision = self.precision.mean
        first = self.mean * precision
        return (
            self.precision.mean_log,
            precision,
            first,
            self.count.reciprocal() + self.mean * first,
        )

    def with_natural(self, natural: Parameters) -> Self:
        """c = −2λ₄, m = λ₃/c, b = −λ₂ − ½cm², a = λ₁ + ½; c, b and a must come out positive."""
        names = self.natural_names
        check_parameters(natural, self.natural, names, "NormalGamma")
        above, minus_energy, pull, minus_half_count = natural
        refuse_unless(above.detach() > -0.5, above, "NormalGamma", names[0], "greater than −½")
        negative = minus_half_count.detach() < 0
        refuse_unless(negative, minus_half_count, "NormalGamma", names[3], "negative")
        count = -2 * minus_half_count
        mean = pull / count
        rate = -minus_energy - 0.5 * pull * mean
        enough = "less than −½cm², which leaves the rate positive"
        refuse_unless(rate.detach() > 0, minus_energy, "NormalGamma", names[1], enough)
        return type(self)(mean, count, above + 0.5, rate)

    def with_expectation(self, expectation: Parameters) -> Self:
        """a and b as for the Gamma of τ, m = μ₃/μ₂, 1/c = μ₄ − μ₃²/μ₂, which must be positive."""
        names = self.expectation_names
        check_parameters(expectation, self.natural, names, "NormalGamma")
        mean_log, precision, first, second = expectation
        shape, rate = shape_and_rate(mean_log, precision, "NormalGamma", (names[0], names[1]))
        mean = first / precision
        spread = second - mean * first
        enough = f"greater than ({names[2]})²/({names[1]})"
        refuse_unless(spread.detach() > 0, second, "NormalGamma", names[3], enough)
        return type(self)(mean, spread.reciprocal(), shape, rate)

    def statistics(self, theta: Tensor) -> Parameters:
        """(ln τ, τ, τx, τx²) of events (..., 2), where τ must be positive."""
        x, precision = self._split(theta)
        return precision.log(), precision, precision * x, precision * x.square()

    def log_partition(self) -> Tensor:
        """Σ ln Γ(a) − a ln b − ½ ln c + ½ ln 2π."""
        normal = 0.5 * math.log(2 * math.pi) - 0.5 * self.count.log()
        return self.precision.log_partition() + normal.sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log p(τ) + log p(x | τ), which needs no difference of squares: (..., event) → (...)."""
        x, precision = self._split(theta)
        scaled = self.count * precision
        normal = 0.5 * (scaled / (2 * math.pi)).log() - 0.5 * scaled * (x - self.mean).square()
        over_coordinates = tuple(range(-self.mean.dim(), 0))
        total = normal.sum(over_coordinates) if over_coordinates else normal
        return self.precision.log_prob(precision) + total

    def entropy(self) -> Tensor:
        """H(τ) + E H(x | τ) = H(τ) + ½ Σ(1 + ln 2π − ln c − E ln τ)."""
        logs = self.count.log() + self.precision.mean_log
        normal = 0.5 * (1 + math.log(2 * math.pi) - logs)
        return self.precision.entropy() + normal.sum()

    def kl(self, other: Self) -> Tensor:
        """KL of the precisions plus ½ Σ(c′/c − 1 − ln(c′/c) + c′(m − m′)²E τ), ′ for ``other``."""
        self.check_same_family(other)
        ratio = other.count / self.count
        shift = other.count * (self.mean - other.mean).square() * self.precision.mean
        normal = 0.5 * (ratio - 1 - ratio.log() + shift)
        return self.precision.kl(other.precision) + normal.sum()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """(n, ..., 2), differentiable in all parameters."""
        check_count(n)
        precision = self.precision.sample(n, generator)
        noise = torch.randn(
            precision.shape, generator=generator, dtype=precision.dtype, device=precision.device
        )
        x = self.mean + noise / (self.count.sqrt() * precision.sqrt())
        return torch.stack((x, precision), -1)

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """x and τ of events (..., 2)."""
        check_events(theta, (*self.mean.shape, 2), "NormalGamma")
        x, precision = theta.unbind(-1)
        refuse_unless(precision.detach() > 0, precision, "NormalGamma", "τ", "positive")
        return x, precision
