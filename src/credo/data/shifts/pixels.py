"""What each shift does to images (N, C, H, W) in [0, 1], given an amount and a generator.

Lengths (blurs) are meant for images of 32 pixels or fewer, and grow with the shorter side of larger
ones.
"""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from credo.checks import import_extra
from credo.errors import DataError

REFERENCE_SIDE = 32
_SUPERSAMPLING = 15
_OCTAVES = 5
_DENSE_POINTS = 4096
"""Pixels up to which a rotation is kept as a matrix: 64 MiB."""


# --- places ---------------------------------------------------------------------------------------


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned about their centre, as Ovadia et al. (2019) turn MNIST: 15, 30, …, 180 degrees.

    As in their code: `scipy.ndimage.rotate` with cubic splines, zeros around the image and a frame
    that grows with the angle, from which the centre is cut out in the image's size. Splines
    overshoot edges by a little, and nothing is clipped.

    Args:
        x: Images (N, C, H, W).
        degrees: The angle; positive turns as scipy does, counterclockwise on the screen.

    >>> rotated(torch.arange(4.0).reshape(1, 1, 2, 2), 90).round(decimals=4).abs()
    tensor([[[[1., 3.], [0., 2.]]]])
    """
    return _turned(x, degrees, grow=True)


def _turned(x: Tensor, degrees: float, grow: bool) -> Tensor:
    """By scipy, in a frame that grows or stays; as a matrix where there are many small images."""
    if degrees % 360 == 0:
        return x
    height, width = x.shape[-2:]
    planes = x.detach().cpu().to(torch.promote_types(x.dtype, torch.float32))
    planes = planes.reshape(-1, height, width)
    points = height * width
    if len(planes) <= points or points > _DENSE_POINTS:
        return _each_turned(planes, degrees, grow).reshape(x.shape).to(x)
    # Turning is linear in the image: that of every single point says all, and there are fewer.
    single = torch.eye(points, dtype=torch.float64).reshape(-1, height, width)
    matrix = _each_turned(single, degrees, grow).reshape(points, points)
    return (planes.reshape(-1, points) @ matrix.to(planes)).reshape(x.shape).to(x)


def _each_turned(planes: Tensor, degrees: float, grow: bool) -> Tensor:
    """Each of the planes (M, H, W), cut to its size."""
    from scipy import ndimage  # takes long to import, so only when it is used

    height, width = planes.shape[-2:]
    turned = ndimage.rotate(planes.numpy(), degrees, axes=(-1, -2), reshape=grow)
    # The frame is smaller than the image in one direction where a long one is turned.
    gaps = [max(0, size - turned.shape[axis]) for axis, size in ((-2, height), (-1, width))]
    turned = np.pad(turned, [(0, 0), *((gap // 2, gap - gap // 2) for gap in gaps)])
    top = turned.shape[-2] // 2 - height // 2
    left = turned.shape[-1] // 2 - width // 2
    centre = turned[:, top : top + height, left : left + width]
    return torch.from_numpy(np.ascontiguousarray(centre))


def rolled(x: Tensor, pixels: int) -> Tensor:
    """Images moved to the right, what leaves coming back on the left: Ovadia's 2, 4, …, 26 pixels.

    Args:
        x: Images (N, C, H, W).
        pixels: How far; negative is to the left.

    >>> rolled(torch.arange(4.0).reshape(1, 1, 1, 4), 1)
    tensor([[[[3., 0., 1., 2.]]]])
    """
    return torch.roll(x, pixels, -1)


def rotation(x: Tensor, degrees: float, generator: Generator) -> Tensor:
    """All by the same angle, about the very centre.

    `rotated` has a frame of whole pixels, which moves the centre by half of one at some angles.
    """
    return _turned(x, degrees, grow=False)


def translation(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Cyclically to the right, by a share of the width."""
    return rolled(x, max(1, round(share * x.shape[-1])))


def occlusion(x: Tensor, share: float, generator: Generator) -> Tensor:
    """A grey square somewhere; that of a higher severity covers that of a lower one."""
    count, _, height, width = x.shape
    side = max(1, round(share * min(height, width)))
    place = torch.rand(count, 2, generator=generator)
    first = (place * torch.tensor([height - side + 1, width - side + 1])).floor().to(x.device)
    rows = torch.arange(height, device=x.device) - first[:, :1]
    columns = torch.arange(width, device=x.device) - first[:, 1:]
    covered = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[
        :, None
    ]
    return torch.where(covered[:, None], 0.5, x)


# --- noise ----------------------------------------------------------------------------------------


def gaussian_noise(x: Tensor, scale: float, generator: Generator) -> Tensor:
    """x + scale·ε."""
    return x + scale * _normal(x, generator)


def shot_noise(x: Tensor, photons: float, generator: Generator) -> Tensor:
    """Counts of light: Poisson(x·photons)/photons."""
    counts = torch.poisson((x * photons).cpu().float(), generator=generator)
    return (counts / photons).to(x)


def impulse_noise(x: Tensor, share: float, generator: Generator) -> Tensor:
    """A share of the values becomes 0 or 1."""
    draws = torch.rand(2, *x.shape, generator=generator).to(x.device)
    return torch.where(draws[0] < share, (draws[1] < 0.5).to(x), x)


# --- blur -----------------------------------------------------------------------------------------


def gaussian_blur(x: Tensor, scale: float, generator: Generator) -> Tensor:
    """Convolution with a Gaussian, edges continued."""
    scale = scale * _magnification(x)
    radius = max(1, math.ceil(4 * scale))
    line = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / scale) ** 2)
    return _filtered(x, torch.outer(line, line))


def defocus_blur(x: Tensor, radius: float, generator: Generator) -> Tensor:
    """Convolution with a disk, whose border covers pixels in part."""
    radius = radius * _magnification(x)
    reach = math.ceil(radius)
    fine = (torch.arange(_SUPERSAMPLING, dtype=torch.float64) + 0.5) / _SUPERSAMPLING - 0.5
    line = (torch.arange(-reach, reach + 1)[:, None] + fine).flatten()
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    kernel = F.avg_pool2d(inside[None, None], _SUPERSAMPLING)[0, 0]
    return _filtered(x, kernel)


# --- light ----------------------------------------------------------------------------------------


def contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    """Every channel drawn towards its mean over the image."""
    mean = x.mean((-2, -1), keepdim=True)
    return mean + factor * (x - mean)


def brightness(x: Tensor, amount: float, generator: Generator) -> Tensor:
    """More of the value of hue, saturation and value: the largest channel grows by the amount."""
    value = x.amax(1, keepdim=True)
    brighter = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * (brighter / value.clamp_min(1e-12)), brighter)


def haze(x: Tensor, thickness: float, generator: Generator) -> Tensor:
    """A bright cloud in front: (x + thickness·cloud)·max x / (max x + thickness)."""
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * _clouds(x, generator)) * top / (top + thickness)


def _clouds(x: Tensor, generator: Generator) -> Tensor:
    """Smooth random fields (N, 1, H, W) that reach from 0 to 1: noise on ever finer grids."""
    count, _, height, width = x.shape
    field = torch.zeros(count, 1, height, width)
    for octave in range(_OCTAVES):
        cells = 2 ** (octave + 1)
        coarse = torch.rand(count, 1, cells, cells, generator=generator)
        field += 0.5**octave * F.interpolate(
            coarse, (height, width), mode="bilinear", align_corners=True
        )
    low, high = field.amin((-2, -1), keepdim=True), field.amax((-2, -1), keepdim=True)
    return ((field - low) / (high - low).clamp_min(1e-12)).to(x)


# --- files ----------------------------------------------------------------------------------------


def pixelate(x: Tensor, factor: float, generator: Generator) -> Tensor:
    """Averaged down to a factor of its size, and each pixel repeated."""
    return _through(_through(x, factor, -1), factor, -2)


def jpeg(x: Tensor, quality: float, generator: Generator) -> Tensor:
    """Written as a JPEG file of this quality, and read again."""
    image = import_extra("PIL.Image", extra="images", purpose="the shift 'jpeg'")
    channels = x.shape[1]
    if channels not in (1, 3):
        raise DataError(f"jpeg takes images of 1 or 3 channels, and these have {channels}")
    bytes_of = (x.detach().cpu() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    out = np.empty_like(bytes_of)
    for place, picture in enumerate(bytes_of):
        file = io.BytesIO()
        image.fromarray(picture[..., 0] if channels == 1 else picture).save(
            file, "JPEG", quality=int(quality)
        )
        with image.open(file, formats=("JPEG",)) as read:
            out[place] = np.asarray(read).reshape(picture.shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).to(x) / 255


# --- parts ----------------------------------------------------------------------------------------


def _normal(x: Tensor, generator: Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator).to(x)


def _magnification(x: Tensor) -> float:
    return max(1.0, min(x.shape[-2:]) / REFERENCE_SIDE)


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel convolved with a kernel that sums to one; the edges are continued."""
    reach = len(kernel) // 2
    count, channels, height, width = x.shape
    planes = x.reshape(count * channels, 1, height, width)
    weight = (kernel / kernel.sum()).to(x)[None, None]
    padded = F.pad(planes, (reach, reach, reach, reach), mode="replicate")
    return F.conv2d(padded, weight).reshape(x.shape)


def _through(x: Tensor, factor: float, dim: int) -> Tensor:
    """One direction averaged over fewer, larger pixels, and each of them repeated."""
    size = x.shape[dim]
    fewer = max(1, int(size * factor))
    block = torch.arange(fewer, dtype=torch.float64)[:, None]
    centre = torch.arange(size, dtype=torch.float64) + 0.5
    # As Pillow's box filter: a pixel belongs to a block as a whole, by its centre.
    edge = size / fewer
    inside = ((centre > block * edge) & (centre <= (block + 1) * edge)).double()
    share = inside / inside.sum(1, keepdim=True)
    nearest = (centre * fewer / size).floor().long()
    matrix = share[nearest].to(x)
    return (x.transpose(dim, -1) @ matrix.T).transpose(dim, -1)
