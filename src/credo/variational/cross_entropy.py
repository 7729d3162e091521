r"""Gradients of the KL in closed form, on flat vectors.

    KL(q‖p) = E_q[−log p(w)] − H(q)

The cross-entropy with the prior gets its gradients here; the entropy of a Gaussian with scale
σ = link(ρ) is Σ log σ + const, whose gradient d log σ/dρ is 1 for the exponential link. Keeping the
two apart saves a division per weight and step.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

from credo.families import DiagGaussian
from credo.families.links import Link
from credo.kl import kl
from credo.types import FlatDistribution, Vector

Stretch: TypeAlias = tuple[slice, float, float]
"""A part of the vector, its 1/s² and its m."""

MOST_STRETCHES = 256
"""Beyond this many, one pass with a vector of precisions is cheaper than a call per stretch."""


class CrossEntropy(Protocol):
    """E_q[−log p(w)] for q = N(mean, scale²)."""

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        ...


def cross_entropy(prior: FlatDistribution) -> CrossEntropy:
    """The fastest exact form for this prior."""
    if isinstance(prior, DiagGaussian):
        stretches = _constant_stretches(prior)
        return LayerwiseCrossEntropy(stretches) if stretches else GaussianCrossEntropy(prior)
    return ClosedFormCrossEntropy(prior)


class GaussianCrossEntropy:
    """½ Σ [(μ − m)² + σ²]/s² + const: gradients (μ − m)/s² and σ/s²."""

    def __init__(self, prior: DiagGaussian) -> None:
        self.precision, self.center = prior.scale.pow(-2), prior.mean

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        grad_mean.addcmul_(self.precision, mean - self.center, value=weight)
        grad_scale.addcmul_(self.precision, scale, value=weight)


class LayerwiseCrossEntropy:
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


class ClosedFormCrossEntropy:
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
        minus = torch.full((), -entropy_weight, dtype=scale.dtype, device=scale.device)
        torch.addcmul(minus, grad_scale, scale, out=grad_scale)
        return
    # softplus: dσ/dρ = sigmoid(ρ) = 1 − e^(−σ)
    slope = -torch.expm1(-scale)
    grad_scale.sub_(scale.reciprocal(), alpha=entropy_weight).mul_(slope)


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
