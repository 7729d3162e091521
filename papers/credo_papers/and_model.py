r"""The Bayesian AND node of Book (2020) §2.4, exactly: posterior on a grid, ELBO by quadrature.

    y ~ Bernoulli(σ(f)),  f = w₁x₁ + w₂x₂ + b,      w = (w₁, w₂, b) ~ N(0, I),  q = N(μ, diag s²)

Each of the four rows of the truth table is seen ``copies`` times. Under q the logit is normal,
f ~ N(μ·x̃, Σ s²x̃²) with x̃ = (x₁, x₂, 1), so the expected log-likelihood is a one-dimensional
integral, and three weights are few enough to integrate the posterior itself on a grid.

The thesis puts a ReLU between the node and the Bernoulli, which as a probability can exceed one and
as a logit can't fall below ½; here the logistic function makes the probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from credo.data import and_gate
from credo.families import DiagGaussian
from credo.rule.quadrature import expectation

GRID = torch.linspace(-10, 10, 81, dtype=torch.float64)
"""A quarter of a prior standard deviation apart: there the trapezoidal rule errs below 1e-9."""


def truth_table() -> tuple[Tensor, Tensor]:
    """x̃ = (x₁, x₂, 1) and y for the four rows: (4, 3) and (4,), float64."""
    x, y = and_gate()
    return torch.cat([x, torch.ones(4, 1)], 1).double(), y.squeeze(1).double()


def log_likelihood(w: Tensor, copies: float) -> Tensor:
    """log P(y | w) of all observations: (..., 3) → (...)."""
    x, y = truth_table()
    logits = w @ x.T
    return -copies * cross_entropy(logits, y.expand_as(logits), reduction="none").sum(-1)


@dataclass(frozen=True)
class ExactPosterior:
    """Moments of the posterior, P(y = 1) at the four rows, and log P(y)."""

    mean: Tensor
    scale: Tensor
    probs: Tensor
    log_evidence: float


def exact_posterior(copies: float) -> ExactPosterior:
    """The posterior by the trapezoidal rule on a grid of 81³ weights.

    >>> exact_posterior(copies=25).probs.numpy().round(3)      # AND is learned ...
    array([0.028, 0.208, 0.208, 0.701])
    >>> exact_posterior(copies=1).probs.numpy().round(3)       # ... but not from four observations
    array([0.367, 0.406, 0.406, 0.44 ])
    """
    w = torch.cartesian_prod(GRID, GRID, GRID)
    cell = float(GRID[1] - GRID[0]) ** 3
    log_prior = -0.5 * w.square().sum(1) - 1.5 * math.log(2 * math.pi)
    log_joint = log_prior + log_likelihood(w, copies)
    mass = torch.softmax(log_joint, 0)
    mean = mass @ w
    x, _ = truth_table()
    return ExactPosterior(
        mean=mean,
        scale=(mass @ (w - mean).square()).sqrt(),
        probs=mass @ torch.sigmoid(w @ x.T),
        log_evidence=float(torch.logsumexp(log_joint, 0)) + math.log(cell),
    )


def expected_log_likelihood(mean: Tensor, scale: Tensor, copies: float) -> Tensor:
    """E_q log P(y | w) for q = N(mean, diag scale²), differentiable in both (3,)."""
    x, y = truth_table()
    spread = (scale.square() @ x.square().T).sqrt()
    loss = expectation(
        lambda f: cross_entropy(f, y.expand_as(f), reduction="none"), x @ mean, spread, order=64
    )
    return -copies * loss.sum()


def elbo(mean: Tensor, scale: Tensor, copies: float) -> Tensor:
    """E_q log P(y | w) − KL(q‖N(0, I)), differentiable in both arguments (3,)."""
    divergence = 0.5 * (mean.square() + scale.square() - 1 - 2 * scale.log()).sum()
    return expected_log_likelihood(mean, scale, copies) - divergence


def mean_field_optimum(copies: float) -> DiagGaussian:
    """The best q: what variational inference should find, by a method of its own (L-BFGS).

    >>> mean_field_optimum(copies=0).scale                     # no data: the prior
    tensor([1., 1., 1.], dtype=torch.float64)
    """

    def negative_elbo(theta: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(theta, requires_grad=True)
        loss = -elbo(point[:3], point[3:].exp(), copies)
        (gradient,) = torch.autograd.grad(loss, point)
        return float(loss.detach()), gradient.numpy()

    optimum = minimize(negative_elbo, np.zeros(6), jac=True, method="L-BFGS-B", tol=1e-12)
    best = torch.from_numpy(optimum.x)
    return DiagGaussian(best[:3], best[3:].exp())


def predictive(mean: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """P(y = 1 | x) under q, at inputs x̃ (N, 3): (N,)."""
    return expectation(torch.sigmoid, x @ mean, (scale.square() @ x.square().T).sqrt(), order=64)
