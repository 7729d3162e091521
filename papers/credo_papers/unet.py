"""A small U-Net: a class for every pixel, from coarse context and fine detail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

GROUPS = 8


class UNet(nn.Module):
    """Images (B, channels, H, W) → logits (B, classes, H, W), for any H and W.

    Level i has ``widths[i]`` channels at 1/2ⁱ of the resolution. On the way down two convolutions
    and a pooling; on the way up the coarser level, magnified, beside what the way down had there,
    and two convolutions. Group normalisation, which unlike batch normalisation keeps no statistics
    that a draw of the weights would invalidate. Every width is a multiple of `GROUPS`.

    Reference: O. Ronneberger, P. Fischer, T. Brox, "U-Net: convolutional networks for biomedical
    image segmentation", 2015.

    >>> net = UNet(widths=(8, 16), channels=3, classes=11)
    >>> net(torch.zeros(2, 3, 15, 20)).shape
    torch.Size([2, 11, 15, 20])
    """

    def __init__(self, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(a, b) for a, b in pairwise((channels, *widths)))
        self.up = nn.ModuleList(
            _block(coarse + fine, fine) for fine, coarse in reversed(list(pairwise(widths)))
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel."""
        levels: list[Tensor] = []
        for block in self.down:
            x = block(max_pool2d(x, 2) if levels else x)
            levels.append(x)
        for block, fine in zip(self.up, reversed(levels[:-1]), strict=True):
            x = interpolate(x, size=fine.shape[-2:], mode="nearest")
            x = block(torch.cat([x, fine], dim=1))
        logits: Tensor = self.head(x)
        return logits


def build_unet(widths: Sequence[int], channels: int, classes: int, seed: int) -> UNet:
    """A `UNet` with Kaiming's normal weights drawn from ``seed``, at the default prior's scale.

    >>> net = build_unet((16, 32, 64, 96), channels=3, classes=11, seed=0)
    >>> sum(p.numel() for p in net.parameters())
    386667
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = UNet(widths, channels, classes)
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(net.head.bias)  # type: ignore[arg-type]
    return net


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3×3 convolutions; the normalisation's own offset makes a bias superfluous."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, outputs),
        nn.ReLU(),
    )  # fmt: skip
