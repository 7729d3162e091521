"""What the ranks of ``tests/contract/test_many_ranks.py`` do; importable by their processes."""

from __future__ import annotations

import copy
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from credo import collectives
from credo.likelihoods import Categorical
from credo.optim import EVON, IVON, VOGN, VON, NaturalOptimizer, Vadam

KINDS: dict[str, tuple[type[NaturalOptimizer], dict[str, Any]]] = {
    "EVON": (EVON, {"refresh": 2}),
    "IVON": (IVON, {}),
    "VOGN": (VOGN, {}),
    "Vadam": (Vadam, {}),
    "VON": (VON, {}),
    "VON-hutchinson": (VON, {"hessian": "hutchinson", "probes": 2}),
}
BATCH = 8


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def make(kind: str, params: Any, **options: Any) -> Any:
    build, own = KINDS[kind]
    defaults = {"lr": 0.05, "num_data": 50, "betas": (0.9, 0.99), "seed": 3}
    return build(params, **{**defaults, **own, **options})


def batch(step: int, part: slice = slice(None), dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 3, generator=generator, dtype=torch.float64).to(dtype)
    return x[part], (x[:, 0] > 0).long()[part]


def backward(opt: NaturalOptimizer, loss: Tensor) -> None:
    if isinstance(opt, VON):
        opt.backward(loss)
    else:
        loss.backward()


def block(opt: NaturalOptimizer, net: nn.Module, step: int, part: slice = slice(None)) -> None:
    x, y = batch(step, part, next(net.parameters()).dtype)
    with opt.sampled():
        backward(opt, F.cross_entropy(net(x), y))


def train(
    opt: NaturalOptimizer,
    net: nn.Module,
    first: int,
    last: int,
    blocks: int = 1,
    part: slice = slice(None),
) -> None:
    for step in range(first, last):
        for _ in range(blocks):
            block(opt, net, step, part)
        opt.step()
        opt.zero_grad()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def outcome(opt: NaturalOptimizer, net: nn.Module) -> tuple[Tensor, Tensor]:
    parts = [t.reshape(-1) for p in net.parameters() for t in opt.state[p].values()]
    return weights(net), torch.cat(parts)


def my_part(sizes: tuple[int, ...]) -> slice:
    start = sum(sizes[: dist.get_rank()])
    return slice(start, start + sizes[dist.get_rank()])


# --- runs -----------------------------------------------------------------------------------------


def shares_of_a_batch(kind: str, sizes: tuple[int, ...]) -> Any:
    net = network()
    opt = make(kind, net, shared_noise=True)
    train(opt, net, 0, 5, part=my_part(sizes))
    return outcome(opt, net)


def own_draws(kind: str, blocks: int) -> Any:
    net = network()
    opt = make(kind, net)
    train(opt, net, 0, 5, blocks)
    return outcome(opt, net)


def added_blocks(kind: str, blocks: int) -> Any:
    """Losses that are divided by the number of blocks."""
    net = network()
    opt = make(kind, net, accumulation="sum")
    for step in range(5):
        for _ in range(blocks):
            with opt.sampled():
                x, y = batch(step)
                backward(opt, F.cross_entropy(net(x), y) / blocks)
        opt.step()
    return outcome(opt, net)


def own_draws_of_own_data(kind: str, draws: str) -> Any:
    net = network(torch.float32)
    opt = make(kind, net, draws=draws)
    train(opt, net, 0, 6, part=my_part((4, 4)))
    return outcome(opt, net)


def continued(kind: str, saved: dict[str, Any], values: dict[str, Tensor]) -> Any:
    net = network(seed=dist.get_rank())
    opt = make(kind, net, seed=77)
    net.load_state_dict(values)
    opt.load_state_dict(saved)
    train(opt, net, 3, 6)
    return outcome(opt, net)


def stopped(kind: str) -> Any:
    net = network()
    opt = make(kind, net)
    train(opt, net, 0, 3)
    return copy.deepcopy(opt.state_dict()), net.state_dict()


def with_ddp(kind: str, way: str) -> Any:
    """Train through DDP, told in one of several ways, or not at all, to leave gradients alone."""
    net = network()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=way == "views")
    given: Any = {"parameters": list(ddp.parameters()), "network": net}.get(way, ddp)
    if way in ("hook", "no_sync"):
        given = net
    if way == "hook":
        ddp.register_comm_hook(None, collectives.leave_alone)
    opt = make(kind, given, **({"module": net} if kind == "VOGN" and given is not net else {}))
    for step in range(5):
        with ddp.no_sync() if way == "no_sync" else nullcontext():
            block(opt, ddp, step, my_part((4, 4)))
        opt.step()
        opt.zero_grad()
    return outcome(opt, net)


def without_ddp(kind: str) -> Any:
    net = network()
    opt = make(kind, net)
    train(opt, net, 0, 5, part=my_part((4, 4)))
    return outcome(opt, net)


def averaged_by_hand(kind: str) -> Any:
    net = network()
    opt = make(kind, net)
    x, y = batch(0, my_part((4, 4)))
    with opt.sampled():
        F.cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    opt.step()


def posterior_of_ddp() -> Any:
    net = network()
    ddp = DistributedDataParallel(net)
    opt = make("IVON", ddp)
    train(opt, ddp, 0, 2)
    posterior = opt.posterior(ddp, Categorical())
    return [s.name for s in posterior.model.random.segments], posterior.mean


# --- mistakes -------------------------------------------------------------------------------------


def message(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def unequal_blocks(kind: str, counts: tuple[int, int]) -> Any:
    """The error, whether anything was lost, and where a good step leads afterwards."""
    net = network()
    opt = make(kind, net)
    before = outcome(opt, net)
    for _ in range(counts[dist.get_rank()]):
        block(opt, net, 0)
    try:
        opt.step()
        found = None
    except Exception as error:
        found = message(error)
    kept = all(torch.equal(a, b) for a, b in zip(before, outcome(opt, net), strict=True))
    train(opt, net, 0, 1)
    return found, kept, outcome(opt, net)


def different_weights(remedy: bool) -> Any:
    net = network(seed=dist.get_rank())
    opt = make("IVON", net)
    if remedy:
        collectives.copy_from_first(net)
    train(opt, net, 0, 1)
    return outcome(opt, net)


def different_networks() -> None:
    IVON(nn.Linear(3 + dist.get_rank(), 2), num_data=10)


def one_rank_loads() -> None:
    """In the middle of a run, so that the others don't expect it."""
    net = network()
    opt = make("IVON", net)
    state = opt.state_dict()
    train(opt, net, 0, 2)
    if dist.get_rank() == 1:
        opt.load_state_dict(state)
    train(opt, net, 2, 3)


def overflow_on_one_rank(kind: str) -> Any:
    net = network()
    opt = make(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = outcome(opt, net)
    for step in range(3):
        bad = step == 0 and dist.get_rank() == 1
        x, y = batch(step, my_part((4, 4)))
        with opt.sampled():
            loss = F.cross_entropy(net(x), y) * (float("inf") if bad else 1.0)
            backward(opt, scaler.scale(loss))
        scaler.step(opt)
        scaler.update()
        if step == 0:
            kept = all(torch.equal(a, b) for a, b in zip(before, outcome(opt, net), strict=True))
    return kept, scaler.get_scale(), outcome(opt, net)


def after_a_skip(kind: str) -> Any:
    """The steps of `overflow_on_one_rank` that count."""
    net = network()
    opt = make(kind, net)
    for group in opt.param_groups:
        group["skipped"] = 1
    train(opt, net, 1, 3, part=my_part((4, 4)))
    return outcome(opt, net)


def nan_on_one_rank() -> None:
    net = network()
    opt = make("IVON", net)
    x, y = batch(0)
    with opt.sampled():
        (F.cross_entropy(net(x), y) * (float("nan") if dist.get_rank() else 1.0)).backward()
    opt.step()


def one_dies() -> None:
    """Rank 1, before its third step."""
    net = network()
    opt = make("IVON", net)
    train(opt, net, 0, 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(opt, net, 2, 4)


def one_hangs() -> None:
    """Rank 1 is busy with something else for longer than the group has patience."""
    net = network()
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    opt = make("IVON", net, process_group=impatient)
    train(opt, net, 0, 2)
    if dist.get_rank() == 1:
        time.sleep(4)
    else:
        train(opt, net, 2, 4)


def one_is_slow() -> Any:
    """Longer than ranks wait before they look for notes, which is no reason to stop."""
    net = network()
    opt = make("IVON", net)
    train(opt, net, 0, 1)
    if dist.get_rank() == 1:
        time.sleep(1.5)
    train(opt, net, 1, 2)
    return outcome(opt, net)


def half_precision() -> tuple[Tensor, Tensor]:
    """A vector of bfloat16, and notes of which it has too few digits."""
    vector = torch.tensor([128.0 + dist.get_rank()], dtype=torch.bfloat16)
    notes = collectives.Ranks().sum_([vector], [257.0 + dist.get_rank()])
    return vector, notes


def small_groups() -> Any:
    """Each rank trains for itself, in a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    net = network()
    opt = make("IVON", net, process_group=groups[dist.get_rank()])
    train(opt, net, 0, 3 + dist.get_rank())
    return outcome(opt, net)
