"""One table: every natural-gradient optimizer keeps the promises of a torch optimizer, and more."""

from __future__ import annotations

import copy
import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.errors import (
    BindingError,
    CheckpointError,
    CredoError,
    DataError,
    NonFiniteError,
    UnsupportedError,
)
from credo.families import DiagGaussian, EigenKroneckerGaussian
from credo.likelihoods import Categorical
from credo.network import bind
from credo.optim import EVON, IVON, VOGN, VON, NaturalOptimizer, Vadam

KINDS = [EVON, IVON, VOGN, VON, Vadam]
every = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def network(dtype: torch.dtype = torch.float64, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.LayerNorm(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).to(dtype)


PUBLISHED_START = {EVON: 1.0, IVON: 1.0, VOGN: 0.01, Vadam: 0.0}


def make(kind: type[NaturalOptimizer], net: nn.Module, params: Any = None, **options: Any) -> Any:
    """The optimizer as published: one group and one prior, whatever the layers."""
    start = {} if kind is VON else {"hess_init": PUBLISHED_START[kind]}
    options = {"lr": 0.05, "num_data": 50, "betas": (0.9, 0.99), **start, **options}
    if kind is VOGN and params is not None:
        options["module"] = net
    if kind is EVON:
        options.setdefault("refresh", 2)
    return kind(net if params is None else params, **options)


def batch(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = numbers(8, 3, seed=seed, dtype=dtype)
    return x, (x[:, 0] > 0).long()


def loss_of(net: nn.Module, seed: int = 0) -> Tensor:
    x, y = batch(seed, next(net.parameters()).dtype)
    return F.cross_entropy(net(x), y)


def backward(opt: NaturalOptimizer, loss: Tensor) -> None:
    if isinstance(opt, VON):
        opt.backward(loss)
    else:
        loss.backward()


def train(opt: NaturalOptimizer, net: nn.Module, first: int, last: int, samples: int = 1) -> None:
    for seed in range(first, last):
        for _ in range(samples):
            with opt.sampled():
                backward(opt, loss_of(net, seed))
        opt.step()
        opt.zero_grad()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def memory(opt: NaturalOptimizer, net: nn.Module) -> Tensor:
    return torch.cat([t.reshape(-1) for p in net.parameters() for t in opt.state[p].values()])


# --- resuming -------------------------------------------------------------------------------------


def through_deepcopy(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(state)


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every
@pytest.mark.parametrize("trip", [through_deepcopy, through_file])
@pytest.mark.parametrize("draws", ["table", "normal", "pool"])
def test_resume_is_bitwise(kind: type, trip: Callable[..., Any], draws: str) -> None:
    whole = network(torch.float32, norm=True)
    opt = make(kind, whole, draws=draws, seed=5, kl_warmup=8)
    train(opt, whole, 0, 4, samples=2)
    saved, weights_then = trip(opt.state_dict()), trip(whole.state_dict())
    train(opt, whole, 4, 9, samples=2)

    resumed = network(torch.float32, norm=True)
    nn.init.zeros_(resumed[0].weight)
    other = make(kind, resumed, seed=99, lr=1.0)
    resumed.load_state_dict(weights_then)
    other.load_state_dict(saved)
    train(other, resumed, 4, 9, samples=2)
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(memory(other, resumed), memory(opt, whole))


@every
def test_state_moves_between_orders_of_the_flat_vector(kind: type) -> None:
    """The same groups over a buffer in the network's order and in the groups' own."""
    one, two = network(norm=True), network(norm=True)
    by_module = make(kind, one)
    groups = [
        {"params": [p for n, p in two.named_parameters() if n[0] != "1"][::-1]},
        {"params": list(two[1].parameters()), "deterministic": True},
    ]
    by_groups = make(kind, two, groups)
    train(by_module, one, 0, 3)
    state = by_module.state_dict()
    # Torch numbers parameters by their place in the groups: turn the first group around as well.
    order = state["param_groups"][0]["params"]
    entries = {i: state["state"][j] for i, j in zip(order, order[::-1], strict=True)}
    by_groups.load_state_dict({**state, "state": {**state["state"], **entries}})
    assert torch.equal(memory(by_groups, two), memory(by_module, one))


@every
def test_a_strange_state_is_refused_and_nothing_lost(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    train(opt, net, 0, 2)
    before, state = memory(opt, net), opt.state_dict()
    broken = copy.deepcopy(state)
    broken["state"][1]["curvature"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="parameter 1 needs state"):
        opt.load_state_dict(broken)
    adam = torch.optim.Adam(net.parameters())
    with pytest.raises(CheckpointError, match="another network or is not of"):
        opt.load_state_dict(adam.state_dict())
    with pytest.raises(CheckpointError, match="groups of"):
        opt.load_state_dict({**state, "param_groups": []})
    assert torch.equal(memory(opt, net), before)


@every
def test_copies_are_refused(kind: type) -> None:
    with pytest.raises(UnsupportedError, match="state_dict"):
        copy.deepcopy(make(kind, network()))


@every
def test_state_entries_are_views_of_the_flat_memory(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    before = opt.state[net[0].weight]["momentum"]
    train(opt, net, 0, 1)
    assert before is opt.state[net[0].weight]["momentum"]
    assert float(before.abs().sum()) > 0


# --- the block ------------------------------------------------------------------------------------


@every
def test_the_block_perturbs_and_restores(kind: type) -> None:
    net = network(norm=True)
    opt = make(kind, net)
    before = weights(net)
    with opt.sampled():
        moved = weights(net) != before
        backward(opt, loss_of(net))
    norm = list(net[1].parameters())
    assert int((~moved).sum()) == sum(p.numel() for p in norm), "all but the norm layer"
    assert torch.equal(weights(net), before)
    assert all(p.grad is not None for p in net.parameters()), "GradScaler looks at them"


@every
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exceptions_restore_and_discard(kind: type, error: type[BaseException]) -> None:
    net, twin = network(), network()
    opt, quiet = make(kind, net), make(kind, twin)

    def interrupted() -> None:
        with opt.sampled():
            backward(opt, 100 * loss_of(net, 9))
            raise error

    with pytest.raises(error):
        interrupted()
    assert torch.equal(weights(net), weights(twin))
    train(opt, net, 0, 2)
    train(quiet, twin, 0, 2)
    assert torch.equal(weights(net), weights(twin))


@every
def test_a_closure_that_fails_leaves_nothing_behind(kind: type) -> None:
    net = network()
    opt = make(kind, net, samples=2)
    before, calls = weights(net), []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError
        loss = loss_of(net)
        if kind is not VON:
            loss.backward()
        return loss

    with pytest.raises(ValueError):
        opt.step(closure)
    assert torch.equal(weights(net), before)
    with pytest.raises(UnsupportedError, match="without a draw"):
        opt.step()


@every
def test_misuse_names_the_remedy(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    with pytest.raises(UnsupportedError, match=r"with optimizer\.sampled"):
        opt.step()
    with opt.sampled():
        backward(opt, loss_of(net))
        for use in (opt.step, lambda: opt.posterior(net, Categorical())):
            with pytest.raises(UnsupportedError, match="leave the block"):
                use()
        with pytest.raises(UnsupportedError, match=r"sampled\(\) inside"), opt.sampled():
            pass
    opt.step()
    with pytest.raises(UnsupportedError, match=r"call loss.backward\(\) inside"), opt.sampled():
        loss_of(net)
    with pytest.raises(UnsupportedError, match="can't be added later"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_von_wants_its_own_backward() -> None:
    net = network()
    opt = make(VON, net)
    with pytest.raises(UnsupportedError, match=r"optimizer.backward\(loss\)"), opt.sampled():
        loss_of(net).backward()
    with pytest.raises(UnsupportedError, match="belongs inside"):
        opt.backward(loss_of(net))
    with pytest.raises(DataError, match="a scalar tensor"):
        opt.step(lambda: 3.0)


def test_vons_hessians_are_torchs() -> None:
    """The exact diagonal to rounding, Hutchinson's within 5 standard errors of it.

    Signs v give v∘Hv the variance Σ_{j≠i} H_ij² at i.
    """
    probes, found = 500, {}
    for hessian in ("exact", "hutchinson"):
        net = network()
        opt = make(VON, net, hessian=hessian, probes=probes)
        with opt.sampled():
            opt.backward(loss_of(net))
            point = {n: p.detach().clone() for n, p in net.named_parameters()}
        found[hessian] = opt._diagonal
    x, y = batch(0)

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([p.numel() for p in point.values()])
        named = {n: t.view_as(p) for (n, p), t in zip(point.items(), pieces, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, named, (x,)), y)

    theta = torch.cat([p.reshape(-1) for p in point.values()])
    matrix = torch.autograd.functional.hessian(loss, theta)
    diagonal = matrix.diagonal()
    torch.testing.assert_close(found["exact"], diagonal, rtol=1e-10, atol=1e-13)
    error = ((matrix.square().sum(1) - diagonal.square()) / probes).sqrt()
    assert bool(((found["hutchinson"] - diagonal).abs() <= 5 * error + 1e-13).all())


@every
def test_late_backward_raises(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    with opt.sampled():
        late = loss_of(net)
        backward(opt, loss_of(net))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


# --- torch's conventions --------------------------------------------------------------------------


@every
@pytest.mark.parametrize("samples", [1, 3])
def test_closure_is_the_block(kind: type, samples: int) -> None:
    by_hand, by_closure = network(), network()
    one, two = make(kind, by_hand), make(kind, by_closure, samples=samples)
    train(one, by_hand, 0, 4, samples)
    for seed in range(4):

        def closure(seed: int = seed) -> Tensor:
            two.zero_grad()
            loss = loss_of(by_closure, seed)
            if kind is not VON:
                loss.backward()
            return loss

        with torch.no_grad():
            assert float(two.step(closure)) > 0
    assert torch.equal(weights(by_hand), weights(by_closure))


@every
def test_lr_schedulers(kind: type) -> None:
    scheduled, by_hand = network(), network()
    one, two = make(kind, scheduled), make(kind, by_hand)
    schedule = torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5)
    for seed in range(5):
        two.param_groups[0]["lr"] = 0.05 * 0.5 ** (seed // 2)
        train(one, scheduled, seed, seed + 1)
        train(two, by_hand, seed, seed + 1)
        schedule.step()
    assert torch.equal(weights(scheduled), weights(by_hand))
    assert one.param_groups[0]["lr"] == pytest.approx(0.05 / 4)


@every
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_any_place(kind: type, set_to_none: bool) -> None:
    net, twin = network(), network()
    opt, other = make(kind, net), make(kind, twin)
    train(other, twin, 0, 3)
    for seed in range(3):
        opt.zero_grad(set_to_none=set_to_none)
        with opt.sampled():
            opt.zero_grad(set_to_none=set_to_none)
            backward(opt, loss_of(net, seed))
        opt.zero_grad(set_to_none=set_to_none)
        opt.step()
    assert torch.equal(weights(net), weights(twin))


@every
def test_parameters_without_gradient_move_by_the_prior_alone(kind: type) -> None:
    """The last layer is not used; without its prior it would not move at all."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = Partial()
    groups = [
        {"params": net.used.parameters()},
        {"params": net.idle.parameters(), "deterministic": True},
    ]
    opt = make(kind, net, groups, damping=1e-8)
    before = weights(net.idle)
    with opt.sampled():
        backward(opt, loss_of(net))
    opt.step()
    assert torch.equal(weights(net.idle), before)

    opt = make(kind, net)
    size = net.idle.weight.detach().abs()
    train(opt, net, 0, 1)
    assert (net.idle.weight.detach().abs() < size).all()


@every
def test_frozen_parameters_stay(kind: type) -> None:
    net = network()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    opt = make(kind, net, net.parameters())
    train(opt, net, 0, 2)
    assert torch.equal(net[0].weight, before)
    assert opt.posterior(net, Categorical()).mean.numel() == weights(net).numel() - 12


@pytest.mark.parametrize("kind", [EVON, IVON, Vadam, VON])
def test_accumulating_inside_a_block_is_one_batch(kind: type) -> None:
    """Two backward passes of half losses at the same draw; sums in another order, so not bitwise.

    VOGN is left out: it sees examples one by one and takes a block for each micro-batch.
    """
    whole, halves = network(), network()
    one, two = make(kind, whole), make(kind, halves)
    for seed in range(3):
        train(one, whole, seed, seed + 1)
        x, y = batch(seed)
        with two.sampled():
            for part in (slice(0, 4), slice(4, 8)):
                backward(two, F.cross_entropy(halves(x[part]), y[part]) / 2)
        two.step()
    # EVON's bases have directions that rounding moves by 1/√ε times itself.
    rtol, atol = (1e-6, 1e-8) if kind is EVON else (1e-9, 1e-11)
    torch.testing.assert_close(weights(halves), weights(whole), rtol=rtol, atol=atol)


@every
def test_blocks_of_micro_batches_are_averaged(kind: type) -> None:
    """Where nothing is random, two blocks of half a batch are one block of the whole."""
    whole, halves = network(), network()
    one, two = (
        make(kind, net, [{"params": net.parameters(), "deterministic": True}], damping=1e-8)
        for net in (whole, halves)
    )
    for seed in range(3):
        train(one, whole, seed, seed + 1)
        x, y = batch(seed)
        for part in (slice(0, 4), slice(4, 8)):
            with two.sampled():
                backward(two, F.cross_entropy(halves(x[part]), y[part]))
        two.step()
    torch.testing.assert_close(weights(halves), weights(whole), rtol=1e-9, atol=1e-11)


def test_vogn_averages_the_squares_of_blocks() -> None:
    """The same for the squares themselves: at lr = 0 and constant gradients the draws don't matter.

    "sum" with its own factor is the same mean.
    """
    x = numbers(8, 3, seed=1)
    found = []
    for reduction, parts in (("mean", 1), ("mean", 2), ("sum", 2)):
        net = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(net.weight)
        opt = make(VOGN, net, lr=0.0, loss_reduction=reduction)
        for part in x.chunk(parts):
            with opt.sampled():
                output = net(part)
                (output.mean() if reduction == "mean" else output.sum()).backward()
        opt.step()
        found.append(memory(opt, net))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-14)


# --- mixed precision ------------------------------------------------------------------------------


@every
def test_bfloat16_autocast(kind: type) -> None:
    """Two draws in one autocast block must differ: its cache of cast weights is cleared."""
    net = network(torch.float32)
    opt = make(kind, net)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with opt.sampled():
                loss = loss_of(net)
                losses.append(loss.item())
                backward(opt, loss)
    opt.step()
    assert losses[0] != losses[1]
    assert net[0].weight.dtype == torch.float32
    assert bool(weights(net).isfinite().all())


@every
def test_grad_scaler_changes_nothing(kind: type) -> None:
    """A power of two scales exactly, so in float64 the trajectories are the same bits but for h."""
    plain, scaled = network(), network()
    one, two = make(kind, plain), make(kind, scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for seed in range(5):
        train(one, plain, seed, seed + 1)
        with two.sampled():
            backward(two, scaler.scale(loss_of(scaled, seed)))
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() > 1024
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(memory(two, scaled), memory(one, plain), rtol=1e-11, atol=1e-13)


@every
def test_grad_scaler_skips_infinities_and_goes_on(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before, state = weights(net), memory(opt, net)
    for bad_block in (0, 1):  # the scaler sees the gradients of the last block only
        for block in range(2):
            with opt.sampled():
                loss = scaler.scale(loss_of(net))
                backward(opt, loss * (float("inf") if block == bad_block else 1.0))
        scaler.step(opt)
        scaler.update()
        assert torch.equal(weights(net), before)
        assert torch.equal(memory(opt, net), state)
    assert [opt.param_groups[0][name] for name in ("step", "skipped")] == [0, 2]
    with opt.sampled():
        backward(opt, scaler.scale(loss_of(net)))
    scaler.step(opt)
    assert not torch.equal(weights(net), before)


@every
def test_infinities_that_only_the_scaler_saw_skip_the_step_too(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    before = weights(net)
    with opt.sampled():
        backward(opt, loss_of(net))
    opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    opt.step()
    assert torch.equal(weights(net), before)


@pytest.mark.parametrize("kind", [EVON, IVON, Vadam])
def test_unscaling_and_clipping_inside_the_block(kind: type) -> None:
    plain, scaled = network(), network()
    one, two = make(kind, plain), make(kind, scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(3):
        with one.sampled():
            loss_of(plain, seed).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        one.step()
        with two.sampled():
            scaler.scale(loss_of(scaled, seed)).backward()
            scaler.unscale_(two)
            nn.utils.clip_grad_norm_(scaled.parameters(), 0.1)
        scaler.step(two)
        scaler.update()
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-11, atol=1e-13)


@every
def test_a_nonfinite_gradient_is_named_and_nothing_lost(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    before, state = weights(net), memory(opt, net)
    with opt.sampled():
        backward(opt, loss_of(net) * float("nan"))
    with pytest.raises(NonFiniteError, match=r"gradient of 0\.weight is not finite at step 0"):
        opt.step()
    assert torch.equal(weights(net), before)
    assert torch.equal(memory(opt, net), state)
    train(opt, net, 0, 1)


# --- groups and bindings --------------------------------------------------------------------------


@every
def test_module_parameters_and_groups_are_the_same_run(kind: type) -> None:
    nets = [network(torch.float32) for _ in range(4)]
    params: list[Any] = [
        None,
        nets[1].parameters(),
        [{"params": nets[2][0].parameters()}, {"params": nets[2][2].parameters()}],
        nets[3].named_parameters(),
    ]
    for net, some in zip(nets, params, strict=True):
        train(make(kind, net, some), net, 0, 4, samples=2)
    for net in nets[1:]:
        assert torch.equal(weights(net), weights(nets[0]))


@every
def test_groups_have_their_own_options(kind: type) -> None:
    net = network()
    groups = [
        {"params": net[0].parameters(), "lr": 0.0, "prior_precision": 7.0},
        {"params": net[2].parameters(), "weight_decay": 0.5},
    ]
    opt = make(kind, net, groups)
    assert opt.param_groups[1]["prior_precision"] == 25.0
    before = weights(net)
    train(opt, net, 0, 2)
    stayed = weights(net) == before
    assert stayed[:16].all()
    assert not stayed[16:].any()
    posterior = opt.posterior(net, Categorical())
    prior = posterior.model.prior_over_weights()
    torch.testing.assert_close(
        prior.scale.square().reciprocal(), torch.tensor([7.0] * 16 + [25.0] * 10).double()
    )


@every
def test_deterministic_groups_anywhere(kind: type) -> None:
    """A point estimate in the middle: the draw must reach the right places."""
    net = network()
    groups = [
        {"params": [net[0].bias], "deterministic": True},
        {"params": [net[0].weight, net[2].weight, net[2].bias]},
    ]
    opt = make(kind, net, groups)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with opt.sampled():
        moved = {n: bool((p != before[n]).all()) for n, p in net.named_parameters()}
        backward(opt, loss_of(net))
    assert moved == {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": True}
    opt.step()
    assert not torch.equal(net[0].bias, before["0.bias"]), "it is trained all the same"


@every
@pytest.mark.parametrize("bare", [False, True])
def test_posterior(kind: type, bare: bool) -> None:
    """Its mean is the weights, its scale 1/√(N(h + δ)); training goes on after predictions."""
    net, undisturbed = network(norm=True), network(norm=True)
    temperature, augmentation = 0.5, 3.0
    options: dict[str, Any] = {"temperature": temperature, "augmentation": augmentation}
    opt, other = (
        make(
            kind,
            n,
            [{"params": n.parameters(), "deterministic": False}] if bare else None,
            **options,
        )
        for n in (net, undisturbed)
    )
    train(opt, net, 0, 3)
    train(other, undisturbed, 0, 3)
    posterior = opt.posterior(net, Categorical())
    random = [(n, p) for n, p in net.named_parameters() if bare or not n.startswith("1.")]
    assert [s.name for s in posterior.model.random.segments] == [
        *(n for n, _ in random if n[0] != "1"),
        *(n for n, _ in random if n[0] == "1"),
    ]
    by_name = dict(net.named_parameters())
    ordered = [by_name[s.name] for s in posterior.model.random.segments]
    assert torch.equal(posterior.mean, torch.cat([p.detach().reshape(-1) for p in ordered]))
    h = torch.cat([opt.state[p]["curvature"].reshape(-1) for p in ordered])
    effective = 50 * augmentation / temperature
    precision = effective * h + opt.param_groups[0]["prior_precision"]
    torch.testing.assert_close(precision_of(posterior.q), precision, rtol=1e-12, atol=0)
    prior = posterior.model.prior_over_weights()
    assert float(prior.scale[0]) ** -2 == pytest.approx(opt.param_groups[0]["prior_precision"])

    before = weights(net)
    probs = posterior.predict(batch(0)[0], samples=8).probs
    assert probs.shape == (8, 2)
    assert torch.equal(weights(net), before)
    train(opt, net, 3, 6)
    train(other, undisturbed, 3, 6)
    assert torch.equal(weights(net), weights(undisturbed))
    assert not torch.equal(weights(net), before)
    assert torch.equal(posterior.mean, torch.cat([by_name_before(before, net, p) for p in ordered]))


def precision_of(q: object) -> Tensor:
    """That of every weight, or of every direction in the basis."""
    if isinstance(q, EigenKroneckerGaussian):
        return torch.cat([block.values.reshape(-1) for block in q.blocks])
    assert isinstance(q, DiagGaussian)
    return q.precision


def by_name_before(before: Tensor, net: nn.Module, wanted: nn.Parameter) -> Tensor:
    start = 0
    for parameter in net.parameters():
        if parameter is wanted:
            return before[start : start + parameter.numel()]
        start += parameter.numel()
    raise AssertionError


@every
def test_somebody_else_binds_the_network_inside_the_block(kind: type) -> None:
    net = network()
    opt = make(kind, net, net.parameters())
    before = weights(net)
    with opt.sampled():
        backward(opt, loss_of(net))
        grads = [p.grad for p in net.parameters()]
        bind(net)
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad
    assert torch.equal(weights(net), before)
    opt.step()


@every
def test_retyped_networks_are_refused(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    net.float()
    with pytest.raises(BindingError, match="re-typed"), opt.sampled():
        pass


@every
def test_a_posterior_of_another_network_is_refused(kind: type) -> None:
    opt = make(kind, network())
    with pytest.raises(BindingError, match="pass the network that was trained"):
        opt.posterior(network(), Categorical())


@every
def test_everything_deterministic_has_no_posterior(kind: type) -> None:
    net = network()
    opt = make(kind, net, [{"params": net.parameters(), "deterministic": True}], damping=1e-8)
    train(opt, net, 0, 1)
    with pytest.raises(UnsupportedError, match="no distribution"):
        opt.posterior(net, Categorical())


@every
def test_kl_warmup_reaches_the_whole_prior(kind: type) -> None:
    """While the KL's weight is a quarter, q is that of four times the data."""
    net = network()
    opt = make(kind, net, kl_warmup=4, lr=0.0)
    found = [opt.posterior(net, Categorical()).q.scale]
    for seed in range(4):
        train(opt, net, seed, seed + 1)
        found.append(opt.posterior(net, Categorical()).q.scale)
    assert opt.effective_data(opt.param_groups[0]) == 50
    h, p = (float(opt.param_groups[0][name]) for name in ("hess_init", "prior_precision"))
    assert float(found[0][0]) == pytest.approx((200 * h + p) ** -0.5)


# --- bad arguments --------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_data": None}, "num_data is missing.*a batch can't tell"),
    ({"num_data": -3}, "num_data must be a positive finite number or None, but it is -3"),
    ({"num_data": "60000"}, "num_data must be a positive finite number"),
    ({"lr": -0.1}, "lr must be 0 or a positive finite number, but it is -0.1"),
    ({"lr": float("nan")}, "lr must be 0 or a positive finite number"),
    ({"lr": "fast"}, "lr must be 0 or a positive finite number, but it is 'fast'"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] must be a number from 0 to 1, less than 1, but it is 1.0"),
    (
        {"betas": (0.9, -0.1)},
        r"betas\[1\] must be a number from 0 to 1, less than 1, but it is -0.1",
    ),
    ({"betas": 0.9}, "betas must be a tuple of 2"),
    ({"hess_init": -1.0}, "hess_init must be"),
    ({"prior_precision": 0.0}, "prior_precision .* must be positive where weights are random"),
    ({"prior_precision": -2.0}, "prior_precision must be 0 or a positive"),
    ({"damping": -1.0}, "damping must be 0 or a positive"),
    ({"temperature": 0.0}, "temperature must be a positive"),
    ({"augmentation": 0}, "augmentation must be a positive"),
    ({"kl_warmup": 1.5}, "kl_warmup must be 0 or a positive whole number"),
    ({"samples": 0}, "samples must be a whole number of at least 1, but it is 0"),
    ({"seed": -1}, "seed must be 0 or a positive whole number"),
    ({"draws": "dice"}, "draws must be one of .*but it is 'dice'"),
    ({"debias": "yes"}, "debias must be True or False"),
]


@every
@pytest.mark.parametrize(
    ("options", "message"), BAD, ids=lambda value: re.sub(r"\W+", "-", str(value))
)
def test_bad_options_name_themselves(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(kind, network(), **options)


@pytest.mark.parametrize("kind", [EVON, IVON, VON])
def test_curvature_that_starts_at_zero_is_refused(kind: type) -> None:
    with pytest.raises(DataError, match="hess_init must be a positive finite number"):
        make(kind, network(), hess_init=0.0)


def test_a_prior_is_given_once() -> None:
    net = network()
    with pytest.raises(
        DataError, match=r"prior_precision and weight_decay.*not both 1\.0 and 0\.1"
    ):
        IVON(net, num_data=10, prior_precision=1.0, weight_decay=0.1)
    with pytest.raises(DataError, match="prior_precision and weight_decay"):
        Vadam([{"params": net.parameters(), "prior_precision": 1.0, "weight_decay": 0.1}],
              num_data=10)  # fmt: skip
    with pytest.raises(DataError, match="weight_decay must be 0 or a positive"):
        IVON(net, num_data=10, weight_decay=-1.0)
    assert IVON(net, num_data=10, weight_decay=0.1).param_groups[0]["prior_precision"] == 1.0
    group = {"params": net.parameters(), "prior_precision": 4.0}
    assert IVON([group], num_data=10).param_groups[0]["prior_precision"] == 4.0


@every
def test_bad_parameters_name_themselves(kind: type) -> None:
    net = network()
    cases: list[tuple[Any, type[Exception], str]] = [
        (net[0].weight, DataError, "an iterable of parameters"),
        ([], DataError, "no floating parameters"),
        ([{"params": net.parameters(), "prior_precison": 1.0}], DataError, "Did you mean"),
        ([{"lr": 1.0}], DataError, 'needs "params"'),
        (["weight"], DataError, "params must hold tensors, not str"),
        ([net[0].weight, net[0].weight.detach().float().requires_grad_()], CredoError, "dtype"),
    ]
    for params, error, message in cases:
        with pytest.raises(error, match=message):
            make(kind, net, params)


def test_vogn_needs_the_network() -> None:
    with pytest.raises(DataError, match="module=net"):
        VOGN(network().parameters(), num_data=10)
    with pytest.raises(DataError, match="loss_reduction"):
        VOGN(network(), num_data=10, loss_reduction="median")


def test_von_refuses_unknown_hessians() -> None:
    with pytest.raises(DataError, match="hessian must be"):
        VON(network(), num_data=10, hessian="guess")
    with pytest.raises(DataError, match="probes must be"):
        VON(network(), num_data=10, probes=0)


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    opt = IVON(net, num_data=10)
    before = weights(net)
    with pytest.raises(BindingError, match="sparse=False"), opt.sampled():
        net(torch.tensor([1])).sum().backward()
    assert torch.equal(weights(net), before)


def test_the_posterior_can_be_saved(tmp_path: Any) -> None:
    net = network()
    opt = make(IVON, net)
    train(opt, net, 0, 2)
    opt.posterior(net, Categorical()).save(tmp_path / "p.safetensors")
    loaded = credo.load(tmp_path / "p.safetensors", network())
    assert torch.equal(loaded.mean, opt.posterior(net, Categorical()).mean)


@every
def test_help_names_every_option_with_its_default(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, default in {"samples": 1, "kl_warmup": 0, "accumulation": "mean"}.items():
        assert parameters[name].default == default
    assert {"temperature", "weight_decay", "shared_noise"} <= set(parameters)
