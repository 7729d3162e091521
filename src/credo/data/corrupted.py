r"""Corrupted test sets that users have as folders of ``.npy`` files: CIFAR-10-C and MNIST-C.

CIFAR-10-C (and CIFAR-100-C) has a file for each corruption, ``fog.npy``, (50000, 32, 32, 3) of
uint8: the 10,000 test images at severity 1, then at 2, … 5; and ``labels.npy``, (50000,). MNIST-C
has a folder for each corruption at one severity, ``fog/test_images.npy``, (10000, 28, 28, 1) of
uint8, and ``fog/test_labels.npy``. Neither comes with Credo.

References: Hendrycks & Dietterich, "Benchmarking neural network robustness to common corruptions
and perturbations", 2019 (arXiv:1903.12261); Mu & Gilmer, "MNIST-C: a robustness benchmark for
computer vision", 2019 (arXiv:1906.02337).
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.checks import checked, nearest
from credo.data.image_set import unit_images
from credo.data.npy import read_npy
from credo.errors import DataError, FileFormatError

Folder = str | PathLike[str]
_SEVERITIES = 5
_LABELS = "labels"


def corruptions(folder: Folder) -> list[str]:
    """The names of the corruptions that a folder of CIFAR-10-C or MNIST-C has.

    Args:
        folder: Where the files are.

    Raises:
        DataError: It is no folder, or holds neither kind of file.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is no folder: give the one that CIFAR-10-C or MNIST-C unpacks to")
    names = [p.stem for p in root.glob("*.npy") if p.stem != _LABELS]
    names += [p.parent.name for p in root.glob("*/test_images.npy")]
    if not names:
        raise DataError(
            f"{root} has neither files like fog.npy (CIFAR-10-C) nor folders with test_images.npy "
            "(MNIST-C): give the folder that the archive unpacks to"
        )
    return sorted(names)


@checked
def read_cifar_c(
    folder: Folder,
    corruption: str,
    severity: Literal[1, 2, 3, 4, 5],
    classes: Literal[10, 100] = 10,
) -> tuple[Tensor, Tensor]:
    """Test images (N, 3, 32, 32), float32 in [0, 1], of one corruption and severity; labels (N,).

    Only that severity's fifth of the file is read.

    Args:
        folder: Where ``<corruption>.npy`` and ``labels.npy`` are.
        corruption: Its name, such as "fog"; `corruptions` lists them.
        severity: 1 to 5.
        classes: 10, or 100 for CIFAR-100-C.

    Raises:
        DataError: There is no such corruption.
        FileFormatError: A file is damaged, or not what it should be.
    """
    path = _existing(Path(folder), corruption, Path(folder) / f"{corruption}.npy")
    images = read_npy(path, severity - 1, _SEVERITIES)
    labels = read_npy(path.with_name(f"{_LABELS}.npy"), severity - 1, _SEVERITIES)
    return _images(path, images, labels, (32, 32, 3), classes)


@checked
def read_mnist_c(
    folder: Folder, corruption: str, split: Literal["test", "train"] = "test"
) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28), float32 in [0, 1], of one corruption, and labels (N,).

    Args:
        folder: The one that has a folder for each corruption.
        corruption: Its name, such as "fog"; `corruptions` lists them.
        split: "test" or "train".

    Raises:
        DataError: There is no such corruption.
        FileFormatError: A file is damaged, or not what it should be.
    """
    place = Path(folder) / corruption
    path = _existing(Path(folder), corruption, place / f"{split}_images.npy")
    labels = read_npy(place / f"{split}_labels.npy")
    return _images(path, read_npy(path), labels, (28, 28, 1), 10)


def _existing(folder: Path, corruption: str, path: Path) -> Path:
    known = corruptions(folder)
    # A name is one of a list, never a path that leads out of the folder.
    if corruption not in known or not path.is_file():
        raise DataError(
            f"{folder} has no corruption {corruption!r} of this kind.{nearest(corruption, known)} "
            f"There are {', '.join(known)}."
        )
    return path


def _images(
    path: Path, images: NDArray[Any], labels: NDArray[Any], shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor]:
    if images.dtype.str != "|u1" or images.shape[1:] != shape or labels.dtype.kind not in "iu":
        raise FileFormatError(
            f"{path}: images should be {('N', *shape)} of uint8 and labels (N,) of integers, but "
            f"they are {images.shape} {images.dtype} and {labels.shape} {labels.dtype}. Check that "
            "these are the right files."
        )
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return unit_images(pixels, torch.from_numpy(labels.astype("int64").ravel()), classes, str(path))
