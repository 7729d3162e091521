"""Reading files nobody vouches for: memory follows the bytes that exist, never those promised.

A header's promise is first held against what the file could contain at most (its size on disk, or
for deflated data 1032 times that, the algorithm's own bound), then read in pieces of one mebibyte.
So a lying header is refused before anything is allocated, and a truncated file costs only what it
really holds.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from credo.errors import FileFormatError

MAX_BYTES = 2**31
"""The most that one array or archive may unpack to; SVHN's largest split needs 1.6 GB."""

DEFLATE_RATIO = 1032
"""Deflate can't shrink data by more than this factor: 258 bytes from two bits."""

_CHUNK = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


class Readable(Protocol):
    """Anything that hands out at most n bytes at a time, and b"" at its end."""

    def read(self, n: int, /) -> bytes:
        """The next bytes.

        Args:
            n: The most that is wanted.
        """
        ...


def malformed(
    path: Path, promised: str, actual: str, remedy: str = "Fetch the file again from its source."
) -> FileFormatError:
    """The error for a file whose content is not what it says.

    Args:
        path: The file.
        promised: What it should be, as a clause.
        actual: What it is, as a clause.
        remedy: What to do about it.
    """
    return FileFormatError(f"{path}: {promised}, but {actual}. {remedy}")


def read_exactly(stream: Readable, size: int, path: Path, what: str) -> bytearray:
    """So many bytes, in memory that grows with what arrives.

    Args:
        stream: Where they come from.
        size: How many there should be.
        path: The file, for the error.
        what: What they are, for the error.

    Raises:
        FileFormatError: The data ends before.
    """
    out = bytearray()
    while len(out) < size:
        piece = stream.read(min(_CHUNK, size - len(out)))
        if not piece:
            raise malformed(
                path, f"{what} should have {size:,} bytes", f"the data ends after {len(out):,}"
            )
        out += piece
    return out


def expect_end(stream: Readable, path: Path, what: str) -> None:
    """Refuse further data; reaching the end also verifies a compressed file's checksum.

    Args:
        stream: Where it would come from.
        path: The file, for the error.
        what: What should be its last part, for the error.

    Raises:
        FileFormatError: There is more.
    """
    if stream.read(1):
        raise malformed(path, f"{what} should be the last of the file", "more data follows")


def check_promise(promised: int, capacity: int, path: Path, what: str) -> None:
    """Refuse, before allocating, a header that promises more bytes than the file can hold.

    Args:
        promised: How many the header promises.
        capacity: How many the file can hold at most.
        path: The file, for the error.
        what: What the bytes are, for the error.

    Raises:
        FileFormatError: It promises too many, or more than `MAX_BYTES`.
    """
    if promised > MAX_BYTES:
        raise malformed(
            path,
            f"{what} promises {promised:,} bytes",
            f"Credo unpacks at most {MAX_BYTES:,}",
            "If the file is genuine, split it into smaller ones.",
        )
    if promised > capacity:
        raise malformed(
            path, f"{what} promises {promised:,} bytes", f"the file can hold at most {capacity:,}"
        )


@contextmanager
def decompressing(path: Path) -> Iterator[None]:
    """Turn the decompressors' own complaints into `FileFormatError`.

    Args:
        path: The file, for the error.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise malformed(path, "this is compressed data", f"it does not unpack ({error})") from error


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[tuple[Readable, int]]:
    """A stream of the file's content, unzipped if it starts like gzip, and its greatest length.

    Args:
        path: The file.
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if raw.peek(2)[:2] != _GZIP_MAGIC:
            yield raw, size
            return
        with decompressing(path), gzip.GzipFile(fileobj=raw, mode="rb") as unzipped:
            yield unzipped, size * DEFLATE_RATIO
