"""One step on a flat vector, given its gradient: the optimizers that torch lacks, beside Adam."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bench.timing import Contestants, Row, interleave
from credo.optim import AdaBound, AMSBound, AMSGrad, RAdam, YellowFin

CREDO: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "credo AdaBound": AdaBound,
    "credo AMSBound": AMSBound,
    "credo AMSGrad": AMSGrad,
    "credo RAdam": RAdam,
    "credo YellowFin": YellowFin,
}
TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adam fused": partial(torch.optim.Adam, fused=True),
    "adam fused again (control)": partial(torch.optim.Adam, fused=True),
    "amsgrad fused": partial(torch.optim.Adam, fused=True, amsgrad=True),
    "torch RAdam": torch.optim.RAdam,
}


def flat_step(parameters: int = 10**6) -> list[Row]:
    """Each has its own vector; the gradient is shared."""
    gradient = torch.randn(parameters)

    def stepping(make: Callable[..., torch.optim.Optimizer]) -> Callable[[], object]:
        parameter = nn.Parameter(torch.randn(parameters))
        parameter.grad = gradient
        optimizer = make([parameter], lr=1e-3)
        for _ in range(6):  # RAdam skips five
            optimizer.step()
        return optimizer.step

    contestants: Contestants = {name: stepping(make) for name, make in {**TORCH, **CREDO}.items()}
    baselines = {"adam fused": "adam fused", "adam": "adam"}
    return interleave("flat optimizer", "10⁶ weights", contestants, baselines, rounds=61, steps=5)
