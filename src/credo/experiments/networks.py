"""The networks of the papers, built from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

NetName = Literal["LeNet-5", "784-100-10"]


def build(name: NetName, image: Sequence[int], seed: int) -> nn.Sequential:
    """The named classifier of ten classes for images (C, H, W), its weights drawn from ``seed``.

    >>> sum(p.numel() for p in build("LeNet-5", (1, 28, 28), seed=0).parameters())
    61706
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "LeNet-5":
            return _kaiming(lenet5(image))
        channels, height, width = image
        return _kaiming(
            nn.Sequential(
                nn.Flatten(), nn.Linear(channels * height * width, 100), nn.ReLU(),
                nn.Linear(100, 10),
            )
        )  # fmt: skip


def lenet5(image: Sequence[int]) -> nn.Sequential:
    """LeNet-5 as document 003 has it (fig. 4.1): max-pooling and ReLU, images 28×28 or 32×32."""
    channels, height, _ = image
    padding = (32 - height) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def _kaiming(net: nn.Sequential) -> nn.Sequential:
    """Uniform weights with Kaiming's standard deviation for ReLU, as document 003 §4.2 starts."""
    for layer in net:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net
