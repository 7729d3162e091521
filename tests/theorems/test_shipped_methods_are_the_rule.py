"""What the library ships and what the engine composes are the same, step for step.

One row for each method that the rule derives: its own trajectory, and the engine's from the same
start on the same batches. Float64 and smooth activations; 50 steps leave rounding below 1e-11.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.autodiff.loss import Loss
from credo.families import DiagGaussian, FixedGaussian, Gaussian
from credo.rule.gallery.adam import adam
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.learner import Learner
from credo.types import Batch

STEPS = 50
NUM_DATA = 48


def model() -> credo.Model:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).double())
    return credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=0.7))


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step % 3)
    x = torch.randn(16, 3, generator=generator).double()
    return x, (x[:, 0] > 0).long()


def shipped(method: credo.MAP) -> list[Tensor]:
    here = model()
    state, path = method.init(here, NUM_DATA, torch.Generator().manual_seed(0)), []
    for step in range(STEPS):
        state, _ = method.update(state, batch(step))
        path.append(here.bind().vector.clone())
    return path


def composed(method: Learner, start: Callable[[Tensor], Gaussian]) -> list[Tensor]:
    """The engine on ℓ(θ) = mean NLL − log p(θ)/n, what MAP descends."""
    here = model()
    prior = here.prior_over_weights()
    state, path = method.init(start(here.bind().vector.clone())), []
    for step in range(STEPS):
        data = Loss.of_model(here, batch(step))
        loss = Loss.of(lambda w, data=data: data.value(w) - prior.log_prob(w) / NUM_DATA)
        method.update(state, loss)
        path.append(state.q.mean.clone())
    return path


@dataclass(frozen=True)
class Row:
    """A shipped method and the composition that must follow it."""

    method: credo.MAP
    engine: Learner
    start: Callable[[Tensor], Gaussian]


ROWS = {
    "MAP with Adam": Row(
        credo.MAP(optimizer="adam", lr=1e-2),
        adam(lr=1e-2),
        lambda mean: DiagGaussian(mean, torch.full((), math.inf, dtype=mean.dtype)),
    ),
    "MAP with SGD": Row(
        credo.MAP(optimizer="sgd", lr=1e-2),
        gradient_descent(1e-2, momentum=0.9),  # what the name "sgd" stands for
        lambda mean: FixedGaussian(mean, torch.ones((), dtype=mean.dtype)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_shipped_method_follows_the_engine(name: str) -> None:
    row = ROWS[name]
    for ours, engines in zip(shipped(row.method), composed(row.engine, row.start), strict=True):
        torch.testing.assert_close(ours, engines, rtol=1e-11, atol=1e-11)
