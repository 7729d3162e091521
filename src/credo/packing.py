"""Objects as tensors plus JSON, read off their dataclass fields: for checkpoints and run folders.

A field that a resumed run needs is declared so, and `pack` and `unpack` do the rest:

    >>> import torch
    >>> from dataclasses import dataclass, field
    >>> @dataclass
    ... class Progress:
    ...     weights: torch.Tensor = field(metadata=STORED)
    ...     steps: int = field(default=0, metadata=STORED)
    ...     scratch: object = None
    >>> tensors, meta = pack(Progress(torch.ones(2), steps=7))
    >>> list(tensors), meta
    (['weights'], {'steps': 7})
    >>> fresh = Progress(torch.zeros(2))
    >>> unpack(fresh, tensors, meta)
    >>> fresh.weights.tolist(), fresh.steps
    ([1.0, 1.0], 7)

============================= ====================================================================
a stored field's value        is kept as
============================= ====================================================================
tensor                        itself; read back in place
a network's flat parameters   their vector; written back as they must be
torch optimizer               its state's tensors, and JSON of numbers and groups
dataclass                     its own stored fields
anything `Packable`           what its ``pack`` gives
None                          nothing: it is None in the fresh object too
numbers, strings, their lists JSON
============================= ====================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from credo.errors import CheckpointError
from credo.storage import under
from credo.types import Json, Vector

STORED = {"stored": True}
"""The metadata of a field that `pack` keeps."""


@runtime_checkable
class Packable(Protocol):
    """An object that knows itself how it is kept."""

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that ``unpack`` needs."""
        ...

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``, into a fresh object."""
        ...


@runtime_checkable
class FlatVector(Protocol):
    """A network's parameters as one vector, as `credo.network` has them."""

    @property
    def vector(self) -> Vector:
        """All of them."""
        ...

    def writing(self) -> AbstractContextManager[Vector]:
        """Inside, the vector may be written."""
        ...


def pack(owner: Any) -> tuple[dict[str, Tensor], Json]:
    """The stored fields of a dataclass instance, as named tensors plus JSON."""
    tensors: dict[str, Tensor] = {}
    meta: Json = {}
    for name, value in _stored(owner):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, FlatVector):
            tensors[name] = value.vector
        elif value is not None:
            own, meta[name] = _pack_value(value)
            tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}
    return tensors, meta


def unpack(owner: Any, tensors: Mapping[str, Tensor], meta: Json) -> None:
    """The inverse of `pack`, into an instance made with the same settings."""
    for name, value in _stored(owner):
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.copy_(tensors[name])
        elif isinstance(value, FlatVector):
            with value.writing() as vector:
                vector.copy_(tensors[name])
        elif isinstance(value, Optimizer):
            unpack_optimizer(value, under(f"{name}.", tensors), meta[name])
        elif isinstance(value, Packable):
            value.unpack(under(f"{name}.", tensors), meta[name])
        elif dataclasses.is_dataclass(value):
            unpack(value, under(f"{name}.", tensors), meta[name])
        elif value is not None:
            setattr(owner, name, meta[name])


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], Json]:
    """An optimizer's state as tensors plus JSON."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: Json = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return tensors, {"state": numbers, "groups": groups}


def unpack_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: Json) -> None:
    """The inverse of `pack_optimizer`, into an optimizer built with the same groups.

    Raises:
        CheckpointError: The groups are not as many.
    """
    fresh = optimizer.state_dict()
    if len(meta["groups"]) != len(fresh["param_groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(meta['groups'])} parameter groups, this one "
            f"{len(fresh['param_groups'])}: resume with the optimizer the run was started with"
        )
    state: dict[int, dict[str, Any]] = {}
    for source in (tensors, meta["state"]):
        for name, value in source.items():
            index, key = name.split(".", 1)
            state.setdefault(int(index), {})[key] = value
    groups = [
        {**stored, "params": group["params"]}
        for stored, group in zip(meta["groups"], fresh["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def as_json(value: Any) -> Any:
    """A setting as the run folder records it, so that two runs can be compared.

    Objects with a ``config`` say it themselves; dataclasses are their fields; of functions the name
    is all that can be said.

    >>> as_json({"mean": "sgd", "betas": (0.9, 0.99), "then": as_json})
    {'mean': 'sgd', 'betas': [0.9, 0.99], 'then': 'as_json'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, HasConfig):
        return value.config()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **settings_of(value)}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def settings_of(owner: Any) -> Json:
    """The fields that make two instances of a dataclass differ, as JSON."""
    return {
        field.name: as_json(getattr(owner, field.name))
        for field in dataclasses.fields(owner)
        if field.init and field.compare
    }


@runtime_checkable
class HasConfig(Protocol):
    """An object that says itself what its settings are."""

    def config(self) -> Json:
        """The settings, as JSON."""
        ...


def _stored(owner: Any) -> list[tuple[str, Any]]:
    return [
        (field.name, getattr(owner, field.name))
        for field in dataclasses.fields(owner)
        if "stored" in field.metadata
    ]


def _pack_value(value: Any) -> tuple[dict[str, Tensor], Any]:
    if isinstance(value, Optimizer):
        return pack_optimizer(value)
    if isinstance(value, Packable):
        return value.pack()
    if dataclasses.is_dataclass(value):
        return pack(value)
    return {}, value
