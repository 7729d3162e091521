"""A start at which nothing is learned is told within the first epoch, with what to change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.train.start import LEAST, LOOK, Start, constant_nll


def task(width: int = 64, rows: int = 4096) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(rows, 20)
    y = (x[:, 0] + x[:, 1] > 0).long()
    net = nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )
    return net, (x, y)


def fit(method: Any, epochs: int = 1, rows: int = 4096) -> None:
    net, data = task(rows=rows)
    credo.fit(credo.Model(net, Categorical()), method, data, epochs, 32, progress=False)


@pytest.mark.parametrize("name", ["MAP", "VI", "IVON", "VOGN", "Vadam", "EVON"])
def test_at_the_defaults_nobody_is_told_anything(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the posterior's scales")  # of so short a run
        fit(getattr(credo, name)())


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (credo.VI(init_scale=20.0, temperature=1.0), "init_scale"),
        (credo.IVON(hess_init=1e-7, temperature=1.0), "hess_init"),
        (credo.MAP(lr=1e-9), "lr_range_test"),
        (credo.IVON(lr=1e-9), "lr "),
    ],
    ids=["VI", "IVON", "MAP slow", "IVON slow"],
)
def test_what_drowns_or_does_not_move_is_named_with_the_setting(method: Any, setting: str) -> None:
    with pytest.warns(UserWarning, match=rf"after \d+ steps the loss(.|\n)*{setting}"):
        fit(method)


def test_small_data_is_looked_at_after_the_first_epochs_that_have_enough_steps() -> None:
    with pytest.warns(UserWarning, match="after 102 steps"):
        fit(credo.MAP(lr=1e-9), epochs=60, rows=64 + 8)  # three batches an epoch


def test_a_network_that_is_trained_already_is_not_stuck() -> None:
    net, data = task()
    model = credo.Model(net, Categorical())
    credo.fit(model, credo.MAP(), data, 3, 32, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.fit(model, credo.MAP(lr=1e-9), data, 1, 32, progress=False)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "expected"),
    [
        (Categorical(), torch.zeros(1, 3), torch.tensor([0, 1, 1, 2]), 1.0397),
        (Bernoulli(), torch.zeros(1, 1), torch.tensor([0.0, 1.0, 1.0, 1.0]), 0.5623),
        (Gaussian(0.5), torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]), 2.2258),
    ],
    ids=["Categorical", "Bernoulli", "Gaussian"],
)
def test_the_best_constant_prediction(
    likelihood: Any, outputs: torch.Tensor, targets: torch.Tensor, expected: float
) -> None:
    """Entropies of the shares, and ½(Var/s² + ln 2πs²), by hand."""
    assert constant_nll(likelihood, outputs, targets) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("num_batches", "steps"), [(1, LEAST), (30, 120), (150, 150), (5000, LOOK)]
)
def test_when_it_looks(num_batches: int, steps: int) -> None:
    start = Start(num_batches)
    assert [start.is_over(1.0) for _ in range(steps)] == [False] * (steps - 1) + [True]
