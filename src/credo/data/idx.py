"""The IDX format of MNIST and its relatives."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from credo.data.bounded import (
    check_promise,
    expect_end,
    malformed,
    open_plain_or_gzip,
    read_exactly,
)

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMENSIONS = 8


def read_idx(path: str | PathLike[str]) -> Tensor:
    """The tensor in an IDX file, plain or gzipped (recognised by content, not by name).

    The file is two zero bytes, a dtype code, the number of dimensions D, D big-endian 32-bit sizes,
    and the elements in row-major order. The result has those sizes and the file's dtype: uint8,
    int8, int16, int32, float32 or float64.

    Args:
        path: The file.

    Raises:
        FileFormatError: The header does not match the bytes that follow; nothing of the promised
            size has been allocated then.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "labels-idx1-ubyte")
    ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([5, 0, 4]))
    ...     read_idx(file)
    tensor([5, 0, 4], dtype=torch.uint8)

    Reference: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
    """
    path = Path(path)
    with open_plain_or_gzip(path) as (stream, capacity):
        zero, code, ndim = _split_magic(bytes(read_exactly(stream, 4, path, "an IDX magic number")))
        if zero != 0 or code not in _DTYPES or not 1 <= ndim <= _MAX_DIMENSIONS:
            raise malformed(
                path,
                "an IDX file starts with 0, 0, a dtype code and 1 to 8 dimensions",
                f"this one starts with {zero}, dtype code {code:#04x}, {ndim} dimensions",
                "Check that the path names an IDX file.",
            )
        sizes = np.frombuffer(read_exactly(stream, 4 * ndim, path, "the IDX sizes"), ">u4").tolist()
        if 0 in sizes:
            raise malformed(path, f"the header promises shape {tuple(sizes)}", "that is empty")
        dtype = np.dtype(_DTYPES[code])
        promised = math.prod(sizes) * dtype.itemsize
        what = f"an IDX array of shape {tuple(sizes)}"
        check_promise(promised, capacity - 4 - 4 * ndim, path, what)
        content = read_exactly(stream, promised, path, what)
        expect_end(stream, path, what)
    array = np.frombuffer(content, dtype).reshape(sizes)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def _split_magic(magic: bytes) -> tuple[int, int, int]:
    return int.from_bytes(magic[:2], "big"), magic[2], magic[3]
