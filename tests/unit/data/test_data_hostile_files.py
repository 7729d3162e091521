"""A file gives a well-formed result or `FileFormatError`, and never costs more than it holds."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from credo.data import cifar, pickled, read_cifar, read_idx, read_svhn
from credo.data.cifar import read_cifar_set
from credo.data.npy import read_npy
from credo.data.npz import read_npz
from credo.errors import DataError, FileFormatError

MEBIBYTE = 2**20
ALLOWANCE = 16 * MEBIBYTE  # readers work in pieces of 1 MiB; the test files are far smaller


def idx(shape: tuple[int, ...], payload: bytes, code: int = 8) -> bytes:
    return bytes([0, 0, code, len(shape)]) + np.array(shape, ">u4").tobytes() + payload


def cifar_python(**changes: object) -> bytes:
    batch = {"data": np.zeros((2, 3072), "u1"), "labels": [1, 2], "filenames": ["a", "b"]}
    return pickle.dumps({**batch, **changes}, 2)


def mat(compressed: bool = True, **changes: np.ndarray) -> bytes:
    variables = {"X": np.zeros((32, 32, 3, 2), "u1"), "y": np.array([[10], [3]], "u1"), **changes}
    out = io.BytesIO()
    scipy.io.savemat(out, variables, do_compression=compressed)
    return out.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **(arrays or {"x": np.arange(6, dtype="i4").reshape(2, 3)}))
    return out.getvalue()


def tar(member: str = "test", content: bytes = b"\x00\x01" + bytes(3072)) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in ("train", member):
            info = tarfile.TarInfo(f"cifar-100-binary/{name}.bin")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def check_idx(path: Path, content: bytes) -> None:
    """A second decoder, by hand, of what was accepted."""
    result = read_idx(path)
    plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    start = 4 + 4 * plain[3]
    assert result.shape == struct.unpack(f">{plain[3]}I", plain[4:start])
    stored = result.numpy().astype(result.numpy().dtype.newbyteorder(">"))
    assert stored.tobytes() == plain[start:]


def check_images(images: torch.Tensor, labels: torch.Tensor, classes: int) -> None:
    assert images.shape[1:] == (3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.shape == (len(images),)
    assert labels.dtype == torch.int64
    assert 0 <= labels.min() <= labels.max() < classes


def check_cifar(path: Path, content: bytes) -> None:
    images, labels = read_cifar(path)
    check_images(images, labels, 10)
    if content[:1] != b"\x80":
        rows = np.concatenate([labels[:, None].numpy().astype("u1"), images.flatten(1).numpy()], 1)
        assert rows.tobytes() == content


def check_tar(path: Path, content: bytes) -> None:
    try:
        parts = read_cifar_set(path, 100)
    except DataError as error:
        if "is incomplete" in str(error):  # the archive is sound but lacks a member
            return
        raise
    for part in parts:
        check_images(*part, 100)


def check_svhn(path: Path, content: bytes) -> None:
    check_images(*read_svhn(path), 10)


def check_npz(path: Path, content: bytes) -> None:
    ours = read_npz(path, ["x"])["x"]
    with zipfile.ZipFile(path) as archive:
        theirs = np.load(io.BytesIO(archive.read("x.npy")), allow_pickle=False)
    np.testing.assert_array_equal(ours, theirs)


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def check_npy(path: Path, content: bytes) -> None:
    ours = read_npy(path)
    np.testing.assert_array_equal(ours, np.load(io.BytesIO(content), allow_pickle=False))
    if len(ours) % 2 == 0:
        np.testing.assert_array_equal(read_npy(path, 1, 2), ours[len(ours) // 2 :])


Check = Callable[[Path, bytes], None]
VALID: dict[str, tuple[Check, bytes]] = {
    "idx": (check_idx, idx((2, 3), bytes(range(6)))),
    "idx of float64": (check_idx, idx((3,), np.arange(3, dtype=">i8").tobytes(), 14)),
    "idx gzipped": (check_idx, gzip.compress(idx((4, 5), bytes(range(20))), mtime=0)),
    "cifar binary": (check_cifar, bytes([3]) + bytes(3072) + bytes([9]) + bytes(3072)),
    "cifar python": (check_cifar, cifar_python()),
    "cifar archive": (check_tar, tar()),
    "mat": (check_svhn, mat()),
    "mat uncompressed": (check_svhn, mat(compressed=False)),
    "npz": (check_npz, npz()),
    "npy": (check_npy, npy(np.arange(6, dtype="i4").reshape(2, 3))),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "file"


def survives(check: Check, path: Path, content: bytes) -> bool:
    """Whether the file is accepted; anything but acceptance or `FileFormatError` propagates."""
    path.write_bytes(content)
    refusal = None
    tracemalloc.start()
    try:
        check(path, content)
    except FileFormatError as error:
        refusal = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ALLOWANCE + 20 * len(content)
    assert refusal is None or str(path) in refusal
    return refusal is None


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """The content after a few edits: bytes and 32-bit words overwritten, cuts, insertions."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        # Headers are short and at the ends: half of the edits go there.
        where = draw(st.integers(0, min(200, len(out))) | st.integers(0, len(out)))
        where = draw(st.sampled_from([where, len(out) - where]))
        kind = draw(st.sampled_from(["byte", "word", "cut", "insert", "drop"]))
        if kind == "byte":
            out[where : where + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "word":
            word = draw(
                st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**20)
            )
            order = draw(st.sampled_from("<>"))
            out[where : where + 4] = struct.pack(f"{order}I", word)
        elif kind == "cut":
            del out[where:]
        elif kind == "insert":
            out[where:where] = draw(st.binary(max_size=20))
        else:
            del out[where : where + draw(st.integers(1, 20))]
    return bytes(out)


@pytest.mark.parametrize("name", VALID)
def test_the_undamaged_file_is_accepted(file: Path, name: str) -> None:
    assert survives(VALID[name][0], file, VALID[name][1])


@pytest.mark.parametrize("name", VALID)
def test_damaged_files(file: Path, name: str) -> None:
    check, content = VALID[name]

    @settings(deadline=None, max_examples=60)
    @given(damage(content))
    def attempt(damaged: bytes) -> None:
        survives(check, file, damaged)

    attempt()


@pytest.mark.parametrize("name", VALID)
def test_every_truncation_is_refused(file: Path, name: str) -> None:
    check, content = VALID[name]
    stops = {*range(min(40, len(content))), *range(0, len(content), 97), len(content) - 1}
    for stop in stops:
        assert not survives(check, file, content[:stop]), f"cut at {stop}"


@pytest.mark.parametrize("check", {check: None for check, _ in VALID.values()})
def test_random_bytes(file: Path, check: Check) -> None:
    starts = [b"", b"\x80\x02", b"\x1f\x8b\x08", b"PK\x03\x04", b"\x00\x00\x08\x03"]

    @settings(deadline=None, max_examples=50)
    @given(st.sampled_from(starts), st.binary(max_size=600))
    @example(b"", b"")
    def attempt(start: bytes, rest: bytes) -> None:
        survives(check, file, start + rest)

    attempt()


# A pickle machine sees few interesting programs in random bytes: these are made of real opcodes.
OPCODES = [b"(", b")", b"]", b"}", b"a", b"e", b"s", b"u", b"t", b"R", b"b", b"\x85", b"\x86",
           b"\x87", b"N", b"K\x00", b"K\x01", b"U\x02u1", b"U\x01b", b"X\x06\x00\x00\x00latin1",
           b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n",
           b"c_codecs\nencode\n", b"q\x00", b"h\x00", b"\x94", b"\x93", b"\x8a\x01\x05",
           b"U\x04data", b"U\x06labels"]  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(OPCODES), max_size=60))
def test_programs_of_admitted_opcodes(file: Path, program: list[bytes]) -> None:
    survives(check_cifar, file, b"\x80\x02" + b"".join(program) + b".")


# ---------------------------------------------------------------- lies, one by one


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx((2**32 - 1,) * 3, b""), "unpacks at most"),
        (idx((10**9,), bytes(10)), "can hold at most 10"),
        (idx((7,), bytes(6)), "can hold at most 6"),
        (idx((5,), bytes(6)), "more data follows"),
        (idx((0, 5), b""), "that is empty"),
        (idx((3,), bytes(3), code=0x0A), "dtype code 0x0a"),
        (idx((1,) * 9, bytes(1)), "9 dimensions"),
        (gzip.compress(idx((10**8,), bytes(10)), mtime=0), "can hold at most"),
        (gzip.compress(idx((1000,), bytes(10)), mtime=0), "ends after 10"),
        (gzip.compress(idx((5,), bytes(5)), mtime=0) + b"tail", "does not unpack"),
        (gzip.compress(idx((5,), bytes(5)), mtime=0)[:-8] + bytes(8), "does not unpack"),
    ],
)
def test_lying_idx_headers(file: Path, content: bytes, message: str) -> None:
    assert not survives(check_idx, file, content)
    with pytest.raises(FileFormatError, match=message):
        read_idx(file)


def test_a_gzip_bomb_behind_a_small_header_is_not_unpacked(file: Path) -> None:
    bomb = gzip.compress(idx((5,), bytes(64 * MEBIBYTE)), compresslevel=1, mtime=0)
    file.write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="more data follows"):
        read_idx(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ALLOWANCE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (bytes(3072), "0 bytes, 1.000 records|3,072 bytes"),
        (bytes([10]) + bytes(3072), "record 0 has label 10"),
        (cifar_python(labels=[1, 10]), "outside 0 to 9"),
        (cifar_python(labels=[1, True]), "outside 0 to 9"),
        (cifar_python(labels=[1]), "not a list of 2 labels"),
        (cifar_python(data=np.zeros((2, 3071), "u1")), "'data' is missing"),
        (cifar_python(data=np.zeros((2, 3072), "i2")), "'data' is missing"),
        (cifar_python(data=np.array([None])), "numpy.dtype in a way"),
        (pickle.dumps([1, 2], 2), "'data' is missing"),
        (cifar_python().replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c"), "and brings 6,144 bytes"),
    ],
)
def test_wrong_cifar_files(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        read_cifar(file)


class Executes:
    """Unpickling this creates a file."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.victim),))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_never_executes(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    content = pickle.dumps({"data": Executes(victim), "labels": []}, protocol)
    file = tmp_path / "data_batch_1"
    file.write_bytes(content)
    with pytest.raises(FileFormatError, match=rf"global {os.mkdir.__module__}\.mkdir"):
        read_cifar(file)
    assert not victim.exists()
    pickle.loads(content)  # the real one would have
    assert victim.exists()


def test_other_numpy_globals_are_refused(file: Path) -> None:
    file.write_bytes(cifar_python(labels=[np.int64(1), np.int64(2)]))
    with pytest.raises(FileFormatError, match=r"global numpy\.(_core|core)\.multiarray\.scalar"):
        read_cifar(file)


def reconstruct(shape: bytes) -> bytes:
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + shape + b"U\x01b\x87R."
    )


@pytest.mark.parametrize(
    "content",
    [
        reconstruct(b"J\x00\x00\x00\x40\x85"),  # an array of 2³⁰ elements, out of 60 bytes
        b"\x80\x02]r\xff\xff\xff\xff.",  # memo slot 2³² − 1: Python's unpickler grows a table to it
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x40.",  # 2⁶² bytes to come
        b"\x80\x02}(" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01u.",  # 2⁶⁰ leaves to hash, as a key
        b"\x80\x02]" + b"q\x00h\x00\x86" * 60 + b")R.",  # 2⁶⁰ leaves to print, as a function
        b"\x80\x02X\x00\x00\x10\x00" + bytes(MEBIBYTE) + b"q\x00"
        + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 1000 + b".",  # a copy each time
    ],
)  # fmt: skip
def test_pickle_bombs_cost_nothing(file: Path, content: bytes) -> None:
    start = time.perf_counter()
    assert not survives(check_cifar, file, content)
    assert time.perf_counter() - start < 5


def test_a_pickle_of_endless_steps_is_stopped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "_MAX_STEPS", 1000)
    file.write_bytes(b"\x80\x02]" + b"]a" * 1000 + b".")
    with pytest.raises(FileFormatError, match="more than 1,000 steps"):
        read_cifar(file)


def test_an_archive_that_unpacks_without_end_is_stopped(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "MAX_BYTES", 4 * MEBIBYTE)
    file.write_bytes(tar("README", bytes(32 * MEBIBYTE)))
    with pytest.raises(FileFormatError, match="beyond 4,194,304 bytes"):
        read_cifar_set(file, 100)


def resized_mat(*sizes: int) -> bytes:
    true_sizes = struct.pack("<4i", 32, 32, 3, 2)
    content = mat(compressed=False)
    assert content.count(true_sizes) == 1
    return content.replace(true_sizes, struct.pack("<4i", *sizes))


def compressed_element(inner_length: int, payload: bytes) -> bytes:
    packed = zlib.compress(struct.pack("<II", 14, inner_length) + payload)
    return mat()[:128] + struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(128), "another kind"),
        (mat()[:128], "numeric arrays in it are none"),
        (mat()[:128] + struct.pack("<II", 14, 2**31), "can hold at most 0|unpacks at most"),
        (compressed_element(2**31 - 1, bytes(8)), "can hold at most"),
        (compressed_element(4000, bytes(8)), "ends after 8|can hold at most"),
        (compressed_element(8, bytes(16)), "more data follows"),
        (resized_mat(32, 32, 3, 3), r"promises shape \(32, 32, 3, 3\) and brings 6,144 values"),
        (resized_mat(2**31 - 1, 2**31 - 1, 2**31 - 1, 2), "brings 6,144 values"),
        (resized_mat(-32, -32, 3, 2), "sizes are not 2 to 8 counts"),
        (mat(X=np.zeros((32, 32, 3, 2))), "X is .* of float64"),
        (mat(X=np.zeros((32, 32, 2), "u1")), "X is"),
        (mat(y=np.ones((3, 1), "u1")), "y is"),
        (mat(y=np.array([[0], [3]], "u1")), "other labels"),
        (mat(y=np.array([[np.nan], [3]])), "other labels"),
        (mat(y=np.array([[1j], [3]])), r"are \['X'\]"),
    ],
)
def test_wrong_mat_files(file: Path, content: bytes, message: str) -> None:
    assert not survives(check_svhn, file, content)
    with pytest.raises(FileFormatError, match=message):
        read_svhn(file)


def npz_with(header: str, payload: bytes = bytes(24)) -> bytes:
    out = io.BytesIO()
    text = header.encode() + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + payload
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", member)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npz_with("{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }"), None),
        (npz_with("{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }"), "ends after 24"),
        (npz_with("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }"), "more data"),
        (npz_with("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999,), }"), "can hold"),
        (npz_with("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9), }"), "its shape is"),
        (npz_with("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"), "plain numbers"),
        (npz_with("__import__('os')"), "plain numbers"),
        (npz(other=np.arange(3)), "no item named"),
    ],
)
def test_lying_npz_headers(file: Path, content: bytes, message: str | None) -> None:
    assert survives(check_npz, file, content) == (message is None)
    if message:
        with pytest.raises(FileFormatError, match=message):
            read_npz(file, ["x"])
