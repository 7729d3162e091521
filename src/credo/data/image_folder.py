r"""Images in folders that are named by their classes, as ImageNet comes: ``train/tench/1.JPEG``.

A set of a million photographs from the web has some that are broken, and anyone may have put them
there. So a file is opened as JPEG or PNG only, whatever its name says; its header is held against
`MAX_PIXELS` before a pixel is unpacked; and whatever goes wrong in between is a `FileFormatError`
with the file's name, which `Crops` can count and go on from.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from credo.checks import Count, checked, import_extra
from credo.data.augment import Box, centre_box, random_box
from credo.data.bounded import malformed
from credo.errors import DataError, FileFormatError, MissingExtraError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 2**26
"""The most that an image may have: 200 MB of RGB. ImageNet's largest have a fifth of this."""

SUFFIXES = (".jpeg", ".jpg", ".png")
FORMATS = ("JPEG", "PNG")
NO_LABEL = -1
TRIES = 8
"""How many images in a row may be unreadable before training on them stops."""


def _pillow() -> Any:
    return import_extra("PIL.Image", extra="images", purpose="reading JPEG and PNG files")


def open_image(path: str | PathLike[str]) -> Image.Image:
    """The image as RGB; grey, CMYK and palettes are converted.

    Args:
        path: A JPEG or PNG file, whatever its name is.

    Raises:
        FileFormatError: It is none, is damaged, or promises more than `MAX_PIXELS`.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            # Odd metadata and mere size are warned of; what matters of them is checked here.
            warnings.simplefilter("ignore")
            with _pillow().open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise malformed(
                        path,
                        f"the header promises {width:,}×{height:,} pixels",
                        f"Credo unpacks at most {MAX_PIXELS:,}",
                        "If the image is genuine, make it smaller.",
                    )
                return image.convert("RGB")
    except (FileFormatError, MissingExtraError):
        raise
    except Exception as error:  # a decoder raises whatever it stumbles over
        problem = f"it does not unpack ({type(error).__name__}: {error})"
        raise malformed(path, "this should be a JPEG or PNG image", problem) from error


def cut(image: Image.Image, box: Box, side: int) -> Tensor:
    """A part of the image, resized to a square: (3, side, side), uint8.

    Args:
        image: An RGB image.
        box: Left, top, right and bottom edge of the part.
        side: How many pixels the square is wide.
    """
    part = image.resize((side, side), _pillow().Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()


@dataclass(frozen=True, repr=False)
class ImageFolder:
    """The images below a folder, in the order of their names.

    Args:
        files: The images.
        labels: (N,), int64, that index ``classes``; `NO_LABEL` where images lie in the folder
            itself instead of in the folder of a class.
        classes: Their names.
    """

    files: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ImageFolder({len(self):,} images, {len(self.classes)} classes)"

    @property
    def is_labelled(self) -> bool:
        """Whether there are classes to compare predictions with."""
        return bool((self.labels != NO_LABEL).all())

    @classmethod
    def find(cls, root: str | PathLike[str], classes: Sequence[str] | None = None) -> ImageFolder:
        """List ``root/class/*.JPEG`` (or .jpg, .png), or ``root/*.JPEG`` without labels.

        Hidden files, other files and deeper folders are passed over.

        Args:
            root: The folder.
            classes: Those of training, in their order, where this is another part of the same set:
                a class that is not among them is refused, one of which there are no images is not.

        Raises:
            DataError: There are no images, or classes that training does not have.

        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("dog/a.JPEG", "cat/b.png", "cat/notes.txt"):
        ...         pathlib.Path(root, name).parent.mkdir(exist_ok=True)
        ...         pathlib.Path(root, name).touch()
        ...     folder = ImageFolder.find(root)
        >>> folder.classes, folder.labels, [file.name for file in folder.files]
        (('cat', 'dog'), tensor([0, 1]), ['b.png', 'a.JPEG'])
        """
        root = Path(root)
        if not root.is_dir():
            raise DataError(f"images are looked for in {root}, which is no folder")
        if bare := _images_in(root):
            labels = torch.full((len(bare),), NO_LABEL)
            return cls(tuple(bare), labels, tuple(classes or ()))
        folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        images = {folder.name: _images_in(folder) for folder in folders}
        if not any(images.values()):
            raise DataError(
                f"{root} has no images: it should have a folder for each class with "
                f"{', '.join(SUFFIXES)} files in it, or such files themselves"
            )
        names = tuple(classes) if classes else tuple(images)
        if strangers := sorted(images.keys() - set(names)):
            raise DataError(
                f"{root} has the class {strangers[0]!r} (and {len(strangers) - 1} more) that the "
                f"{len(names)} classes of training don't have"
            )
        if not classes and (empty := [name for name, files in images.items() if not files]):
            raise DataError(
                f"{root / empty[0]} should have images of a class, but has none (nor have "
                f"{len(empty) - 1} more): put them there or remove the folder"
            )
        place = {name: index for index, name in enumerate(names)}
        pairs = [(file, place[name]) for name, files in images.items() for file in files]
        labels = torch.tensor([label for _, label in pairs])
        return cls(tuple(file for file, _ in pairs), labels, names)

    def __len__(self) -> int:
        return len(self.files)


class Crop(NamedTuple):
    """A square of an image.

    In a batch these are images (B, 3, side, side), labels (B,) and a list of B texts.

    Args:
        image: (3, side, side), uint8.
        label: Its class.
        problem: What was wrong with the file, or "".
    """

    image: Tensor
    label: Tensor
    problem: str


@checked
class Crops(Dataset[Crop]):
    """Squares out of a folder's images.

    ``crops[index]`` is the centre of an image, for prediction; ``crops[index, seed]`` a random part
    of it (`credo.data.augment.random_box`), flipped or not, for training. Draws are a function of
    the seed alone, so that worker processes and ranks need no state.

    The ``problem`` of an image that can't be read says so, and in training it is replaced by the
    next that can (of the same class, mostly); in prediction it is black, for the caller to leave
    out.

    Args:
        folder: The images.
        side: How many pixels the squares are wide.
        strict: Whether an image that can't be read is a `FileFormatError` instead.
    """

    def __init__(self, folder: ImageFolder, side: Count, *, strict: bool = False) -> None:
        self.folder, self.side, self.strict = folder, side, strict

    def __repr__(self) -> str:
        return f"Crops({len(self):,} images, {self.side}×{self.side})"

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, key: int | tuple[int, int]) -> Crop:
        index, seed = key if isinstance(key, tuple) else (key, None)
        problem = ""
        for place in range(index, index + (1 if seed is None else TRIES)):
            try:
                image, label = self._read(place % len(self), seed)
            except FileFormatError as error:
                if self.strict:
                    raise
                problem = problem or str(error)
            else:
                return Crop(image, label, problem)
        if seed is not None:
            raise FileFormatError(f"{TRIES} images in a row can't be read; the first: {problem}")
        black = torch.zeros(3, self.side, self.side, dtype=torch.uint8)
        return Crop(black, self.folder.labels[index], problem)

    def _read(self, index: int, seed: int | None) -> tuple[Tensor, Tensor]:
        image, label = open_image(self.folder.files[index]), self.folder.labels[index]
        if seed is None:
            return cut(image, centre_box(*image.size), self.side), label
        generator = Generator().manual_seed(seed)
        square = cut(image, random_box(*image.size, generator), self.side)
        flip = bool(torch.randint(2, (), generator=generator))
        return square.flip(-1) if flip else square, label


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
