"""Numeric arrays from NumPy's ``.npy`` files, with the header held against the data first.

`numpy.load` allocates what a header says before it looks for the data; this does not, and there is
no pickle: a header must say plain numbers, as NumPy itself writes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.data.bounded import (
    MAX_BYTES,
    Readable,
    check_promise,
    expect_end,
    malformed,
    read_exactly,
)
from credo.errors import DataError

_NPY_1 = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:b1|[ui][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9]{1,19}(?:, ?[0-9]{1,19}){0,7})?,?\), \}\s*"
)


@dataclass(frozen=True)
class NpyHeader:
    """What an array's header promises.

    Args:
        dtype: Of its numbers.
        shape: Of the array, nowhere 0.
        by_column: Whether the first index runs fastest.
        size: Bytes of the header itself.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_column: bool
    size: int

    @property
    def promised(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, values: bytearray, shape: tuple[int, ...]) -> NDArray[Any]:
        """The numbers in this shape, in the machine's byte order.

        Args:
            values: Their bytes.
            shape: That of the array, or of some of its rows.
        """
        array = np.frombuffer(values, self.dtype).reshape(
            shape, order="F" if self.by_column else "C"
        )
        return array.astype(self.dtype.newbyteorder("="), copy=False)


def read_header(stream: Readable, path: Path, what: str) -> NpyHeader:
    """The header of an array, which the stream is left behind.

    Args:
        stream: Where it comes from.
        path: The file, for the error.
        what: What the array is, for the error.

    Raises:
        FileFormatError: It is none, or not of plain numbers, or the array is empty.
    """
    start = bytes(read_exactly(stream, 10, path, what))
    length = int.from_bytes(start[8:], "little")
    header = bytes(read_exactly(stream, length, path, what))
    parsed = _HEADER.fullmatch(header)
    if start[:8] != _NPY_1 or parsed is None:
        raise malformed(path, f"{what} should be plain numbers", "its header says otherwise")
    shape = tuple(int(n) for n in (parsed[3] or b"").replace(b" ", b"").split(b",") if n)
    if 0 in shape:
        raise malformed(path, f"{what} should hold numbers", f"its shape is {shape}")
    return NpyHeader(np.dtype(parsed[1].decode()), shape, parsed[2] == b"True", 10 + length)


def read_npy(path: str | PathLike[str], part: int | None = None, parts: int = 1) -> NDArray[Any]:
    """The array of a ``.npy`` file, or one of several equal parts of its rows.

    Args:
        path: The file.
        part: Which part, from 0; None is all. Only its bytes are read.
        parts: How many parts the rows are cut into.

    Raises:
        DataError: There is no such file, or no such part.
        FileFormatError: Header and data disagree, or the rows don't divide.
    """
    path, what = Path(path), "the array"
    if not path.is_file():
        raise DataError(f"{path} is no file: check the folder and the name")
    if part is not None and not 0 <= part < parts:
        raise DataError(f"{path}: part {part} of {parts} is not there; they count from 0")
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = read_header(stream, path, what)
        if header.promised != size - header.size:
            raise malformed(
                path,
                f"{what} of shape {header.shape} should have {header.promised:,} bytes",
                f"the file has {size - header.size:,} behind its header",
            )
        if part is None or header.by_column:
            check_promise(header.promised, MAX_BYTES, path, what)
            values = read_exactly(stream, header.promised, path, what)
            expect_end(stream, path, what)
            whole = header.array(values, header.shape)
            return whole if part is None else whole[_rows(header, path, part, parts)].copy()
        rows = _rows(header, path, part, parts)
        row = header.promised // header.shape[0]
        check_promise((rows.stop - rows.start) * row, MAX_BYTES, path, what)
        stream.seek(rows.start * row, 1)
        values = read_exactly(stream, (rows.stop - rows.start) * row, path, what)
        return header.array(values, (rows.stop - rows.start, *header.shape[1:]))


def _rows(header: NpyHeader, path: Path, part: int, parts: int) -> slice:
    if not header.shape or header.shape[0] % parts:
        raise malformed(
            path, f"the rows should come in {parts} equal parts", f"the shape is {header.shape}"
        )
    each = header.shape[0] // parts
    return slice(part * each, (part + 1) * each)
