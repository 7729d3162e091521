"""Remembered inputs, with the heads that they belong to, as named tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credo.types import Batch, Inputs


def pack_inputs(memory: Sequence[Inputs]) -> dict[str, Tensor]:
    """``0.input``, ``0.head``, ``1.input``, …; heads where there are some.

    >>> list(pack_inputs([torch.ones(3), (torch.ones(2), torch.zeros(2))]))
    ['0.input', '1.input', '1.head']
    """
    tensors: dict[str, Tensor] = {}
    for index, inputs in enumerate(memory):
        if isinstance(inputs, Tensor):
            tensors[f"{index}.input"] = inputs
        else:
            assert isinstance(inputs, tuple)
            tensors[f"{index}.input"], tensors[f"{index}.head"] = inputs
    return tensors


def unpack_inputs(tensors: Mapping[str, Tensor], device: torch.device) -> list[Inputs]:
    """The inverse of `pack_inputs`; other tensors are left aside."""
    memory: list[Inputs] = []
    while (x := tensors.get(f"{len(memory)}.input")) is not None:
        head = tensors.get(f"{len(memory)}.head")
        memory.append(x.to(device) if head is None else (x.to(device), head.to(device)))
    return memory


def pack_batches(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """`pack_inputs`, with the targets as ``0.target``, …"""
    targets = {f"{index}.target": target for index, (_, target) in enumerate(batches)}
    return {**pack_inputs([inputs for inputs, _ in batches]), **targets}


def unpack_batches(tensors: Mapping[str, Tensor], device: torch.device) -> list[Batch]:
    """The inverse of `pack_batches`."""
    memory = unpack_inputs(tensors, device)
    return [(x, tensors[f"{index}.target"].to(device)) for index, x in enumerate(memory)]
