"""Inputs and targets of a batch, whatever shape a data loader gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from credo.errors import DataError
from credo.types import Batch, Inputs

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same inputs with every tensor of theirs changed.

    >>> import torch
    >>> map_inputs(lambda x: x[:1], {"pixels": torch.arange(3)})
    {'pixels': tensor([0])}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def unpack_batch(batch: Any) -> Batch:
    """Inputs and targets of what a data loader yields.

    A pair (x, y); a longer tuple, whose last entry is the targets; or a mapping with one of the
    usual target keys, the rest being keyword arguments of the network.

    >>> import torch
    >>> x, y = unpack_batch({"pixels": torch.ones(2, 3), "labels": torch.tensor([0, 1])})
    >>> sorted(x), y.tolist()
    (['pixels'], [0, 1])
    """
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {k: v for k, v in batch.items() if k != key}, batch[key]
        raise DataError(
            f"a mapping batch needs its targets under one of {TARGET_KEYS}, not {sorted(batch)}"
        )
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, list | tuple) and len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    raise DataError(
        f"a batch must be (inputs, targets) or a mapping, not {type(batch).__name__}; "
        "does the dataset yield inputs alone?"
    )
