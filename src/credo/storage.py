"""Posteriors and checkpoints on disk: safetensors only, written atomically, read with suspicion."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credo.errors import FileFormatError
from credo.types import Json
from credo.version import __version__

FORMAT = "credo"


def write_atomically(path: Path, data: bytes) -> None:
    """All of the data or nothing: a crash leaves the old file.

    Args:
        path: The file; its folder is made.
        data: Its whole content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are private, and a run folder is to be read by others.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Json) -> None:
    """One safetensors file.

    Args:
        path: The file.
        tensors: By name.
        meta: Travels as JSON in the header.
    """
    ready = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    write_atomically(path, save(ready, {FORMAT: json.dumps(meta)}))


def read_tensors(path: Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], Json]:
    """The inverse of `write_tensors`; anything else is a `FileFormatError`.

    The header is checked against the file's size before a tensor is read, so a lying header can't
    cause a huge allocation.

    Args:
        path: The file.
        device: Where the tensors are to be.
    """
    if not path.is_file():
        raise FileFormatError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            meta = json.loads((file.metadata() or {})[FORMAT])
            # Copies: tensors inside of a file start anywhere, and unaligned sums round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except KeyError as error:
        raise FileFormatError(
            f"{path} is a safetensors file, but Credo did not write it"
        ) from error
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FileFormatError(
            f"{path} is damaged or not a safetensors file ({error}); use a copy, or fit again"
        ) from error
    if not isinstance(meta, dict):
        raise FileFormatError(f"{path} has no settings in its header; Credo did not write it")
    return tensors, meta


def require(path: Path, meta: Json, keys: Iterable[str]) -> list[Any]:
    """Entries of the header that must be there.

    Args:
        path: The file, for the error.
        meta: Its header.
        keys: The entries.
    """
    missing = [key for key in keys if key not in meta]
    if missing:
        raise FileFormatError(f"{path} lacks {missing} in its header: it is not what was expected")
    return [meta[key] for key in keys]


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose names start with the prefix, without it.

    Args:
        prefix: To look for.
        tensors: By name.
    """
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def environment() -> Json:
    """Versions and machine, for the record of a run."""
    return {
        "credo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
