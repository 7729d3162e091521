"""Groups that are computed together give what they give apart, as long as and only if alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo.optim
from credo.optim import layout
from credo.optim.base import NaturalOptimizer

Change = Callable[[NaturalOptimizer, int], None]
OPTIMIZERS = {"IVON": credo.optim.IVON, "Vadam": credo.optim.Vadam, "VOGN": credo.optim.VOGN}


def nothing(optimizer: NaturalOptimizer, step: int) -> None:
    pass


def lr_of_one_group(optimizer: NaturalOptimizer, step: int) -> None:
    """Another rate for a while, then the same again."""
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[1]["lr"] = 0.1 * rate if step in (3, 4) else rate


def lr_of_all(optimizer: NaturalOptimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def prior_of_one_group(optimizer: NaturalOptimizer, step: int) -> None:
    if step == 3:
        optimizer.param_groups[1]["prior_precision"] *= 50.0


def warmup_of_one_group(optimizer: NaturalOptimizer, step: int) -> None:
    optimizer.param_groups[0]["kl_warmup"] = 9 if step > 3 else 0


def clip_or_damping_of_one_group(optimizer: NaturalOptimizer, step: int) -> None:
    for name in ("clip_radius", "damping"):
        if name in optimizer.param_groups[1] and step == 2:
            optimizer.param_groups[1][name] = 0.003


def state_loaded(optimizer: NaturalOptimizer, step: int) -> None:
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[1]["lr"] *= 0.5


CHANGES: list[Change] = [
    nothing, lr_of_one_group, lr_of_all, prior_of_one_group, warmup_of_one_group,
    clip_or_damping_of_one_group, state_loaded,
]  # fmt: skip


def trained(name: str, change: Change, **settings: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Weights, scales and state after some steps; how many parcels each step had."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5)).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 5).double()
    optimizer = OPTIMIZERS[name](net, num_data=60, **settings)
    assert [group["deterministic"] for group in optimizer.param_groups] == [False, False, True]
    parcels = []
    for step in range(7):
        change(optimizer, step)
        with optimizer.sampled():
            F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        parcels.append(len(optimizer._parcels(optimizer._effective_data)))
    q = optimizer.posterior(net, credo.likelihoods.Gaussian()).q
    remembered = [tensor for p in net.parameters() for tensor in optimizer.state[p].values()]
    return [*(p.detach() for p in net.parameters()), q.scale, *remembered], parcels


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_merged_groups_move_as_they_do_apart(
    name: str, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, parcels = trained(name, change)
    assert 2 in parcels, "nothing was merged"
    monkeypatch.setattr(layout, "LARGEST", 0)
    apart, parcels = trained(name, change)
    assert set(parcels) == {3}
    for one, other in zip(together, apart, strict=True):
        # Roundings: δ is added as a vector, and Vadam's step is not the fused kernel's.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_another_rate_in_one_group_parts_them() -> None:
    _, parcels = trained("IVON", lr_of_one_group)
    assert parcels == [2, 2, 2, 3, 3, 2, 2]


def test_a_rate_of_zero_holds_its_group_only() -> None:
    def hold(optimizer: NaturalOptimizer, step: int) -> None:
        optimizer.param_groups[1]["lr"] = 0.0

    held, _ = trained("IVON", hold)
    torch.manual_seed(0)
    start = [p.double() for layer in (nn.Linear(3, 8), nn.Linear(8, 5)) for p in layer.parameters()]
    assert [torch.equal(a, b) for a, b in zip(held, start, strict=False)] == [False] * 2 + [
        True
    ] * 2


def test_a_published_rate_that_knows_the_layer_is_not_merged() -> None:
    _, parcels = trained("IVON", nothing, rescale_lr=True)
    assert set(parcels) == {3}


def test_hooks_and_profilers_see_every_step() -> None:
    net = nn.Linear(2, 1)
    optimizer = credo.optim.IVON(net, num_data=10)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls == ["before", "closure", "after"]
    other = credo.optim.IVON(nn.Linear(2, 1), num_data=10)
    with torch.profiler.profile() as record, pytest.raises(credo.errors.UnsupportedError):
        other.step()
    assert "Optimizer.step#IVON.step" in {event.key for event in record.key_averages()}
