"""Torch optimizers over flat vectors: built by name or by callable.

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

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from credo import optim
from credo.checks import nearest
from credo.errors import DataError, UnsupportedError
from credo.optim.lean import LeanAdam
from credo.optim.separate import separate

Groups: TypeAlias = list[dict[str, Any]]
OneSpec: TypeAlias = str | Callable[[Groups], Optimizer]
OptimizerSpec: TypeAlias = OneSpec | Mapping[str, OneSpec]
"""A name such as "adam", or a callable given the parameter groups ``mean`` and ``scale``; or one of
these for each group, as in {"mean": "sgd", "scale": "adam"}."""

BY_NAME: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,  # `LeanAdam` where it can be fused
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
        raise DataError(
            f"optimizer={spec!r} is unknown.{nearest(name, BY_NAME)} Choose one of "
            f"{sorted(BY_NAME)}"
        )
    factory = BY_NAME[name]
    options: dict[str, Any] = {}
    if "fused" in inspect.signature(factory).parameters and _can_fuse(groups):
        if name == "adam":
            return LeanAdam(groups)
        options["fused"] = True
    return factory(groups, **options)


def _can_fuse(groups: Groups) -> bool:
    parameters = [p for group in groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
