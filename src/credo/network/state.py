"""What a forward pass depends on besides weights, put back: mode, buffers, random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def modes_kept(net: nn.Module) -> Iterator[None]:
    """Put every module's own mode, train or eval, back as it was.

    Args:
        net: The network.
    """
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(net: nn.Module, recurrent_gradients: bool = False) -> Iterator[None]:
    """The network in eval mode; every module's own mode is put back.

    Args:
        net: The network.
        recurrent_gradients: Whether recurrent layers without dropout, for which the modes are the
            same, are put into training mode: CUDA's have gradients in no other.
    """
    with modes_kept(net):
        net.eval()
        for module in net.modules() if recurrent_gradients else ():
            module.training = isinstance(module, nn.RNNBase) and not module.dropout
        yield


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put every buffer back as it was: the same tensor with the same numbers."""
    saved = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, values in saved:
                owner._buffers[name] = buffer
                buffer.copy_(values)


class ForwardState:
    """The state that a forward pass may change besides weights, to run it again as it was.

    Batch norm counts its statistics, spectral norm iterates, dropout draws from torch's generator.
    """

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self._buffers = list(net.buffers())
        self._values = [buffer.clone() for buffer in self._buffers]
        self._cuda = device if device.type == "cuda" else None
        self._random = self._random_states()

    def was_random(self) -> bool:
        """Whether random numbers were drawn since."""
        pairs = zip(self._random, self._random_states(), strict=True)
        return not all(torch.equal(before, now) for before, now in pairs)

    def restore_buffers(self) -> None:
        """Put the buffers back."""
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)

    def rewind(self) -> None:
        """Put buffers and generators back."""
        self.restore_buffers()
        torch.set_rng_state(self._random[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._random[1], self._cuda)

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._cuda is not None:
            states.append(torch.cuda.get_rng_state(self._cuda))
        return states
