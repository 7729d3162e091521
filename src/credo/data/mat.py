"""SVHN's cropped digits, from the MATLAB 5 files they are published in.

The format is walked by hand instead of by `scipy.io.loadmat`, which allocates what a header says
before it looks for the data; the tests hold the two equal on well-formed files.
"""

from __future__ import annotations

import math
import zlib
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.data.bounded import (
    DEFLATE_RATIO,
    check_promise,
    decompressing,
    expect_end,
    malformed,
    read_exactly,
)

_MATRIX, _COMPRESSED = 14, 15
_STORAGE = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8",
            13: "u8"}  # fmt: skip
_NUMERIC_CLASSES = range(6, 16)
_COMPLEX = 0x800
_SVHN = "an SVHN file holds X (32, 32, 3, N) of uint8 and y (N, 1) with labels 1 to 10"


def read_svhn(path: str | PathLike[str]) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of ``train_32x32.mat`` and its siblings.

    SVHN writes the digit 0 as label 10; here it is label 0.

    Args:
        path: The file, MATLAB 5, compressed or not.

    Raises:
        FileFormatError: It is anything else, or a header does not match its data.

    >>> import pathlib, tempfile, numpy, scipy.io
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "test_32x32.mat")
    ...     X, y = numpy.zeros((32, 32, 3, 2), "u1"), numpy.array([[10], [3]])
    ...     scipy.io.savemat(file, {"X": X, "y": y})
    ...     images, labels = read_svhn(file)
    >>> images.shape, labels
    (torch.Size([2, 3, 32, 32]), tensor([0, 3]))

    Reference: Y. Netzer et al., "Reading digits in natural images with unsupervised feature
    learning", 2011; format: MathWorks, "MAT-File Format", level 5.
    """
    path = Path(path)
    variables = _read_variables(path)
    if "X" not in variables or "y" not in variables:
        raise malformed(path, _SVHN, f"the numeric arrays in it are {sorted(variables) or 'none'}")
    pixels, labels = variables["X"], variables["y"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise malformed(path, _SVHN, f"X is {pixels.shape} of {pixels.dtype}")
    if labels.shape != (pixels.shape[3], 1):
        raise malformed(path, _SVHN, f"X is {pixels.shape} and y is {labels.shape}")
    if not np.isin(labels, np.arange(1, 11)).all():
        raise malformed(path, _SVHN, "y has other labels")
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return torch.from_numpy(images), torch.from_numpy(labels[:, 0].astype(np.int64) % 10)


def _read_variables(path: Path) -> dict[str, NDArray[Any]]:
    """The file's real numeric arrays by name; variables of other kinds are passed over."""
    variables = {}
    size = path.stat().st_size
    with path.open("rb") as stream, decompressing(path):
        order = _byte_order(bytes(read_exactly(stream, 128, path, "a MATLAB 5 header")), path)
        while (start := stream.tell()) < size:
            kind, length = _tag(read_exactly(stream, 8, path, "an element's tag"), order)
            check_promise(length, size - start - 8, path, "an element")
            payload = None
            if kind == _COMPRESSED:
                payload = _inflate_matrix(stream, length, order, path)
            elif kind == _MATRIX:
                payload = read_exactly(stream, length, path, "a matrix")
            if payload is not None and (named := _Matrix(payload, order, path).read()):
                variables[named[0]] = named[1]
            stream.seek(start + 8 + length)
    return variables


def _byte_order(header: bytes, path: Path) -> str:
    order = {b"IM": "<", b"MI": ">"}.get(header[126:128])
    version = int.from_bytes(header[124:126], "little" if order == "<" else "big")
    if order is None or version != 0x0100:
        raise malformed(
            path,
            "SVHN comes as MATLAB 5 files",
            "this header is of another kind",
            "Use the cropped-digits file as published, e.g. test_32x32.mat.",
        )
    return order


def _tag(data: bytes | bytearray | memoryview, order: str) -> tuple[int, int]:
    kind, length = np.frombuffer(data, f"{order}u4", count=2).tolist()
    return kind, length


def _inflate_matrix(stream: BinaryIO, length: int, order: str, path: Path) -> bytearray | None:
    inflated = _Inflated(stream, length)
    kind, inner = _tag(read_exactly(inflated, 8, path, "a compressed element's tag"), order)
    check_promise(inner, length * DEFLATE_RATIO, path, "a compressed element")
    if kind != _MATRIX:
        return None
    payload = read_exactly(inflated, inner, path, "a compressed matrix")
    expect_end(inflated, path, "a compressed matrix")
    return payload


class _Inflated:
    """``length`` bytes of a stream, decompressed as they are asked for."""

    def __init__(self, stream: BinaryIO, length: int) -> None:
        self._stream, self._left, self._pending = stream, length, b""
        self._zlib = zlib.decompressobj()

    def read(self, n: int) -> bytes:
        while not self._zlib.eof:
            if not self._pending:
                self._pending = self._stream.read(min(2**16, self._left))
                self._left -= len(self._pending)
            if not self._pending:
                raise EOFError("the compressed data stops short")
            data = self._zlib.decompress(self._pending, n)
            self._pending = self._zlib.unconsumed_tail
            if data:
                return data
        return b""


class _Matrix:
    """One matrix element: flags, sizes, name and values, each with a tag of its own."""

    def __init__(self, payload: bytearray, order: str, path: Path) -> None:
        self._rest, self._order, self._path = memoryview(payload), order, path

    def read(self) -> tuple[str, NDArray[Any]] | None:
        flags = self._part()
        if flags.dtype.itemsize != 4 or flags.dtype.kind != "u" or flags.size != 2:
            raise self._refusal("its flags are not two words")
        if flags[0] & 0xFF not in _NUMERIC_CLASSES or flags[0] & _COMPLEX:
            return None
        sizes, name, values = self._part(), self._part(), self._part()
        if sizes.dtype.kind != "i" or not 2 <= sizes.size <= 8 or (sizes < 0).any():
            raise self._refusal("its sizes are not 2 to 8 counts")
        shape = tuple(sizes.tolist())
        if math.prod(shape) != values.size or values.size == 0:
            raise self._refusal(f"it promises shape {shape} and brings {values.size:,} values")
        if name.dtype.itemsize != 1:
            raise self._refusal("its name is not text")
        label = name.tobytes().decode("latin1")
        return label, values.reshape(shape, order="F")

    def _part(self) -> NDArray[Any]:
        if len(self._rest) < 8:
            raise self._refusal("it ends before all its parts have come")
        kind, length = _tag(self._rest[:8], self._order)
        if kind >> 16:  # up to four bytes of data travel inside the tag
            kind, length = kind & 0xFFFF, kind >> 16
            start, stop, end = 4, 4 + length, 8
        else:
            start, stop, end = 8, 8 + length, 8 + -(-length // 8) * 8
        if kind not in _STORAGE or stop > len(self._rest) or (start == 4 and length > 4):
            raise self._refusal(f"a part of type {kind} promises {length:,} bytes")
        dtype = np.dtype(f"{self._order}{_STORAGE[kind]}")
        if length % dtype.itemsize:
            raise self._refusal(f"a part of {dtype} promises {length:,} bytes")
        data, self._rest = self._rest[start:stop], self._rest[end:]
        return np.frombuffer(data, dtype)

    def _refusal(self, actual: str) -> Exception:
        return malformed(self._path, "a matrix has flags, sizes, a name and values", actual)
