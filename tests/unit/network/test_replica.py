"""A private copy behaves as the network does, and shares nothing that can change."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from zoo import ZOO, specimen

from credo.network.replica import borrowed, private, replica


class Habits(nn.Module):
    """What user's modules do: keep activations, count calls, hold layers in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.order = [self.first, self.second]
        self.options = {"scale": 2.0}
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.order:
            x = layer(x).tanh() * self.options["scale"]
        self.last = x
        return x


def doubled() -> nn.Module:
    net = nn.Linear(4, 3)
    net.forward = functools.partial(lambda forward, x: 2 * forward(x), net.forward)  # type: ignore[method-assign]
    return net


KINDS = {
    "habits": Habits,
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(4, 5), parametrizations.spectral_norm(nn.Linear(5, 3))
    ),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
    "old weight norm": lambda: nn.Sequential(nn.Linear(4, 4), old_weight_norm()),
    "replaced forward": doubled,
}


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [*KINDS, *ZOO])
def test_a_copy_computes_what_the_network_does_at_its_own_weights(kind: str) -> None:
    net, x = (KINDS[kind](), torch.randn(5, 4)) if kind in KINDS else specimen(kind)[:2]
    net(x)  # modules may keep something of a forward pass
    net.eval()
    expected = net(x)
    copied = replica(net)
    assert copied is not None
    with private(net, {}) as flat:
        assert torch.equal(flat.module(x), expected)
        with flat.writing() as vector:
            vector.mul_(1.5)
        moved = flat.module(x)
        assert not torch.equal(moved, expected)
    assert torch.equal(net(x), expected)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(net(x), moved)


def test_a_copy_shares_nothing_that_changes() -> None:
    net = nn.Sequential(Habits(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[2].requires_grad_(False)
    net[0].calls = 7
    with private(net, {"1.running_mean": torch.full((3,), 5.0)}) as flat:
        copied = flat.module
        assert copied[2].weight is net[2].weight, "frozen weights are only read"
        assert bool((copied[1].running_mean == 5).all())
        assert not net[1].running_mean.any()
        copied(torch.randn(2, 4))
        copied.register_forward_hook(lambda *_: None)
        copied[0].options["scale"] = 0.0
        assert copied[0].order[0] is copied[0].first
    assert net[0].calls == 7
    assert net[0].options["scale"] == 2.0
    assert net.training
    assert not net._forward_hooks


def test_functions_that_hook_a_network_fire_on_its_copy() -> None:
    seen: list[Tensor] = []
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    net[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with private(net, {}) as flat:
        flat.module(torch.randn(2, 4))
    assert len(seen) == 1


def remembering() -> nn.Module:
    net = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    net.register_forward_hook(lambda module, inputs, output: output + other(*inputs))
    return net


def test_what_a_copy_could_not_be_is_borrowed() -> None:
    net = remembering()
    assert replica(net) is None
    x = torch.randn(2, 4)
    expected = net(x)
    places = [p.data_ptr() for p in net.parameters()]
    with private(net, {}) as flat:
        assert flat.module is net
        with flat.writing() as vector:
            vector.zero_()
    assert torch.equal(net(x), expected)
    assert [p.data_ptr() for p in net.parameters()] == places


def test_a_borrowed_network_comes_back_whatever_happens() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ZeroDivisionError), borrowed(net, {"1.running_mean": torch.ones(3)}) as flat:
        _ = flat.vector.zero_()[0] / (1 / net.training)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_parametrised_weights_are_the_copys_own() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    net = nn.Linear(2, 2)
    parametrize.register_parametrization(net, "weight", Double())
    copied = replica(net)
    assert copied is not None
    assert copied.parametrizations.weight.original is not net.parametrizations.weight.original
