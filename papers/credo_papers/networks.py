"""The networks of the papers, built from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

NetName = Literal[
    "LeNet-5",
    "784-100-10",
    "ResNet-20",
    "ResNet-20 GN",
    "ResNet-18",
    "ResNet-18 GN",
    "PreactResNet-18",
    "small softplus",
    "small CNN",
    "CVNN",
    "VGG19",
]
Norm = Literal["batch", "group"]


def build(name: NetName, image: Sequence[int], seed: int, classes: int = 10) -> nn.Sequential:
    """The named classifier for images (C, H, W), its weights drawn from ``seed``.

    "GN" is group norm in place of batch norm: examples then don't mix, so that each has a gradient
    of its own.

    >>> sum(p.numel() for p in build("LeNet-5", (1, 28, 28), seed=0).parameters())
    61706
    """
    channels, height, width = image
    norm: Norm = "group" if name.endswith(" GN") else "batch"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "LeNet-5":
            net = lenet5(image, classes)
        elif name in ("ResNet-20", "ResNet-20 GN"):
            net = resnet20(channels, classes, norm)
        elif name in ("ResNet-18", "ResNet-18 GN"):
            net = resnet18(channels, classes, norm)
        elif name == "PreactResNet-18":
            net = preact_resnet18(channels, classes)
        elif name == "small softplus":
            net = small_softplus(image, classes)
        elif name == "small CNN":
            net = small_cnn(image, classes)
        elif name == "CVNN":
            net = cvnn(image, classes)
        elif name == "VGG19":
            net = vgg19(channels, classes)
        else:
            net = nn.Sequential(
                nn.Flatten(), nn.Linear(channels * height * width, 100), nn.ReLU(),
                nn.Linear(100, classes),
            )  # fmt: skip
        return _kaiming(net)


def lenet5(image: Sequence[int], classes: int = 10) -> nn.Sequential:
    """LeNet-5 as Book (2020, fig. 4.1) has it: max-pooling and ReLU, images 28×28 or 32×32."""
    channels, height, _ = image
    padding = (32 - height) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def small_softplus(image: Sequence[int], classes: int = 10) -> nn.Sequential:
    """Two strided 3×3 convolutions and two linear layers: smooth, and cheap enough for sweeps.

    >>> sum(p.numel() for p in small_softplus((3, 16, 16)).parameters())
    72042
    """
    channels, height, width = image
    cells = math.ceil(height / 4) * math.ceil(width / 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 2, 1), nn.Softplus(), nn.Conv2d(16, 32, 3, 2, 1), nn.Softplus(),
        nn.Flatten(), nn.Linear(32 * cells, 128), nn.Softplus(), nn.Linear(128, classes),
    )  # fmt: skip


def small_cnn(image: Sequence[int], classes: int = 10) -> nn.Sequential:
    """`small_softplus` with ReLU: a convolutional network that is cheap enough for sweeps."""
    return nn.Sequential(
        *(nn.ReLU() if isinstance(layer, nn.Softplus) else layer
          for layer in small_softplus(image, classes))
    )  # fmt: skip


def cvnn(image: Sequence[int], classes: int = 10) -> nn.Sequential:
    """The "simple convolutional NN" of Wolinski, Charpiat & Ollivier (2020), who say no more of it.

    >>> sum(p.numel() for p in cvnn((3, 32, 32)).parameters())
    4409738
    """
    channels, height, width = image
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128 * (height // 4) * (width // 4), 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


def vgg19(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """VGG19 for images of 32×32: sixteen 3×3 convolutions with batch norm, one linear layer.

    Reference: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image
    recognition", 2015, table 1, column E; batch norm and a single linear layer are what is
    common on CIFAR.

    >>> sum(p.numel() for p in vgg19().parameters())
    20040522
    """
    layers: list[nn.Module] = []
    for width, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), _norm("batch", width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_head(512, classes))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them, by a 1×1 convolution where sizes change."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = _norm(norm, channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = _norm(norm, channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), _norm(norm, channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) → (B, channels, H/stride, W/stride)."""
        h = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(h)) + self.shortcut(x))


class PreactBlock(nn.Module):
    """Norm and softplus before each of two 3×3 convolutions; a 1×1 one where sizes change."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.first_norm = _norm(norm, channels_in)
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second_norm = _norm(norm, channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) → (B, channels, H/stride, W/stride)."""
        active = softplus(self.first_norm(x))
        h = self.second(softplus(self.second_norm(self.first(active))))
        return h + (x if self.shortcut is None else self.shortcut(active))


def resnet20(channels: int = 3, classes: int = 10, norm: Norm = "batch") -> nn.Sequential:
    """ResNet-20 for small images such as CIFAR's: three stages of 16, 32 and 64 channels.

    Reference: He et al., "Deep residual learning for image recognition", 2016, §4.2; shortcuts
    where sizes change are their option B.

    >>> sum(p.numel() for p in resnet20().parameters())
    272474
    """
    stem = [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), _norm(norm, 16), nn.ReLU()]
    return nn.Sequential(*stem, *_stages((16, 32, 64), 3, norm), *_head(64, classes))


def resnet18(channels: int = 3, classes: int = 1000, norm: Norm = "batch") -> nn.Sequential:
    """ResNet-18 for images of some 224×224: four stages of 64 to 512 channels (He et al., table 1).

    >>> sum(p.numel() for p in resnet18().parameters())
    11689512
    """
    stem = [nn.Conv2d(channels, 64, 7, 2, 3, bias=False), _norm(norm, 64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    return nn.Sequential(*stem, *_stages((64, 128, 256, 512), 2, norm), *_head(512, classes))


def preact_resnet18(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """PreactResNet-18 for images of 32×32 or so, with softplus, as Unlu & Aitchison (2021) have it.

    Reference: He et al., "Identity mappings in deep residual networks", 2016: the identity runs
    from the first convolution to the last norm.

    >>> sum(p.numel() for p in preact_resnet18().parameters())
    11172170
    """
    stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
    stages = _stages((64, 128, 256, 512), 2, "batch", PreactBlock)
    return nn.Sequential(
        stem, *stages, _norm("batch", 512), nn.Softplus(), *_head(512, classes)
    )  # fmt: skip


def _stages(
    widths: Sequence[int],
    blocks: int,
    norm: Norm,
    block: type[ResidualBlock] | type[PreactBlock] = ResidualBlock,
) -> list[nn.Module]:
    """Stages of ``blocks`` each, of which all but the first begin by halving the resolution."""
    layers: list[nn.Module] = []
    width = widths[0]
    for channels in widths:
        for _ in range(blocks):
            layers.append(block(width, channels, 1 if width == channels else 2, norm))
            width = channels
    return layers


def _head(width: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(min(32, channels // 4), channels)


def _kaiming(net: nn.Sequential) -> nn.Sequential:
    """Uniform weights with Kaiming's standard deviation for ReLU, as Book (2020, §4.2) starts."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return net
