"""Pruning is exact where groups are zero, and refuses what it cannot follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import DataError, UnsupportedError
from credo.penalties import prune

F64 = torch.float64


def trained_norms(net: nn.Module) -> nn.Module:
    """Batch norms with statistics and gains of their own, in evaluation mode."""
    g = torch.Generator().manual_seed(5)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                tensor.data.normal_(generator=g)
            module.running_var.uniform_(0.5, 2.0, generator=g)
    return net.double().eval()


def seeded(build: Callable[[], nn.Sequential]) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return trained_norms(build())


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.Softplus(), nn.Linear(6, 3)
    ),
    "no bias to fold into": lambda: nn.Sequential(
        nn.Linear(12, 8), nn.Sigmoid(), nn.Linear(8, 3, bias=False)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.MaxPool2d(2, padding=1),
        nn.Conv2d(6, 5, 2, padding=1, padding_mode="reflect"), nn.Tanh(), nn.Dropout2d(),
        nn.AvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(20), nn.Linear(20, 7), nn.BatchNorm1d(7),
        nn.ELU(), nn.Linear(7, 3),
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 6, 3, stride=2), nn.SiLU()),
        nn.Sequential(nn.Conv2d(6, 5, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(20, 3),
    ),
}  # fmt: skip
INPUTS = {"perceptron": (12,), "no bias to fold into": (12,)}


def points(name: str) -> Tensor:
    shape = INPUTS.get(name, (2, 8, 8))
    return torch.randn(5, *shape, dtype=F64, generator=torch.Generator().manual_seed(1))


def layers(net: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize("name", CHAINS)
def test_units_without_incoming_weights_are_removed_exactly(name: str) -> None:
    net = seeded(CHAINS[name])
    for layer in layers(net)[:-1]:
        with torch.no_grad():
            layer.weight[1:3].zero_()
    expected, before = net(points(name)), [tuple(layer.weight.shape) for layer in layers(net)]
    small = prune(net)
    after = [tuple(layer.weight.shape) for layer in layers(small)]
    assert [b[0] - a[0] for a, b in zip(after, before, strict=True)] == [2] * (len(after) - 1) + [0]
    # Sums in another order.
    torch.testing.assert_close(small(points(name)), expected, rtol=0, atol=1e-12)
    assert [tuple(layer.weight.shape) for layer in layers(net)] == before
    for layer in layers(small):
        sizes = (
            (layer.out_features, layer.in_features)
            if isinstance(layer, nn.Linear)
            else (layer.out_channels, layer.in_channels)
        )
        assert sizes == tuple(layer.weight.shape[:2])


@pytest.mark.parametrize("name", CHAINS)
def test_units_without_outgoing_weights_are_removed_exactly(name: str) -> None:
    net = seeded(CHAINS[name])
    for first, second in zip(layers(net)[:-1], layers(net)[1:], strict=True):
        cells = second.weight.shape[1] // first.weight.shape[0]
        with torch.no_grad():
            second.weight[:, cells : 3 * cells].zero_()
    expected = net(points(name))
    small = prune(net, groups="outgoing")
    for old, new in zip(layers(net)[:-1], layers(small)[:-1], strict=True):
        assert old.weight.shape[0] - new.weight.shape[0] == 2
    torch.testing.assert_close(small(points(name)), expected, rtol=0, atol=1e-12)


def test_zero_padding_keeps_constants_that_no_bias_can_replace() -> None:
    """ReLU makes units with a negative bias silent, and those go; the others stay."""
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(),
        nn.Linear(144, 3),
    )  # fmt: skip
    net = trained_norms(net)
    with torch.no_grad():
        net[0].weight[:4].zero_()
        net[0].bias.copy_(torch.tensor([-1.0, 1.0, -0.5, 2.0, 0.3, 0.3]))
    x = points("convolutions")
    with pytest.warns(UserWarning, match=r"2 units of '0'.*zero padding"):
        small = prune(net)
    assert small[0].out_channels == 4
    torch.testing.assert_close(small(x), net(x), rtol=0, atol=1e-12)
    # What the layer does not listen to needs no bias.
    with torch.no_grad():
        net[2].weight[:, 1].zero_()
    assert prune(net, groups="outgoing")[0].out_channels == 5


def test_average_pooling_that_counts_padding_is_such_padding() -> None:
    def build(counts: bool) -> nn.Sequential:
        pool = nn.AvgPool2d(2, padding=1, count_include_pad=counts)
        return nn.Sequential(nn.Conv2d(2, 3, 3), pool, nn.Conv2d(3, 2, 1), nn.Flatten())

    for counts in (True, False):
        net = build(counts).double()
        with torch.no_grad():
            net[0].weight[0].zero_()
        x = points("convolutions")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            small = prune(net)
        assert (small[0].out_channels, len(caught)) == ((3, 1) if counts else (2, 0))
        torch.testing.assert_close(small(x), net(x), rtol=0, atol=1e-12)


def test_a_threshold_removes_what_setting_to_zero_would() -> None:
    net = seeded(CHAINS["no bias to fold into"])
    norms = net[0].weight.norm(dim=1)
    threshold = norms.sort().values[2].item()
    small = prune(net, threshold)
    with torch.no_grad():
        net[0].weight[norms <= threshold] = 0
    assert small[0].out_features == 5
    x = points("no bias to fold into")
    torch.testing.assert_close(small(x), net(x), rtol=0, atol=1e-12)


def test_a_layer_keeps_a_unit_even_if_all_are_empty() -> None:
    net = seeded(CHAINS["perceptron"])
    with torch.no_grad():
        net[0].weight.zero_()
    small = prune(net)
    assert small[0].out_features == 1
    torch.testing.assert_close(
        small(points("perceptron")), net(points("perceptron")), rtol=0, atol=1e-12
    )


def test_a_bound_and_trained_network_can_be_pruned() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=g)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model = credo.Model(net, credo.likelihoods.Categorical())
    penalty = credo.penalties.Penalty("group_lasso", lam=0.05, factors="usual")
    method = credo.MAP(lr=0.02, penalty=penalty)
    credo.fit(model, method, (x, y), epochs=60, batch_size=64, progress=False, schedule="linear")
    small = prune(net, threshold=0.01)
    assert small[0].out_features < 16
    # At most sixteen units of up to 0.01 times |x| < 5, seen through weights of order one.
    assert float((small(x) - net(x)).detach().abs().max()) < 1
    assert small[0].weight.requires_grad


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(3, 4), Branch(), nn.Linear(4, 2)), "'1', a Branch"),
        (Branch(), "'the network', a Branch"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "'1', a LayerNorm"),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)), "Softmax"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)), "groups=2"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 2)), "without Flatten"),
        (nn.Sequential(nn.Linear(2, 4), nn.Conv2d(4, 2, 1)), "not images"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.Linear(4, 2)), "Flatten"),
        (nn.Sequential(SHARED, nn.ReLU(), SHARED), "'2'.*used twice"),
        (
            nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
            ),
            "running statistics",
        ),
    ],
)
def test_other_networks_are_refused_by_name(net: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prune(net)


def test_bad_settings_are_named() -> None:
    net = seeded(CHAINS["perceptron"])
    with pytest.raises(DataError, match="threshold must be 0 or a positive"):
        prune(net, -1.0)
    with pytest.raises(DataError, match="'rows'"):
        prune(net, groups="rows")
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="'0' holds weights that are not finite"):
        prune(net)
