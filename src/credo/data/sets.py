"""Named image sets, from the folder that CREDO_DATA names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from credo.data.cifar import read_cifar_set
from credo.data.embedded import digits
from credo.data.idx import read_idx
from credo.data.image_set import ImageSet, unit_images
from credo.data.mat import read_svhn
from credo.data.npz import read_npz
from credo.errors import DataError, FileFormatError

_DIGITS = tuple("0123456789")
_FASHION = ("t-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
            "bag", "ankle boot")  # fmt: skip
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
            "truck")  # fmt: skip
_CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
    crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905
)
_Loader: TypeAlias = Callable[[Path], ImageSet]
_SVHN_FALLBACK = "svhn_test5k_32x32.npz"
_NOTMNIST = "notmnist_10k.npz"


def load(name: str, root: str | PathLike[str] | None = None) -> ImageSet:
    """An image set by name: digits, mnist, fashion-mnist, cifar10, cifar100, svhn or notmnist.

    "digits" needs no files. What is looked for under the root:

    - mnist, fashion-mnist: the four IDX files, gzipped or not, in ``mnist``, ``fashion-mnist``
      (or ``MNIST/raw``, ``FashionMNIST/raw``);
    - cifar10, cifar100: ``cifar-10-batches-bin``, ``cifar-10-batches-py``, ``cifar-100-binary``,
      ``cifar-100-python``, or the archives ``cifar-10-binary.tar.gz``, … they come in;
    - svhn: ``train_32x32.mat`` and ``test_32x32.mat``, in ``svhn`` or the root itself; failing
      these ``svhn_test5k_32x32.npz``, whose 5,000 images are crops of the full-number photographs,
      not the official test set's pixels: ``source`` says so, and there are no training images;
    - notmnist: ``notmnist_10k.npz``, letters A to J, for testing only.

    ``papers/make_data.py`` of the repository makes the two ``.npz`` files from what their authors
    published. None of the sets but the digits comes with Credo; each has its own terms of use.

    Args:
        name: One of those.
        root: The folder that holds the data sets; by default the one that the environment variable
            CREDO_DATA names.

    Raises:
        DataError: There is no set of that name, or its files are not there.
        FileFormatError: A file is damaged or something else.

    >>> load("digits").test[1].shape
    torch.Size([500])
    """
    if name == "digits":
        return digits()
    if name not in _LOADERS:
        raise DataError(f"no data set is called {name!r}; there are digits, {', '.join(_LOADERS)}")
    return _LOADERS[name](data_root(root, name))


def data_root(root: str | PathLike[str] | None, name: str) -> Path:
    """The folder with real data.

    Args:
        root: A folder, or None for the one that CREDO_DATA names.
        name: Which set is wanted, for the error.

    Raises:
        DataError: There is no such folder.
    """
    chosen = root or os.environ.get("CREDO_DATA")
    if not chosen:
        raise DataError(
            f"the data set {name!r} is read from files, and no folder is given: set the "
            "environment variable CREDO_DATA to the folder that holds the data sets, or pass root="
        )
    if not Path(chosen).is_dir():
        raise DataError(
            f"the data set {name!r} was looked for in {chosen}, which is no folder: correct the "
            "environment variable CREDO_DATA or root="
        )
    return Path(chosen)


def first_existing(root: Path, candidates: Sequence[str], name: str) -> Path:
    """The first of several files or folders that exists.

    Args:
        root: Where they are looked for.
        candidates: Their paths under it.
        name: Which set is wanted, for the error.

    Raises:
        DataError: None does; the message lists them.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    raise DataError(
        f"the data set {name!r} needs one of {', '.join(candidates)} in {root}, and none is there: "
        "put one there, or let the environment variable CREDO_DATA (or root=) name another folder"
    )


def _idx_loader(name: str, other: str, classes: tuple[str, ...]) -> _Loader:
    def read(root: Path, part: str) -> Tensor:
        files = [f"{folder}/{part}{end}" for folder in (name, other) for end in ("", ".gz")]
        return read_idx(first_existing(root, files, name))

    def split(root: Path, prefix: str) -> tuple[Tensor, Tensor]:
        images = read(root, f"{prefix}-images-idx3-ubyte")
        labels = read(root, f"{prefix}-labels-idx1-ubyte")
        if images.shape[1:] != (28, 28) or labels.ndim != 1 or images.dtype != torch.uint8:
            raise FileFormatError(
                f"{name} in {root}: images should be (N, 28, 28) uint8 and labels (N,), but they "
                f"are {tuple(images.shape)} {images.dtype} and {tuple(labels.shape)}. Check that "
                "these are the right files."
            )
        return unit_images(images.unsqueeze(1), labels, len(classes), f"{name} in {root}")

    def loader(root: Path) -> ImageSet:
        train, test = split(root, "train"), split(root, "t10k")
        return ImageSet(name, train, test, classes, f"IDX files in {root}")

    return loader


def _cifar_loader(name: str, n: Literal[10, 100], classes: tuple[str, ...]) -> _Loader:
    folders = [f"cifar-{n}-{kind}" for kind in ("batches-bin", "batches-py", "binary", "python")]
    archives = [f"cifar-{n}-{kind}.tar.gz" for kind in ("binary", "python")]

    def loader(root: Path) -> ImageSet:
        path = first_existing(root, folders + archives, name)
        train, test = (unit_images(*part, n, str(path)) for part in read_cifar_set(path, n))
        return ImageSet(name, train, test, classes, str(path))

    return loader


def _load_svhn(root: Path) -> ImageSet:
    tests = ["svhn/test_32x32.mat", "test_32x32.mat", _SVHN_FALLBACK]
    test_path = first_existing(root, tests, "svhn")
    if test_path.name == _SVHN_FALLBACK:
        note = "5,000 test images cropped from full-number photographs, not the official pixels"
        return _test_only("svhn", test_path, _DIGITS, (32, 32, 3), note)
    trains = ["svhn/train_32x32.mat", "train_32x32.mat"]
    train_path = first_existing(root, trains, "svhn")
    train, test = (unit_images(*read_svhn(p), 10, str(p)) for p in (train_path, test_path))
    return ImageSet("svhn", train, test, _DIGITS, str(test_path.parent))


def _load_notmnist(root: Path) -> ImageSet:
    path = first_existing(root, [_NOTMNIST], "notmnist")
    return _test_only("notmnist", path, tuple("ABCDEFGHIJ"), (28, 28), "10,000 letters")


def _test_only(
    name: str, path: Path, classes: tuple[str, ...], shape: tuple[int, ...], note: str
) -> ImageSet:
    """A set from an .npz with x (N, H, W) or (N, H, W, C) of uint8 and y (N,)."""
    arrays = read_npz(path, ["x", "y"])
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    if x.dtype != torch.uint8 or x.shape[1:] != shape or y.ndim != 1 or y.dtype.is_floating_point:
        raise FileFormatError(
            f"{path}: x should be {('N', *shape)} of uint8 and y (N,) of integers, but they are "
            f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}. Check that it is the "
            "right file."
        )
    images = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x.unsqueeze(1)
    test = unit_images(images, y, len(classes), str(path))
    train = (test[0][:0].clone(), test[1][:0].clone())
    return ImageSet(name, train, test, classes, f"{path}: {note}; no training images")


_LOADERS: dict[str, _Loader] = {
    "mnist": _idx_loader("mnist", "MNIST/raw", _DIGITS),
    "fashion-mnist": _idx_loader("fashion-mnist", "FashionMNIST/raw", _FASHION),
    "cifar10": _cifar_loader("cifar10", 10, _CIFAR10),
    "cifar100": _cifar_loader("cifar100", 100, _CIFAR100),
    "svhn": _load_svhn,
    "notmnist": _load_notmnist,
}
