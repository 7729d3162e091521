r"""Training images changed at random: flips and shifts of small ones, crops of large ones.

A network that sees an image in many versions learns what they have in common. For a posterior the
versions also count as data, though not each as a new example: `credo.optim` has ``augmentation``
for the factor by which they multiply ``num_data`` (10 on CIFAR-10 and 5 on ImageNet in Osawa et
al., 2019, arXiv:1906.02506), and with `credo.fit` a temperature divided by it says the same.

    >>> images = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> moves = torch.tensor([[1, 0, 1]])            # flipped; the crop starts in row 0, column 1
    >>> move(images, moves, padding=1)
    tensor([[[[0., 0.], [1., 0.]]]])
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from credo.checks import Count, Index, Share, checked
from credo.errors import DataError

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of an image, in pixels."""

AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)
_TRIES = 10


@checked
def draw_moves(count: Index, padding: Index = 4, generator: Generator | None = None) -> Tensor:
    """For each of ``count`` images (flip, top, left), whole numbers (count, 3).

    Half of the images are flipped; the crop starts in one of the 2·padding + 1 rows and columns of
    the padded image.

    Args:
        count: How many images there are.
        padding: How far an image is shifted at most, in pixels.
        generator: Where the draws come from; torch's global generator by default.
    """
    flips = torch.randint(2, (count, 1), generator=generator)
    return torch.cat([flips, torch.randint(2 * padding + 1, (count, 2), generator=generator)], 1)


def move(images: Tensor, moves: Tensor, padding: int = 4) -> Tensor:
    """Images padded by zeros, flipped, and cropped to their size.

    Args:
        images: (N, C, H, W).
        moves: What `draw_moves` drew for them, (N, 3).
        padding: The same as there.

    Raises:
        DataError: The moves are not one row for each image.
    """
    count, channels, height, width = images.shape
    if moves.shape != (count, 3):
        raise DataError(
            f"{count} images need moves of shape {(count, 3)}, one row of (flip, top, left) for "
            f"each, not {tuple(moves.shape)}: take draw_moves({count})"
        )
    flips, tops, lefts = moves.to(images.device)[:, :, None].unbind(1)
    rows = tops + torch.arange(height, device=images.device)
    columns = lefts + torch.arange(width, device=images.device)
    columns = torch.where(flips.bool(), width + 2 * padding - 1 - columns, columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image, channel = (torch.arange(n, device=images.device) for n in (count, channels))
    moved: Tensor = padded[
        image[:, None, None, None], channel[None, :, None, None],
        rows[:, None, :, None], columns[:, None, None, :],
    ]  # fmt: skip
    return moved


@checked
class FlippedAndShifted(Dataset[tuple[Tensor, Tensor]]):
    """Images (N, C, H, W) with labels, each flipped and shifted anew whenever it is asked for.

    The draws are from torch's global generator, which `credo.fit` seeds, keeps in checkpoints and
    gives back: runs repeat and resume exactly.

    Args:
        images: (N, C, H, W).
        labels: One for each image.
        padding: How far an image is shifted at most; CIFAR's 4 pixels are an eighth of its side.

    >>> x, y = torch.rand(5, 3, 32, 32), torch.arange(5)
    >>> data = FlippedAndShifted(x, y)
    >>> len(data), data[2][0].shape, data[2][1]
    (5, torch.Size([3, 32, 32]), tensor(2))
    """

    def __init__(self, images: Tensor, labels: Tensor, padding: Index = 4) -> None:
        if images.dim() != 4 or len(images) != len(labels):
            raise DataError(
                f"images must be (N, C, H, W) with a label each, not {tuple(images.shape)} with "
                f"{len(labels)} labels"
            )
        self.images, self.labels, self.padding = images, labels, padding

    def __repr__(self) -> str:
        size = "×".join(map(str, self.images.shape[1:]))
        return f"FlippedAndShifted({len(self):,} images {size}, moved by up to {self.padding})"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        moved = move(self.images[index, None], draw_moves(1, self.padding), self.padding)
        return moved[0], self.labels[index]


@checked
def random_box(width: Count, height: Count, generator: Generator | None = None) -> Box:
    """A random part of an image, to be resized to a square.

    Its area is uniform in `AREAS` times that of the image, the logarithm of width/height uniform
    in that of `RATIOS`, its place uniform. A shape that does not fit is drawn again; if none of ten
    fits, which happens with very long images only, it is the largest centred part of such a ratio.

    Args:
        width: The image's, in pixels.
        height: The image's, in pixels.
        generator: Where the draws come from; torch's global generator by default.

    Returns:
        Left, top, right and bottom edge.

    Reference: C. Szegedy et al., "Going deeper with convolutions", 2015, §6.

    >>> random_box(640, 480, torch.Generator().manual_seed(0))
    (..., ..., ..., ...)
    """
    draws = torch.rand(_TRIES, 2, generator=generator, dtype=torch.float64)
    spot = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    for size, shape in draws.tolist():
        area = (AREAS[0] + size * (AREAS[1] - AREAS[0])) * width * height
        ratio = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** shape
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if 1 <= w <= width and 1 <= h <= height:
            left, top = spot[0] * (width - w), spot[1] * (height - h)
            return left, top, left + w, top + h
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    return _centred(width, height, min(width, height * ratio), min(height, width / ratio))


@checked
def centre_box(width: Count, height: Count, share: Share = 0.875) -> Box:
    """The central square of an image.

    Args:
        width: The image's, in pixels.
        height: The image's, in pixels.
        share: The square's side over the image's shorter one: 224 of 256.

    Returns:
        Left, top, right and bottom edge.

    >>> centre_box(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = share * min(width, height)
    return _centred(width, height, side, side)


def _centred(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h
