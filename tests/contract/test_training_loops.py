"""The loops that people have: edits of ``.grad``, accumulation, scaling, norm layers.

Float64. Where two loops make the same numbers in the same order they are compared bit by bit; where
sums are taken in another order, a few roundings of 1e-16 pass through three steps of rates below
one, and IVON's curvature multiplies them by N = 50: hence 1e-11.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.errors import DataError, UnsupportedError
from credo.optim import IVON, VOGN, VON, NaturalOptimizer, Vadam

KINDS = [IVON, VOGN, VON, Vadam]
every = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
Edit = Callable[[nn.Module], object]


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.LayerNorm(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()


def make(kind: type[NaturalOptimizer], net: nn.Module, **options: Any) -> Any:
    return kind(net, **{"lr": 0.05, "num_data": 50, "betas": (0.9, 0.99), **options})


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def halves(seed: int) -> list[tuple[Tensor, Tensor]]:
    x, y = batch(seed)
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def backward(opt: NaturalOptimizer, loss: Tensor) -> None:
    if isinstance(opt, VON):
        opt.backward(loss)
    else:
        loss.backward()


def block(
    opt: NaturalOptimizer, net: nn.Module, examples: tuple[Tensor, Tensor], factor: float = 1.0
) -> None:
    with opt.sampled():
        backward(opt, F.cross_entropy(net(examples[0]), examples[1]) * factor)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


def outcome(opt: NaturalOptimizer, net: nn.Module) -> Tensor:
    state = [opt.state[p][name].reshape(-1) for name in opt.vectors for p in net.parameters()]
    return torch.cat([weights(net), *state])


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


# --- gradients that are changed after the block ---------------------------------------------------


def clip_norm(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def clip_value(net: nn.Module) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def shrink(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.125)


def replace(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5 + 0.1


def drop_a_layer(net: nn.Module) -> None:
    for parameter in net[0].parameters():
        parameter.grad = None


@every
@pytest.mark.parametrize("edit", [clip_norm, clip_value, replace, drop_a_layer])
def test_an_edit_after_the_block_is_an_edit_at_its_end(kind: type, edit: Edit) -> None:
    inside, after, plain = network(), network(), network()
    one, two, three = make(kind, inside), make(kind, after), make(kind, plain)
    for seed in range(3):
        with one.sampled():
            x, y = batch(seed)
            backward(one, F.cross_entropy(inside(x), y))
            edit(inside)
        one.step()
        block(two, after, batch(seed))
        edit(after)
        two.step()
        block(three, plain, batch(seed))
        three.step()
    assert torch.equal(outcome(two, after), outcome(one, inside))
    assert not torch.equal(weights(after), weights(plain)), "the edit matters"


def test_edits_of_a_summed_loss_count_in_its_own_units() -> None:
    mean, total = network(), network()
    one, two = make(VOGN, mean), make(VOGN, total, loss_reduction="sum")
    for seed in range(3):
        for part in halves(seed):
            block(one, mean, part)
            block(two, total, part, factor=4)
        shrink(mean)
        shrink(total)
        one.step()
        two.step()
    assert_same(outcome(two, total), outcome(one, mean))


@every
def test_after_several_blocks_one_norm_is_clipped(kind: type) -> None:
    """The mean gradient is made shorter by a factor: as if each block's own were."""
    after, inside = network(), network()
    one, two = make(kind, after), make(kind, inside)
    for seed in range(3):
        for part in halves(seed):
            block(one, after, part)
        before = gradients(after)
        clip_norm(after)
        factor = float(gradients(after).norm() / before.norm())
        assert factor < 0.5
        one.step()
        for x, y in halves(seed):
            with two.sampled():
                backward(two, F.cross_entropy(inside(x), y))
                for parameter in inside.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
        two.step()
    assert_same(outcome(one, after), outcome(two, inside))


@pytest.mark.parametrize("kind", [VOGN, VON, Vadam])
def test_what_does_not_read_curvature_off_gradients_takes_any_edit_of_several(kind: type) -> None:
    after, inside = network(), network()
    one, two = make(kind, after), make(kind, inside)
    for seed in range(3):
        for part in halves(seed):
            block(one, after, part)
        drop_a_layer(after)
        one.step()
        for x, y in halves(seed):
            with two.sampled():
                backward(two, F.cross_entropy(inside(x), y))
                drop_a_layer(inside)
        two.step()
    assert_same(outcome(one, after), outcome(two, inside))


def test_ivon_refuses_other_edits_of_several_blocks() -> None:
    net = network()
    opt = make(IVON, net)
    before = outcome(opt, net)
    for part in halves(0):
        block(opt, net, part)
    clip_value(net)
    with pytest.raises(UnsupportedError, match=r"not by one factor .* inside of every block"):
        opt.step()
    assert torch.equal(outcome(opt, net), before)
    block(opt, net, batch(0))
    opt.step()


@every
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_grad_holds_what_the_blocks_make_up(kind: type, accumulation: str) -> None:
    net = network()
    opt = make(kind, net, accumulation=accumulation)
    single = []
    for part in halves(0):
        with opt.sampled():
            backward(opt, F.cross_entropy(net(part[0]), part[1]))
            single.append(gradients(net))
    expected = single[0] + single[1]
    assert_same(gradients(net), expected / 2 if accumulation == "mean" else expected)
    opt.step()
    assert_same(gradients(net), expected / 2 if accumulation == "mean" else expected)


@every
def test_a_failed_block_leaves_the_gradients_of_the_others(kind: type) -> None:
    net, twin = network(), network()
    opt, quiet = make(kind, net), make(kind, twin)

    def failing() -> None:
        with opt.sampled():
            backward(opt, F.cross_entropy(net(batch(5)[0]), batch(5)[1]))
            raise RuntimeError

    for seed in range(2):
        block(opt, net, batch(seed))
        kept = gradients(net).clone()
        with pytest.raises(RuntimeError):
            failing()
        assert torch.equal(gradients(net), kept)
        opt.step()
        block(quiet, twin, batch(seed))
        quiet.step()
    assert torch.equal(outcome(opt, net), outcome(quiet, twin))


# --- accumulation ---------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("parts", [2, 4])
def test_divided_losses_are_added_to_the_same_step(kind: type, parts: int) -> None:
    averaged, added = network(), network()
    one, two = make(kind, averaged), make(kind, added, accumulation="sum")
    for seed in range(3):
        x, y = batch(seed)
        for part in zip(x.split(8 // parts), y.split(8 // parts), strict=True):
            block(one, averaged, part)
            block(two, added, part, factor=1 / parts)
        one.step()
        two.step()
    assert_same(outcome(two, added), outcome(one, averaged))


@every
def test_divided_losses_inside_of_one_block_are_one_batch(kind: type) -> None:
    """One draw for all micro-batches: the step of the joint batch, squares of examples included."""
    whole, parts = network(), network()
    one, two = make(kind, whole), make(kind, parts, accumulation="sum")
    for seed in range(3):
        block(one, whole, batch(seed))
        one.step()
        with two.sampled():
            for x, y in halves(seed):
                backward(two, F.cross_entropy(parts(x), y) / 2)
        two.step()
    assert_same(outcome(two, parts), outcome(one, whole))


def test_vogn_adds_passes_and_blocks_at_once() -> None:
    """Two blocks of two micro-batches with a quarter of the loss each."""
    averaged, added = network(), network()
    one, two = make(VOGN, averaged), make(VOGN, added, accumulation="sum")
    for seed in range(3):
        for x, y in halves(seed):
            block(one, averaged, (x, y))
            with two.sampled():
                for part in (slice(0, 2), slice(2, 4)):
                    (F.cross_entropy(added(x[part]), y[part]) / 4).backward()
        one.step()
        two.step()
    assert_same(outcome(two, added), outcome(one, averaged))


def test_several_passes_of_a_summed_loss_are_one_batch() -> None:
    whole, parts = network(), network()
    one, two = (make(VOGN, net, loss_reduction="sum") for net in (whole, parts))
    for seed in range(3):
        block(one, whole, batch(seed), factor=8)
        one.step()
        with two.sampled():
            for x, y in halves(seed):
                F.cross_entropy(parts(x), y, reduction="sum").backward()
        two.step()
    assert_same(outcome(two, parts), outcome(one, whole))


def test_vogn_asks_what_several_passes_mean() -> None:
    net = network()
    opt = make(VOGN, net)
    message = r'2 backward passes in one sampled\(\) block.*accumulation="sum"'

    def two_passes() -> None:
        with opt.sampled():
            for x, y in halves(0):
                (F.cross_entropy(net(x), y) / 2).backward()

    with pytest.raises(UnsupportedError, match=message):
        two_passes()


@every
def test_a_closures_draws_are_averaged_in_any_case(kind: type) -> None:
    nets = [network(), network()]
    for net, accumulation in zip(nets, ("mean", "sum"), strict=True):
        opt = make(kind, net, samples=3, accumulation=accumulation)

        def closure(net: nn.Module = net) -> Tensor:
            loss = F.cross_entropy(net(batch(0)[0]), batch(0)[1])
            if kind is not VON:
                loss.backward()
            return loss

        opt.step(closure)
    assert torch.equal(weights(nets[0]), weights(nets[1]))


@every
def test_an_unknown_accumulation_is_refused(kind: type) -> None:
    with pytest.raises(DataError, match="accumulation must be one of"):
        make(kind, network(), accumulation="product")


# --- scaled losses --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [IVON, Vadam])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_unscaling_after_the_blocks(
    kind: type, accumulation: str, blocks: int, clips: bool
) -> None:
    plain, scaled = network(), network()
    one, two = (make(kind, net, accumulation=accumulation) for net in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    factor = 1 / blocks if accumulation == "sum" else 1.0
    for seed in range(3):
        for part in halves(seed)[:blocks]:
            block(one, plain, part, factor)
            with two.sampled():
                loss = F.cross_entropy(scaled(part[0]), part[1]) * factor
                scaler.scale(loss).backward()
        scaler.unscale_(two)
        if clips:
            clip_norm(plain)
            clip_norm(scaled)
        one.step()
        scaler.step(two)
        scaler.update()
    assert_same(outcome(two, scaled), outcome(one, plain))


@pytest.mark.parametrize("kind", [VOGN, VON])
def test_unscaling_is_left_to_the_scaler_where_squares_are_scaled_too(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with opt.sampled():
        backward(opt, scaler.scale(F.cross_entropy(net(batch(0)[0]), batch(0)[1])))
    scaler.unscale_(opt)
    with pytest.raises(UnsupportedError, match=r"clip .* to max_norm \* scaler.get_scale"):
        scaler.step(opt)
    scaler.update()
    net = network()
    opt = make(kind, net)
    with opt.sampled():
        backward(opt, scaler.scale(F.cross_entropy(net(batch(0)[0]), batch(0)[1])))
    shrink(net)  # clip_grad_norm_ adds 1e-6 to the norm, which is not the same when scaled
    scaler.step(opt)
    reference = network()
    other = make(kind, reference)
    block(other, reference, batch(0))
    shrink(reference)
    other.step()
    assert_same(outcome(opt, net), outcome(other, reference))


@pytest.mark.parametrize("kind", [IVON, Vadam])
def test_unscaling_one_of_several_blocks_is_refused(kind: type) -> None:
    net = network()
    opt = make(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(halves(0)):
        with opt.sampled():
            scaler.scale(F.cross_entropy(net(x), y)).backward()
            if index == 1:
                scaler.unscale_(opt)
    with pytest.raises(UnsupportedError, match="once, after all blocks"):
        scaler.step(opt)


# --- norm layers ----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("way", ["parameters", "named", "groups"])
def test_norm_layers_that_nobody_meant_to_be_random_are_named_once(kind: type, way: str) -> None:
    net = network(norm=True)
    params: Any = {
        "parameters": net.parameters(),
        "named": net.named_parameters(),
        "groups": [{"params": net.parameters(), "lr": 0.1}],
    }[way]
    more = {"module": net} if kind is VOGN else {}
    opt = kind(params, num_data=50, lr=0.01, **more)
    with pytest.warns(UserWarning, match=r"LayerNorm \(weight \(4,\).*deterministic=True") as told:
        block(opt, net, batch(0))
    assert len(told) == 1
    assert told[0].filename == __file__, "it points at the loop"
    for seed in range(2):
        opt.step()
        block(opt, net, batch(seed))


@every
def test_who_decided_is_not_told(kind: type) -> None:
    """The network itself; groups that say what they want; layers without norms."""
    for decision in (True, False):
        net = network(norm=True)
        groups = [
            {"params": [*net[0].parameters(), *net[3].parameters()]},
            {"params": net[1].parameters(), "deterministic": decision},
        ]
        more = {"module": net} if kind is VOGN else {}
        block(kind(groups, num_data=50, lr=0.01, **more), net, batch(0))
    net = network(norm=True)
    block(make(kind, net), net, batch(0))
    net = network()
    more = {"module": net} if kind is VOGN else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block(kind(net.parameters(), num_data=50, lr=0.01, **more), net, batch(0))
