"""What the optimizers of points share: options that are checked, groups, closures, refusals.

These are ordinary `torch.optim.Optimizer`s, for any network and any loop; torch's schedulers drive
their ``lr``. `credo.optim.by_name` builds them by name for flat vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from credo.checks import check, constraints_of
from credo.errors import UnsupportedError
from credo.optim.groups import Group


@dataclass(frozen=True)
class Mover:
    """A parameter that has a gradient, both laid out in the order of a contiguous tensor.

    The kernels that do a step in one pass walk through memory as it comes: torch's fused Adam gives
    a transposed parameter and its contiguous gradient wrong values without a word. ``value`` is the
    parameter itself or, where that is not contiguous, a copy that is written back.
    """

    parameter: Tensor
    value: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> Mover:
        """With the gradient that it has now."""
        assert parameter.grad is not None
        return cls(parameter, parameter.contiguous(), parameter.grad.contiguous())


class Descent(Optimizer, ABC):
    """An optimizer that keeps for each parameter a few tensors of its shape.

    The state of a parameter is those tensors and ``step``, how many steps it has made, so that
    parameters may join later or get a gradient now and then only. Groups may change every option;
    what the constructor's annotations say of it holds for them too.

    Args:
        params: Parameters, or groups of them, as every optimizer of torch takes them.
        options: The defaults of all options.
    """

    def __init__(self, params: ParamsT, options: Group) -> None:
        super().__init__(params, options)

    @abstractmethod
    def _advance(self, work: list[tuple[Group, list[Mover]]]) -> None:
        """Change the movers' values in place, group by group; gradients stay as they are."""

    def add_param_group(self, param_group: Group) -> None:
        """More parameters, with options of their own where the group names them.

        The group's rate is remembered as ``base_lr``: what a scheduler makes of it later counts
        relative to that.
        """
        settled = {**self.defaults, **param_group}
        for name, declared in constraints_of(type(self).__init__).items():
            if name in settled and name != "params":
                check(name, settled[name], declared)
        super().add_param_group({**param_group, "base_lr": settled.get("base_lr", settled["lr"])})
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise UnsupportedError(
                    f"{type(self).__name__} takes real floating parameters, not {parameter.dtype}: "
                    "split complex ones by torch.view_as_real"
                )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; a ``closure`` computes them and the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in moving):
                raise UnsupportedError(
                    f"{type(self).__name__} needs dense gradients: build the embedding with "
                    "sparse=False, or give it to torch.optim.SparseAdam"
                )
            if moving:
                work.append((group, [Mover.of(p) for p in moving]))
        self._advance(work)
        for _, movers in work:
            for mover in movers:
                if mover.value is not mover.parameter:
                    mover.parameter.copy_(mover.value)
        return loss

    def _counted(
        self, work: list[tuple[Group, list[Mover]]], names: tuple[str, ...]
    ) -> Iterator[tuple[Group, int, list[Tensor], list[Tensor], list[list[Tensor]]]]:
        """Count a step and give what can move together: group, step, values,
        gradients (with ``weight_decay`` in them), state.

        ``names`` are the tensors of the state, zero at first; the last item has a list for each.
        """
        for group, movers in work:
            parts: dict[Any, list[Mover]] = {}
            for mover in movers:
                state, value = self.state[mover.parameter], mover.value
                if not state:
                    for name in names:
                        state[name] = torch.zeros_like(value)
                    state["step"] = 0
                state["step"] += 1
                parts.setdefault((state["step"], value.device, value.dtype), []).append(mover)
            for (step, _, _), some in parts.items():
                values, gradients = [m.value for m in some], [m.gradient for m in some]
                memory = [[self.state[mover.parameter][name] for mover in some] for name in names]
                yield group, step, values, decayed(group, values, gradients), memory


def rate_factor(group: Group) -> float:
    """What a scheduler has made of the group's rate: lr / base_lr."""
    if group["base_lr"]:
        return float(group["lr"] / group["base_lr"])
    return float(group["lr"] > 0)


def decayed(group: Group, values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """The gradients plus those of ½·weight_decay·‖w‖²."""
    if not group["weight_decay"]:
        return gradients
    return list(torch._foreach_add(gradients, values, alpha=group["weight_decay"]))
