r"""The objective of variational inference: its value, the KL's shares, and the KL's gradients.

    ELBO_η = −n·E_q[mean NLL] − η·KL(q‖p),        KL(q‖p) = E_q[−log p(w)] − H(q)

symbols: n ``num_data``, η ``temperature``, p the prior, q = N(mean, diag scale²) with
scale = link(ρ). Methods minimise −ELBO_η/n, minibatch by minibatch.

* `elbo` is the value, in nats over the whole data set.
* `kl_weights` share the KL out over the M minibatches of an epoch: π_i ∝ λ^i, Σπ_i = 1.
  ``"uniform"`` is λ = 1, π_i = 1/M. λ = ½ puts nearly all of the KL on the first few batches, λ = 2
  on the last few; λ = 0 is Book's name for no KL at all.
* `prior_term` gives the gradients of the cross-entropy E_q[−log p(w)] in closed form, on flat
  vectors; `chain_to_rho_` adds those of the entropy, Σ log σ + const, whose d log σ/dρ is 1 for the
  exponential link. Keeping the two apart saves a division per weight and step.

References: Blundell et al. 2015 (shares); Huix et al. 2022 (η); Book 2020 (shares, measured).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.checks import Count, NotNegative, checked
from credo.families import DiagGaussian
from credo.families.links import Link
from credo.kl import kl
from credo.types import FlatDistribution, Vector

KLWeights: TypeAlias = Literal["uniform"] | NotNegative


def elbo(nll: float, kl: float, temperature: float, num_data: int) -> float:
    """ELBO_η in nats over the whole data set, from the mean NLL per example under q.

    Args:
        nll: The mean over examples of E_q[−log p(y | w)].
        kl: KL(q‖prior) in nats.
        temperature: η, the weight of the KL.
        num_data: N, the number of training examples.

    >>> elbo(nll=0.5, kl=3.0, temperature=0.1, num_data=100)
    -50.3
    """
    return -nll * num_data - temperature * kl


@checked
def kl_weights(rule: KLWeights, num_batches: Count) -> NDArray[np.float64]:
    """π_i for every minibatch, (M,).

    Args:
        rule: ``"uniform"``, or the ratio λ of one minibatch's weight to that of the one before.
        num_batches: M.

    >>> kl_weights("uniform", 4)
    array([0.25, 0.25, 0.25, 0.25])
    >>> kl_weights(0.5, 3).round(3)
    array([0.571, 0.286, 0.143])
    """
    ratio = 1.0 if rule == "uniform" else float(rule)
    if ratio == 0:
        return np.zeros(num_batches)
    # softmax(i·ln λ): 2⁵⁰⁰ overflows float32, this does not.
    logits = np.arange(num_batches) * math.log(ratio)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


Stretch: TypeAlias = tuple[slice, float, float]
"""A part of the vector, its 1/s² and its m."""

SMALL = 1 << 15
"""So many weights take less time than the calls that go over them stretch by stretch."""
MOST_STRETCHES = 256
"""Beyond this many, one pass with a vector of precisions is cheaper than a call per stretch."""


class PriorTerm(Protocol):
    """E_q[−log p(w)] for q = N(mean, scale²)."""

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        ...


def prior_term(prior: FlatDistribution) -> PriorTerm:
    """The fastest exact form for this prior."""
    if isinstance(prior, DiagGaussian):
        stretches = _constant_stretches(prior) if prior.size > SMALL else []
        return LayerwisePriorTerm(stretches) if stretches else GaussianPriorTerm(prior)
    return ClosedFormPriorTerm(prior)


class GaussianPriorTerm:
    """½ Σ [(μ − m)² + σ²]/s² + const: gradients (μ − m)/s² and σ/s²."""

    def __init__(self, prior: DiagGaussian) -> None:
        self.precision = prior.scale.pow(-2)
        self.center = prior.mean if bool(prior.mean.any()) else None

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        distance = mean if self.center is None else mean - self.center
        grad_mean.addcmul_(self.precision, distance, value=weight)
        grad_scale.addcmul_(self.precision, scale, value=weight)


class LayerwisePriorTerm:
    """The same for a prior that is constant over layers, kept as a few numbers and not a vector.

    That saves two passes over memory in every step.
    """

    def __init__(self, stretches: list[Stretch]) -> None:
        self.stretches = stretches

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        for place, precision, center in self.stretches:
            grad_mean[place].add_(mean[place], alpha=weight * precision)
            if center:
                grad_mean[place].sub_(weight * precision * center)
            grad_scale[place].add_(scale[place], alpha=weight * precision)


class ClosedFormPriorTerm:
    """Any prior whose KL `credo.kl` knows, differentiated by autograd on the flat vectors."""

    def __init__(self, prior: FlatDistribution) -> None:
        self.prior = prior

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        with torch.enable_grad():
            leaves = mean.detach().requires_grad_(), scale.detach().requires_grad_()
            q = DiagGaussian(*leaves)
            by_mean, by_scale = torch.autograd.grad(kl(q, self.prior) + q.entropy(), leaves)
        grad_mean.add_(by_mean, alpha=weight)
        grad_scale.add_(by_scale, alpha=weight)


def chain_to_rho_(grad_scale: Vector, scale: Vector, link: Link, entropy_weight: float) -> None:
    """Turn ∂/∂σ into ∂/∂ρ in place, subtracting ``entropy_weight`` times ∂H(q)/∂ρ."""
    if link.name == "exp":
        minus = _number(-entropy_weight, scale.dtype, scale.device)
        torch.addcmul(minus, grad_scale, scale, out=grad_scale)
        return
    # softplus: dσ/dρ = sigmoid(ρ) = 1 − e^(−σ)
    slope = -torch.expm1(-scale)
    grad_scale.sub_(scale.reciprocal(), alpha=entropy_weight).mul_(slope)


@lru_cache(maxsize=16)
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As a tensor, which is the same at every step and never written."""
    return torch.full((), value, dtype=dtype, device=device)


def _constant_stretches(prior: DiagGaussian) -> list[Stretch]:
    """Stretches with one scale and mean; none if there would be too many."""
    if prior.mean.stride() != (0,):
        return []
    center = float(prior.mean[0])
    if prior.scale.stride() == (0,):
        return [(slice(0, prior.size), float(prior.scale[0]) ** -2, center)]
    values, counts = torch.unique_consecutive(prior.scale, return_counts=True)
    if len(values) > MOST_STRETCHES:
        return []
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return [
        (slice(start, stop), scale**-2, center)
        for start, stop, scale in zip(starts, stops, values.tolist(), strict=True)
    ]
