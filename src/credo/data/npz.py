"""Numeric arrays from a NumPy ``.npz`` archive, with the header held against the data first."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from credo.data.bounded import (
    DEFLATE_RATIO,
    check_promise,
    decompressing,
    expect_end,
    malformed,
    read_exactly,
)
from credo.data.npy import read_header
from credo.errors import FileFormatError


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
        header = read_header(stream, path, what)
        check_promise(header.promised, member.compress_size * DEFLATE_RATIO, path, what)
        values = read_exactly(stream, header.promised, path, what)
        expect_end(stream, path, what)
    return header.array(values, header.shape)
