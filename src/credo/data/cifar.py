"""CIFAR-10 and CIFAR-100: the binary version and the Python version, loose or in their archive."""

from __future__ import annotations

import tarfile
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.checks import checked
from credo.data.bounded import (
    MAX_BYTES,
    Readable,
    check_promise,
    malformed,
    open_plain_or_gzip,
    read_exactly,
)
from credo.data.pickled import PickledArray, read_pickle
from credo.errors import DataError, FileFormatError

_PIXELS = 3 * 32 * 32
_PICKLE_START = b"\x80"  # no label is this large, so the first byte tells the versions apart
_LABEL_LIMITS = {10: (10,), 100: (20, 100)}  # CIFAR-100 puts the coarse label before the fine one
_PYTHON_LABELS = {10: "labels", 100: "fine_labels"}
_TRAIN = {10: tuple(f"data_batch_{i}" for i in range(1, 6)), 100: ("train",)}
_TEST = {10: "test_batch", 100: "test"}

Examples = tuple[Tensor, Tensor]


@checked
def read_cifar(path: str | PathLike[str], classes: Literal[10, 100] = 10) -> Examples:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of one batch file, binary or Python.

    The Python version is a pickle; it is read without unpickling, so nothing that the file names is
    imported or called.

    Args:
        path: The file, as it comes in the archive.
        classes: 10, or 100 for CIFAR-100 with its fine labels.

    Raises:
        FileFormatError: The file is damaged or something else.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "test_batch.bin")
    ...     _ = file.write_bytes(bytes([7]) + bytes(3072))
    ...     images, labels = read_cifar(file)
    >>> images.shape, labels
    (torch.Size([1, 3, 32, 32]), tensor([7]))

    Reference: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    path = Path(path)
    size = path.stat().st_size
    check_promise(size, size, path, "the file")
    with path.open("rb") as stream:
        return _parse(read_exactly(stream, size, path, "the file"), path, classes)


@checked
def read_cifar_set(
    path: str | PathLike[str], classes: Literal[10, 100] = 10
) -> tuple[Examples, Examples]:
    """Training and test examples from a folder of batch files or an archive of them.

    Args:
        path: A folder or ``.tar.gz`` with ``data_batch_1`` … ``test_batch`` (CIFAR-10) or ``train``
            and ``test`` (CIFAR-100), each with or without ``.bin``. An archive is read, never
            extracted.
        classes: 10 or 100.

    Raises:
        DataError: A batch is missing.
        FileFormatError: A file is damaged or something else.
    """
    path = Path(path)
    wanted = (*_TRAIN[classes], _TEST[classes])
    batches = _from_folder(path, wanted, classes) if path.is_dir() else _from_tar(path, classes)
    missing = [name for name in wanted if name not in batches]
    if missing:
        raise DataError(
            f"{path} has no {', '.join(missing)} (with or without .bin), so CIFAR-{classes} is "
            "incomplete. Fetch the whole archive again."
        )
    images, labels = zip(*(batches[name] for name in _TRAIN[classes]), strict=True)
    return (torch.cat(images), torch.cat(labels)), batches[_TEST[classes]]


def _from_folder(
    path: Path, wanted: tuple[str, ...], classes: Literal[10, 100]
) -> dict[str, Examples]:
    files = {name: path / f"{name}{suffix}" for suffix in ("", ".bin") for name in wanted
             if (path / f"{name}{suffix}").is_file()}  # fmt: skip
    return {name: read_cifar(file, classes) for name, file in files.items()}


def _from_tar(path: Path, classes: int) -> dict[str, Examples]:
    wanted = (*_TRAIN[classes], _TEST[classes])
    batches = {}
    try:
        with open_plain_or_gzip(path) as (stream, _):
            budget = _Budget(stream, path)
            # "r|" never seeks, so everything that is unpacked passes through the budget.
            with tarfile.open(fileobj=budget, mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = Path(member.name).name.removesuffix(".bin")
                    content = archive.extractfile(member) if member.isreg() else None
                    if name in wanted and content is not None:
                        what = f"its member {member.name!r}"
                        data = read_exactly(content, member.size, path, what)
                        batches[name] = _parse(data, path / member.name, classes)
            while budget.read(2**20):
                pass  # gzip's checksum comes after the last byte
    except FileFormatError:
        raise
    except (tarfile.TarError, ArithmeticError, LookupError, ValueError, RecursionError) as error:
        raise malformed(path, "this should be a tar archive", f"it is damaged ({error})") from error
    return batches


class _Budget:
    """Stops a small archive that unpacks without end."""

    def __init__(self, stream: Readable, path: Path) -> None:
        self._stream, self._path, self._left = stream, path, MAX_BYTES

    def read(self, n: int) -> bytes:
        data = self._stream.read(n)
        self._left -= len(data)
        if self._left < 0:
            raise malformed(
                self._path,
                "a CIFAR archive unpacks to about 190 MB",
                f"this one goes beyond {MAX_BYTES:,} bytes",
            )
        return data


def _parse(data: bytearray, path: Path, classes: int) -> Examples:
    parse = _parse_python if data[:1] == _PICKLE_START else _parse_binary
    images, labels = parse(data, path, classes)
    return (
        torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()),
        torch.from_numpy(labels.astype(np.int64)),
    )


def _parse_binary(
    data: bytearray, path: Path, classes: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    limits = _LABEL_LIMITS[classes]
    record = len(limits) + _PIXELS
    if len(data) == 0 or len(data) % record:
        raise malformed(
            path,
            f"a CIFAR-{classes} file consists of records of {record:,} bytes",
            f"it has {len(data):,} bytes, {len(data) / record:.3f} records",
            f"Fetch it again, or check that it is CIFAR-{classes}.",
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    for column, limit in enumerate(limits):
        _check_labels(records[:, column], limit, path, classes)
    return records[:, len(limits) :], records[:, len(limits) - 1]


def _parse_python(
    data: bytearray, path: Path, classes: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    batch = read_pickle(data, path)
    content: dict[str, Any] = {}
    if isinstance(batch, dict):
        for key, value in batch.items():
            content[key.decode("latin1") if isinstance(key, bytes) else str(key)] = value
    field = _PYTHON_LABELS[classes]
    promised = f"a CIFAR-{classes} batch is a dict with 'data' (N, 3072) of uint8 and '{field}'"
    images, labels = content.get("data"), content.get(field)
    pixels = images.values if isinstance(images, PickledArray) else None
    if pixels is None or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise malformed(path, promised, "its 'data' is missing or something else")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise malformed(path, promised, f"its '{field}' is not a list of {len(pixels):,} labels")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise malformed(path, promised, f"its '{field}' has labels outside 0 to {classes - 1}")
    return pixels, np.array(labels, np.int64)


def _check_labels(labels: NDArray[np.uint8], limit: int, path: Path, classes: int) -> None:
    if (worst := int(labels.max())) >= limit:
        raise malformed(
            path,
            f"labels lie in 0 to {limit - 1}",
            f"record {int(labels.argmax()):,} has label {worst}",
            f"Fetch it again, or check that it is the binary version of CIFAR-{classes}.",
        )
