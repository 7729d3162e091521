"""A network so small that a step is nothing but calls: 10-50-1, minibatches of 32, one thread."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import credo
from bench.timing import Contestants, Row, interleave

NUM_DATA, BATCH, EPOCHS = 3200, 32, 3
METHODS: dict[str, Callable[[], credo.method.Method]] = {
    name: getattr(credo, name) for name in ("MAP", "VI", "IVON", "Vadam", "VOGN")
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))


def fitting(rounds: int = 15) -> list[Row]:
    """All of `credo.fit`, relative to a plain loop of the same steps, in processor time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 10, generator=generator)
    y = 0.5 * x[:, :1] + 0.1 * torch.randn(NUM_DATA, 1, generator=generator)

    def loop(**settings: bool) -> None:
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, **settings)
        for _ in range(EPOCHS):
            for rows in torch.randperm(NUM_DATA).split(BATCH):
                optimizer.zero_grad()
                F.mse_loss(net(x[rows]), y[rows]).backward()
                optimizer.step()

    def fit(method: credo.method.Method) -> None:
        model = credo.Model(network(), credo.likelihoods.Gaussian())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # three epochs are no training
            credo.fit(model, method, (x, y), epochs=EPOCHS, batch_size=BATCH, progress=False)

    contestants: Contestants = {
        "adam": loop,
        "adam again (control)": loop,
        "adam fused": lambda: loop(fused=True),
    }
    for name, make in METHODS.items():
        contestants[f"credo.fit {name}"] = lambda make=make: fit(make())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return interleave(
            "fit of a tiny network", "10-50-1", contestants, {"adam": "adam"}, rounds, steps=1,
            clock=time.process_time,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
