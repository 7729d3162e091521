r"""Inputs that change after training: what is left of accuracy and calibration then?

A shift is called as ``shift(x, severity, seed=0)`` and returns inputs like ``x``. Severity 0 gives
the inputs themselves, 1 to 5 go ever further from them; labels stay. `IMAGES` has shifts for images
(N, C, H, W) in [0, 1], `TABLES` those for tables (N, D), which `of_table` makes from the training
table. Images that are standardised go through `on_pixels`.

    >>> import torch
    >>> from credo.data import digits, shifts
    >>> x, y = digits().test
    >>> noisy = shifts.IMAGES["gaussian_noise"](x, severity=3)
    >>> noisy.shape == x.shape
    True
    >>> shifts.IMAGES["rotation"]
    ImageShift('rotation': 9, 18, 27, 36, 45; degrees)

How they stand to the published protocols:

- Hendrycks & Dietterich, "Benchmarking neural network robustness to common corruptions and
  perturbations", 2019 (arXiv:1903.12261), for images of 32 pixels (CIFAR-10-C). The same formulas
  and amounts: Gaussian, shot and impulse noise, Gaussian blur, contrast, brightness, pixelate, JPEG
  (of whatever version the installed encoder is; blurs grow with the image, so that they mean the
  same at another size). Alike, but not the same: ``defocus_blur`` has disks whose spread is about
  that of theirs, ``haze`` their formula and thickness with a cloud made otherwise than their fog.
  Ours: ``rotation``, ``translation``, ``occlusion``. Not here: elastic, frost, glass, motion and
  zoom blur, saturate, snow, spatter, speckle. `credo.data.read_cifar_c` reads their own images.
- Ovadia et al., "Can you trust your model's uncertainty?", 2019 (arXiv:1906.02530), on MNIST:
  `rotated` by 15, 30, …, 180 degrees (`ROTATIONS`) and `rolled` by 2, 4, …, 26 pixels (`ROLLS`),
  as their code does it. Labels stay, so a 6 turned by 180° is still called a 6.

The steps are strict for images of 24 pixels and more; on smaller ones some repeat (`translation` by
whole pixels, `pixelate` to whole blocks).

Draws depend on the seed alone, not on the severity, and come from torch's generator on the CPU: the
same everywhere, whatever device the inputs are on.
"""

from credo.data.shifts.base import SEVERITIES, Shift
from credo.data.shifts.images import IMAGES, ImageShift, OnPixels, image_shift, on_pixels
from credo.data.shifts.pixels import rolled, rotated
from credo.data.shifts.tables import (
    TABLES,
    CovariateTilt,
    FeatureNoise,
    Missingness,
    TableShift,
    of_table,
)

ROTATIONS = tuple(range(15, 181, 15))
"""The angles of Ovadia et al. (2019) on MNIST, in degrees."""

ROLLS = tuple(range(2, 28, 2))
"""How far Ovadia et al. (2019) roll MNIST, in pixels."""

__all__ = [
    "IMAGES",
    "ROLLS",
    "ROTATIONS",
    "SEVERITIES",
    "TABLES",
    "CovariateTilt",
    "FeatureNoise",
    "ImageShift",
    "Missingness",
    "OnPixels",
    "Shift",
    "TableShift",
    "image_shift",
    "of_table",
    "on_pixels",
    "rolled",
    "rotated",
]
