"""Every functional of the Jacobian is that of the dense matrix which ``torch.func.jacrev`` forms.

All in float64: both sides add the same products in another order, so they agree to about 1e-14 of
the largest entry; 1e-10 leaves room for long sums.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.autodiff.jacobians import Jacobians
from credo.autodiff.layer_jacobians import DiagonalFactors, KronCovariance, KronFactors, gram
from credo.errors import DataError, UnsupportedError
from credo.network import FlatParams, Selection, bind, last_layer, select

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because"),  # jacrev's
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def words(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(1))


class Calls(nn.Module):
    """A network from submodules and a function of them and the input."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(self, *args, **kwargs)


def tied_by_name() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3))


def warm_norm() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    norm.running_mean, norm.running_var = normal(3), normal(3).square() + 0.5
    norm.weight.data, norm.bias.data = normal(3, seed=1), normal(3, seed=2)
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (lambda: nn.Linear(4, 3), normal(5, 4)),
    "scalar outputs": (
        lambda: Calls(lambda self, x: self.a(x)[:, 0], a=nn.Linear(4, 1)),
        normal(5, 4),
    ),
    "mlp, in-place activation": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5, bias=False), nn.Tanh(),
            nn.Linear(5, 3),
        ),
        normal(7, 4),
    ),
    "linear on sequences": (
        lambda: Calls(
            lambda self, x: self.b(torch.tanh(self.a(x)).flatten(1)),
            a=nn.Linear(4, 2), b=nn.Linear(6, 3),
        ),
        normal(5, 3, 4),
    ),
    "sequence first": (
        lambda: Calls(
            lambda self, x: torch.tanh(self.a(x.transpose(0, 1))).sum(0), a=nn.Linear(4, 3)
        ),
        normal(5, 5, 4),
    ),
    "dense outputs": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1)),
        normal(3, 2, 3, 2),
    ),
    "conv2d with everything": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), groups=2, dilation=2), nn.Tanh(),
            nn.Flatten(), nn.Linear(90, 3),
        ),
        normal(4, 4, 9, 8),
    ),
    "conv2d same": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, (2, 3), padding="same"), nn.Tanh(), nn.Flatten(),
                              nn.Linear(48, 3)),
        normal(4, 2, 4, 4),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool1d(1),
                              nn.Flatten(), nn.Linear(4, 3)),
        normal(4, 3, 6),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)),
        normal(3, 2, 3, 3, 3),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), nn.Tanh(),
            nn.Flatten(), nn.LazyLinear(2).to(torch.float64),
        ),
        normal(3, 4, 2, 3),
    ),
    "tied": (tied_by_name, normal(5, 4)),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
        normal(5, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Flatten(), nn.Linear(20, 3)),
        words(6, 5),
    ),
    "batch norm": (warm_norm, normal(4, 2, 4, 4)),
    "attention": (
        lambda: Calls(
            lambda self, x: self.b(self.a(x, x, x, need_weights=False)[0].mean(1)),
            a=nn.MultiheadAttention(4, 2, batch_first=True), b=nn.Linear(4, 3),
        ),
        normal(3, 5, 4),
    ),
    "cross attention": (
        lambda: Calls(
            lambda self, x, y: self.a(x, y, y, need_weights=False)[0].mean(1),
            a=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        (normal(3, 2, 4), normal(3, 5, 4)),
    ),
    "a layer that is not reached": (
        lambda: Calls(lambda self, x: self.a(x), a=nn.Linear(4, 2), b=nn.Linear(3, 3)),
        normal(5, 4),
    ),
    "keyword inputs": (
        lambda: Calls(lambda self, x, y: self.a(x * y), a=nn.Linear(4, 2)),
        {"x": normal(5, 4), "y": normal(5, 4, seed=3)},
    ),
}  # fmt: skip


SLOW: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied autoencoder": (
        lambda: Calls(
            lambda self, x: F.linear(torch.tanh(self.a(x)), self.a.weight.t()), a=nn.Linear(4, 3)
        ),
        normal(5, 4),
    ),
    "recurrent": (
        lambda: Calls(
            lambda self, x: self.b(self.a(x)[0][:, -1]),
            a=nn.GRU(3, 4, batch_first=True),
            b=nn.Linear(4, 2),
        ),
        normal(4, 5, 3),
    ),
}


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    make, inputs = (NETWORKS | SLOW)[name]
    net = make().to(torch.float64).eval()
    run(net, inputs)
    return net, inputs


def run(net: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def take(inputs: Any, index: slice) -> Any:
    if isinstance(inputs, dict):
        return {key: value[index] for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[index] for value in inputs)
    return inputs[index]


def dense(net: nn.Module, selection: Selection, inputs: Any) -> Tensor:
    """J by torch.func.jacrev, (B, K, P)."""
    chosen = {s.name: dict(net.named_parameters())[s.name].detach() for s in selection.segments}

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        if isinstance(inputs, dict):
            return torch.func.functional_call(net, parameters, (), inputs)
        return torch.func.functional_call(net, parameters, inputs)

    batch = len(outputs(chosen))
    found = {k: v.detach() for k, v in torch.func.jacrev(outputs)(chosen).items()}
    return torch.cat(
        [found[name].reshape(batch, -1, tensor.numel()) for name, tensor in chosen.items()], dim=-1
    )


def both(name: str, selector: Any = "all") -> tuple[Jacobians, Tensor, FlatParams, Selection]:
    net, inputs = build(name)
    flat = bind(net)
    last = last_layer(net, inputs) if selector == "last_layer" else None
    selection = select(flat.segments, selector, last)
    return (
        Jacobians.at(net, flat, selection, inputs),
        dense(net, selection, inputs),
        flat,
        selection,
    )


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-10)


def roots_for(jacobians: Jacobians, count: int = 2) -> Tensor:
    return normal(count, *jacobians.outputs.shape, seed=5)


def tiles_over(size: int, shapes: list[tuple[int, int]]) -> tuple[list[KronCovariance], Tensor]:
    """Tiles of these shapes with full bases, and the dense covariance."""
    tiles, dense = [], []
    for index, (a, b) in enumerate(shapes):
        left, right = normal(a, a, seed=index), normal(b, b, seed=index + 1)
        variance = normal(a, b, seed=index + 2).square()
        tiles.append(KronCovariance(left, right, variance))
        root = torch.kron(left, right)
        dense.append(root * variance.flatten() @ root.mT)
    assert sum(tile.size for tile in tiles) == size
    return tiles, torch.block_diag(*dense)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_functionals_are_those_of_the_dense_jacobian(name: str) -> None:
    jacobians, reference, _, selection = both(name)
    roots = roots_for(jacobians)
    pulled = torch.einsum("rbk,bkp->rbp", roots.reshape(2, len(reference), -1), reference)
    variance, columns = normal(selection.size).square(), normal(selection.size, 3)
    close(jacobians.rows(), reference)
    close(jacobians.pull(roots), pulled)
    close(jacobians.squares(roots), pulled.square().sum((0, 1)))
    close(jacobians.gram(roots), torch.einsum("rbp,rbq->pq", pulled, pulled))
    close(jacobians.variance_diag(variance), (reference * variance) @ reference.mT)
    close(jacobians.times(columns), reference @ columns)
    restricted = pulled.movedim(0, 1)
    close(jacobians.variance_diag(variance, roots), (restricted * variance) @ restricted.mT)
    assert jacobians.num_outputs == reference.shape[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_covariances_in_kronecker_blocks(name: str) -> None:
    jacobians, reference, _, selection = both(name)
    own = jacobians.kron(roots_for(jacobians))
    shapes = [
        (len(f.left), len(f.right)) if isinstance(f, KronFactors) else (f.diagonal.numel(), 1)
        for f in own
    ]
    tiles, covariance = tiles_over(selection.size, shapes)
    close(jacobians.kron_variance(tiles), reference @ covariance @ reference.mT)


@pytest.mark.parametrize("shapes", [[(1, 43)], [(10, 2), (23, 1)], [(3, 3), (4, 8), (1, 2)]])
def test_kronecker_blocks_need_not_be_those_of_the_layers(shapes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    flat, x = bind(net), normal(6, 4)
    selection = select(flat.segments)
    tiles, covariance = tiles_over(43, shapes)
    reference = dense(net, selection, x)
    found = Jacobians.at(net, flat, selection, x).kron_variance(tiles)
    close(found, reference @ covariance @ reference.mT)


def test_bases_that_are_the_identity_can_be_left_out() -> None:
    jacobians, reference, _, selection = both("conv2d with everything")
    variance = normal(selection.size).square()
    sizes = [f.left.shape[0] * f.right.shape[0] for f in jacobians.kron(roots_for(jacobians))]
    shapes = [(f.left.shape[0], f.right.shape[0]) for f in jacobians.kron(roots_for(jacobians))]
    pieces = zip(variance.split(sizes), shapes, strict=True)
    tiles = [KronCovariance(None, None, piece.view(shape)) for piece, shape in pieces]
    # One group of the convolution has a basis, the other has none.
    tiles[0] = KronCovariance(torch.eye(3, dtype=torch.float64), None, tiles[0].variance)
    close(jacobians.kron_variance(tiles), (reference * variance) @ reference.mT)


@pytest.mark.parametrize("selector", ["last_layer", None, "0.weight", ["0.bias", "3.*"]])
def test_a_selection_gives_its_columns_alone(selector: Any) -> None:
    jacobians, reference, _, _ = both("layer norm", selector)
    close(jacobians.rows(), reference)
    rows = torch.einsum("rbk,bkp->rbp", roots_for(jacobians), reference).flatten(0, 1)
    close(jacobians.gram(roots_for(jacobians)), rows.mT @ rows)
    close(
        jacobians.squares(roots_for(jacobians, 1)).sum()[None],
        torch.einsum("rbk,bkp->rbp", roots_for(jacobians, 1), reference).square().sum()[None],
    )


def test_the_last_layer_needs_no_graph_before_it() -> None:
    net, inputs = build("mlp, in-place activation")
    flat = bind(net)
    last = Jacobians.at(net, flat, select(flat.segments, last_layer(net)), inputs)
    node, depth = last._graph.grad_fn, 0
    while node is not None:
        depth += 1
        node = next(
            (n for n, _ in node.next_functions if n is not None and "Acc" not in n.name()), None
        )
    assert depth <= 2
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("name", SLOW)
def test_what_has_no_rule_is_replayed_and_said_once(name: str) -> None:
    net, inputs = build(name)
    flat = bind(net)
    selection = select(flat.segments)
    with pytest.warns(UserWarning, match=r"Jacobians of these parameters .* a\.weight"):
        jacobians = Jacobians.at(net, flat, selection, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Jacobians.at(net, flat, selection, inputs)
    parameters = [flat.parameter_at[s.start] for s in selection.segments]
    rows = [
        torch.cat([
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(parameters,
                            torch.autograd.grad(output, parameters, retain_graph=True,
                                                allow_unused=True), strict=True)
        ])
        for output in run(net, inputs).flatten()
    ]  # fmt: skip
    reference = torch.stack(rows).view(len(inputs), -1, selection.size)
    variance = normal(selection.size).square()
    close(jacobians.rows(), reference)
    close(jacobians.variance_diag(variance), (reference * variance) @ reference.mT)
    roots = roots_for(jacobians)
    pulled = torch.einsum("rbk,bkp->rbp", roots, reference)
    close(jacobians.squares(roots), pulled.square().sum((0, 1)))


def kron_of(f: KronFactors) -> Tensor:
    return torch.kron(f.left, f.right)


def test_factors_are_exact_for_one_example_and_one_position() -> None:
    net, inputs = build("mlp, in-place activation")
    flat = bind(net)
    selection = select(flat.segments)
    jacobians = Jacobians.at(net, flat, selection, inputs[:1])
    roots = roots_for(jacobians, 3)
    pulled = jacobians.pull(roots)[:, 0]
    for factors in jacobians.kron(roots):
        assert isinstance(factors, KronFactors)
        part = pulled[:, factors.place]
        close(kron_of(factors), part.mT @ part)


def test_factors_of_a_convolution_count_positions_as_examples() -> None:
    """left = Σ g gᵀ and right = mean a aᵀ over examples and positions, windows by F.unfold."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    net = nn.Sequential(conv, nn.Flatten())
    flat, x = bind(net), normal(4, 2, 5, 4)
    jacobians = Jacobians.at(net, flat, select(flat.segments), x)
    roots = roots_for(jacobians)
    weight, bias = jacobians.kron(roots)
    g = roots.view(2, 4, 3, -1).movedim(2, 0).flatten(1)
    a = F.unfold(x, 3, stride=2, padding=1).movedim(1, 0).flatten(1)
    assert isinstance(weight, KronFactors)
    assert isinstance(bias, KronFactors)
    close(weight.left, g @ g.mT)
    close(weight.right, a @ a.mT / a.shape[1])
    close(kron_of(bias), g @ g.mT)


@pytest.mark.parametrize(
    "name", ["mlp, in-place activation", "conv2d with everything", "transposed"]
)
def test_over_batches_left_adds_up_and_right_averages(name: str) -> None:
    net, inputs = build(name)
    flat = bind(net)
    selection = select(flat.segments)
    whole = Jacobians.at(net, flat, selection, inputs)
    roots = roots_for(whole)
    total = len(inputs)
    cuts = (slice(0, 1), slice(1, total))
    halves = [
        Jacobians.at(net, flat, selection, take(inputs, cut)).kron(roots[:, cut]) for cut in cuts
    ]
    shares = [len(range(total)[cut]) / total for cut in cuts]
    for one, first, second in zip(whole.kron(roots), *halves, strict=True):
        assert isinstance(one, KronFactors)
        close(first.left + second.left, one.left)
        close(shares[0] * first.right + shares[1] * second.right, one.right)
        assert first.place == one.place


def test_factors_of_groups_are_those_of_their_own_channels() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, groups=2).double()
    flat, x = bind(conv), normal(3, 4, 5, 5)
    jacobians = Jacobians.at(conv, flat, select(flat.segments), x)
    roots = roots_for(jacobians)
    first, second, _ = jacobians.kron(roots)
    for factors, channels, filters in ((first, slice(0, 2), slice(0, 3)),
                                       (second, slice(2, 4), slice(3, 6))):  # fmt: skip
        part = nn.Conv2d(2, 3, 3).double()
        part.weight.data, part.bias.data = conv.weight[filters].data, conv.bias[filters].data
        alone = bind(part)
        expected, _ = Jacobians.at(
            part, alone, select(alone.segments), x[:, channels]
        ).kron(roots[:, :, filters])  # fmt: skip
        close(factors.left, expected.left)
        close(factors.right, expected.right)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 130])
def test_a_product_in_slabs_is_the_product(width: int) -> None:
    rows = normal(20, width)
    close(gram(rows), rows.mT @ rows)


def test_parameters_outside_matrices_have_a_diagonal() -> None:
    jacobians, reference, _, selection = both("layer norm")
    roots = roots_for(jacobians)
    squares = torch.einsum("rbk,bkp->rbp", roots, reference).square().sum((0, 1))
    found = {f.name: f for f in jacobians.kron(roots)}
    for name in ("1.weight", "1.bias"):
        factors = found[name]
        assert isinstance(factors, DiagonalFactors)
        close(factors.diagonal, squares[selection.slices()[name]])


def test_numbers_tells_what_a_batch_will_take() -> None:
    net, inputs = build("mlp, in-place activation")
    flat = bind(net)
    jacobians = Jacobians.at(net, flat, select(flat.segments), inputs)
    assert jacobians.numbers() == 3 * (6 + 5 + 3 + 3 + 3)
    assert jacobians.numbers(1) < jacobians.numbers(2)


def test_batch_statistics_are_refused() -> None:
    net, inputs = build("batch norm")
    flat = bind(net.train())
    with pytest.raises(UnsupportedError, match=r"1 normalises .* net.eval\(\)"):
        Jacobians.at(net, flat, select(flat.segments), inputs)


def test_an_input_overwritten_later_is_refused() -> None:
    net = Calls(lambda self, x: self.a(h := x * 1.0) + h.mul_(2.0), a=nn.Linear(3, 3)).double()
    flat = bind(net)
    jacobians = Jacobians.at(net, flat, select(flat.segments), normal(4, 3))
    with pytest.raises(UnsupportedError, match="overwritten in place"):
        jacobians.rows()


def test_cotangents_of_another_shape_are_refused() -> None:
    jacobians, *_ = both("linear")
    with pytest.raises(DataError, match=r"\(5, 3\).*\(2, 5, 4\)"):
        jacobians.squares(torch.ones(2, 5, 4, dtype=torch.float64))


def test_blocks_that_do_not_cover_the_weights_are_refused() -> None:
    jacobians, *_ = both("linear")
    with pytest.raises(DataError, match="cover 4 weights, but 15"):
        jacobians.kron_variance([KronCovariance(None, None, torch.ones(2, 2, dtype=torch.float64))])


@pytest.mark.parametrize("net", [
    Calls(lambda self, x: self.a(x).sum(), a=nn.Linear(3, 2)),
    Calls(lambda self, x: (self.a(x),), a=nn.Linear(3, 2)),
])  # fmt: skip
def test_outputs_without_examples_are_refused(net: nn.Module) -> None:
    net = net.double()
    flat = bind(net)
    with pytest.raises(DataError, match=r"examples|not a tensor"):
        Jacobians.at(net, flat, select(flat.segments), normal(4, 3))


def test_the_network_is_left_as_it_was_and_can_be_freed() -> None:
    net, inputs = build("batch norm")
    flat = bind(net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    jacobians = Jacobians.at(net, flat, select(flat.segments, last_layer(net)), inputs)
    jacobians.rows()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    seen = weakref.ref(net)
    del net, jacobians, flat
    gc.collect()
    assert seen() is None
