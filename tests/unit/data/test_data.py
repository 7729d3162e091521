"""Readers return what the formats say, sets have the stated shapes, toys follow their formulas."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

import credo.data as data
from credo.data.augment import FlippedAndShifted
from credo.data.cifar import read_cifar_set
from credo.data.npz import read_npz
from credo.data.pickled import read_pickle
from credo.errors import DataError, FileFormatError

IDX_CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def cifar_arrays(n: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
    return pixels, rng.integers(0, classes, n, dtype=np.uint8)


def binary_batch(n: int, classes: int = 10) -> bytes:
    pixels, labels = cifar_arrays(n, classes)
    coarse = [labels[:, None] // 5] if classes == 100 else []
    return np.concatenate([*coarse, labels[:, None], pixels], 1).tobytes()


def python_batch(n: int, classes: int = 10, protocol: int = 2) -> bytes:
    pixels, labels = cifar_arrays(n, classes)
    key = "labels" if classes == 10 else "fine_labels"
    names = [f"image_{i}.png" for i in range(n)]
    return pickle.dumps({"data": pixels, key: labels.tolist(), "filenames": names}, protocol)


# ---------------------------------------------------------------- IDX


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dtype", IDX_CODES)
def test_idx_returns_the_array_in_every_dtype(tmp_path: Path, dtype: str, zipped: bool) -> None:
    array = np.random.default_rng(0).integers(0, 100, (3, 4, 5)).astype(dtype)
    content = idx_bytes(array, IDX_CODES[dtype])
    file = tmp_path / "array"
    file.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    result = data.read_idx(file)
    assert result.dtype == torch.from_numpy(array).dtype
    np.testing.assert_array_equal(result.numpy(), array)


def test_idx_result_can_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx_bytes(np.ones(3, "u1"), 8))
    result = data.read_idx(tmp_path / "a")
    result += 1
    assert result.tolist() == [2, 2, 2]


# ---------------------------------------------------------------- CIFAR


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("version", ["binary", "python 2", "python 3", "python 4"])
def test_cifar_batch(tmp_path: Path, classes: int, version: str) -> None:
    if version == "binary":
        content = binary_batch(4, classes)
    else:
        content = python_batch(4, classes, int(version[-1]))
    (tmp_path / "batch").write_bytes(content)
    images, labels = data.read_cifar(tmp_path / "batch", classes)
    pixels, expected = cifar_arrays(4, classes)
    np.testing.assert_array_equal(images.numpy(), pixels.reshape(4, 3, 32, 32))
    np.testing.assert_array_equal(labels.numpy(), expected)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes that Python 2's cPickle wrote: byte strings, and numpy.core in the names."""
    raw = pixels.tobytes()
    minus_one = b"J\xff\xff\xff\xff"
    state = b"(K\x03U\x01|NNN" + minus_one + minus_one + b"K\x00t"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87Rq\x05" + state + b"b"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + b"(K\x01M" + len(pixels).to_bytes(2, "little") + b"M\x00\x0c\x86"
        + dtype + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )  # fmt: skip
    items = b"".join(b"K" + bytes([k]) for k in labels)
    return b"\x80\x02}q\x01(U\x04data" + array + b"U\x06labels]q\x02(" + items + b"eu."


def test_cifar_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    pixels, labels = cifar_arrays(3)
    content = python2_batch(pixels, labels.tolist())
    # Python's own unpickler agrees that this is what it says.
    theirs = pickle.loads(content, encoding="bytes")
    np.testing.assert_array_equal(theirs[b"data"], pixels)
    (tmp_path / "data_batch_1").write_bytes(content)
    images, got = data.read_cifar(tmp_path / "data_batch_1")
    np.testing.assert_array_equal(images.numpy().reshape(3, -1), pixels)
    assert got.tolist() == labels.tolist()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary() | st.integers(), inner)
    | st.lists(inner).map(tuple),
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_objects_come_out_of_a_pickle_as_python_reads_them(thing: object, p: int) -> None:
    assert read_pickle(pickle.dumps(thing, p), Path("x")) == thing


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<f4", "|u1", "|b1"])
def test_arrays_come_out_of_a_pickle(dtype: str, order: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    for protocol in (2, 3, 4):
        result = read_pickle(pickle.dumps(array, protocol), Path("x")).values
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


def cifar10_files(version: str) -> dict[str, bytes]:
    suffix, batch = (".bin", binary_batch) if version == "binary" else ("", python_batch)
    files = {f"data_batch_{i}{suffix}": batch(i) for i in range(1, 6)}
    return {**files, f"test_batch{suffix}": batch(7)}


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"some-folder/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_from_folder_and_archive(tmp_path: Path, version: str, packed: bool) -> None:
    files = cifar10_files(version)
    if packed:
        write_tar(tmp_path / f"cifar-10-{version}.tar.gz", files)
    else:
        folder = (
            tmp_path / {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"}[version]
        )
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    result = data.load("cifar10", tmp_path)
    expected = np.concatenate([cifar_arrays(i)[0] for i in range(1, 6)]).reshape(-1, 3, 32, 32)
    torch.testing.assert_close(result.train[0], torch.from_numpy(expected).float() / 255)
    assert (
        result.train[1].tolist()
        == np.concatenate([cifar_arrays(i)[1] for i in range(1, 6)]).tolist()
    )
    assert result.test[0].shape == (7, 3, 32, 32)
    assert len(result.classes) == 10


def test_cifar100_from_folder(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    for name, n in (("train.bin", 5), ("test.bin", 2)):
        (tmp_path / "cifar-100-binary" / name).write_bytes(binary_batch(n, 100))
    result = data.load("cifar100", tmp_path)
    assert result.train[1].tolist() == cifar_arrays(5, 100)[1].tolist()
    assert len(set(result.classes)) == 100
    assert list(result.classes) == sorted(result.classes)


def test_incomplete_cifar_names_what_is_missing(tmp_path: Path) -> None:
    files = cifar10_files("binary")
    del files["data_batch_3.bin"]
    write_tar(tmp_path / "a.tar.gz", files)
    with pytest.raises(DataError, match="no data_batch_3 "):
        read_cifar_set(tmp_path / "a.tar.gz")


def test_cifar_with_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="classes must be one of 10, 100, but it is 20"):
        data.read_cifar(tmp_path / "x", 20)


# ---------------------------------------------------------------- MAT, NPZ


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("label_type", ["u1", "f8", "i4"])
def test_svhn_equals_scipy(tmp_path: Path, compressed: bool, label_type: str) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 32, 3, 11), dtype=np.uint8)
    labels = np.arange(11)[:, None] % 10 + 1
    file = tmp_path / "test_32x32.mat"
    extra = {"note": "text", "cell": np.array([1, "a"], dtype=object)}
    content = {"X": pixels, "y": labels.astype(label_type), **extra}
    scipy.io.savemat(file, content, do_compression=compressed)
    theirs = scipy.io.loadmat(file)
    images, got = data.read_svhn(file)
    np.testing.assert_array_equal(images.numpy(), np.transpose(theirs["X"], (3, 2, 0, 1)))
    np.testing.assert_array_equal(got.numpy(), theirs["y"][:, 0].astype(int) % 10)


def test_svhn_set_and_its_fallback(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "svhn_test5k_32x32.npz", x=x, y=np.array([0, 9, 1, 2], "u1"))
    fallback = data.load("svhn", tmp_path)
    assert "not the official pixels" in fallback.source
    assert fallback.train[0].shape == (0, 3, 32, 32)
    assert fallback.train[1].shape == (0,)
    torch.testing.assert_close(
        fallback.test[0], torch.from_numpy(x.transpose(0, 3, 1, 2)).float() / 255
    )
    mat = {"X": x.transpose(1, 2, 3, 0), "y": np.array([[10], [9], [1], [2]], "u1")}
    (tmp_path / "svhn").mkdir()
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / "svhn" / f"{part}_32x32.mat", mat)
    official = data.load("svhn", tmp_path)
    torch.testing.assert_close(official.train[0], fallback.test[0])
    assert official.test[1].tolist() == [0, 9, 1, 2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_equals_numpy(tmp_path: Path, save: object) -> None:
    arrays = {
        "a": np.arange(6, dtype="i4").reshape(2, 3),
        "b": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "c": np.array(5),
        "d": np.arange(3, dtype=">f4"),
    }
    save(tmp_path / "a.npz", **arrays)
    result = read_npz(tmp_path / "a.npz", arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(result[name], array)
        assert result[name].dtype == array.dtype.newbyteorder("=")


# ---------------------------------------------------------------- sets


def test_mnist_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    for prefix, n in (("train", 5), ("t10k", 3)):
        images = idx_bytes(rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), 8)
        labels = idx_bytes(np.arange(n, dtype="u1"), 8)
        (tmp_path / "mnist" / f"{prefix}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(images, mtime=0)
        )
        (tmp_path / "mnist" / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    result = data.load("mnist", tmp_path)
    assert result.train[0].shape == (5, 1, 28, 28)
    assert result.train[0].dtype == torch.float32
    assert 0 <= result.train[0].min() < 0.1 < 0.9 < result.train[0].max() <= 1
    assert result.test[1].tolist() == [0, 1, 2]
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(
        idx_bytes(np.arange(4, dtype="u1"), 8)
    )
    with pytest.raises(FileFormatError, match="3 images and 4 labels"):
        data.load("mnist", tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(3, 10, "u1"), 8))
    with pytest.raises(FileFormatError, match="0 to 9, but they reach from 10 to 10"):
        data.load("mnist", tmp_path)


def test_missing_data_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDO_DATA", raising=False)
    with pytest.raises(DataError, match="set the environment variable CREDO_DATA"):
        data.load("mnist")
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no folder.*CREDO_DATA"):
        data.load("mnist")
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"mnist/train-images-idx3-ubyte\.gz.*CREDO_DATA"):
        data.load("mnist")
    for name in ("fashion-mnist", "cifar10", "cifar100", "svhn", "notmnist"):
        with pytest.raises(DataError, match="CREDO_DATA"):
            data.load(name)
    with pytest.raises(DataError, match="'imagenet'; there are digits, mnist"):
        data.load("imagenet")


def test_digits_are_split_without_overlap_and_always_alike() -> None:
    first, second = data.digits(), data.load("digits")
    for a, b in zip((*first.train, *first.test), (*second.train, *second.test), strict=True):
        assert torch.equal(a, b)
    from sklearn.datasets import load_digits

    together = torch.cat([first.train[0], first.test[0]]).flatten(1).mul(16)
    ours = sorted(map(tuple, together.tolist()))
    assert ours == sorted(map(tuple, load_digits().data.tolist()))
    assert first.test[1].unique().tolist() == list(range(10))
    assert first.test[1][:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]


def test_digits_ood_images_are_in_range_and_distinct() -> None:
    ood = data.digits().ood
    assert ood.shape == (500, 1, 8, 8)
    assert ood.dtype == torch.float32
    assert ood.min() == 0
    assert ood.max() == 1
    assert len(ood.flatten(1).unique(dim=0)) == 500


# ---------------------------------------------------------------- standardise


def test_standardise_equals_sklearn_on_tables() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(3, 5, (50, 4)), rng.normal(size=(7, 4))
    train[:, 2] = 0.1
    scaler = StandardScaler().fit(train)
    ours = data.standardise(torch.from_numpy(train), torch.from_numpy(test))
    # sklearn and we sum in different orders: a few ulps of numbers of order one.
    np.testing.assert_allclose(ours[0].numpy(), scaler.transform(train), atol=1e-13)
    np.testing.assert_allclose(ours[1].numpy(), scaler.transform(test), atol=1e-13)
    assert (ours[0][:, 2] == 0).all()


def test_standardise_scales_images_per_channel() -> None:
    images = torch.rand(20, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 5.0, 9.0]
    ).view(1, 3, 1, 1)
    (scaled,) = data.standardise(images)
    channels = scaled.double().transpose(0, 1).flatten(1)
    # float32 inputs: the mean of 320 numbers of order one is off by less than 1e-6.
    assert channels.mean(1).abs().max() < 1e-6
    assert (channels.std(1, correction=0) - 1).abs().max() < 1e-6
    assert scaled.dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [
        (torch.ones(3, 2, dtype=torch.int64),),
        (torch.ones(0, 2),),
        (torch.tensor([[math.nan]]),),
        (torch.ones(3, 2), torch.ones(3, 4)),
    ],
)
def test_standardise_refuses_what_it_cannot_scale(bad: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(DataError, match="standardise"):
        data.standardise(*bad)


# ---------------------------------------------------------------- toys


def test_two_moons_without_noise_lie_on_their_circles() -> None:
    x, y = data.two_moons(101, noise=0.0, seed=3)
    outer, inner = x[y == 0], x[y == 1]
    assert len(outer) == 51
    # float32 sine and cosine: radii are one to a few ulps.
    torch.testing.assert_close(outer.norm(dim=1), torch.ones(51), atol=1e-6, rtol=0)
    centred = inner - torch.tensor([1.0, 0.5])
    torch.testing.assert_close(centred.norm(dim=1), torch.ones(50), atol=1e-6, rtol=0)
    assert (outer[:, 1] >= -1e-6).all()
    assert (centred[:, 1] <= 1e-6).all()


def test_sinus_leaves_its_gap_and_has_the_stated_noise() -> None:
    n, noise = 4000, 0.3
    x, y = data.sinus_with_gap(n, seed=1, noise=noise)
    assert (x.abs() >= 1.5).all()
    assert (x.abs() <= 4).all()
    assert min((x < 0).sum(), (x > 0).sum()) > n / 2 - 5 * math.sqrt(n) / 2
    residual = y - x.sin()
    assert abs(residual.std().item() - noise) < 5 * noise / math.sqrt(2 * n)
    assert abs(residual.mean().item()) < 5 * noise / math.sqrt(n)


def test_toys_depend_on_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    for toy in (data.two_moons, data.sinus_with_gap):
        assert torch.equal(toy(20, seed=1)[0], toy(20, seed=1)[0])
        assert not torch.equal(toy(20, seed=1)[0], toy(20, seed=2)[0])
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(DataError, match="n must be a whole number of at least 1"):
        data.two_moons(0)


def test_and_gate_is_logical_and() -> None:
    x, y = data.and_gate()
    assert y.flatten().tolist() == [float(bool(a) and bool(b)) for a, b in x.tolist()]
    assert x.unique(dim=0).shape == (4, 2)


def test_data_sets_say_what_they_are_in_one_line() -> None:
    assert repr(data.digits()) == (
        "<ImageSetWithOod 'digits': 1,297 images to train, 500 to test, 10 classes, "
        "500 images of something else, 1×8×8 pixels; next: credo.fit(model, method, data.train)>"
    )
    moved = FlippedAndShifted(torch.zeros(5, 3, 8, 8), torch.zeros(5))
    assert repr(moved) == "FlippedAndShifted(5 images 3×8×8, moved by up to 4)"
