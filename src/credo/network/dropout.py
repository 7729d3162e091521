"""Dropout layers of a network: which there are, one after every activation, and masks in use.

>>> import torch
>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
>>> dropout_layers(net)
[]
>>> copied = with_dropout(net, 0.1)
>>> copied[1]
Sequential(
  (0): ReLU()
  (1): Dropout(p=0.1, inplace=False)
)
>>> copied[0].weight is net[0].weight
True
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.modules.activation import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    RReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Softsign,
    Tanh,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from credo.errors import UnsupportedError

ACTIVATIONS = (
    CELU, ELU, GELU, GLU, Hardswish, Hardtanh, LeakyReLU, Mish, PReLU, ReLU, ReLU6, RReLU, SELU,
    Sigmoid, SiLU, Softplus, Softsign, Tanh,
)  # fmt: skip
"""After which dropout is put. A softmax is none: what follows it are probabilities."""


def dropout_layers(net: nn.Module) -> list[str]:
    """The paths of the layers that drop something in training, with a probability above 0.

    Dropout that a ``forward`` calls as a function can't be seen.

    Args:
        net: The network.
    """
    return [name for name, module in net.named_modules() if _probability(module) > 0]


def with_dropout(net: nn.Module, p: float) -> nn.Module:
    """A copy that shares the network's parameters and buffers and drops with probability p.

    Layers that drop already do it with p; where there are none, one is put after every activation
    that is a module.

    Args:
        net: The network; it stays as it is.
        p: The probability.

    Raises:
        UnsupportedError: There is neither a dropout layer nor an activation module.
    """
    memo: dict[int, Any] = {id(part): part for part in [*net.parameters(), *net.buffers()]}
    copied: nn.Module = copy.deepcopy(net, memo)
    found = False
    for module in copied.modules():
        if isinstance(module, _DropoutNd):
            module.p, found = p, True
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            module.dropout, found = p, True
    if found:
        return copied
    for module in list(copied.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, ACTIVATIONS):
                setattr(module, name, nn.Sequential(child, nn.Dropout(p)))
                found = True
    if not found:
        raise UnsupportedError(
            f"{type(net).__name__} has neither dropout layers nor activations that are modules "
            "(torch.nn.ReLU(), …), after which they could be put: write torch.nn.Dropout layers "
            "into the network, or call its activations as modules"
        )
    return copied


def drop(net: nn.Module) -> None:
    """Let the network drop as in training; normalisation keeps the statistics it has.

    Args:
        net: In eval mode; its modes are changed.
    """
    # All but norm layers: torch's transformer layers leave their dropout out in eval mode,
    # whatever the mode of the dropout layer itself.
    for module in net.modules():
        module.training = not isinstance(module, _NormBase)


def _probability(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout)
    return 0.0
