"""The statistics that batch norm keeps for prediction, gathered anew at other weights.

Running means and variances belong to the weights that they were gathered with. At others, such as
an average of weights or a draw, they are wrong, and the outputs with them.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> x = torch.randn(64, 2)
    >>> with gathering(net):
    ...     _ = net(x)
    >>> torch.allclose(net[1].running_mean, net[0](x).mean(0), atol=1e-6)
    True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from credo.network.state import evaluating


def norm_statistics(net: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of a network's norm layers, by name; none in most networks.

    Args:
        net: The network; the tensors are its own.
    """
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, layer in net.named_modules()
        if isinstance(layer, _NormBase)
        for name, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


@contextmanager
def gathering(net: nn.Module) -> Iterator[None]:
    """Inside, norm layers gather their statistics from nothing, every batch counting the same.

    All else is as for prediction: there is no dropout. Modes are put back, statistics stay.

    Args:
        net: The network.
    """
    layers = [m for m in net.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    momenta = [layer.momentum for layer in layers]
    with evaluating(net):
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
            layer.momentum = None
        try:
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
