r"""Reparameterised Monte Carlo: draw weights, run the network, and read both gradients off.

For w = μ + σ∘ε the chain rule gives closed forms, so no graph is built through the sampling:

    ∂/∂μ E[f(w)] = E[g],    ∂/∂σ E[f(w)] = E[g∘ε],    g = ∇_w f(w)

What f contains besides the negative log-likelihood distinguishes three estimators
(Book 2020, §3):

========== ========================== =====================================================
name       KL term                    gradient that it adds to g, with weight κ = temperature/n
========== ========================== =====================================================
``reparam`` in closed form            none here: the objective adds the exact gradient
``total``  sampled, −log p(w) − H(q)  κ·(−∇log p(w)); the entropy is exact by itself, because
                                      log q(μ+σε; μ, σ) = −½ε² − log σ depends on σ alone
``path``   sampled, log q(w) − log p  κ·(−ε/σ − ∇log p(w)): "sticking the landing"; the score
           with q's own parameters    term of q is dropped, so at q = posterior the variance is 0
           held fixed
========== ========================== =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor

from credo.network import FlatParams, Selection
from credo.network.flat import Gathering
from credo.noise import NoiseSource
from credo.types import Vector

SampledKL: TypeAlias = Literal["total", "path"]


@final
@dataclass
class GaussianStep:
    """One estimate of ∇E_q[NLL] for q = N(mean, scale²) over the selected weights.

    ``energy`` runs the network as it stands and returns the mean negative log-likelihood of the
    batch. The estimator averages ``samples`` draws and leaves ∂/∂mean in ``grad_mean`` and ∂/∂scale
    in ``grad_scale``, both (P,); until then these are memory that it may use, for noise as well.
    Gradients of deterministic parameters stay in ``.grad``, averaged the same way. Of several
    ``ranks`` that draw noise of their own, each has its draws of all.
    """

    flat: FlatParams
    random: Selection
    mean: Vector
    scale: Vector
    energy: Callable[[], Tensor]
    kl_weight: float
    samples: int
    key: tuple[int, ...]
    grad_mean: Vector
    grad_scale: Vector
    rank: int = 0
    ranks: int = 1

    @cached_property
    def gathering(self) -> Gathering:
        """Of the selected weights' gradients, into ``grad_mean``."""
        return Gathering(self.flat, self.random, self.grad_mean)

    @cached_property
    def weights(self) -> Vector | None:
        """The selected weights as the network has them, where they are one run."""
        return self.random.view(self.flat.vector) if self.random.is_one_run else None

    def key_of(self, sample: int) -> tuple[int, ...]:
        """That of the noise of one of this rank's samples."""
        return (*self.key, sample * self.ranks + self.rank)


class Estimator(Protocol):
    """A way to estimate the gradient of an expectation over q.

    ``integrates_kl`` says that the KL's gradient is part of what it fills in; otherwise the
    objective adds the closed form.
    """

    integrates_kl: bool

    def gradients(self, step: GaussianStep) -> float:
        """Fill in ``step.grad_mean`` and ``step.grad_scale``; return the mean NLL."""
        ...


class HasGradient(Protocol):
    """A distribution whose log-density has a gradient in closed form."""

    def grad_log_prob(self, w: Vector) -> Vector:
        """∇ log p(w), (P,)."""
        ...


@final
class WeightNoise:
    """The plain estimator: one draw of all weights serves the whole batch.

    ``sampled_kl=None`` leaves the KL to the objective.
    """

    def __init__(
        self, noise: NoiseSource, prior: HasGradient, sampled_kl: SampledKL | None = None
    ) -> None:
        self.noise, self.prior, self.sampled_kl = noise, prior, sampled_kl
        self.integrates_kl = sampled_kl is not None

    def gradients(self, step: GaussianStep) -> float:
        """Fill in both gradients; return the mean NLL over the draws."""
        if step.samples == 1:
            nll = self._draw(step, 0)
        else:
            nll = self._average_draws(step)
        if self.sampled_kl == "total":
            step.grad_scale.sub_(step.scale.reciprocal(), alpha=step.kl_weight)
        return nll

    def _average_draws(self, step: GaussianStep) -> float:
        mean_total = torch.zeros_like(step.grad_mean)
        scale_total = torch.zeros_like(step.grad_scale)
        nll = 0.0
        for sample in range(step.samples):
            nll += self._draw(step, sample) / step.samples
            mean_total += step.grad_mean
            scale_total += step.grad_scale
        step.grad_mean.copy_(mean_total)
        step.grad_scale.copy_(scale_total)
        return nll

    def _draw(self, step: GaussianStep, sample: int) -> float:
        """One draw's share of both gradients; ``grad_scale`` lends its memory to the noise."""
        share = 1 / step.samples
        eps = self.noise.draw(step.grad_scale, *step.key_of(sample))
        weights = write_weights(step, eps)
        loss = step.energy()
        (loss if step.samples == 1 else loss * share).backward()
        step.gathering.take()
        if self.sampled_kl is not None:
            kappa = step.kl_weight * share
            step.grad_mean.sub_(self.prior.grad_log_prob(weights), alpha=kappa)
            if self.sampled_kl == "path":
                step.grad_mean.addcdiv_(eps, step.scale, value=-kappa)
        torch.mul(eps, step.grad_mean, out=step.grad_scale)
        return loss.item()


def write_weights(step: GaussianStep, eps: Vector) -> Vector:
    """Put mean + scale∘ε into the network; the weights (P,) that it now has."""
    flat = step.flat
    if not flat.is_in_place():
        flat.check()
    try:
        weights = torch.addcmul(step.mean, step.scale, eps, out=step.weights)
        if step.weights is None:
            step.random.write(flat.vector, weights)
    finally:
        flat.tell()
    return weights
