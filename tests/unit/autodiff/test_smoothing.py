"""What `credo.autodiff.smoothing` finds in a network, and what it puts in its place."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credo.autodiff.smoothing import LeakySoftplus, SoftClamp, kinks, refuse_kinks, smooth
from credo.errors import UnsupportedError


class Residual(nn.Module):
    """Piecewise linear calls of every kind, with no layer to swap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x)) + F.relu(x, inplace=False) + x.relu()
        h = F.leaky_relu(h, 0.2) + F.relu6(h) + F.hardtanh(h) + F.hardswish(h)
        return self.second(h).relu_()


LAYERS = {
    "ReLU": nn.ReLU(inplace=True),
    "LeakyReLU": nn.LeakyReLU(0.2),
    "ReLU6": nn.ReLU6(),
    "Hardtanh": nn.Hardtanh(-2, 3),
    "Hardswish": nn.Hardswish(),
    "Hardsigmoid": nn.Hardsigmoid(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_kinked_layer_is_found_and_swapped(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), LAYERS[name])
    x = torch.randn(4, 3)
    assert kinks(net(x))
    assert smooth(net) is net
    assert not kinks(net(x))


@pytest.mark.parametrize("name", LAYERS)
def test_the_stand_in_is_the_same_far_from_the_kink(name: str) -> None:
    """All of them differ by e^(−|x|)·|x| at most, so at ±40 by less than float64 tells."""
    x = torch.tensor([-40.0, 40.0], dtype=torch.float64)
    torch.testing.assert_close(smooth(LAYERS[name])(x), LAYERS[name](x.clone()), atol=1e-12, rtol=0)


def test_a_lone_activation_becomes_its_relative() -> None:
    assert isinstance(smooth(nn.ReLU()), nn.Softplus)
    assert isinstance(smooth(nn.LeakyReLU()), LeakySoftplus)
    assert isinstance(smooth(nn.ReLU6()), SoftClamp)


def test_calls_inside_forward_are_swapped_too() -> None:
    net = Residual().double()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Two more act on the inputs alone, before any parameter: no gradient passes those.
    assert sum(kinks(net(x)).values()) == 6
    h = net.first(x)
    h = F.softplus(h) + 2 * F.softplus(x)
    leaky = 0.2 * h + 0.8 * F.softplus(h)
    six = F.softplus(h) - F.softplus(h - 6)
    tanh = -1 + F.softplus(h + 1) - F.softplus(h - 1)
    expected = F.softplus(net.second(leaky + six + tanh + F.silu(h)))
    smooth(smooth(net))
    assert len(net._forward_pre_hooks) == 1
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(copy.deepcopy(net)(x), expected)
    net(x).sum().backward()
    assert torch.relu(torch.tensor(-1.0)) == 0, "outside the network nothing changed"


def test_an_error_inside_forward_leaves_no_trace() -> None:
    net = smooth(Residual())
    with pytest.raises(RuntimeError):
        net(torch.randn(4, 7))
    assert torch.relu(torch.tensor(-1.0)) == 0


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layers_keep_one_function_in_training_and_evaluation(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    smooth(layer).train(training)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert not kinks(layer(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.train()(x))


@pytest.mark.parametrize(
    "activation",
    [nn.Softplus(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.CELU(2.0),
     nn.Mish(), nn.MaxPool1d(2)],
    ids=repr,
)  # fmt: skip
def test_smooth_networks_pass(activation: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 4), activation)
    refuse_kinks(net(torch.randn(3, 4)), "it")
    smooth(net)
    assert net[1] is activation


@pytest.mark.parametrize(
    "activation", [nn.PReLU(), nn.SELU(), nn.ELU(2.0), nn.Threshold(0.1, 0.0), nn.Softshrink(),
                   nn.Hardshrink(), nn.RReLU()], ids=repr,
)  # fmt: skip
def test_kinks_without_a_relative_are_found(activation: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 4), activation)
    with pytest.raises(UnsupportedError, match=r"the network has .*credo\.smooth"):
        refuse_kinks(net(torch.randn(3, 4)), "Variational Laplace")
