"""CamVid: street scenes with a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.data.npz import read_npz
from credo.data.sets import data_root, first_existing
from credo.display import Display, Displayed
from credo.errors import FileFormatError

_FILE = "camvid_120x160.npz"
_PARTS = ("train", "val", "test")
_IMAGE = (120, 160, 3)
_CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car",
            "pedestrian", "bicyclist")  # fmt: skip


@dataclass(frozen=True, repr=False)
class SegmentationSet(Displayed):
    """Images with masks, for training, validation and testing.

    Args:
        name: What it is called.
        train: Images (N, C, H, W), float32 in [0, 1], and masks (N, H, W), int64, whose entries
            index ``classes`` or are ``void``.
        val: Likewise.
        test: Likewise.
        classes: Their names.
        void: A pixel without a known class, to be left out by ``Categorical(ignore_index=void)``
            and by the metrics' ``ignore_index``.
        source: Which file was read.
    """

    name: str
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    void: int
    source: str

    def _display(self) -> Display:
        numbers = [(part, f"{len(getattr(self, part)[0]):,}") for part in _PARTS]
        size = "×".join(map(str, self.test[0].shape[1:]))
        counts = ", ".join(f"{count} {part}" for part, count in numbers)
        return Display(
            f"SegmentationSet {self.name!r}: {counts} images {size}, {len(self.classes)} classes",
            "credo.fit(model, method, scenes.train)",
            [*numbers, ("source", self.source)],
        )


def camvid(root: str | PathLike[str] | None = None) -> SegmentationSet:
    """CamVid at 120×160 with 11 classes, 11 = void: 367, 101 and 233 images.

    Read from ``camvid_120x160.npz``, which ``papers/make_data.py`` makes from the published images:
    ``x_train`` (N, 120, 160, 3) and ``y_train`` (N, 120, 160), both uint8, and likewise ``val`` and
    ``test``.

    Args:
        root: The folder that has it; by default the one that CREDO_DATA names.

    Raises:
        DataError: The file is not there.
        FileFormatError: It is damaged, or has other arrays.

    References: G. Brostow, J. Fauqueur, R. Cipolla, "Semantic object classes in video: a
    high-definition ground truth database", 2009; V. Badrinarayanan, A. Kendall, R. Cipolla,
    "SegNet", 2017 (the 11 classes and the three parts).
    """
    path = first_existing(data_root(root, "camvid"), [_FILE], "camvid")
    arrays = read_npz(path, [f"{kind}_{part}" for part in _PARTS for kind in "xy"])
    train, val, test = (
        _pair(arrays[f"x_{part}"], arrays[f"y_{part}"], part, path) for part in _PARTS
    )
    return SegmentationSet("camvid", train, val, test, _CLASSES, len(_CLASSES), str(path))


def _pair(
    images: NDArray[Any], masks: NDArray[Any], part: str, path: Path
) -> tuple[Tensor, Tensor]:
    """Pixels as float32 in [0, 1] with the channels first and masks as int64, once they fit."""
    if (
        images.dtype != np.uint8
        or masks.dtype != np.uint8
        or images.shape[1:] != _IMAGE
        or masks.shape != images.shape[:3]
    ):
        raise FileFormatError(
            f"{path}: the images of {part!r} should be {('N', *_IMAGE)} and the masks "
            f"{('N', *_IMAGE[:2])}, both uint8, but they are {images.shape} {images.dtype} and "
            f"{masks.shape} {masks.dtype}. Check that it is the right file."
        )
    if int(masks.max()) > len(_CLASSES):
        raise FileFormatError(
            f"{path}: the masks of {part!r} should hold classes 0 to {len(_CLASSES) - 1} and "
            f"{len(_CLASSES)} for void, but they reach {int(masks.max())}. Check that it is the "
            "right file."
        )
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32)
    return pixels.contiguous().div_(255), torch.from_numpy(masks).to(torch.int64)
