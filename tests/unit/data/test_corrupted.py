"""Folders like CIFAR-10-C and MNIST-C, made here: what is read, and what is refused by name."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from credo.data import corruptions, read_cifar_c, read_mnist_c
from credo.data.npy import read_npy
from credo.errors import DataError, FileFormatError

EACH = 6
"""Images of each severity, in place of 10,000."""


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=allow_pickle)
    return out.getvalue()


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(EACH) % 10, 5).astype("u1")
    np.save(tmp_path / "labels.npy", labels)
    for name in ("fog", "jpeg_compression"):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 256, (5 * EACH, 32, 32, 3), "u1"))
    return tmp_path


@pytest.fixture
def mnist_c(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name in ("fog", "zigzag"):
        (tmp_path / name).mkdir()
        for split, count in (("test", 4), ("train", 8)):
            images = rng.integers(0, 256, (count, 28, 28, 1), "u1")
            np.save(tmp_path / name / f"{split}_images.npy", images)
            np.save(tmp_path / name / f"{split}_labels.npy", np.arange(count, dtype="i8"))
    return tmp_path


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("by_column", [False, True])
def test_one_severity_of_cifar_c(cifar_c, severity, by_column):
    whole = np.load(cifar_c / "fog.npy")
    if by_column:
        np.save(cifar_c / "fog.npy", np.asfortranarray(whole))
    x, y = read_cifar_c(cifar_c, "fog", severity)
    rows = slice((severity - 1) * EACH, severity * EACH)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    np.testing.assert_array_equal((x * 255).round().permute(0, 2, 3, 1).numpy(), whole[rows])
    assert y.tolist() == list(range(EACH))


@pytest.mark.parametrize(("split", "count"), [("test", 4), ("train", 8)])
def test_mnist_c(mnist_c, split, count):
    x, y = read_mnist_c(mnist_c, "zigzag", split)
    whole = np.load(mnist_c / "zigzag" / f"{split}_images.npy")
    np.testing.assert_array_equal((x * 255).round().permute(0, 2, 3, 1).numpy(), whole)
    assert y.tolist() == list(range(count))


def test_names_are_listed_and_the_nearest_is_named(cifar_c, tmp_path):
    assert corruptions(cifar_c) == ["fog", "jpeg_compression"]
    with pytest.raises(DataError, match=r"no corruption 'jpeg_compresion'.* Did you mean 'jpeg_"):
        read_cifar_c(cifar_c, "jpeg_compresion", 1)
    with pytest.raises(DataError, match="severity must be one of 1, 2, 3, 4, 5, but it is 6"):
        read_cifar_c(cifar_c, "fog", 6)
    with pytest.raises(DataError, match="is no folder"):
        corruptions(tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"neither files like fog\.npy"):
        corruptions(tmp_path / "empty")


def test_a_name_does_not_lead_out_of_the_folder(mnist_c):
    inner = mnist_c / "zigzag"
    with pytest.raises(DataError, match=r"no corruption '\.\./fog'"):
        read_mnist_c(mnist_c, "../fog")
    with pytest.raises(DataError, match=r"no corruption '\.\./fog/test_images'"):
        read_cifar_c(inner, "../fog/test_images", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the data ends after 0"),
        (npy(np.zeros((5, 32, 32, 3), "u1"))[:-1], "the file has"),
        (npy(np.zeros((5, 32, 32, 3), "u1")) + b"x", "the file has"),
        (npy(np.array([{"a": 1}], object), allow_pickle=True), "should be plain numbers"),
        (npy(np.zeros((0, 32, 32, 3), "u1")), "should hold numbers"),
        (npy(np.zeros((6, 32, 32, 3), "u1")), "5 equal parts"),
        (npy(np.zeros((5, 32, 32, 3), "f4")), "of uint8"),
        (npy(np.zeros((5, 28, 28, 1), "u1")), "should be .*32, 32, 3"),
        (npy(np.zeros((10, 32, 32, 3), "u1")), "there are 2 images and 6 labels"),
    ],
)
def test_damaged_files_are_refused_by_name(cifar_c, content, words):
    (cifar_c / "fog.npy").write_bytes(content)
    with pytest.raises(FileFormatError, match=words) as refusal:
        read_cifar_c(cifar_c, "fog", 1)
    assert "fog.npy" in str(refusal.value)


def test_labels_of_no_class_are_refused(cifar_c):
    np.save(cifar_c / "labels.npy", np.full(5 * EACH, 10, "u1"))
    with pytest.raises(FileFormatError, match="labels should lie in 0 to 9"):
        read_cifar_c(cifar_c, "fog", 1)
    x, y = read_cifar_c(cifar_c, "fog", 1, classes=100)
    assert len(x) == len(y) == EACH


def test_a_header_that_promises_the_moon_costs_nothing(tmp_path):
    path = tmp_path / "moon.npy"
    honest = npy(np.zeros(1, "u1"))
    promise = honest.replace(b"(1,), }", b"(9999999999999,), }")
    lying = promise[:8] + (len(promise) - 11).to_bytes(2, "little") + promise[10:]
    path.write_bytes(lying)
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="should have 9,999,999,999,999 bytes"):
        read_npy(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_parts_are_numbered(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6))
    assert read_npy(tmp_path / "a.npy", 2, 3).tolist() == [4, 5]
    assert read_npy(tmp_path / "a.npy").tolist() == list(range(6))
    with pytest.raises(DataError, match="part 3 of 3 is not there"):
        read_npy(tmp_path / "a.npy", 3, 3)
    with pytest.raises(DataError, match="is no file"):
        read_npy(tmp_path / "b.npy")
