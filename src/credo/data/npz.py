"""Numeric arrays from a NumPy ``.npz`` archive, with the header held against the data first."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.data.bounded import (
    DEFLATE_RATIO,
    check_promise,
    decompressing,
    expect_end,
    malformed,
    read_exactly,
)
from credo.errors import FileFormatError

_NPY_1 = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:b1|[ui][1248]|f[248]))', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9]{1,19}(?:, ?[0-9]{1,19}){0,7})?,?\), \}\s*"
)


def read_npz(path: str | PathLike[str], names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Arrays of a NumPy archive; numbers only, so no pickle is involved.

    `numpy.load` allocates what a header says before it looks for the data; this does not.

    Args:
        path: The archive.
        names: Which of its arrays are wanted.

    Raises:
        FileFormatError: A header and its data disagree, or an array is missing.
    """
    path = Path(path)
    size = path.stat().st_size
    check_promise(size, size, path, "the file")
    with path.open("rb") as stream:
        content = io.BytesIO(read_exactly(stream, size, path, "the file"))
    try:
        with decompressing(path), zipfile.ZipFile(content) as archive:
            return {name: _read_member(archive, name, path) for name in names}
    except FileFormatError:
        raise
    except KeyError as error:
        raise malformed(path, "this archive should have certain arrays", str(error)) from error
    except (zipfile.BadZipFile, struct.error, ValueError, RuntimeError, OverflowError) as error:
        raise malformed(path, "this should be an .npz archive", f"{error}") from error


def _read_member(archive: zipfile.ZipFile, name: str, path: Path) -> NDArray[Any]:
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise malformed(path, "NumPy stores or deflates arrays", f"{name} is packed otherwise")
    what = f"the array {name!r}"
    with archive.open(member) as stream:
        start = bytes(read_exactly(stream, 10, path, what))
        header_size = int.from_bytes(start[8:], "little")
        header = bytes(read_exactly(stream, header_size, path, what))
        parsed = _HEADER.fullmatch(header)
        if start[:8] != _NPY_1 or parsed is None:
            raise malformed(path, f"{what} should be plain numbers", "its header says otherwise")
        dtype = np.dtype(parsed[1].decode())
        shape = tuple(int(n) for n in (parsed[3] or b"").replace(b" ", b"").split(b",") if n)
        promised = math.prod(shape) * dtype.itemsize
        if promised == 0:
            raise malformed(path, f"{what} should hold numbers", f"its shape is {shape}")
        check_promise(promised, member.compress_size * DEFLATE_RATIO, path, what)
        values = read_exactly(stream, promised, path, what)
        expect_end(stream, path, what)
    by_column = parsed[2] == b"True"
    array = np.frombuffer(values, dtype).reshape(shape, order="F" if by_column else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)
