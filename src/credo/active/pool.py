"""The pool: inputs whose labels can be asked for, taken apart by rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.errors import DataError
from credo.network.batches import map_inputs
from credo.types import Inputs, Vector


def as_inputs(pool: Any) -> Inputs:
    """Tensors of what a user brings: a tensor, an array, a mapping or a tuple of them."""
    if isinstance(pool, Mapping):
        return {name: torch.as_tensor(part) for name, part in pool.items()}
    if isinstance(pool, list | tuple) and pool and isinstance(pool[0], Tensor | np.ndarray):
        return tuple(torch.as_tensor(part) for part in pool)
    return torch.as_tensor(pool)


def size(inputs: Inputs) -> int:
    """How many examples there are.

    >>> size({"left": torch.zeros(3, 2), "right": torch.zeros(3)})
    3
    """
    lengths = {len(part) for part in parts(inputs)}
    if len(lengths) != 1 or not min(lengths):
        raise DataError(
            f"the pool needs inputs with the same number of examples, at least one, but their "
            f"first dimensions are {sorted(lengths)}"
        )
    return lengths.pop()


def rows(inputs: Inputs, chosen: Tensor) -> Inputs:
    """The examples with these numbers, in this order."""
    return map_inputs(lambda x: x[chosen.to(x.device)], inputs)


def chunks(inputs: Inputs, length: int, like: Vector) -> Iterator[Inputs]:
    """All examples, so many at a time, where the network is and in its precision."""

    def moved(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)

    for start in range(0, size(inputs), length):
        piece = slice(start, start + length)
        yield map_inputs(lambda x, piece=piece: moved(x[piece]), inputs)  # type: ignore[misc]


def fingerprint(inputs: Inputs) -> str:
    """A short text that another pool would not have."""
    digest = hashlib.sha256()
    for part in parts(inputs):
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def parts(inputs: Inputs) -> list[Tensor]:
    """The tensors that the inputs are made of."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)
