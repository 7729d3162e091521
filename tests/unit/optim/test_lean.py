"""The lean Adam is torch's, bit for bit, and hands over whatever is not plain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from credo.optim.lean import LeanAdam


def vectors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator).to(dtype) for n in (5, 3, 40)]


def groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "lr": 0.01, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 0.3, "betas": (0.5, 0.9)},
    ]


def gradients(steps: int, seed: int = 1) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [torch.randn(n, generator=generator) for n in (5, 3, 40)]


def run(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1, gap: int = -1) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, grads in enumerate(gradients(steps, seed)):
        for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            parameter.grad = None if number == gap and index == 1 else grad.to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def torchs(parameters: list[Tensor]) -> torch.optim.Adam:
    return torch.optim.Adam(groups(parameters), fused=True)


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-1, 0, 3])
def test_steps_are_torchs_bit_for_bit(dtype: torch.dtype, gap: int) -> None:
    """With rates that change, and a parameter that has no gradient once."""
    ours, theirs = vectors(dtype), vectors(dtype)
    run(LeanAdam(groups(ours)), 7, gap=gap)
    run(torchs(theirs), 7, gap=gap)
    assert_same(ours, theirs)


def test_each_goes_on_from_the_others_state() -> None:
    ours, theirs = vectors(), vectors()
    lean, full = LeanAdam(groups(ours)), torchs(theirs)
    run(lean, 4)
    run(full, 4)
    first, second = lean.state_dict(), full.state_dict()
    lean.load_state_dict(second)
    full.load_state_dict(first)
    run(lean, 4, seed=2)
    run(full, 4, seed=2)
    assert_same(ours, theirs)
    assert float(lean.state[ours[0]]["step"]) == 8.0


def test_mixed_dtypes_are_left_to_torch() -> None:
    ours, theirs = vectors(), vectors()
    for some in (ours, theirs):
        some[1] = some[1].double()
    run(LeanAdam(groups(ours)), 4)
    run(torchs(theirs), 4)
    assert_same(ours, theirs)


def test_hooks_and_closures_are_called() -> None:
    ours = vectors()
    optimizer, seen = LeanAdam(groups(ours)), []
    run(optimizer, 2)
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    run(optimizer, 1)
    assert seen == ["before", "after"]
    assert optimizer.step(lambda: 3.0) == 3.0


def test_a_scheduler_of_torchs_finds_it_used() -> None:
    optimizer = LeanAdam(groups(vectors()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(optimizer, 3)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3 * 0.5)
