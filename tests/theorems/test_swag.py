"""SWAG sees what descent on a quadratic is known to do: an AR(1) process for every weight.

With gradients λ(w − z), z ~ N(0, s²) anew at each step, plain descent at rate η is

    w ← (1 − ηλ)w + ηλ z,        stationary variance σ² = ηλ s²/(2 − ηλ)

Weights with the same λ are independent copies, so tolerances are standard errors over them.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

import credo
from credo.families import FactorGaussian

D = torch.float64
COPIES, STEPS, RATE, NOISE = 400, 4000, 0.2, 0.7
CURVATURES = (0.5, 1.0, 3.0)
START, ITERATES, RANK = 0.1, 400, 20


class Valleys(nn.Module):
    """√λ·w: with unit noise its loss is ½λ(w − z)² for targets √λ·z."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(CURVATURES) * COPIES, dtype=D))
        roots = torch.tensor(CURVATURES, dtype=D).sqrt()
        self.register_buffer("roots", roots.repeat_interleave(COPIES))

    def forward(self, x: Tensor) -> Tensor:
        return (self.roots * self.weight).expand(len(x), -1)


@cache
def swag() -> FactorGaussian:
    net = Valleys()
    model = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0))
    train = credo.MLE(lr=RATE, optimizer="sgd-plain")
    method = credo.SWAG(train=train, start=START, rate=1.0, iterates=ITERATES, rank=RANK)
    state = method.init(model, 1, torch.Generator().manual_seed(0))
    state.clock.epochs = STEPS
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        z = NOISE * torch.randn(1, net.weight.numel(), generator=generator, dtype=D)
        state, _ = method.update(state, (torch.zeros(1, 1, dtype=D), net.roots * z))
    q = method.posterior(state).q
    assert isinstance(q, FactorGaussian)
    return q


def stationary(curvature: float) -> float:
    pull = RATE * curvature
    return pull * NOISE**2 / (2 - pull)


def of_copies(values: Tensor) -> list[Tensor]:
    return list(values.view(len(CURVATURES), COPIES))


def test_the_diagonal_is_half_the_stationary_variance_of_the_iterates() -> None:
    spacing = (1 - START) * STEPS / ITERATES
    for curvature, found in zip(CURVATURES, of_copies(2 * swag().diagonal), strict=True):
        # Of n iterates with correlation ρ^k at distance k, σ² less the variance of their mean.
        rho = (1 - RATE * curvature) ** spacing
        lags = torch.arange(1, ITERATES, dtype=D)
        lost = (1 + 2 * ((1 - lags / ITERATES) * rho**lags).sum()) / ITERATES
        expected = stationary(curvature) * (1 - float(lost))
        assert float(lost) < 0.02
        error = float(found.std()) / math.sqrt(COPIES)
        assert abs(float(found.mean()) - expected) < 5 * error
        # The tolerance tells the stationary variance from that of a single kick or of the data.
        assert 5 * error < 0.05 * expected


def test_the_low_rank_part_has_that_variance_too_and_is_as_noisy_as_its_rank_says() -> None:
    """DDᵀ/(K − 1) averages K/(K − 1) σ²; K far apart squares of normals have sd √(2/K), 32 %."""
    low_rank = 2 * swag().factor.square().sum(1)
    for curvature, found in zip(CURVATURES, of_copies(low_rank), strict=True):
        expected = RANK / (RANK - 1) * stationary(curvature)
        spread = math.sqrt(2 / RANK)
        # θ̄ is a mean of 400, which is the 2 % beside the standard error.
        assert abs(float(found.mean()) / expected - 1) < 5 * spread / math.sqrt(COPIES) + 0.02
        # The sd of 400 values of a χ² with 20 degrees is known to about 5 %.
        assert abs(float(found.std()) / expected - spread) < 0.2 * spread


def test_weights_that_are_independent_are_drawn_so() -> None:
    """Over copies the mean product of different weights is 0: the rank part has no bias there."""
    columns = swag().factor * math.sqrt(2 * (RANK - 1))
    product = (columns[:COPIES] * columns[COPIES : 2 * COPIES]).sum(1) / (RANK - 1)
    assert abs(float(product.mean())) < 5 * float(product.std()) / math.sqrt(COPIES)


def test_the_mean_is_better_than_any_iterate() -> None:
    """A mean of n iterates with n/2 or more independent ones: variance below 2 % of σ²."""
    for curvature, found in zip(CURVATURES, of_copies(swag().mean), strict=True):
        assert float(found.square().mean()) < 0.03 * stationary(curvature)
