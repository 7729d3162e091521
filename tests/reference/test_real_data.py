"""The real files, held against facts that others published about them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from credo.data import load
from credo.data.image_set import ImageSet
from credo_papers.uci_tables import uci

ROOT = os.environ.get("CREDO_DATA")


def real(name: str) -> ImageSet:
    files = {
        "mnist": "mnist",
        "fashion-mnist": "fashion-mnist",
        "cifar10": "cifar-10-batches-bin",
        "notmnist": "notmnist_10k.npz",
        "svhn": "svhn_test5k_32x32.npz",
    }
    return load(name, require(files[name]))


def require(file: str) -> Path:
    if not ROOT:
        pytest.skip("CREDO_DATA names no folder with real data sets")
    if not Path(ROOT, file).exists():
        pytest.skip(f"the folder in CREDO_DATA has no {file}")
    return Path(ROOT)


# Mean and standard deviation of the training pixels, as commonly quoted to four digits, and the
# first test label; the class counts are those of the sets' own descriptions.
@pytest.mark.parametrize(
    ("name", "shape", "mean", "std", "counts", "first"),
    [
        ("mnist", (60_000, 1, 28, 28), [0.1307], [0.3081],
         [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009], "7"),
        ("fashion-mnist", (60_000, 1, 28, 28), [0.2860], [0.3530], [1000] * 10, "ankle boot"),
        ("cifar10", (50_000, 3, 32, 32), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616],
         [1000] * 10, "cat"),
    ],
)  # fmt: skip
def test_real_sets_have_the_published_statistics(
    name: str,
    shape: tuple[int, ...],
    mean: list[float],
    std: list[float],
    counts: list[int],
    first: str,
) -> None:
    data = real(name)
    images, labels = data.train
    assert images.shape == shape
    assert labels.shape == shape[:1]
    assert data.test[1].bincount().tolist() == counts
    assert data.classes[int(data.test[1][0])] == first
    stds, means = torch.std_mean(images, dim=(0, 2, 3), correction=0)
    # Half a unit of the quoted fourth digit, and as much again for how it was rounded.
    torch.testing.assert_close(means, torch.tensor(mean), atol=1e-4, rtol=0)
    torch.testing.assert_close(stds, torch.tensor(std), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "shape", "note"),
    [
        ("notmnist", (10_000, 1, 28, 28), "no training images"),
        ("svhn", (5_000, 3, 32, 32), "not the official pixels"),
    ],
)
def test_sets_for_testing_only(name: str, shape: tuple[int, ...], note: str) -> None:
    data = real(name)
    assert data.test[0].shape == shape
    assert len(data.train[0]) == 0
    assert note in data.source
    assert data.test[1].unique().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("name", "rows", "columns", "range_of_y"),
    [
        ("yacht", 308, 6, (0.01, 62.42)),
        ("concrete", 1030, 8, (2.33, 82.6)),
        ("wine_red", 1599, 11, (3, 8)),
    ],
)
def test_uci_tables(name: str, rows: int, columns: int, range_of_y: tuple[float, float]) -> None:
    root = require("uci_yacht_concrete_wine.npz")
    sets = {tuple(uci(name, s, root)[3].flatten().tolist()) for s in range(20)}
    assert len(sets) == 20
    x_train, y_train, x_test, y_test = uci(name, 0, root)
    assert x_train.shape[1] == x_test.shape[1] == columns
    y = torch.cat([y_train, y_test])
    assert len(y) == rows
    assert abs(len(y_test) - rows / 10) <= 1
    assert (round(y.min().item(), 2), round(y.max().item(), 2)) == range_of_y
