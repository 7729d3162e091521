"""Binding holds for every kind of network, and every way of breaking it is noticed."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from zoo import ZOO, specimen

import credo
from credo.errors import BindingError, DataError
from credo.network import Selection, bind, select, unbind


@pytest.fixture(params=ZOO, ids=str)
def case(request: pytest.FixtureRequest):
    return specimen(request.param)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(x), y)


def test_binding_changes_no_output_and_no_gradient(case) -> None:
    net, x, y = case
    plain = copy.deepcopy(net)
    flat = bind(net)
    loss_of(plain, x, y).backward()
    loss_of(net, x, y).backward()
    everything = Selection.of(flat.segments)
    gradient = flat.gradient(everything, out=torch.empty_like(flat.vector))
    expected = dict(plain.named_parameters())
    for segment in flat.segments:
        torch.testing.assert_close(
            gradient[segment.slice].view(segment.shape), expected[segment.name].grad
        )
    assert all(p.grad is None for p in net.parameters())


def test_the_buffer_is_the_network(case) -> None:
    net, _, _ = case
    flat = bind(net)
    assert flat.size == sum(p.numel() for p in net.parameters())  # tied weights counted once
    with flat.writing() as vector:
        vector.zero_()
    assert all(not p.any() for p in net.parameters())
    assert bind(net) is flat
    unbind(net)
    with torch.no_grad():
        next(net.parameters()).fill_(1.0)
    assert not flat.vector.any(), "an unbound network has storage of its own"


def test_segments_tell_the_facts_of_their_layers(case) -> None:
    net, _, _ = case
    modules = dict(net.named_modules())
    for segment in bind(net).segments:
        assert segment.fan_in >= 1
        assert segment.fan_out >= 1
        owner = modules[segment.layer]
        assert type(owner).__name__ == segment.layer_type
        if isinstance(owner, nn.Linear):
            assert (segment.fan_in, segment.fan_out) == (owner.in_features, owner.out_features)
        if isinstance(owner, nn.Conv2d):
            assert segment.fan_in == owner.in_channels // owner.groups * 9
        if segment.name.endswith("in_proj_weight"):
            assert (segment.fan_in, segment.fan_out) == (8, 8)


def test_norm_layers_are_deterministic_by_default(case) -> None:
    net, _, _ = case
    model = credo.Model(net, credo.likelihoods.Categorical())
    norms = sum(
        p.numel()
        for m in net.modules()
        if isinstance(m, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d)
        for p in m.parameters()
    )
    assert model.deterministic.size == norms
    assert model.random.size + norms == model.flat.size
    assert model.random.is_one_run


def test_deepcopy_is_an_ordinary_network(case) -> None:
    net, _, _ = case
    flat = bind(net)
    other = copy.deepcopy(net)
    with flat.writing() as vector:
        vector.zero_()
    assert any(p.any() for p in other.parameters())
    assert bind(other) is not flat
    flat.check()


def test_state_dict_round_trip(case, tmp_path) -> None:
    net, x, _ = case
    bind(net)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    fresh = copy.deepcopy(net)
    for p in fresh.parameters():
        p.data.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    net.eval(), fresh.eval()
    torch.testing.assert_close(fresh(x), net(x), rtol=0, atol=0)


def test_load_state_dict_in_place_keeps_the_binding(case) -> None:
    net, _, _ = case
    flat = bind(net)
    net.load_state_dict({k: torch.zeros_like(v) for k, v in net.state_dict().items()})
    flat.check()
    assert not flat.vector.any()


BREAKERS = {
    "double": lambda net: net.double(),
    "to dtype": lambda net: net.to(torch.float64),
    "assign": lambda net: net.load_state_dict(
        {k: v.clone() for k, v in net.state_dict().items()}, assign=True
    ),
    "freeze": lambda net: next(net.parameters()).requires_grad_(False),
    "replace": lambda net: setattr(net[0], "weight", nn.Parameter(torch.zeros(6, 4))),
    "move data": lambda net: setattr(net[0].weight, "data", torch.zeros(6, 4)),
}


@pytest.mark.parametrize("how", BREAKERS)
def test_what_breaks_the_binding_is_refused_then_bound_anew(how: str) -> None:
    net, _, _ = specimen("mlp")
    flat = bind(net)
    BREAKERS[how](net)
    with pytest.raises(BindingError, match="moved, re-typed, replaced or frozen"), flat.writing():
        pass
    again = bind(net)
    assert again is not flat
    again.check()
    trainable = [p for p in net.parameters() if p.requires_grad]
    assert again.size == sum(p.numel() for p in trainable)
    assert again.vector.dtype == trainable[0].dtype


def test_a_late_backward_raises_instead_of_lying() -> None:
    """Trap: writes through the buffer don't bump version counters unless told to."""
    net, x, y = specimen("mlp")
    flat = bind(net)
    loss = loss_of(net, x, y)
    with flat.writing() as vector:
        vector.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_sees_every_write() -> None:
    """Trap: inside one autocast block the cast copy of the first weights is cached."""
    net, x, _ = specimen("mlp")
    flat = bind(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = net(x)
        with flat.writing() as vector:
            vector.zero_()
        second = net(x)
    assert first.any()
    assert not second.any()


def test_frozen_parameters_are_left_out_and_tied_ones_counted_once() -> None:
    net, _, _ = specimen("tied by name")
    net.head.requires_grad_(False)
    names = [s.name for s in bind(net).segments]
    assert names == ["first.weight", "first.bias", "second.bias"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("last_layer", {"7.weight", "7.bias"}),
        ("0", {"0.weight", "0.bias"}),
        ("*.bias", {"0.bias", "3.bias", "7.bias", "1.bias", "4.bias"}),
        (["0.*", "7.weight"], {"0.weight", "0.bias", "7.weight"}),
        (lambda s: s.layer_type == "BatchNorm2d", {"1.weight", "1.bias"}),
    ],
)
def test_selectors(selector, expected) -> None:
    net, _, _ = specimen("conv, batch norm, group norm")
    selection = select(bind(net).segments, selector)
    assert {s.name for s in selection.segments} == expected
    vector = torch.arange(float(bind(net).size))
    values = selection.read(vector)
    target = torch.zeros_like(vector)
    selection.write(target, values)
    kept = torch.zeros_like(vector, dtype=torch.bool)
    for segment in selection.segments:
        kept[segment.slice] = True
    torch.testing.assert_close(target, torch.where(kept, vector, 0.0), rtol=0, atol=0)


def test_bad_networks_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"no parameter matches \['head\*'\]"):
        select(bind(nn.Linear(2, 2)).segments, "head*")
    with pytest.raises(BindingError, match="nothing to be Bayesian"):
        bind(nn.ReLU())
    with pytest.raises(BindingError, match="lazy"):
        bind(nn.LazyLinear(3))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(BindingError, match="mixed dtype"):
        bind(mixed)
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = nn.Parameter(shared[0].weight.data)
    with pytest.raises(BindingError, match="over the same memory"):
        bind(shared)


def test_sparse_gradients_are_refused_by_name() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    flat = bind(net)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(BindingError, match="sparse=False"):
        flat.gradient(Selection.of(flat.segments), out=torch.empty_like(flat.vector))


def test_a_bound_network_can_be_freed() -> None:
    net = nn.Linear(2, 2)
    bind(net)
    dead = weakref.ref(net)
    del net
    gc.collect()
    assert dead() is None


def test_showing_a_spare_buffer_leaves_the_first_one_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    flat = bind(net)
    x, mean = torch.randn(5, 3), flat.vector.clone()
    first, at_mean = flat.shown, net(x)
    spare = flat.spare()
    spare.vector.zero_()
    flat.show(spare)
    flat.check()
    assert torch.equal(net(x), torch.zeros(5, 2))
    assert torch.equal(first.vector, mean)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        at_mean.sum().backward()
    flat.show(first)
    flat.check()
    assert flat.vector is first.vector
    assert torch.equal(flat.vector, mean)
