r"""Variational message passing: the rule at rate one, one factor after the other.

Let q(θ) = Π_i q_i(θ_i) with every q_i of the family that is conjugate to the model. Then
E_q log p(D, θ) is linear in each μ_i while the other factors are held, and with ℓ = −log p(D, θ)
the rule for factor i,

    λ_i ← (1 − ρ)λ_i + ρ∇_{μ_i}E_q log p(D, θ)

has a gradient that does not depend on λ_i. At ρ = 1 one step is therefore the best q_i there is:
λ_i becomes the sum of the messages from the factors of p that θ_i takes part in. Going round is
coordinate ascent on the evidence lower bound E_q log p(D, θ) + Σ_i H(q_i), which never falls.

What is given up is the dependence between factors. A single factor gives up nothing: under a
Normal–Gamma prior one step is the posterior.

A model is here its E_q log p(D, θ) as a function of the μ_i; the messages are found by autodiff.

    >>> from credo.families import DiagGaussian
    >>> from credo.rule.families import Gamma
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> priors = DiagGaussian(0 * one, 10 * one), Gamma(one, one)      # of mean and precision
    >>> model = normal_model(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), *priors)
    >>> factors: Factors = priors
    >>> for _ in range(20):
    ...     factors = sweep(factors, model)
    >>> mean, precision = factors
    >>> round(mean.mean.item(), 3), precision.shape
    (1.993, tensor([2.5000], dtype=torch.float64))

Reference: Winn & Bishop, "Variational message passing", 2005; Bishop, "Pattern recognition and
machine learning", 2006, section 10.1.3, where the prior of the mean depends on the precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families import DiagGaussian
from credo.families.base import check_floating, refuse_unless
from credo.rule.families import (
    Gamma,
    NormalGamma,
    expectation_parameters,
    log_partition,
    natural_parameters,
)
from credo.rule.families.exponential import Member, Parameters, inner
from credo.rule.gallery.entry import Entry
from credo.rule.rule import step

ENTRY = Entry(
    algorithm="variational message passing",
    family="a product of conjugate families",
    expectation="exact",
    curvature="none",
    step="ρ = 1, one factor after the other",
    approximates="dependence between factors",
    test="tests/theorems/test_gallery_conjugate.py::test_message_passing_is_coordinate_ascent",
)

Factors: TypeAlias = tuple[Member, ...]

ExpectedLogJoint: TypeAlias = Callable[..., Tensor]
"""E_q log p(D, θ), 0-dim, from the expectation parameters of each factor, one tuple a factor."""


def loss_gradient(factors: Factors, index: int, model: ExpectedLogJoint) -> Parameters:
    """∇_{μ_i}E_q[ℓ]: minus the messages to factor ``index`` from the model and the others."""
    before, mine, after = (
        [expectation_parameters(q) for q in part]
        for part in (factors[:index], factors[index : index + 1], factors[index + 1 :])
    )
    gradient: Parameters = torch.func.grad(lambda mu: -model(*before, mu, *after))(*mine)
    return gradient


def sweep(factors: Factors, model: ExpectedLogJoint) -> Factors:
    """Every factor once, in order."""
    for index in range(len(factors)):
        best = step(factors[index], loss_gradient(factors, index, model), rate=1.0)
        factors = (*factors[:index], best, *factors[index + 1 :])
    return factors


def elbo(factors: Factors, model: ExpectedLogJoint) -> Tensor:
    """E_q log p(D, θ) + Σ_i H(q_i), a lower bound of log p(D); 0-dim, in nats."""
    entropy = torch.stack([q.entropy() for q in factors]).sum()
    return model(*(expectation_parameters(q) for q in factors)) + entropy


def expected_log_prior(prior: Member, expectation: Parameters) -> Tensor:
    """E log p(θ) = ⟨λ₀, μ⟩ − A(λ₀), for a family whose base measure is 1."""
    return inner(expectation, natural_parameters(prior)) - log_partition(prior)


def expected_log_normal(
    x: Tensor, log_tau: Tensor, tau: Tensor, tau_mean: Tensor, tau_square: Tensor
) -> Tensor:
    """E log N(x; m, 1/τ) from E ln τ, E τ, E τm and E τm², elementwise."""
    exponent = tau * x.square() - 2 * tau_mean * x + tau_square
    return 0.5 * (log_tau - math.log(2 * math.pi) - exponent)


def normal_model(x: Tensor, mean_prior: DiagGaussian, precision_prior: Gamma) -> ExpectedLogJoint:
    """x_n ~ N(m, 1/τ) with m and τ independent a priori, for factors (q(m), q(τ)).

    ``x`` is (N, P), both priors are over P coordinates.
    """
    scale = mean_prior.scale
    check_rows("x", x, precision_prior.rate)
    check_rows("x", x, scale)
    proper = (scale > 0) & torch.isfinite(scale)
    refuse_unless(proper, scale, "mean_prior", "scale", "positive and finite")

    def expected_log_joint(mean: Parameters, precision: Parameters) -> Tensor:
        (first, second), (log_tau, tau) = mean, precision
        data = expected_log_normal(x, log_tau, tau, tau * first, tau * second).sum()
        about_mean = expected_log_prior(mean_prior, mean)
        return data + about_mean + expected_log_prior(precision_prior, precision)

    return expected_log_joint


def normal_gamma_model(x: Tensor, prior: NormalGamma) -> ExpectedLogJoint:
    """x_n ~ N(m, 1/τ) with the conjugate prior of (m, τ) together, for one factor.

    ``x`` is (N, P), the prior is over P coordinates.
    """
    check_rows("x", x, prior.mean)

    def expected_log_joint(both: Parameters) -> Tensor:
        return expected_log_normal(x, *both).sum() + expected_log_prior(prior, both)

    return expected_log_joint


def check_rows(name: str, rows: Tensor, like: Tensor) -> None:
    """Raise `DataError` unless ``rows`` is finite and (N, P), N ≥ 1, where ``like`` is (P,)."""
    if like.dim() != 1:
        raise DataError(f"the prior must be over coordinates (P,), got {tuple(like.shape)}")
    if rows.dim() != 2 or len(rows) == 0 or rows.shape[1] != len(like):
        raise DataError(
            f"{name} must be (N, {len(like)}) with at least one row, as wide as the prior; got "
            f"shape {tuple(rows.shape)}"
        )
    check_floating(**{name: rows, "prior": like})
    if not bool(torch.isfinite(rows).all()):
        raise DataError(f"{name} has values that are not finite")
