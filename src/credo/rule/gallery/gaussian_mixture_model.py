r"""The Bayesian mixture of Gaussians: message passing, and the same code on minibatches.

    π ~ Dirichlet        (m_k, τ_k) ~ Normal–Gamma        z_n ~ π        x_n ~ N(m_{z_n}, 1/τ_{z_n})

with q = q(π) Π_k q(m_k, τ_k) Π_n q(z_n), each of the family of its prior, so that every step of
`credo.rule.gallery.message_passing` is exact for its factor. The labels z are local: given the
rest, ρ = 1 finds their best q at once. The rest is global and moves at any rate ρ. On S of n rows,
n/S times what these rows say is an unbiased message, and ρ_t falling by `robbins_monro` makes it
stochastic variational inference; all rows at ρ = 1 make it coordinate ascent.

    >>> x = torch.tensor([[-5.1], [-5.0], [-4.9], [4.9], [5.0], [5.1]], dtype=torch.float64)
    >>> pair = torch.ones(2, 1, dtype=torch.float64)
    >>> method = GaussianMixtureModel(Dirichlet(pair[:, 0]), NormalGamma(0 * pair, *[pair] * 3))
    >>> state = method.init(x, torch.Generator().manual_seed(1))
    >>> for _ in range(20):
    ...     state = method.update(state, x)
    >>> weights, components = state
    >>> components.mean.flatten().sort().values                   # drawn to the prior's 0
    tensor([-3.7491,  3.7491], dtype=torch.float64)

What is given up: dependence between labels, weights and components.

Reference: Bishop, "Pattern recognition and machine learning", 2006, section 10.2.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.rule.families import Categorical, Dirichlet, NormalGamma, Parameters
from credo.rule.gallery import message_passing
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.message_passing import (
    ExpectedLogJoint,
    check_rows,
    expected_log_normal,
    expected_log_prior,
    loss_gradient,
)
from credo.rule.gallery.stochastic_variational_inference import scale_of_batch
from credo.rule.rule import step

ENTRY = Entry(
    algorithm="Bayesian mixture of Gaussians",
    family="categorical × Dirichlet × Normal–Gamma",
    expectation="exact, or of a minibatch",
    curvature="none",
    step="local ρ = 1; global ρ = 1, or ρ_t = (t + 1)^−κ on minibatches",
    approximates="dependence between factors",
    test="tests/theorems/test_gallery_conjugate.py::test_a_bayesian_mixture_is_that_of_scikit_learn",
)

State: TypeAlias = tuple[Dirichlet, NormalGamma]


@dataclass(frozen=True)
class GaussianMixtureModel:
    """K components with independent coordinates: priors Dirichlet (K,) and Normal–Gamma (K, P)."""

    weight_prior: Dirichlet
    component_prior: NormalGamma

    def __post_init__(self) -> None:
        weights, components = self.weight_prior.concentration, self.component_prior.mean
        if weights.dim() != 1 or components.dim() != 2 or len(weights) != len(components):
            raise DataError(
                "weight_prior must be over (K,) and component_prior over (K, P), got "
                f"{tuple(weights.shape)} and {tuple(components.shape)}"
            )

    def init(self, x: Tensor, generator: Generator | None = None) -> State:
        """The priors, but with K rows of ``x`` as means: equal components would stay equal."""
        check_rows("x", x, self.component_prior.mean[0])
        count = len(self.component_prior.mean)
        if len(x) < count:
            raise DataError(f"x must have a row for each of the {count} components, got {len(x)}")
        rows = torch.randperm(len(x), generator=generator)[:count].to(x.device)
        return self.weight_prior, dataclasses.replace(self.component_prior, mean=x[rows])

    def update(
        self, state: State, x: Tensor, rate: float = 1.0, num_data: int | None = None
    ) -> State:
        """Labels, then weights and components; ``x`` are some of ``num_data`` rows, or all."""
        factors = self.with_labels(state, x)
        model = self._expected_log_joint(x, scale_of_batch(x, num_data, "num_data"))
        _, weights, components = factors
        return (
            step(weights, loss_gradient(factors, 1, model), rate),
            step(components, loss_gradient(factors, 2, model), rate),
        )

    def with_labels(self, state: State, x: Tensor) -> tuple[Categorical, Dirichlet, NormalGamma]:
        """The best q(z) for these weights and components, and them."""
        check_rows("x", x, self.component_prior.mean[0])
        odds = x.new_zeros(len(x), len(self.component_prior.mean) - 1)
        labels = Categorical(odds)
        gradient = loss_gradient((labels, *state), 0, self._expected_log_joint(x, scale=1.0))
        return step(labels, gradient, rate=1.0), *state

    def elbo(self, state: State, x: Tensor) -> Tensor:
        """The bound of log p(x) at the best labels; 0-dim."""
        factors = self.with_labels(state, x)
        return message_passing.elbo(factors, self._expected_log_joint(x, scale=1.0))

    def _expected_log_joint(self, x: Tensor, scale: float) -> ExpectedLogJoint:
        def expected_log_joint(
            labels: Parameters, weights: Parameters, components: Parameters
        ) -> Tensor:
            but_last = labels[0]
            probs = torch.cat([but_last, 1 - but_last.sum(-1, keepdim=True)], -1)
            scores = weights[0] + expected_log_normal(x.unsqueeze(1), *components).sum(-1)
            about_weights = expected_log_prior(self.weight_prior, weights)
            about_components = expected_log_prior(self.component_prior, components)
            return scale * (probs * scores).sum() + about_weights + about_components

        return expected_log_joint
