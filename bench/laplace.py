"""Laplace's approximation: a fit, in epochs of training, and the linearised predictive."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from bench import rivals
from bench.nets import NETS, batch
from bench.timing import Contestants, Row, interleave

NUM_DATA = 10_000
BATCH_SIZE = 128
ROUNDS = 5
CAP = 20.0
"""Seconds that a contestant's first run may take; one that takes longer is left out."""
RIVAL_INPUTS = 10
"""laplace-torch holds the Jacobians of all inputs it is given: 19 MB each on this network."""

METHODS = {
    "credo diag, ggn": credo.Laplace(structure="diag"),
    "credo diag, fisher": credo.Laplace(structure="diag", curvature="fisher"),
    "credo kron, ggn": credo.Laplace(structure="kron"),
    "credo kron, fisher": credo.Laplace(structure="kron", curvature="fisher"),
    "credo last layer kron, ggn": credo.Laplace(subset="last_layer"),
    "credo last layer kron, fisher": credo.Laplace(subset="last_layer", curvature="fisher"),
}


def adam_epoch(net: nn.Module, x: Tensor, y: Tensor, **settings: bool) -> Callable:
    """Every example once, in random batches, as ordinary training does."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, **settings)

    def epoch() -> None:
        for chosen in torch.randperm(len(x)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()

    return epoch


def credo_fit(net: nn.Module, method: credo.Laplace | credo.MAP, x: Tensor, y: Tensor) -> Callable:
    model = credo.Model(net, credo.likelihoods.Categorical())
    epochs = 1 if isinstance(method, credo.MAP) else 0

    def fit() -> credo.Posterior:
        with warnings.catch_warnings():
            # True of these networks, and of no consequence for the time that a pass takes.
            warnings.filterwarnings("ignore", message="the network does not look trained")
            return credo.fit(
                model, method, (x, y), epochs=epochs, batch_size=BATCH_SIZE, progress=False
            )

    return fit


def fitting(
    net: str = "mlp", num_data: int = NUM_DATA, rounds: int = ROUNDS, cap: float = CAP
) -> list[Row]:
    """One fit on ``num_data`` examples, relative to an epoch of Adam on the same."""
    make, (x, y) = NETS[net], batch(net, num_data)
    contestants: Contestants = {
        "adam": adam_epoch(make(), x, y),
        "adam again (control)": adam_epoch(make(), x, y),
        "adam fused": adam_epoch(make(), x, y, fused=True),
        "credo MAP": credo_fit(make(), credo.MAP(), x, y),
    }
    builders = {name: partial(credo_fit, make(), method, x, y) for name, method in METHODS.items()}
    for name, settings in rivals.LAPLACE_TORCH.items():
        run = partial(rivals.laplace_torch, make(), x, y, *settings)
        builders[name] = lambda run=run: run
    contestants |= rivals.working(builders, cap)
    baselines = {"adam": "epoch of adam", "adam fused": "epoch of adam fused"}
    return interleave("laplace fit", net, contestants, baselines, rounds, steps=1)


def prediction(
    net: str = "mlp", samples: int = 32, inputs: int = 1000, rounds: int = ROUNDS, cap: float = CAP
) -> list[Row]:
    """The linearised predictive of ``inputs``, relative to ``samples`` plain forward passes."""
    make, (x, y) = NETS[net], batch(net, inputs)
    few = x[:BATCH_SIZE], y[:BATCH_SIZE]
    plain = make().eval()

    @torch.no_grad()
    def deterministic() -> Tensor:
        return torch.stack([plain(x) for _ in range(samples)]).softmax(-1).mean(0)

    def ours(method: credo.Laplace, link: str) -> Callable:
        posterior = credo_fit(make(), method, *few)()
        return lambda: posterior.predict(x, at="linearised", link=link).probs

    def theirs(subset: str, structure: str, backend: str) -> Callable:
        fitted = rivals.laplace_torch(make(), *few, subset, structure, backend)
        size = inputs if subset == "last_layer" else RIVAL_INPUTS
        return lambda: torch.cat(
            [fitted(part, pred_type="glm", link_approx="probit") for part in x.split(size)]
        )

    contestants: Contestants = {
        "deterministic": deterministic,
        "deterministic again (control)": deterministic,
    }
    builders = {
        f"credo {name}, {link}": partial(ours, METHODS[method], link)
        for name, method in (
            ("diag", "credo diag, ggn"),
            ("kron", "credo kron, ggn"),
            ("last layer kron", "credo last layer kron, ggn"),
        )
        for link in ("probit", "samples")
    }
    builders |= {
        f"{name}, probit": partial(theirs, *settings)
        for name, settings in rivals.LAPLACE_TORCH.items()
    }
    contestants |= rivals.working(builders, cap)
    baselines = {"deterministic": f"{samples} deterministic forwards"}
    return interleave("linearised prediction", net, contestants, baselines, rounds, steps=1)
