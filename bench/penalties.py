"""Penalties in a training loop, and the time it takes to solve one for its prior."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

import credo
from bench.nets import NETS, batch
from bench.timing import Contestants, Row, interleave
from credo.penalties import KINDS, Kind, penalty

NUM_DATA = 50_000
POINTS = 4096


def in_a_loop(net: str = "resnet20", rounds: int = 11) -> list[Row]:
    """A penalty and its gradient alone, relative to a step of Adam without one."""
    make, (x, y) = NETS[net], batch(net)

    def step() -> Callable[[], object]:
        network = make()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

        def train() -> None:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

        return train

    def alone(kind: Kind) -> Callable[[], object]:
        network = make()
        return lambda: penalty(network, kind, num_data=NUM_DATA).backward()

    contestants: Contestants = {"adam": step(), "adam again (control)": step()}
    contestants |= {f"credo penalty {kind}, alone": alone(kind) for kind in KINDS}
    return interleave("penalty", net, contestants, {"adam": "adam"}, rounds, steps=1)


def to_priors(rounds: int = 31) -> list[Row]:
    """`from_penalty` on a table of 4,096 points, relative to what it may take: 50 ms."""
    x = np.linspace(-8, 8, POINTS)
    scales = (0.03, 0.06, 0.12)
    tables = {
        "L2 with its σ": [0.5 * (x**2 + s**2) - np.log(s) for s in scales],
        "|μ| (no prior)": [np.abs(x)] * 3,
        "μ² alone (no prior)": [x**2] * 3,
    }
    solve = credo.priors.from_penalty
    contestants: Contestants = {"50 ms": partial(_wait, 0.05)}
    contestants |= {
        f"credo from_penalty, {name}": partial(solve, (x, np.stack(rows)), sigmas=scales)
        for name, rows in tables.items()
    }
    return interleave(
        "from_penalty", f"{POINTS} points", contestants, {"50 ms": "50 ms"}, rounds, steps=1
    )


def _wait(seconds: float) -> None:
    """A sleep would be longer than it is asked to be; the clock is read until it has passed."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
