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
from credo.families import Delta
from credo.network import FlatParams, Selection, bind, last_layer, select, unbind
from credo.network.flat import Draw


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
    assert model.random.size + norms == model.bind().size
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
    selection = select(bind(net).segments, selector, last_layer(net))
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


def test_showing_a_draw_leaves_the_buffer_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    flat = bind(net)
    x, mean = torch.randn(5, 3), flat.vector.clone()
    at_mean = net(x)
    draw = Draw(torch.zeros_like(flat.vector), flat.segments, flat.parameters)
    flat.show(draw)
    flat.check()
    assert torch.equal(net(x), torch.zeros(5, 2))
    assert torch.equal(flat.vector, mean)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        at_mean.sum().backward()
    flat.show_home(draw)
    flat.check()
    assert net[0].weight.data_ptr() == flat.vector.data_ptr()
    assert torch.equal(torch.cat([p.detach().flatten() for p in net.parameters()]), mean)


def test_a_draw_of_some_parameters_moves_no_other() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    flat = bind(net)
    before = [p.data_ptr() for p in net[1].parameters()]
    draw = Draw(torch.zeros(16), flat.segments[:2], flat.parameters[:2])
    flat.show(draw)
    assert not net[0].weight.any()
    assert [p.data_ptr() for p in net[1].parameters()] == before
    net.double()  # what is re-typed while it is shown gets the numbers where it is
    flat.show_home(draw)
    torch.testing.assert_close(net[0].weight.detach().flatten(), flat.vector[:12].double())


# --- who owns the network -------------------------------------------------------------------------


def places(net: nn.Module) -> list[int]:
    return [p.data_ptr() for p in net.parameters()]


def test_looking_at_a_model_moves_nothing(case) -> None:
    net, x, y = case
    loss_of(net, x, y).backward()
    before, grads = places(net), [p.grad for p in net.parameters()]
    model = credo.Model(net, credo.likelihoods.Categorical())
    assert model.random.size + model.deterministic.size == model.weights().numel()
    assert model.prior_over_weights().scale is not None
    posterior = credo.Posterior.at_network(model, Delta(model.weights(model.random)))
    posterior.predict(x, samples=2)
    with posterior.in_network():
        pass
    assert places(net) == before
    assert all(a is b for a, b in zip(grads, [p.grad for p in net.parameters()], strict=True))
    assert [s.name for s in model.segments] == [s.name for s in bind(net).segments]


def test_binding_and_releasing_keep_gradients(case) -> None:
    net, x, y = case
    loss_of(net, x, y).backward()
    before = [p.grad.clone() for p in net.parameters()]
    bind(net)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
    unbind(net)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("method", [credo.MAP(), credo.VI(), credo.IVON(), credo.Laplace()])
def test_leftover_gradients_are_not_trained_on(method) -> None:
    results = []
    for leftover in (False, True):
        net, x, y = specimen("mlp")
        if leftover:
            for p in net.parameters():
                p.grad = torch.full_like(p, 100.0)
        model = credo.Model(net, credo.likelihoods.Categorical())
        credo.fit(model, method, (x, y), epochs=2, progress=False)
        results.append(model.weights())
    assert torch.equal(*results)


@pytest.mark.parametrize("method", [credo.IVON(), credo.VOGN(), credo.Vadam(), credo.VI()])
@pytest.mark.parametrize("network", ["mlp", "conv, batch norm, group norm"])
def test_training_binds_once(method, network, monkeypatch) -> None:
    """The method, its optimizer and predictions between steps share one buffer."""
    net, x, y = specimen(network, n=16)
    bindings = []
    made = FlatParams.__init__

    def counted(self, module, *args, **options):
        bindings.append(module)
        made(self, module, *args, **options)

    monkeypatch.setattr(FlatParams, "__init__", counted)
    model = credo.Model(net, credo.likelihoods.Categorical())
    state = method.init(model, 16, torch.Generator().manual_seed(0))
    before = places(net)
    state.clock.num_batches = 1
    for step in range(40):
        state, _ = method.update(state, (x, y))
        if step % 10 == 0:
            method.posterior(state).predict(x, samples=2)
            assert model.random.size
    assert places(net) == before
    own = {id(m) for m in net.modules()}
    assert [module for module in bindings if id(module) in own] == [net]


@pytest.mark.filterwarnings("ignore:norm layers are random here")
@pytest.mark.parametrize("network", ["mlp", "layer norm"])
def test_an_optimizer_of_bare_parameters_and_a_model_share_the_network(network) -> None:
    """Built in either order, used in turn, they are what they are alone."""
    kinds = {"first": True, "later": False}
    ends = {}
    for name, first in kinds.items():
        net, x, y = specimen(network)
        flat = bind(net) if not first else None
        opt = credo.optim.IVON(net.parameters(), lr=0.1, num_data=8)
        seen = []
        for step in range(6):
            with opt.sampled():
                loss_of(net, x, y).backward()
            opt.step()
            if step == 2:
                flat = bind(net)
            opt.posterior(net, credo.likelihoods.Categorical()).predict(x, samples=2)
            seen.append(places(net))
        assert flat is bind(net)
        assert seen[2:] == seen[2:3] * 4, "bound once, they stay"
        ends[name] = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(ends["first"], ends["later"])


def test_without_norm_layers_the_optimizers_buffer_is_the_networks() -> None:
    net, _, _ = specimen("mlp")
    credo_optimizer = credo.optim.IVON(net.parameters(), lr=0.1, num_data=8)
    before = places(net)
    bind(net)
    assert places(net) == before
    assert credo_optimizer.param_groups


def test_a_part_of_a_bound_network_moves_nothing() -> None:
    net, _, _ = specimen("mlp")
    whole = bind(net)
    before = places(net)
    part = bind(net[2])
    assert places(net) == before
    whole.check()
    with part.writing() as vector:
        vector.zero_()
    assert not whole.vector[30:].any()
    assert whole.vector[:30].any()


def test_two_optimizers_on_one_network_draw_in_one_block() -> None:
    net, x, y = specimen("mlp")
    first = credo.optim.IVON(net[0].parameters(), lr=0.1, num_data=8)
    second = credo.optim.Vadam(net[2].parameters(), lr=0.1, num_data=8)
    flat = bind(net)
    before = flat.vector.clone()
    with first.sampled(), second.sampled():
        assert all((p.detach() != before[s.slice].view(s.shape)).all() for s, p in flat.pairs())
        loss_of(net, x, y).backward()
    assert torch.equal(flat.vector, before)
    flat.check()
    first.step(), second.step()
    assert (flat.vector != before).all()


def test_binding_in_inference_mode_poisons_nothing() -> None:
    net, x, y = specimen("mlp")
    with torch.inference_mode():
        bind(net)
    loss_of(net, x, y).backward()
    model = credo.Model(net, credo.likelihoods.Categorical())
    with torch.inference_mode():
        posterior = credo.fit(model, credo.Laplace(), (x, y), epochs=1, progress=False)
        assert torch.isfinite(posterior.predict(x.clone()).probs).all()
    with torch.no_grad():
        credo.fit(model, credo.VI(), (x, y), epochs=1, progress=False)
    with torch.inference_mode():
        made_there = nn.Linear(2, 2)
    with pytest.raises(BindingError, match="outside of it"):
        bind(made_there)
