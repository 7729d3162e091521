"""The networks that are timed, and a batch for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


class Block(nn.Module):
    """Two 3×3 convolutions with batch norm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(h)) + self.shortcut(x))


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(3):
            layers.append(Block(width, channels, stride if index == 0 else 1))
            width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def with_group_norm(net: nn.Module) -> nn.Module:
    """Batch norm mixes examples, which then have no gradients of their own."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(8, child.num_features))
    return net


NETS = {
    "mlp": mlp,
    "lenet5": lenet5,
    "resnet20": resnet20,
    "resnet20 groupnorm": lambda: with_group_norm(resnet20()),
    "wide mlp": lambda: mlp(2048),
}


def batch(net: str, size: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if net.startswith("resnet20") else (1, 28, 28)
    x = torch.randn(size, *shape, generator=generator)
    return x, torch.randint(0, 10, (size,), generator=generator)
