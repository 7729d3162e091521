"""Norm layers that became random because the optimizer was given parameters, not the network.

A parameter does not know its layer, so ``IVON(net.parameters())`` draws the gains and shifts of
norm layers too, around a prior mean of zero, where a gain belongs near one. The layers are seen
when they run: in the first ``sampled()`` block, which then says so once. Groups that say
``deterministic``, be it True or False, have decided and are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from credo.network.execution import NORM_LAYERS
from credo.optim.groups import Group

_NAMED = 4
"""So many layers are named, the rest is counted."""


def undecided(given: Sequence[Any], groups: Sequence[Group]) -> dict[int, Tensor]:
    """By their id, the random parameters that nobody said to be random.

    Args:
        given: What the optimizer was given: parameters, with names or without, or groups.
        groups: What became of it.
    """
    decided = {
        id(parameter)
        for item in given
        if isinstance(item, Mapping) and "deterministic" in item
        for parameter in _tensors(item["params"])
    }
    return {
        id(parameter): parameter
        for group in groups
        if not group["deterministic"]
        for parameter in group["params"]
        if id(parameter) not in decided
    }


def _tensors(params: Any) -> list[Any]:
    """Those of a group, which may have names, or be one alone."""
    items = [params] if isinstance(params, Tensor) else list(params)
    return [item[1] if isinstance(item, tuple) else item for item in items]


@contextmanager
def told_of(parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Warn on leaving if a norm layer that ran in the block owns some of the ``parameters``."""
    found: dict[int, str] = {}

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(module, NORM_LAYERS):
            own = {a: p for a, p in module._parameters.items() if id(p) in parameters}
            if own:
                sizes = ", ".join(
                    f"{name} {tuple(p.shape)}" for name, p in own.items() if p is not None
                )
                found[id(module)] = f"{type(module).__name__} ({sizes})"

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
    if found:
        names = list(found.values())
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(
            f"norm layers are random here, around a prior mean of zero: {', '.join(names[:_NAMED])}"
            f"{more}. The optimizer was given parameters, which don't know their layers. Give it "
            "the network itself, as in IVON(net, ...), which leaves norm layers without noise and "
            "prior, or put their parameters into a group with deterministic=True (with "
            "deterministic=False if they are meant to be random)",
            UserWarning,
            stacklevel=6,
        )
