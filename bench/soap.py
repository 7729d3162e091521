"""SOAP (Vyas et al., 2024): Adam in the eigenbases of the gradients' second moments, as a rival.

Only what the comparison needs: matrices (convolutions as (channels out, rest)) up to ``max_size``
in their bases, the rest by Adam, decoupled weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from credo.optim.eigenbasis import EigenMatrix, sides


class SOAP(torch.optim.Optimizer):
    """Adam's second moment stays where it is at a refresh, but for the order of its columns."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        refresh: int = 10,
        max_size: int = 1024,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": weight_decay})
        self._refresh, self._max_size, self._step = refresh, max_size, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._step += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(group, parameter)

    def _move(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["m"], state["v"] = (torch.zeros(parameter.numel()) for _ in range(2))
            state["basis"] = self._basis_for(parameter)
        basis, gradient = state["basis"], parameter.grad.reshape(-1)
        room, turned = torch.empty_like(gradient), gradient
        if basis is not None:
            basis.absorb(gradient, beta2)
            turned = basis.into(gradient, torch.empty_like(gradient), room)
        m, v = state["m"].lerp_(turned, 1 - beta1), state["v"].lerp_(turned.square(), 1 - beta2)
        m_hat, v_hat = m / (1 - beta1**self._step), v / (1 - beta2**self._step)
        step = m_hat / (v_hat.sqrt() + group["eps"])
        if basis is not None:
            step = basis.out_of(step, torch.empty_like(step), room)
        parameter.mul_(1 - group["lr"] * group["decay"])
        parameter.sub_(step.view_as(parameter), alpha=group["lr"])
        if basis is not None and self._step % self._refresh == 0:
            basis.refresh(parameter.reshape(-1), m, v)

    def _basis_for(self, parameter: Tensor) -> EigenMatrix | None:
        if parameter.dim() < 2:
            return None
        shape = (len(parameter), parameter.numel() // len(parameter))
        axes = sides(shape, self._max_size, one_sided=False)
        return (
            EigenMatrix(slice(0, parameter.numel()), shape, axes, parameter) if any(axes) else None
        )
