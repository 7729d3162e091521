"""Σ_i g_i² harvested in one backward pass is what a loop over single examples finds.

All in float64: both sides compute the same sums in another order, so they agree to about 1e-12 of
the largest entry; 1e-10 leaves room for long sums.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from credo.autodiff import layer_calls
from credo.autodiff.squares import Squares
from credo.errors import DataError, UnsupportedError
from credo.network import FlatParams, Selection, bind, last_layer, select

pytestmark = [
    pytest.mark.filterwarnings("ignore:per-example gradients of these parameters"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def words(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(1))


class Calls(nn.Module):
    """A network from submodules and a function of them and the input."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.one(x)), inplace=True)
        return F.relu(x + self.norms[1](self.two(h)))


def evaluated(norm: nn.Module) -> nn.Module:
    for name in ("running_mean", "running_var"):
        getattr(norm, name).uniform_(0.5, 1.5)
    return norm.eval()


def sequence(cell: nn.Module) -> nn.Module:
    return Calls(lambda n, x: n.head(n.cell(x)[0][:, -1]), cell=cell, head=nn.Linear(3, 2))


def attention(**settings) -> nn.Module:
    return Calls(
        lambda n, x: n.att(x, x.flip(1) if settings.get("kdim") else x, x, need_weights=False)[0],
        att=nn.MultiheadAttention(4, 2, batch_first=True, **settings),
    )


def positions() -> nn.Module:
    """A table of positions whose length, 5, is that of the batch: sizes can't tell them apart."""
    return Calls(
        lambda n, x: n.head(n.table(x) + n.place(torch.arange(x.shape[1]))).tanh(),
        table=nn.Embedding(7, 4), place=nn.Embedding(5, 4), head=nn.Linear(4, 2),
    )  # fmt: skip


IMAGE = normal(5, 2, 7, 6)
SIGNAL = normal(5, 4, 9)
TOKENS = normal(5, 3, 4)
ROWS = normal(5, 4)

# name → (network, inputs, segments that have to be replayed)
FAST = {
    "linear": (lambda: nn.Linear(4, 3), ROWS),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), ROWS),
    "linear on a sequence": (lambda: nn.Linear(4, 3), TOKENS),
    "linear on a grid": (lambda: nn.Linear(4, 3), normal(5, 2, 3, 4)),
    "linear on one position": (lambda: nn.Linear(4, 3), normal(5, 1, 4)),
    "linear, sequence first": (
        lambda: Calls(lambda n, x: n.map(x.transpose(0, 1)).transpose(0, 1), map=nn.Linear(4, 3)),
        TOKENS,
    ),
    "linear, sequence of batch length": (
        lambda: Calls(lambda n, x: n.map(x.transpose(0, 1)).transpose(0, 1), map=nn.Linear(4, 3)),
        normal(5, 5, 4),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), SIGNAL),
    "conv1d, dilated, grouped": (lambda: nn.Conv1d(4, 6, 2, dilation=3, groups=2), SIGNAL),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), IMAGE),
    "conv2d, everything": (
        lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        IMAGE,
    ),
    "conv2d, depthwise": (lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), IMAGE),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)), IMAGE),
    "conv2d, valid": (lambda: nn.Conv2d(2, 3, 2, padding="valid"), IMAGE),
    "conv2d, reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d, rest of the stride": (lambda: nn.Conv2d(2, 3, 2, stride=4), normal(5, 2, 8, 9)),
    "conv2d, grey": (lambda: nn.Conv2d(1, 3, 3, padding=1), normal(5, 1, 6, 6)),
    "conv2d, one pixel": (lambda: nn.Conv2d(2, 3, 1, stride=2, bias=False), IMAGE),
    "conv2d, sixteen": (lambda: nn.Conv2d(16, 16, 3, stride=2, padding=1), normal(5, 16, 5, 5)),
    "conv2d, channels last": (
        lambda: nn.Conv2d(2, 3, 3, padding=1), IMAGE.to(memory_format=torch.channels_last)
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=(0, 1, 0), stride=2), normal(5, 2, 4, 3, 5)),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), SIGNAL
    ),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dilation=2, output_padding=1),
        IMAGE,
    ),
    "transposed 2d, sixteen": (lambda: nn.ConvTranspose2d(16, 16, 2), normal(5, 16, 3, 3)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 1, 2, bias=False), normal(5, 2, 2, 3, 2)),
    "embedding": (lambda: nn.Embedding(7, 3), words(5, 6)),
    "embedding of one word": (lambda: nn.Embedding(7, 3), words(5)),
    "embedding, padded": (lambda: nn.Embedding(7, 3, padding_idx=-2), words(5, 6)),
    "embedding, sequence first": (
        lambda: Calls(lambda n, x: n.table(x.T).transpose(0, 1), table=nn.Embedding(7, 3)),
        words(5, 6),
    ),
    "layer norm": (lambda: nn.LayerNorm(4), TOKENS),
    "layer norm of rows": (lambda: nn.LayerNorm(4), ROWS),
    "layer norm, two dimensions": (lambda: nn.LayerNorm((3, 4)), TOKENS),
    "layer norm, sequence first": (
        lambda: Calls(lambda n, x: n.norm(x.transpose(0, 1)).transpose(0, 1), norm=nn.LayerNorm(4)),
        TOKENS,
    ),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), TOKENS),
    "rms norm": (lambda: nn.RMSNorm(4), TOKENS),
    "group norm": (lambda: nn.GroupNorm(2, 4), normal(5, 4, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), SIGNAL),
    "batch norm, evaluated": (lambda: evaluated(nn.BatchNorm2d(2)), IMAGE),
    "attention": (lambda: attention(), TOKENS),
    "attention on three things": (lambda: attention(kdim=4, vdim=4, bias=False), TOKENS),
    "attention, packed, two things": (
        lambda: Calls(
            lambda n, x: n.att(x, x.flip(1), x.flip(1))[0],
            att=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        TOKENS,
    ),
    "attention, once alone and once across": (
        lambda: Calls(
            lambda n, x: n.att(n.att(x, x, x)[0], x, x)[0],
            att=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        TOKENS,
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), ROWS
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3),
            nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3),
        ),
        normal(5, 1, 8, 8),
    ),
    "resnet": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), Residual(4), Residual(4), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, 3),
        ),
        IMAGE,
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), TOKENS
    ),
    "reused": (
        lambda: Calls(
            lambda n, x: n.head(n.body(n.body(x).tanh())), body=nn.Linear(4, 4),
            head=nn.Linear(4, 2),
        ),
        ROWS,
    ),
    "reused convolution": (
        lambda: Calls(
            lambda n, x: n.conv(n.conv(x).tanh()), conv=nn.Conv2d(2, 2, 3, padding=1, stride=2)
        ),
        IMAGE,
    ),
    "reused norm": (lambda: Calls(lambda n, x: n.norm(n.norm(x)), norm=nn.LayerNorm(4)), TOKENS),
    "tied words": (
        lambda: Calls(
            lambda n, x: F.linear(n.table(x).tanh(), n.table.weight), table=nn.Embedding(7, 3)
        ),
        words(5, 4),
    ),
    "dictionary": (
        lambda: Calls(
            lambda n, a, b: n.one(a) * n.two(b), one=nn.Linear(4, 2), two=nn.Linear(3, 2)
        ),
        {"a": ROWS, "b": normal(5, 3)},
    ),
}  # fmt: skip

SLOW = {
    "tied autoencoder": (
        lambda: Calls(
            lambda n, x: F.linear(n.map(x).tanh(), n.map.weight.t()), map=nn.Linear(4, 3)
        ),
        ROWS, {"map.weight"},
    ),
    "lstm": (
        lambda: sequence(nn.LSTM(4, 3, batch_first=True)), TOKENS,
        {"cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"},
    ),
    "rnn": (
        lambda: sequence(nn.RNN(4, 3, batch_first=True)), TOKENS,
        {"cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"},
    ),
    "table of positions": (positions, words(5, 5), {"place.weight"}),
    "examples and positions in one dimension": (
        lambda: Calls(lambda n, x: n.map(x.flatten(0, 1)).view(-1, 3, 2),
                      map=nn.Linear(4, 2)),
        TOKENS, {"map.weight", "map.bias"},
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2)), ROWS,
        {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
    "attention with a learned key": (
        lambda: attention(add_bias_kv=True), TOKENS,
        {
            "att.in_proj_weight", "att.in_proj_bias", "att.bias_k", "att.bias_v",
            "att.out_proj.weight", "att.out_proj.bias",
        },
    ),
    "product of weights": (
        lambda: Calls(
            lambda n, x: x @ F.linear(n.a.weight, n.b.weight),
            a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 2, bias=False),
        ),
        ROWS, {"a.weight", "b.weight"},
    ),
    "two outputs": (
        lambda: Calls(
            lambda n, x: {"a": n.map(x), "b": [x @ n.map.weight[:2].T, n.map(x).detach()]},
            map=nn.Linear(4, 3),
        ),
        ROWS, {"map.weight"},
    ),
    "bilinear, two inputs": (
        lambda: Calls(lambda n, a, b: n.map(a, b), map=nn.Bilinear(4, 3, 2)),
        (ROWS, normal(5, 3)), {"map.weight", "map.bias"},
    ),
}  # fmt: skip
NETWORKS = {name: (*row, set()) for name, row in FAST.items()} | SLOW


def outputs_of(net: nn.Module, x) -> Tensor:
    """All outputs of each example in a row, (B, …)."""
    if isinstance(x, dict):
        out = net(**x)
    else:
        out = net(*x) if isinstance(x, tuple) else net(x)
    if isinstance(out, dict):
        return torch.cat([out["a"], out["b"][0]], dim=1)
    return out.flatten(1)


def losses(net: nn.Module, x) -> Tensor:
    """A nonlinear loss of each example, (B,): no two output entries weigh the same."""
    out = outputs_of(net, x)
    targets = torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)
    return (out - targets).square().sum(1) + (out * targets).sin().sum(1)


def examples_of(x, rows: slice):
    if isinstance(x, dict):
        return {key: value[rows] for key, value in x.items()}
    return tuple(t[rows] for t in x) if isinstance(x, tuple) else x[rows]


class Case:
    """A network with random parameters, all of them selected unless told otherwise."""

    def __init__(self, name: str, selector="all", **settings) -> None:
        make, self.x, self.slow = NETWORKS[name]
        torch.manual_seed(0)
        self.net = make().double()
        for i, parameter in enumerate(self.net.parameters()):
            parameter.data += 0.3 * normal(*parameter.shape, seed=i)
        self.flat: FlatParams = bind(self.net)
        last = last_layer(self.net, self.x) if selector == "last_layer" else None
        self.selection: Selection = select(self.flat.segments, selector, last)
        self.squares = Squares(self.flat, self.selection, **settings)

    def batch(self, *rows: int):
        return examples_of(self.x, slice(*rows)) if rows else self.x

    def harvest(self, loss=torch.mean, *rows: int) -> None:
        with self.squares.armed():
            loss(losses(self.net, self.batch(*rows))).backward()

    def found(self, **settings) -> Tensor:
        out = torch.full((self.selection.size,), math.nan, dtype=torch.float64)
        return self.squares.mean(out, **settings)

    def looped(self) -> Tensor:
        """Mean of squares, one example after the other."""
        parameters = [self.flat.parameter_at[s.start] for s in self.selection.segments]
        total = torch.zeros(self.selection.size, dtype=torch.float64)
        for i in range(5):
            loss = losses(self.net, self.batch(i, i + 1)).sum()
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            total += torch.cat([
                torch.zeros(p.numel()) if g is None else g.flatten()
                for p, g in zip(parameters, grads, strict=True)
            ]).square()  # fmt: skip
        return total / 5


def assert_close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("name", NETWORKS)
def test_squares_are_those_of_a_loop_and_gradients_are_as_ever(name):
    case, plain = Case(name), Case(name)
    case.harvest()
    losses(plain.net, plain.x).mean().backward()
    assert_close(case.found(), case.looped())
    assert case.squares.count == 5
    for ours, theirs in zip(case.net.parameters(), plain.net.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(case.net.buffers(), plain.net.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NETWORKS)
def test_squares_do_not_depend_on_the_chunks(name, monkeypatch):
    case = Case(name)
    monkeypatch.setattr(layer_calls, "CHUNK_NUMBERS", 1)
    case.harvest()
    assert_close(case.found(), case.looped())


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_replayed_is_said_once_and_by_name(name):
    case = Case(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        case.harvest()
        case.harvest()
    told = [w for w in told if "running each example alone" in str(w.message)]
    assert len(told) == bool(case.slow)
    for segment in case.selection.segments:
        if told:
            assert (f"{segment.name}:" in str(told[0].message)) == (segment.name in case.slow)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer", "reused", "tied words"])
def test_squares_are_those_of_vmap(name):
    case = Case(name)
    case.harvest()

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return losses(lambda x: functional_call(case.net, weights, (x,)), x.unsqueeze(0)).sum()

    weights = {s.name: case.flat.vector[s.slice].view(s.shape) for s in case.selection.segments}
    grads = vmap(grad(loss), (None, 0), randomness="same")(weights, case.x)
    expected = torch.cat([grads[s.name].flatten(1) for s in case.selection.segments], dim=1)
    assert_close(case.found(), expected.square().mean(0))


SOME = [
    "mlp", "cnn", "attention", "reused", "tied words", "embedding", "group norm",
    "tied autoencoder", "lstm",
]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_reductions_and_scales_are_divided_out(name):
    mean, total = Case(name), Case(name, loss_reduction="sum")
    mean.harvest(lambda each: 64.0 * each.mean())
    total.harvest(torch.sum)
    assert_close(mean.found(grad_scale=64.0), mean.looped())
    assert_close(total.found(), mean.looped())
    out = torch.empty_like(total.found())
    assert_close(total.squares.sum(out), 5 * mean.looped())


@pytest.mark.parametrize("separately", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_micro_batches_of_any_size_add_up(name, separately):
    case = Case(name)
    if separately:
        case.harvest(torch.mean, 0, 2)
        case.harvest(torch.mean, 2, 5)
    else:
        with case.squares.armed():
            for rows in ((0, 2), (2, 5)):
                losses(case.net, case.batch(*rows)).mean().backward()
    assert case.squares.count == 5
    assert_close(case.found(), case.looped())
    case.squares.reset()
    assert case.squares.count == 0
    case.harvest()
    assert_close(case.found(), case.looped())


@pytest.mark.parametrize("name", SOME)
def test_draws_of_the_weights_add_up(name):
    """Each backward pass belongs to the weights that it ran with."""
    case, other = Case(name), Case(name)
    draws = [0.1 * normal(case.flat.size, seed=seed) for seed in range(2)]
    expected = torch.zeros(case.selection.size, dtype=torch.float64)
    for draw in draws:
        with other.flat.writing() as vector:
            vector += draw
        expected += other.looped() / 2
    with case.squares.armed():
        for draw in draws:
            with case.flat.writing() as vector:
                vector += draw
            losses(case.net, case.x).mean().backward()
    assert case.squares.count == 10
    assert_close(case.found(), expected)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_two_calls_in_one_backward_pass_are_parts_of_one_loss(name):
    case = Case(name)
    with case.squares.armed():
        one = losses(case.net, case.x)
        two = losses(case.net, 2 * case.x)
        (one + two).mean().backward()
    parameters = [case.flat.parameter_at[s.start] for s in case.selection.segments]
    expected = 0.0
    for i in range(5):
        rows = case.batch(i, i + 1)
        loss = losses(case.net, rows).sum() + losses(case.net, 2 * rows).sum()
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        expected = expected + flat.square() / 5
    assert case.squares.count == 5
    assert_close(case.found(), expected)
    assert not torch.allclose(expected, case.looped())


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied words"])
def test_the_parts_of_a_network_may_be_called(name):
    """Without a call of the network itself the first dimension has to do."""
    case = Case(name)
    with case.squares.armed():
        losses(case.net.forward, case.x).mean().backward()
    assert_close(case.found(), case.looped())


@pytest.mark.parametrize("selector", ["*.weight", "*.bias", "0.*", "last_layer"])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_part_of_the_network_is_enough(name, selector):
    case = Case(name, selector)
    case.harvest()
    assert_close(case.found(), case.looped())
    assert all(p.grad is not None for p in case.net.parameters())


def test_a_frozen_layer_is_passed_through():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    net[2].weight.requires_grad_(False)
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        losses(net, ROWS).mean().backward()
    found = squares.mean(torch.empty(flat.size, dtype=torch.float64))
    assert (found > 0).all()
    assert net[2].weight.grad is None


def test_an_unused_parameter_has_no_squares():
    net = Calls(lambda n, x: n.used(x), used=nn.Linear(4, 2), idle=nn.Linear(3, 3)).double()
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        losses(net, ROWS).mean().backward()
    found = squares.mean(torch.full((flat.size,), math.nan, dtype=torch.float64))
    assert (found[:10] > 0).all()
    assert (found[10:] == 0).all()
    assert net.idle.weight.grad is None


def installed(net: nn.Module) -> int:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    parameter_hooks = sum(len(p._backward_hooks or {}) for p in net.parameters())
    return hooks + parameter_hooks + len(torch.overrides._get_current_function_mode_stack())


@pytest.mark.parametrize("name", ["mlp", "reused", "lstm"])
@pytest.mark.parametrize("where", ["forward", "loss", "backward", "nowhere"])
def test_nothing_stays_installed(name, where):
    case = Case(name)

    def fail(*_):
        raise ZeroDivisionError

    def run() -> None:
        with case.squares.armed():
            assert installed(case.net) > 0
            x = case.x.clone().requires_grad_()
            handles = []
            if where == "forward":
                handles.append(next(case.net.children()).register_forward_hook(fail))
            if where == "backward":
                x.register_hook(fail)
            try:
                each = losses(case.net, x)
                if where == "loss":
                    fail()
                each.mean().backward()
            finally:
                for handle in handles:
                    handle.remove()

    before = installed(case.net)
    if where == "nowhere":
        run()
        assert case.squares.count == 5
    else:
        with pytest.raises(ZeroDivisionError):
            run()
        assert case.squares.count == 0
    assert installed(case.net) == before == 0
    case.squares.reset()
    case.harvest()
    assert_close(case.found(), case.looped())


def test_a_pass_that_dies_inside_the_block_leaves_no_squares():
    case = Case("mlp")
    x = case.x.clone().requires_grad_()
    x.register_hook(lambda _: 1 / 0)
    with case.squares.armed():
        with pytest.raises(ZeroDivisionError):
            losses(case.net, x).mean().backward()
        losses(case.net, case.x).mean().backward()
    assert case.squares.count == 5
    assert_close(case.found(), case.looped())


def test_a_pass_that_dies_discards_the_ones_before():
    case = Case("mlp")
    case.harvest()
    x = case.x.clone().requires_grad_()
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), case.squares.armed():
        losses(case.net, x).mean().backward()
    assert case.squares.count == 0
    assert (case.squares.sum(torch.empty(case.selection.size, dtype=torch.float64)) == 0).all()


def test_without_arming_nothing_is_harvested():
    case = Case("mlp")
    losses(case.net, case.x).mean().backward()
    with case.squares.armed():
        late = losses(case.net, case.x).mean()
    late.backward()
    assert case.squares.count == 0
    with pytest.raises(UnsupportedError, match=r"inside armed\(\)"):
        case.found()


def test_passes_without_gradients_are_left_alone():
    case = Case("tied words")
    with case.squares.armed():
        with torch.no_grad():
            losses(case.net, case.x)
            case.net.table.weight.norm()
        losses(case.net, case.x).mean().backward()
    assert_close(case.found(), case.looped())


@pytest.mark.parametrize("name", ["mlp", "reused"])
def test_a_graph_may_be_used_twice(name):
    case = Case(name)
    with case.squares.armed():
        loss = losses(case.net, case.x).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert case.squares.count == 10
    assert_close(case.found(), case.looped())


def test_a_forward_pass_that_goes_nowhere_is_harmless():
    case = Case("cnn")
    with case.squares.armed():
        losses(case.net, case.x)
        losses(case.net, case.x).mean().backward()
    assert_close(case.found(), case.looped())


@pytest.mark.parametrize("name", ["mlp", "cnn", "embedding", "reused", "tied autoencoder"])
def test_activations_die_with_the_backward_pass(name):
    case, activations = Case(name), []
    for module in case.net.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda m, i, out: activations.append(weakref.ref(out.untyped_storage()))
            )
    with case.squares.armed():
        each = losses(case.net, case.x)
        del activations[:-1]  # what the recorded call replays is no activation
        loss = each.mean()
        del each
        loss.backward()
    gc.collect()
    assert all(ref() is None for ref in activations)
    assert loss.grad_fn is not None


def test_writing_the_weights_between_the_passes_is_noticed():
    case = Case("mlp")
    with case.squares.armed():
        loss = losses(case.net, case.x).mean()
        with case.flat.writing() as vector:
            vector += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert case.squares.count == 0


def test_differentiating_twice_is_refused():
    case = Case("mlp")
    with case.squares.armed():
        loss = losses(case.net, case.x).mean()
        (first,) = torch.autograd.grad(loss, case.net[0].weight, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "transformer", "conv2d, sixteen", "reused", "tied autoencoder"]
)
def test_autocast_is_followed_and_squares_are_in_float32(name):
    """The loop runs under autocast too, so that both meet the same kinks of ReLU and pooling.

    bfloat16 keeps 8 bits of each g_i: at most a per cent of a norm, of squares two.
    """
    case = Case(name)
    net = copy.deepcopy(case.net).float()
    plain = copy.deepcopy(net)
    flat = bind(net)
    squares = Squares(flat, select(flat.segments, "all"))

    def loss(network: nn.Module, *rows: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = outputs_of(network, case.batch(*rows).float())
        assert out.dtype == torch.bfloat16 or name == "transformer"
        return losses(lambda _: out.float(), None).mean()

    with squares.armed():
        loss(net).backward()
    found = squares.mean(torch.empty(flat.size))
    assert found.dtype == torch.float32
    loss(plain).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() <= 0.01 * theirs.grad.norm()

    expected = torch.zeros(flat.size)
    for i in range(5):
        grads = torch.autograd.grad(loss(net, i, i + 1), flat.parameters)
        expected += torch.cat([g.flatten() for g in grads]).square() / 5
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_half_precision_networks_are_squared_in_float32():
    """g is about 1e-4; its square is zero in float16."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half()
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        (1e-3 * net(ROWS.half()).float().sum(1)).mean().backward()
    found = squares.mean(torch.empty(flat.size))
    assert (found > 0).all()
    assert found.max() < 1e-5


def test_batch_norm_elsewhere_gives_shares_of_the_batch_gradient():
    """g_i is row i of (gradient at the output) ⊗ row i of the input, squared: no loop finds it."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    flat = bind(net)
    squares, seen = Squares(flat, select(flat.segments, "0.weight")), []

    def watch(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(seen.append)

    net[0].register_forward_hook(watch)
    with squares.armed():
        losses(net, ROWS).sum().backward()
    (g,) = [t for t in seen if len(t) == 5]
    expected = torch.einsum("bo,bi->boi", g, ROWS).square().mean(0) * 25
    found = squares.mean(torch.empty(12, dtype=torch.float64))
    assert_close(found, expected.flatten())
    assert int(net[1].num_batches_tracked) == 1


def refuse_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    flat = bind(net)
    with Squares(flat, select(flat.segments, "all")).armed():
        net(ROWS)


def refuse_slow(*layers: nn.Module) -> None:
    core = sequence(nn.RNN(4, 3, batch_first=True))
    net = nn.Sequential(core, *layers).double()
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        losses(net, TOKENS).mean().backward()


def refuse_loss_as_output() -> None:
    net = Calls(lambda n, x: n.cell(x)[0].square().mean(), cell=nn.RNN(4, 3, batch_first=True))
    flat = bind(net.double())
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        net(TOKENS).backward()


def refuse_packed_sequences() -> None:
    net = Calls(lambda n, x: n.cell(x)[1][0], cell=nn.RNN(4, 3, batch_first=True)).double()
    flat = bind(net)
    x = nn.utils.rnn.pack_padded_sequence(TOKENS, torch.tensor([3, 3, 2, 2, 1]), batch_first=True)
    with Squares(flat, select(flat.segments)).armed():
        net(x).sum().backward()


def refuse_fixed_batch() -> None:
    """It can't be surveyed, so sizes must do, and they don't agree; nor can it run alone."""
    net = Calls(lambda n, x: n.map(x.flatten(0, 1)).view(5, 3, 2), map=nn.Linear(4, 2)).double()
    flat = bind(net)
    with Squares(flat, select(flat.segments)).armed():
        losses(net, TOKENS).mean().backward()


def refuse_penalty() -> None:
    case = Case("mlp")
    with case.squares.armed():
        (losses(case.net, case.x).mean() + case.net[0].weight.square().sum()).backward()


def refuse_unequal_batches() -> None:
    case = Case("mlp")
    with case.squares.armed():
        (losses(case.net, case.x).mean() + losses(case.net, case.batch(0, 2)).mean()).backward()


def refuse_unseen() -> None:
    case = Case("mlp")
    early = case.net[0](case.x)
    with case.squares.armed():
        losses(case.net[1:], early).mean().backward()


def refuse_checkpoint(use_reentrant: bool) -> None:
    net = Calls(
        lambda n, x: n.head(checkpoint(n.body, x, use_reentrant=use_reentrant)),
        body=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), head=nn.Linear(3, 2),
    ).double()  # fmt: skip
    flat = bind(net)
    with Squares(flat, select(flat.segments)).armed():
        losses(net, ROWS.clone().requires_grad_()).mean().backward()


def refuse_old_graph() -> None:
    case = Case("mlp")
    with case.squares.armed():
        old = losses(case.net, case.x).mean()
        old.backward(retain_graph=True)
        (old + losses(case.net, case.x).mean()).backward()


def refuse_arming_twice() -> None:
    case = Case("mlp")
    with case.squares.armed(), case.squares.armed():
        pass


REFUSED = {
    "batch norm": (refuse_batch_norm, r"1\.weight, 1\.bias: batch norm.*\.eval\(\)"),
    "dropout": (lambda: refuse_slow(nn.Dropout(0.5)), "dropout"),
    "batch norm in a replay": (lambda: refuse_slow(nn.BatchNorm1d(2)), "more than 1 value"),
    "loss as output": (refuse_loss_as_output, "first dimension"),
    "packed sequences": (refuse_packed_sequences, "first dimension"),
    "fixed batch": (refuse_fixed_batch, "it can't run on one"),
    "penalty": (refuse_penalty, "leave it to the prior"),
    "unequal batches": (refuse_unequal_batches, "5 and 2 examples|2 and 5 examples"),
    "unseen": (refuse_unseen, r"0\.weight got a gradient"),
    "checkpoint": (lambda: refuse_checkpoint(False), "activation checkpointing"),
    "re-entrant checkpoint": (lambda: refuse_checkpoint(True), "re-entrant checkpointing"),
    "old graph": (refuse_old_graph, "retain_graph"),
    "armed twice": (refuse_arming_twice, "armed already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(name):
    run, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        run()
    assert not torch.overrides._get_current_function_mode_stack()


def test_an_unknown_reduction_is_refused():
    with pytest.raises(DataError, match="loss_reduction"):
        Case("mlp", loss_reduction="none")
