"""Torch optimizers over flat vectors: built by name or by callable, checkpointed without pickle.

A name stands for the optimizer with its own defaults and the group's ``lr``. For other settings
give a callable:

    >>> import credo
    >>> method = credo.VI(optimizer=lambda groups: credo.optim.AdaBound(groups, final_lr=0.01))

``"radam"`` and ``"amsgrad"`` are torch's; ``"radam-original"`` and ``"amsgrad-original"`` are what
their authors published. ``"sgd"`` and ``"momentum"`` have momentum 0.9, ``"sgd-plain"`` none.
``"yellowfin"`` tunes the rates of means and scales apart, from each group's own gradients: ``lr``
and ``scale_lr`` are those of the first step only.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from credo import optim
from credo.errors import CheckpointError, DataError, UnsupportedError
from credo.optim.separate import separate
from credo.types import Json

Groups: TypeAlias = list[dict[str, Any]]
OneSpec: TypeAlias = str | Callable[[Groups], Optimizer]
OptimizerSpec: TypeAlias = OneSpec | Mapping[str, OneSpec]
"""A name such as "adam", or a callable given the parameter groups ``mean`` and ``scale``; or one of
these for each group, as in {"mean": "sgd", "scale": "adam"}."""

BY_NAME: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": partial(optim.RAdam, early="momentum"),
    "radam-original": optim.RAdam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "amsgrad-original": optim.AMSGrad,
    "adabound": optim.AdaBound,
    "amsbound": optim.AMSBound,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd-plain": torch.optim.SGD,
    "yellowfin": optim.YellowFin,
}
"""Optimizers for which a flat vector is as good as matrices: all that read a weight's own gradient,
and YellowFin, which also reads the whole gradient's norm."""

NEED_MATRICES = ("muon", "adafactor", "shampoo", "soap", "lbfgs")


def build(spec: OptimizerSpec, groups: Groups) -> Optimizer:
    """The optimizer over these groups; fused where torch has a fused kernel for it."""
    if isinstance(spec, Mapping):
        return separate(spec, groups, build)
    if not isinstance(spec, str):
        optimizer = spec(groups)
        if not isinstance(optimizer, Optimizer):
            raise DataError(
                f"optimizer={spec!r} returned {type(optimizer).__name__}; it must take parameter "
                "groups and return a torch.optim.Optimizer, e.g. lambda groups: torch.optim.SGD("
                "groups, momentum=0.9)"
            )
        return optimizer
    name = spec.lower()
    if name in NEED_MATRICES:
        raise UnsupportedError(
            f"optimizer={spec!r} needs whole matrices or the loss itself, but Credo steps one flat "
            f"vector; choose one of {sorted(BY_NAME)} or pass a callable"
        )
    if name not in BY_NAME:
        near = difflib.get_close_matches(name, BY_NAME, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"optimizer={spec!r} is unknown; {hint}Choose one of {sorted(BY_NAME)}")
    factory = BY_NAME[name]
    options: dict[str, Any] = {}
    if "fused" in inspect.signature(factory).parameters and _can_fuse(groups):
        options["fused"] = True
    return factory(groups, **options)


def pack(optimizer: Optimizer) -> tuple[dict[str, Tensor], Json]:
    """The optimizer's state as tensors plus JSON."""
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


def unpack(optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: Json) -> None:
    """The inverse of `pack`, into an optimizer built with the same groups."""
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


def describe(spec: OptimizerSpec) -> Any:
    """What the run folder records."""
    if isinstance(spec, Mapping):
        return {name: describe(one) for name, one in spec.items()}
    return spec if isinstance(spec, str) else getattr(spec, "__qualname__", repr(spec))


def _can_fuse(groups: Groups) -> bool:
    parameters = [p for group in groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
