"""The Dirichlet distribution: probability vectors, conjugate to categorical counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import check_count, refuse_unless
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    check_parameters,
)
from credo.rule.families.special import (
    check_events,
    check_positive,
    check_simplex,
    digamma_minus_log,
    dirichlet_concentration,
    sample_log_gamma,
    stirling_remainder,
)


@dataclass(frozen=True, eq=False)
class Dirichlet(ExponentialFamily):
    """p(θ) ∝ Π θ_k^{α_k − 1} on the simplex; ``concentration`` α is (..., K), K ≥ 2.

    λ = α − 1, T = ln θ, μ_k = ψ(α_k) − ψ(α₀) with α₀ = Σα, A = Σ ln Γ(α_k) − ln Γ(α₀). Events are
    (..., K); leading dimensions of α are independent. The density is over the first K−1
    coordinates, as everywhere.

    >>> q = Dirichlet(torch.tensor([1.0, 2.0, 3.0]))
    >>> q.mean
    tensor([0.1667, 0.3333, 0.5000])
    >>> q.with_expectation(q.expectation).concentration
    tensor([1.0000, 2.0000, 3.0000])
    """

    concentration: Tensor

    natural_names = ("concentration minus one",)
    expectation_names = ("mean of ln θ",)

    def __post_init__(self) -> None:
        if self.concentration.dim() == 0 or self.concentration.shape[-1] < 2:
            raise DataError(
                "Dirichlet: concentration must be (..., K) with K ≥ 2, got "
                f"{tuple(self.concentration.shape)}"
            )
        check_positive("Dirichlet", concentration=self.concentration)

    @property
    def total(self) -> Tensor:
        """α₀ = Σα, (..., 1)."""
        return self.concentration.sum(-1, keepdim=True)

    @property
    def natural(self) -> Parameters:
        """α − 1."""
        return (self.concentration - 1,)

    @property
    def expectation(self) -> Parameters:
        """ψ(α_k) − ψ(α₀)."""
        return (self.mean.log() + self._log_bias,)

    @property
    def _log_bias(self) -> Tensor:
        """E ln θ − ln E θ = δ(α_k) − δ(α₀), (..., K)."""
        return digamma_minus_log(self.concentration) - digamma_minus_log(self.total)

    def with_natural(self, natural: Parameters) -> Self:
        """α = λ + 1; λ ≤ −1 is refused."""
        check_parameters(natural, self.natural, self.natural_names, "Dirichlet")
        (above,) = natural
        name = self.natural_names[0]
        refuse_unless(above.detach() > -1, above, "Dirichlet", name, "greater than −1")
        return type(self)(above + 1)

    def with_expectation(self, expectation: Parameters) -> Self:
        """Solve ψ(α_k) − ψ(α₀) = μ_k; Σ exp μ_k ≥ 1, which Jensen's inequality forbids, is refused.

        1 − Σ exp μ_k is about (K−1)/(2α₀), so that many digits of a large α₀ are lost.
        """
        check_parameters(expectation, self.natural, self.expectation_names, "Dirichlet")
        (expected_logs,) = expectation
        total = expected_logs.detach().double().exp().sum(-1)
        refuse_unless(
            total < 1 - 1e-14, total, "Dirichlet", "the sum of exp(mean of ln θ)", "less than 1"
        )
        return type(self)(dirichlet_concentration(expected_logs))

    @property
    def mean(self) -> Tensor:
        """α/α₀, (..., K)."""
        return self.concentration / self.total

    @property
    def variance(self) -> Tensor:
        """m(1 − m)/(α₀ + 1) with the mean m, (..., K)."""
        return self.mean * (1 - self.mean) / (self.total + 1)

    def statistics(self, theta: Tensor) -> Parameters:
        """ln θ of points inside the simplex, (..., K)."""
        check_events(theta, tuple(self.concentration.shape), "Dirichlet")
        check_simplex(theta, "Dirichlet", "θ")
        return (theta.log(),)

    def log_partition(self) -> Tensor:
        """Σ ln Γ(α_k) − ln Γ(α₀)."""
        return torch.lgamma(self.concentration).sum() - torch.lgamma(self.total).sum()

    def entropy(self) -> Tensor:
        """A − ⟨λ, μ⟩ with Stirling's formula taken out of every ln Γ, where it cancels by hand.

        ½Σ ln α_k − (K−½) ln α₀ + ½(K−1) ln 2π + ΣR(α_k) − R(α₀) − Σ(α_k − 1)(δ(α_k) − δ(α₀)).
        """
        alpha, total = self.concentration, self.total
        free = alpha.shape[-1] - 1
        logs = 0.5 * alpha.log().sum() - (free + 0.5) * total.log().sum()
        constant = 0.5 * free * math.log(2 * math.pi) * total.numel()
        bias = ((alpha - 1) * self._log_bias).sum()
        return logs + constant + self._remainder() - bias

    def kl(self, other: Self) -> Tensor:
        """KL(self‖other), as the entropy without large terms that cancel.

        Σα_k′(r_k − 1 − ln r_k) + ½Σ ln(α_k/α_k′) − ½ ln(α₀/α₀′) + ΣR(α_k′) − R(α₀′) − ΣR(α_k)
        + R(α₀) + Σ(α_k − α_k′)(δ(α_k) − δ(α₀)), where ′ means ``other`` and r is the ratio of the
        means, E θ/E′θ. Σα_k′(r_k − 1) is zero, and takes the rounding of r out of −Σα_k′ ln r_k.
        """
        self.check_same_family(other)
        alpha, alpha_other = self.concentration, other.concentration
        ratio = self.mean / other.mean
        means = (alpha_other * (ratio - 1 - ratio.log())).sum()
        volumes = (alpha / alpha_other).log().sum() - (self.total / other.total).log().sum()
        bias = ((alpha - alpha_other) * self._log_bias).sum()
        return means + 0.5 * volumes + other._remainder() - self._remainder() + bias

    def _remainder(self) -> Tensor:
        parts = stirling_remainder(self.concentration).sum()
        return parts - stirling_remainder(self.total).sum()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Gamma draws, normalised in logarithms: (n, ..., K), differentiable in α."""
        check_count(n)
        logs = sample_log_gamma(self.concentration, n, generator)
        dtype = self.concentration.dtype
        return logs.softmax(-1).to(dtype).clamp(min=torch.finfo(dtype).tiny)
