"""Running a network's forward pass a second time exactly as it was."""

from __future__ import annotations

import torch
from torch import Tensor

from credo.model import Model


class Replay:
    """The state that a forward pass may change besides weights, to run it again as it was.

    Batch norm counts its statistics, spectral norm iterates, dropout draws from torch's generator.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._buffers = list(model.net.buffers())
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
