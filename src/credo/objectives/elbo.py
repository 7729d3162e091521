r"""Gradients of the KL in closed form, on flat vectors.

    KL(q‖p) = E_q[−log p(w)] − H(q)

The cross-entropy with the prior gets its gradients here; the entropy of a Gaussian with scale
σ = link(ρ) is Σ log σ + const, whose gradient d log σ/dρ is 1 for the exponential link. Keeping the
two apart saves a division per weight and step.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from credo.families import DiagGaussian
from credo.families.links import Link
from credo.kl import kl
from credo.types import FlatDistribution, Vector


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
        return GaussianCrossEntropy(prior)
    return ClosedFormCrossEntropy(prior)


class GaussianCrossEntropy:
    """½ Σ [(μ − m)² + σ²]/s² + const: gradients (μ − m)/s² and σ/s²."""

    def __init__(self, prior: DiagGaussian) -> None:
        self.precision = _one_number_if_constant(prior.scale).pow(-2)
        center = _one_number_if_constant(prior.mean)
        self.pull = center * self.precision if bool((center != 0).any()) else None

    def add_gradients_(
        self, mean: Vector, scale: Vector, weight: float, grad_mean: Vector, grad_scale: Vector
    ) -> None:
        """Add ``weight`` times the gradients with respect to mean and scale."""
        grad_mean.addcmul_(self.precision, mean, value=weight)
        if self.pull is not None:
            grad_mean.sub_(self.pull, alpha=weight)
        grad_scale.addcmul_(self.precision, scale, value=weight)


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


def _one_number_if_constant(vector: Vector) -> Tensor:
    """A stride-0 vector as 0-dim tensor, so that arithmetic with it reads no memory."""
    return vector[0] if vector.stride() == (0,) else vector
