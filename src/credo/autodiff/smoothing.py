r"""Smooth stand-ins for piecewise linear activations, and a look for those that are left.

What differentiates a gradient (Variational Laplace) needs activations with finite second
derivatives. ReLU's is zero but for a spike δ(x) at the kink, which no example ever meets: the
gradient of a squared gradient then misses a term, silently. Max pooling has such kinks where two
inputs tie, but selects rather than bends, and is let through.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> smooth(net)[1]
    Softplus(beta=1.0, threshold=20.0)

Reference: Unlu & Aitchison, "Variational Laplace for Bayesian neural networks", 2021, §4.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from credo.errors import UnsupportedError


class LeakySoftplus(nn.Module):
    """a·x + (1 − a)·ln(1 + eˣ): slope a far on the left, 1 far on the right."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return _leaky_softplus(x, self.negative_slope)


class SoftClamp(nn.Module):
    """low + ln(1 + e^(x − low)) − ln(1 + e^(x − high)): between low and high."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return _soft_clamp(x, self.low, self.high)


def smooth(net: nn.Module) -> nn.Module:
    """Swap the network's piecewise linear activations for smooth ones, in place; return it.

    ReLU becomes softplus, and likewise LeakyReLU, ReLU6, Hardtanh, Hardswish and Hardsigmoid their
    smooth relatives: as layers, as functions kept in attributes, and as calls such as
    ``torch.relu`` inside the ``forward`` of a module of your own. Weights stay as they are, so a
    trained network needs more training afterwards. Smooth a network again before `credo.load`.

    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x)
    >>> smooth(Block())(torch.zeros(1))
    tensor([0.6931])

    Args:
        net: The network, which is changed in place.

    Returns:
        The network, or its smooth relative if it was a single activation.
    """
    swapped = _smooth_layer(net)
    if swapped is not None:
        return swapped
    modules = list(net.modules())
    for module in modules:
        for name, child in module._modules.items():
            if child is not None and (soft := _smooth_layer(child)) is not None:
                setattr(module, name, soft)
        for name, value in list(vars(module).items()):
            if callable(value) and value in _SMOOTH_CALLS:
                setattr(module, name, F.softplus if value in _RELUS else _SMOOTH_CALLS[value])
                if isinstance(module, nn.TransformerEncoderLayer):
                    module.activation_relu_or_gelu = 0  # its inference kernel knows ReLU alone
    if any(not type(module).__module__.startswith("torch.") for module in modules):
        _smooth_calls_of(net)
    return net


def kinks(outputs: Tensor) -> dict[str, int]:
    """The piecewise linear activations between parameters and outputs, and how often each.

    Found in the graph that autograd recorded, so functions count as much as layers.

    >>> kinks(torch.relu(torch.ones(1, requires_grad=True)) + 1)
    {'ReLU': 1}

    Args:
        outputs: A network's outputs, with their graph.
    """
    counts = Counter(_KINKED[node.name()] for node in graph(outputs) if _has_kink(node))
    return dict(counts)


def refuse_kinks(outputs: Tensor, who: str) -> None:
    """Raise `UnsupportedError`, with the remedy, if the network is not smooth.

    Args:
        outputs: A network's outputs, with their graph.
        who: What needs second derivatives, for the error.
    """
    counts = kinks(outputs)
    if not counts:
        return
    listed = ", ".join(f"{name} ({count}×)" for name, count in counts.items())
    raise UnsupportedError(
        f"{who} differentiates the gradient, but the network has {listed}: piecewise linear, so "
        "that the second derivative is a spike at the kink which no example meets, and the "
        "penalty's gradient would be silently wrong. Call credo.smooth(net) first: it swaps ReLU "
        "for softplus and others for their smooth relatives. GELU, SiLU, tanh and softplus pass."
    )


def graph(outputs: Tensor) -> Iterator[Any]:
    """Every node of the autograd graph that leads to ``outputs``.

    Args:
        outputs: A network's outputs, with their graph.
    """
    waiting, seen = [outputs.grad_fn], {outputs.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


_KINKED = {
    "ReluBackward0": "ReLU",
    "LeakyReluBackward0": "LeakyReLU",
    "PreluKernelBackward0": "PReLU",
    "RreluWithNoiseBackward0": "RReLU",
    "HardtanhBackward0": "Hardtanh or ReLU6",
    "HardsigmoidBackward0": "Hardsigmoid",
    "HardswishBackward0": "Hardswish",
    "ThresholdBackward0": "Threshold",
    "SoftshrinkBackward0": "Softshrink",
    "HardshrinkBackward0": "Hardshrink",
    "EluBackward0": "SELU, or ELU with alpha other than 1",
}
"""Autograd's name for the backward of each; ELU's slope jumps at 0 unless alpha is 1."""


def _has_kink(node: Any) -> bool:
    if node.name() == "EluBackward0":
        return bool(abs(node._saved_alpha * node._saved_input_scale - 1) > 1e-6)
    return node.name() in _KINKED


def _smooth_layer(layer: nn.Module) -> nn.Module | None:
    """The smooth relative of a layer, if it needs one."""
    match layer:
        case nn.ReLU():
            return nn.Softplus()
        case nn.LeakyReLU():
            return LeakySoftplus(layer.negative_slope)
        case nn.Hardtanh():  # ReLU6 is one
            return SoftClamp(layer.min_val, layer.max_val)
        case nn.Hardswish():
            return nn.SiLU()
        case nn.Hardsigmoid():
            return nn.Sigmoid()
    return None


def _leaky_softplus(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return negative_slope * x + (1 - negative_slope) * F.softplus(x)


def _soft_clamp(
    x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    return min_val + F.softplus(x - min_val) - F.softplus(x - max_val)


def _softplus_into(x: Tensor) -> Tensor:
    # Softplus keeps its input for the backward pass, so it is given a copy to keep.
    return x.copy_(F.softplus(x.clone()))


_RELUS: set[Callable[..., Tensor]] = {F.relu, torch.relu, torch.Tensor.relu}
_SMOOTH_CALLS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    **{relu: lambda input, inplace=False: F.softplus(input) for relu in _RELUS},
    torch.relu_: _softplus_into,
    torch.Tensor.relu_: _softplus_into,
    F.leaky_relu: _leaky_softplus,
    F.relu6: lambda input, inplace=False: _soft_clamp(input, 0.0, 6.0),
    F.hardtanh: _soft_clamp,
    F.hardswish: lambda input, inplace=False: F.silu(input),
    F.hardsigmoid: lambda input, inplace=False: torch.sigmoid(input),
}


class _SmoothCalls(TorchFunctionMode):
    """While active, calls of piecewise linear functions go to their smooth relatives."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        chosen: Callable[..., Any] = _SMOOTH_CALLS.get(func, func)
        return chosen(*args, **(kwargs or {}))


class _AroundForward:
    """Activates `_SmoothCalls` from before a module's forward until after it, errors included."""

    def __init__(self) -> None:
        self.active: list[_SmoothCalls] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        self.active.append(_SmoothCalls())
        self.active[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self.active.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _smooth_calls_of(net: nn.Module) -> None:
    hooks = net._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), _AroundForward) for hook in hooks):
        return
    around = _AroundForward()
    net.register_forward_pre_hook(around.enter)
    net.register_forward_hook(around.leave, always_call=True)
