"""Posteriors of networks with batch norm whose draws have statistics of their own.

Draws of the weights come with the statistics that the training data have at them, which can only be
gathered while the data are there. So the draws are made once, kept, and predicted with: they are a
bag of networks, and q is the distribution that they are from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families import Delta, Family
from credo.model import Model
from credo.network import FlatParams
from credo.noise import NoiseSource
from credo.posterior.posterior import NetworkDraws, Posterior
from credo.types import Json


class RefreshedPosterior(Posterior):
    """A posterior that predicts with ``kept`` draws, each with its norm layers' statistics.

    ``predict(at="samples")`` takes each of them once, or as many as are asked for, chosen by the
    seed; ``at="mean"`` and ``at="linearised"`` take q's mean with the statistics gathered there.

    Args: as `Posterior`.
    """

    kept: Tensor
    """The draws, (S, P)."""

    statistics: dict[str, Tensor]
    """What each norm layer's buffer is at each of them, (S, ...), by the buffer's name."""

    @classmethod
    def of(
        cls, posterior: Posterior, kept: Tensor, statistics: Mapping[str, Tensor]
    ) -> RefreshedPosterior:
        """The same posterior with draws that have been made.

        Args:
            posterior: Whose q they are draws of.
            kept: The draws, (S, P).
            statistics: What each norm layer's buffer is at each of them, (S, ...).
        """
        if kept.dim() != 2 or not len(kept) or kept.shape[1] != posterior.q.size:
            raise DataError(
                f"draws must be (S, {posterior.q.size}) with S ≥ 1, got shape {tuple(kept.shape)}"
            )
        for name, values in statistics.items():
            here = posterior.buffers.get(name)
            if here is None or values.shape != (len(kept), *here.shape):
                raise DataError(f"the statistics {name} don't fit the network or its draws")
        found = cls(
            posterior.model, posterior.q, posterior.point, posterior.buffers, posterior.draws
        )
        found.predicts, found.history = posterior.predicts, posterior.history
        found.kept, found.statistics = kept, dict(statistics)
        return found

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that `save` writes."""
        tensors, meta = super().pack()
        tensors["kept"] = self.kept
        tensors |= {f"statistics.{name}": values for name, values in self.statistics.items()}
        return tensors, {**meta, "kind": "refreshed"}

    def _draws_on(
        self, model: Model, flat: FlatParams, q: Family, samples: int,
        noise: Callable[[], NoiseSource], keep: bool,
    ) -> NetworkDraws:  # fmt: skip
        if isinstance(q, Delta):
            return super()._draws_on(model, flat, q, samples, noise, keep)
        return _KeptDraws(self, model, flat, q, samples, noise, keep)


class _KeptDraws(NetworkDraws):
    """The network at one kept draw after the other, each with its statistics."""

    def __init__(self, posterior: RefreshedPosterior, *rest: Any) -> None:
        super().__init__(*rest)
        like = self._flat.vector
        self._kept = posterior.kept.to(like)
        live = dict(self._model.net.named_buffers())
        self._statistics = [
            (live[name], values.to(like)) for name, values in posterior.statistics.items()
        ]

    def _weights_in_place(self) -> Iterator[None]:
        rows: list[int] = list(range(len(self._kept)))
        if self._samples < len(rows):
            generator = torch.Generator().manual_seed(self._noise().seed)
            rows = torch.randperm(len(rows), generator=generator)[: self._samples].tolist()
        for row in rows:
            with self._flat.writing() as vector:
                self._random.write(vector, self._kept[row])
            for buffer, values in self._statistics:
                buffer.copy_(values[row])
            yield
