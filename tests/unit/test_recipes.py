"""A recipe's prior pulls as the weight decay that it was given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import credo
from credo.recipes import cold_posterior


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_the_temperature_does_not_weaken_the_decay(temperature: float) -> None:
    """(T/n)·∇(−log p) = λw, whatever T."""
    net, n, decay = nn.Linear(4, 3).double(), 500, 2e-3
    model, method = cold_posterior(
        net, credo.likelihoods.Categorical(), n, weight_decay=decay, temperature=temperature
    )
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64)
    pull = -method.temperature / n * model.prior_over_weights().grad_log_prob(weights)
    torch.testing.assert_close(pull, decay * weights, rtol=1e-12, atol=0)
