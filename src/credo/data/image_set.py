"""What every image data set becomes, and the scaling of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.display import Display, Displayed
from credo.errors import DataError, FileFormatError


@dataclass(frozen=True, repr=False)
class ImageSet(Displayed):
    """Training and test images with labels.

    Args:
        name: What `credo.data.load` calls it.
        train: Images (N, C, H, W), float32 in [0, 1], and labels (N,), int64, that index
            ``classes``. A set that is for testing only has N = 0 of them.
        test: Likewise.
        classes: Their names.
        source: Which file or folder was read, and what a reader of results should know of it.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    source: str

    def _display(self) -> Display:
        images, _ = self.test
        size, numbers = "×".join(map(str, images.shape[1:])), dict(self._numbers())
        parts = [f"{count} {what}" for what, count in numbers.items()]
        return Display(
            f"{type(self).__name__} {self.name!r}: {', '.join(parts)}, {size} pixels",
            "credo.fit(model, method, data.train)",
            [*numbers.items(), ("source", self.source)],
        )

    def _numbers(self) -> list[tuple[str, str]]:
        return [
            ("images to train", f"{len(self.train[1]):,}"),
            ("to test", f"{len(self.test[1]):,}"),
            ("classes", str(len(self.classes))),
        ]


@dataclass(frozen=True, repr=False)
class ImageSetWithOod(ImageSet):
    """An `ImageSet` with images that belong to none of its classes.

    Args:
        name: What `credo.data.load` calls it.
        train: Images and labels.
        test: Likewise.
        classes: Their names.
        source: Which file or folder was read.
        ood: The others, (N, C, H, W), float32 in [0, 1].
    """

    ood: Tensor

    def _numbers(self) -> list[tuple[str, str]]:
        return [*super()._numbers(), ("images of something else", f"{len(self.ood):,}")]


def unit_images(pixels: Tensor, labels: Tensor, classes: int, source: str) -> tuple[Tensor, Tensor]:
    """Pixels 0…255 as float32 in [0, 1] and labels as int64, after a check that they fit.

    Args:
        pixels: (N, C, H, W) of uint8.
        labels: (N,) whole numbers.
        classes: How many classes there are.
        source: Where they come from, for the error.

    Raises:
        FileFormatError: There are not as many labels as images, or labels of no class.
    """
    if len(pixels) != len(labels):
        raise FileFormatError(
            f"{source}: there are {len(pixels):,} images and {len(labels):,} labels. "
            "The files belong to different sets or one is damaged: fetch them again."
        )
    labels = labels.to(torch.int64)
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FileFormatError(
            f"{source}: labels should lie in 0 to {classes - 1}, but they reach from "
            f"{int(labels.min())} to {int(labels.max())}. Check that these are the right files."
        )
    return pixels.to(torch.float32).div_(255), labels


def standardise(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Shift and scale by the training set's mean and standard deviation: (x − mean) / std.

    Images (N, C, …) are scaled per channel, tables (N, D) per column, vectors (N,) as a whole. The
    same numbers serve ``train`` and every one of ``others``, so nothing of a test set leaks into
    training. The standard deviation divides by N. A column that is constant in ``train`` is kept
    and only shifted.

    Args:
        train: What the mean and the standard deviation are taken of.
        *others: What is shifted and scaled by the same numbers, such as test inputs.

    Returns:
        ``train`` and all of ``others``, in their order.

    Raises:
        DataError: The tensors don't fit together, or ``train`` is empty or not finite.

    >>> standardise(torch.tensor([[0.0, 7.0], [2.0, 7.0]]), torch.tensor([[3.0, 8.0]]))
    (tensor([[-1.,  0.], [ 1.,  0.]]), tensor([[2., 1.]]))
    """
    for x in (train, *others):
        if not x.is_floating_point() or x.ndim == 0 or x.shape[1:2] != train.shape[1:2]:
            raise DataError(
                f"standardise got a tensor of {x.dtype} and shape {tuple(x.shape)} beside training "
                f"data of shape {tuple(train.shape)}; give floating-point tensors (N, D, …) with "
                "the same D"
            )
    if len(train) == 0 or not bool(torch.isfinite(train).all()):
        raise DataError(
            f"standardise needs finite training data, but its {len(train)} rows are empty or hold "
            "nan or inf; drop or fill those rows first"
        )
    reduced = [d for d in range(train.ndim) if d != 1]
    mean = train.mean(reduced, keepdim=True, dtype=torch.float64)
    # Rounding leaves a constant column a tiny spread, so constancy is asked of the values.
    constant = train.amin(reduced, keepdim=True) == train.amax(reduced, keepdim=True)
    std = (train.double() - mean).square().mean(reduced, keepdim=True).sqrt()
    std = torch.where(constant, 1.0, std)
    mean = torch.where(constant, train.amin(reduced, keepdim=True).double(), mean)
    return tuple(((x - mean.to(x)) / std.to(x)) for x in (train, *others))
