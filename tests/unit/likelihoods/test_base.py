"""What is asked of a likelihood, and what its base class gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import DataError
from credo.likelihoods import BaseLikelihood


class Poisson(BaseLikelihood):
    """A user's own: counts with rate exp(f)."""

    kind = "loss"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.poisson_nll_loss(outputs, targets, reduction="none").flatten(1).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.exp(), generator)

    def hessian(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(outputs.exp())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        return

    def config(self) -> dict[str, str]:
        return {"type": "Poisson"}


def test_a_derived_likelihood_has_what_has_a_default():
    x, y = torch.randn(8, 1), torch.ones(8, 1)
    model = credo.Model(nn.Linear(1, 1), Poisson())
    assert model.likelihood.ignore_index is None
    posterior = credo.fit(model, credo.VI(), (x, y), epochs=1, progress=False)
    assert posterior.predict(x, samples=2).outputs.shape == (2, 8, 1)


def test_one_that_only_looks_like_a_likelihood_is_told_what_it_lacks():
    class Half:
        kind = "loss"

        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs

    with pytest.raises(DataError, match=r"Half has no check, .*ignore_index.*BaseLikelihood"):
        credo.Model(nn.Linear(1, 1), Half())
