"""Image shifts by name, with their five amounts, and their use on images that are standardised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Generator, Tensor

from credo.checks import nearest
from credo.data.shifts import pixels
from credo.data.shifts.base import Shift, check_floats, check_severity, generator_of
from credo.errors import DataError

_ROUNDING = 1e-3
"""How far beside [0, 1] the pixels of standardised images may come back."""


@final
@dataclass(frozen=True)
class ImageShift:
    """A change of images (N, C, H, W) in [0, 1] at five severities.

    Args:
        name: What `IMAGES` calls it.
        amounts: One for each severity from 1 to 5.
        unit: What the amounts are.
        change: ``change(x, amount, generator)``; its result is clipped to [0, 1].
    """

    name: str
    amounts: tuple[float, float, float, float, float]
    unit: str
    change: Callable[[Tensor, float, Generator], Tensor]

    def __call__(self, x: Tensor, severity: int, seed: int = 0) -> Tensor:
        """The shifted images, in the dtype and on the device they came in.

        Args:
            x: Images (N, C, H, W) of floating-point numbers in [0, 1].
            severity: 1 to 5; 0 gives ``x`` back.
            seed: Of whatever is drawn at random, the same draws at every severity.

        Raises:
            DataError: ``x`` is no such tensor, or the severity is another.
        """
        severity = check_severity(self.name, severity)
        x = check_images(self.name, x)
        if severity == 0:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        changed = self.change(wide, self.amounts[severity - 1], generator_of(seed))
        return changed.clamp(0, 1).to(x.dtype)

    def with_labels(
        self, x: Tensor, y: Tensor, severity: int, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Shifted images and their labels, which stay.

        Args:
            x: Images.
            y: One label for each.
            severity: 0 to 5.
            seed: As in a call.
        """
        return self(x, severity, seed), y

    def __repr__(self) -> str:
        listed = ", ".join(f"{amount:g}" for amount in self.amounts)
        return f"ImageShift({self.name!r}: {listed}; {self.unit})"


def check_images(name: str, x: object) -> Tensor:
    """The images, if they are (N, C, H, W), floating-point and in [0, 1].

    Args:
        name: The shift, for the error.
        x: What was given.

    Raises:
        DataError: They are not; the message says what to do.
    """
    images = check_floats(name, x)
    if images.ndim != 4 or 0 in images.shape:
        raise DataError(
            f"{name} needs images (N, C, H, W) with at least one pixel, but their shape is "
            f"{tuple(images.shape)}"
            + (": x.unsqueeze(1) adds the channel" if images.ndim == 3 else "")
        )
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise DataError(
            f"{name} needs pixels in [0, 1], but they reach from {low:.4g} to {high:.4g}: divide "
            "pixels of 0 to 255 by 255, and wrap the shift for images that are standardised: "
            "credo.data.shifts.on_pixels(shift, mean, std)"
        )
    return images


def _table(*shifts: ImageShift) -> dict[str, ImageShift]:
    return {shift.name: shift for shift in shifts}


IMAGES: dict[str, ImageShift] = _table(
    ImageShift("rotation", (9, 18, 27, 36, 45), "degrees", pixels.rotation),
    ImageShift("translation", (2 / 28, 4 / 28, 6 / 28, 8 / 28, 10 / 28), "of the width, cyclic",
               pixels.translation),
    ImageShift("gaussian_noise", (0.04, 0.06, 0.08, 0.09, 0.10), "standard deviation",
               pixels.gaussian_noise),
    ImageShift("shot_noise", (500, 250, 100, 75, 50), "photons at white", pixels.shot_noise),
    ImageShift("impulse_noise", (0.01, 0.02, 0.03, 0.05, 0.07), "share of values",
               pixels.impulse_noise),
    ImageShift("gaussian_blur", (0.4, 0.6, 0.7, 0.8, 1.0), "deviation, pixels of 32",
               pixels.gaussian_blur),
    ImageShift("defocus_blur", (0.6, 0.75, 1.0, 1.15, 1.55), "radius, pixels of 32",
               pixels.defocus_blur),
    ImageShift("contrast", (0.75, 0.5, 0.4, 0.3, 0.15), "factor", pixels.contrast),
    ImageShift("brightness", (0.05, 0.1, 0.15, 0.2, 0.3), "added to the value", pixels.brightness),
    ImageShift("haze", (0.2, 0.5, 0.75, 1.0, 1.5), "thickness", pixels.haze),
    ImageShift("pixelate", (0.95, 0.9, 0.85, 0.75, 0.65), "of the side", pixels.pixelate),
    ImageShift("jpeg", (80, 65, 58, 50, 40), "quality", pixels.jpeg),
    ImageShift("occlusion", (0.2, 0.3, 0.4, 0.5, 0.6), "of the side", pixels.occlusion),
)  # fmt: skip
"""Every image shift by name."""


def image_shift(name: str) -> ImageShift:
    """A shift of `IMAGES`, or a `DataError` that names the nearest one.

    Args:
        name: What it is called.

    >>> image_shift("gaussian_blur").amounts
    (0.4, 0.6, 0.7, 0.8, 1.0)
    """
    if name not in IMAGES:
        raise DataError(
            f"no image shift is called {name!r}.{nearest(name, IMAGES)} There are "
            f"{', '.join(IMAGES)}."
        )
    return IMAGES[name]


@final
@dataclass(frozen=True)
class OnPixels:
    """A shift of pixels for images that are standardised: see `on_pixels`.

    Args:
        shift: The shift of images in [0, 1].
        mean: What was subtracted, one number for each channel or one for all.
        std: What was divided by, likewise.
    """

    shift: Shift
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor, severity: int, seed: int = 0) -> Tensor:
        """The shifted images, standardised as they came.

        Args:
            x: Standardised images (N, C, H, W).
            severity: 0 to 5.
            seed: Of the shift.

        Raises:
            DataError: They are not standardised by this mean and std.
        """
        if check_severity(repr(self.shift), severity) == 0:
            return x
        x = check_floats("on_pixels", x)
        if x.ndim != 4 or len(self.mean) not in (1, x.shape[1]):
            raise DataError(
                f"on_pixels needs images (N, C, H, W) of {len(self.mean)} channels, but their "
                f"shape is {tuple(x.shape)}"
            )
        mean, std = (x.new_tensor(values).reshape(1, -1, 1, 1) for values in (self.mean, self.std))
        images = x * std + mean
        low, high = float(images.min()), float(images.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise DataError(
                f"on_pixels: with mean {self.mean} and std {self.std} the pixels reach from "
                f"{low:.4g} to {high:.4g} instead of [0, 1]: give the numbers that the images were "
                "standardised by"
            )
        return (self.shift(images.clamp(0, 1), severity, seed) - mean) / std


def on_pixels(
    shift: Shift | str,
    mean: float | Sequence[float] | Tensor,
    std: float | Sequence[float] | Tensor,
) -> OnPixels:
    """The shift for images that were standardised: x = (pixels − mean)/std.

    Undoes the standardisation, shifts, and standardises by the same numbers again.

    Args:
        shift: A shift of images in [0, 1], or its name in `IMAGES`.
        mean: One number, or one for each channel: ``pixels.mean((0, 2, 3))``.
        std: Likewise: ``pixels.std((0, 2, 3), correction=0)`` for `credo.data.standardise`.

    >>> x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> darker = on_pixels("contrast", mean=0.5, std=0.25)((x - 0.5) / 0.25, 3)
    >>> torch.allclose(darker * 0.25 + 0.5, IMAGES["contrast"](x, 3), atol=1e-6)
    True
    """
    chosen = image_shift(shift) if isinstance(shift, str) else shift
    numbers = [torch.as_tensor(v, dtype=torch.float64).flatten() for v in (mean, std)]
    means, stds = (tuple(map(float, values)) for values in numbers)
    if len(means) != len(stds) or not all(s > 0 for s in stds):
        raise DataError(
            f"on_pixels needs a mean and a positive std for each channel, but they are {means} "
            f"and {stds}"
        )
    return OnPixels(chosen, means, stds)
