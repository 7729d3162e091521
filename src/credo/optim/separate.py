"""One optimizer for each parameter group, behind the face of a single one.

>>> import torch
>>> mean, scale = torch.zeros(3), torch.zeros(3)
>>> both = SeparateOptimizers(
...     [torch.optim.SGD([{"params": [mean], "name": "mean"}], lr=0.1),
...      torch.optim.Adam([{"params": [scale], "name": "scale"}], lr=0.01)]
... )
>>> [(group["name"], group["lr"]) for group in both.param_groups]
[('mean', 0.1), ('scale', 0.01)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from credo.errors import DataError


class SeparateOptimizers(Optimizer):
    """Several optimizers that step together; groups and state are theirs, one after the other."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        # The groups are the parts' own dictionaries: a rate that is changed here is changed there.
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """As a single optimizer over all groups would have it."""
        merged: dict[str, Any] = {"state": {}, "param_groups": []}
        for part in self.parts:
            offset = _size(merged["param_groups"])
            own = part.state_dict()
            merged["state"] |= {offset + index: entry for index, entry in own["state"].items()}
            merged["param_groups"] += _moved(own["param_groups"], offset)
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        groups = list(state_dict["param_groups"])
        offset = 0
        for part in self.parts:
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            end = offset + _size(mine)
            entries = {
                index - offset: entry
                for index, entry in state_dict["state"].items()
                if offset <= index < end
            }
            part.load_state_dict({"state": entries, "param_groups": _moved(mine, -offset)})
            offset = end
        # Loading gives every part new dictionaries.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def separate(
    specs: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    build: Callable[[Any, list[dict[str, Any]]], Optimizer],
) -> SeparateOptimizers:
    """An optimizer for each group by its name, each built from its own specification."""
    names = [group["name"] for group in groups]
    if sorted(specs) != sorted(names):
        raise DataError(
            f"optimizer names the parameter groups {sorted(specs)}, but this method has "
            f"{sorted(names)}: give one optimizer for each, or a single one for all"
        )
    return SeparateOptimizers([build(specs[group["name"]], [group]) for group in groups])


def _size(groups: Sequence[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def _moved(groups: Sequence[dict[str, Any]], offset: int) -> list[dict[str, Any]]:
    return [{**group, "params": [index + offset for index in group["params"]]} for group in groups]
