"""Torch's Adam on a few flat vectors, without what its step does for parameters of any kind.

The arithmetic is torch's fused kernel and the state is torch's, so that each can go on from the
other's. What is left out takes longer than a small network's backward pass: sorting parameters by
device and dtype, looking for capturable and differentiable variants, a record for profilers.
Whatever needs that (a closure, hooks, a parameter without a gradient, a rate that is a tensor) is
left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim import optimizer as torch_optimizer


class _Batch(NamedTuple):
    """The vectors of one group with their state, as the kernel takes them."""

    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


def _without_hooks(step: Any) -> Callable[..., Any]:
    """Torch wraps ``step`` of every class that is instantiated, once."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


class LeanAdam(Adam):
    """`torch.optim.Adam` with ``fused=True``, for flat vectors on one device.

    >>> import torch
    >>> vector = torch.ones(3)
    >>> vector.grad = torch.ones(3)
    >>> optimizer = LeanAdam([{"params": [vector], "lr": 0.5}])
    >>> optimizer.step()
    >>> optimizer.step()
    >>> vector.abs().max() < 1e-6
    tensor(True)
    """

    _full_step = Optimizer.profile_hook_step(_without_hooks(Adam.step))

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, fused=True)
        self._batches: list[_Batch] = []
        kinds = [{(p.dtype, p.device) for p in group["params"]} for group in self.param_groups]
        self._are_alike = all(len(kind) == 1 for kind in kinds)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._batches = []  # load_state_dict replaces the state's tensors

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group; its first step is torch's."""
        super().add_param_group(param_group)
        self._batches = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of Adam.

        Args:
            closure: Computes the loss again, as for any optimizer of torch.
        """
        gradients = [[p.grad for p in group["params"]] for group in self.param_groups]
        if closure is not None or not self._are_alike or not self._is_plain(gradients):
            return self._full_step(closure)
        if not self._batches:
            result = self._full_step()
            self._batches = [self._batch(group["params"]) for group in self.param_groups]
            return result
        with torch.no_grad():
            for group, batch, grads in zip(
                self.param_groups, self._batches, gradients, strict=True
            ):
                beta1, beta2 = group["betas"]
                torch._foreach_add_(batch.steps, 1)
                torch._fused_adam_(
                    batch.parameters,
                    grads,
                    batch.averages,
                    batch.squares,
                    [],
                    batch.steps,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=group["maximize"],
                )
        return None

    # Torch would wrap it for profilers and hooks; those are looked for in `_is_plain`.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_plain(self, gradients: list[list[Tensor | None]]) -> bool:
        hooks = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        if hooks or getattr(self, "grad_scale", None) is not None:
            return False
        for group, grads in zip(self.param_groups, gradients, strict=True):
            if group["amsgrad"] or isinstance(group["lr"], Tensor):
                return False
            for grad in grads:
                if grad is None:
                    return False
        return True

    def _batch(self, parameters: list[Tensor]) -> _Batch:
        states = [self.state[parameter] for parameter in parameters]
        return _Batch(
            parameters,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
        )
