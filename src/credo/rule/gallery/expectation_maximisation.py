r"""Expectation maximisation for a mixture of Gaussians: a distribution for labels, a point for θ.

Labels z with parameters θ = (π, m_k, S_k) have the loss ℓ = −log p(x, z | θ). Take q(z) categorical
and q(θ) a point.

*E-step.* ∇_{μ_k} of E ℓ is −(ln p(x, z=k | θ) − ln p(x, z=K | θ)), and the rule at ρ = 1 gives the
exact λ_k = ln p(z=k | x, θ) − ln p(z=K | x, θ).

*M-step.* p(x, z | θ) is an exponential family too; write θ by its expectation parameters η and let
T̄ be the mean of the N complete statistics under q(z). Then ∇_ηℓ = −N F(T̄ − η) with F the Fisher
matrix of one example in η. The rule for a Gaussian of fixed precision S = NF around η, seen from
its mean only, is η ← η − ρS⁻¹∇_ηℓ = (1 − ρ)η + ρT̄, and at ρ = 1

    η ← T̄      the model's moments become the data's.

What is given up: the spread of θ, and with it the entropy that would stop a component from
collapsing onto one point, which is refused where it happens.

    >>> from credo.families import DiagGaussian
    >>> x = torch.tensor([[-5.5], [-4.5], [4.5], [5.5]])
    >>> components = (DiagGaussian(torch.tensor([m]), torch.tensor([1.0])) for m in (-1.0, 1.0))
    >>> mixture = update(GaussianMixture(torch.tensor([0.0]), tuple(components)), x)
    >>> [round(component.mean.item(), 2) for component in mixture.components]
    [-5.0, 5.0]

Reference: Dempster, Laird & Rubin, "Maximum likelihood from incomplete data via the EM algorithm",
1977; Neal & Hinton, "A view of the EM algorithm", 1998.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credo.families import GaussianMixture
from credo.rule.families import (
    Categorical,
    expectation_parameters,
    sufficient_statistics,
    with_expectation,
)
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.message_passing import check_rows
from credo.rule.rule import step

ENTRY = Entry(
    algorithm="expectation maximisation",
    family="categorical labels, a point for the parameters",
    expectation="exact over labels, at the point over parameters",
    curvature="Fisher matrix of the complete data",
    step="ρ = 1, labels and parameters in turn",
    approximates="the parameters' spread",
    test="tests/theorems/test_gallery_conjugate.py::test_one_em_step_is_that_of_scikit_learn",
)


def update(mixture: GaussianMixture, x: Tensor) -> GaussianMixture:
    """One E-step and one M-step on all rows of ``x`` (N, P).

    ``mixture.log_prob(x).sum()`` never falls.
    """
    return maximisation_step(mixture, x, expectation_step(mixture, x))


def expectation_step(mixture: GaussianMixture, x: Tensor) -> Categorical:
    """q(z) = p(z | x, θ), over (N, K)."""
    check_rows("x", x, mixture.mean)
    densities = [component.log_prob(x) for component in mixture.components]
    log_joint = torch.stack(densities, -1) + mixture.log_weights
    log_odds = log_joint[:, :-1] - log_joint[:, -1:]
    return step(Categorical(torch.zeros_like(log_odds)), (-log_odds,), rate=1.0)


def maximisation_step(mixture: GaussianMixture, x: Tensor, labels: Categorical) -> GaussianMixture:
    """η ← T̄, the average of (1[z=k]; 1[z=k]T_k(x)) under q(z)."""
    moments = (
        torch.einsum("n,n...->...", shares, statistic) / len(x)
        for shares, component in zip(labels.probs.T, mixture.components, strict=True)
        for statistic in sufficient_statistics(component, x)
    )
    return with_expectation(mixture, (expectation_parameters(labels)[0].mean(0), *moments))
