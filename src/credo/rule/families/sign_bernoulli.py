"""Signs: every weight is −1 or +1, as in a binary network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from credo.errors import DataError, UnsupportedError
from credo.families import register
from credo.families.base import Family, check_count, check_floating, check_points, refuse_unless
from credo.kl import closed_form
from credo.noise import NoiseSource, key_to_seed
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    check_parameters,
)
from credo.types import Vector


@register
@dataclass(frozen=True, eq=False)
class SignBernoulli(Family, ExponentialFamily):
    """Independent w ∈ {−1, +1} with λ = ½ ln(p/(1−p)), p = P(w = +1) = σ(2λ).

    ``half_logit`` is λ (P,). T(w) = w, μ = E w = tanh λ, A = ln 2 cosh λ. In float64 μ rounds to 1
    beyond |λ| = 19 (float32: 9): λ is the coordinate to keep.

    >>> q = SignBernoulli(torch.tensor([0.0, 1.0]))
    >>> q.mean, q.variance
    (tensor([0.0000, 0.7616]), tensor([1.0000, 0.4200]))
    >>> q.log_prob(torch.tensor([1.0, -1.0]))
    tensor(-2.8201)
    """

    half_logit: Vector

    is_continuous: ClassVar[bool] = False

    natural_names = ("half log-odds",)
    expectation_names = ("mean",)

    def __post_init__(self) -> None:
        check_floating(half_logit=self.half_logit)
        if self.half_logit.dim() != 1:
            raise DataError(
                f"SignBernoulli: half_logit must be (P,), got {tuple(self.half_logit.shape)}"
            )
        values = self.half_logit.detach()
        refuse_unless(torch.isfinite(values), values, "SignBernoulli", "half_logit", "finite")

    @property
    def mean(self) -> Vector:  # type: ignore[override]
        """tanh λ."""
        return self.half_logit.tanh()

    @property
    def variance(self) -> Vector:
        """sech² λ = 4σ(2λ)σ(−2λ), which keeps its digits where 1 − tanh² λ has none left."""
        return 4 * torch.sigmoid(2 * self.half_logit) * torch.sigmoid(-2 * self.half_logit)

    @property
    def scale(self) -> Vector:
        """sech λ."""
        return self.variance.sqrt()

    @property
    def natural(self) -> Parameters:
        """λ."""
        return (self.half_logit,)

    @property
    def expectation(self) -> Parameters:
        """μ = tanh λ."""
        return (self.mean,)

    def with_natural(self, natural: Parameters) -> Self:
        """The member with these half log-odds."""
        check_parameters(natural, self.natural, self.natural_names, "SignBernoulli")
        return type(self)(*natural)

    def with_expectation(self, expectation: Parameters) -> Self:
        """λ = artanh μ; |μ| ≥ 1 is refused."""
        check_parameters(expectation, self.natural, self.expectation_names, "SignBernoulli")
        (mean,) = expectation
        inside = mean.detach().abs() < 1
        refuse_unless(inside, mean, "SignBernoulli", "mean", "strictly between −1 and 1")
        return type(self)(mean.atanh())

    def statistics(self, theta: Tensor) -> Parameters:
        """T(w) = w: (..., P), which must be signs."""
        check_points(theta, self.size)
        signs = theta.detach().abs() == 1
        refuse_unless(signs, theta, "SignBernoulli", "the weight", "−1 or +1")
        return (theta,)

    def log_partition(self) -> Tensor:
        """Σ ln 2 cosh λ."""
        return torch.logaddexp(self.half_logit, -self.half_logit).sum()

    def log_prob(self, w: Vector) -> Tensor:
        """Σ ln σ(2λw): (..., P) → (...)."""
        (signs,) = self.statistics(w)
        return F.logsigmoid(2 * self.half_logit * signs).sum(-1)

    def grad_log_prob(self, w: Vector) -> NoReturn:
        """Refused: the distribution is discrete."""
        raise UnsupportedError(
            "SignBernoulli has no grad_log_prob: its weights are −1 or +1, and there is nothing "
            "between them to take a derivative along. Gradients exist in its parameters: by "
            "autodiff of log_prob in half_logit, or by credo.rule.expectation_gradient"
        )

    def entropy(self) -> Tensor:
        """Σ ln(1 + e^{−x}) + xσ(−x) with x = 2|λ|: neither term can be negative or overflow."""
        log_odds = 2 * self.half_logit.abs()
        return (F.softplus(-log_odds) + log_odds * torch.sigmoid(-log_odds)).sum()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Signs, (n, P), without a graph."""
        check_count(n)
        out = self.half_logit.new_empty(n, self.size)
        return self._draw_(out, generator)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``.

        The noise source lends its seed only: normals from its table know 8,192 values, too few for
        a weight that flips once in a million draws.
        """
        check_count(n)
        generator = torch.Generator(out.device)
        for index in range(n):
            generator.manual_seed(key_to_seed(noise.seed, index))
            yield self._draw_(out, generator)

    def _draw_(self, out: Tensor, generator: Generator | None) -> Tensor:
        """Overwrite ``out`` (..., P) with signs: +1 where a uniform number is below p."""
        with torch.no_grad():
            below = out.uniform_(generator=generator) < torch.sigmoid(2 * self.half_logit)
            return out.copy_(below).mul_(2).sub_(1)


@closed_form(SignBernoulli, SignBernoulli)
def _kl_terms(q: SignBernoulli, p: SignBernoulli) -> Vector:
    """ln 2 cosh λ' − ln 2 cosh λ − (λ' − λ) tanh λ, the Bregman divergence of each weight's A."""
    mine, its = q.half_logit, p.half_logit
    gap = torch.logaddexp(its, -its) - torch.logaddexp(mine, -mine)
    return gap - (its - mine) * q.mean
