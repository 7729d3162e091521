"""The networks that are timed, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import credo
from credo_papers.networks import resnet20


def mlp(width: int = 400) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def softplus(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same network with softplus in the place of ReLU, for methods that ask for it."""
    return lambda: credo.smooth(make())


NETS = {
    "mlp": mlp,
    "lenet5": lenet5,
    "resnet20": resnet20,
    # Batch norm mixes examples, which then have no gradients of their own.
    "resnet20 groupnorm": lambda: resnet20(norm="group"),
    "wide mlp": lambda: mlp(2048),
    "softplus mlp": softplus(mlp),
    "softplus lenet5": softplus(lenet5),
    "softplus resnet20": softplus(resnet20),
}


def batch(net: str, size: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if "resnet20" in net else (1, 28, 28)
    x = torch.randn(size, *shape, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)
