"""Small dense layers are torch's own with a hook, large ones nodes: the squares are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from credo.autodiff import layer_squares
from credo.autodiff.squares import Squares
from credo.network import bind, select


def harvested(uses: int, bias: bool) -> tuple[list[str], list[Tensor]]:
    """Names of the graph's nodes; squares, gradients and the input's gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=bias).double()
    net = nn.Sequential(layer, nn.ReLU(inplace=True), *[layer] * (uses - 1), nn.Linear(4, 2))
    net = net.double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        out = net(x)
        out.square().sum(1).mean().backward()
    assert x.grad is not None
    assert out.grad_fn is not None
    found = squares.mean(torch.empty(flat.size, dtype=torch.float64))
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [out.grad_fn.name()], [found, x.grad, *gradients]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("uses", [1, 2])
def test_hooks_and_nodes_find_the_same(
    uses: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, by_hook = harvested(uses, bias)
    assert not any("SquaringNode" in name for name in names)
    monkeypatch.setattr(layer_squares, "SMALL", 0)
    names, by_node = harvested(uses, bias)
    assert all("SquaringNode" in name for name in names)
    torch.testing.assert_close(by_hook, by_node, rtol=1e-12, atol=1e-14)


def test_a_backward_pass_in_autocast_squares_in_full_precision() -> None:
    net, x = nn.Linear(2, 1), torch.tensor([[1.001, 2.0], [3.0, 4.0]])
    flat = bind(net)
    squares = Squares(flat, select(flat.segments))
    with squares.armed():
        loss = net(x).mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
    expected = torch.cat([x.square().mean(0), torch.ones(1)])
    torch.testing.assert_close(squares.mean(torch.empty(3)), expected)
