"""Posteriors that are dropout masks: what MC dropout predicts with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import Delta
from credo.model import Model
from credo.network.batches import (
    BATCH_SIZE,
    as_inputs,
    chunks,
    inputs_alone,
    is_loader,
    like_weights,
)
from credo.network.dropout import drop
from credo.noise import key_to_seed
from credo.posterior.link import Link
from credo.posterior.posterior import SAMPLES, At, Posterior
from credo.posterior.predictive import Predictive
from credo.types import Inputs, Json

_GLOBAL_GENERATOR = threading.Lock()
"""Dropout draws from torch's own generator, which all threads share."""


class DropoutPosterior(Posterior):
    """A network whose dropout stays on: every sample is a mask for all inputs.

    The distribution is over masks, not over weights: there is no ``mean`` and no ``sample``.
    ``q`` is the point mass at the trained weights.

    Args: as `Posterior`.
    """

    inserted: float | None = None
    """The probability that `credo.MCDropout` set; None if the network's layers have their own."""

    @property
    def points(self) -> None:
        """Masks are not counted."""
        return None

    @property
    def mean(self) -> NoReturn:
        """Refused."""
        self._refuse("mean")

    def sample(self, n: int, generator: Generator | None = None) -> NoReturn:
        """Refused.

        Args:
            n: How many.
            generator: Of the draws.
        """
        self._refuse("sample")

    def predict(
        self,
        x: Inputs | Any,
        samples: int | None = None,
        batch_size: int | None = None,
        generator: Generator | None = None,
        *,
        at: At | None = None,
        link: Link | None = None,
        keep_samples: bool = True,
    ) -> Predictive:
        """The predictive over masks.

        Threads take turns, because dropout draws from a generator that they share.

        Args:
            x: As `Posterior.predict` takes them.
            samples: How many masks; 64 by default.
            batch_size: Inputs that pass at once; every batch has masks of its own.
            generator: Where the seed of the masks comes from; repeatable without it.
            at: "samples" draws masks; "mean" is the network without dropout.
            link: For "linearised", which there is none of.
            keep_samples: Keep every sample, (S, B, ...); else only averages over them, (B, ...).
        """
        at = at or self.predicts
        if at == "linearised":
            raise UnsupportedError(
                'MC dropout has no Gaussian over weights to make linear: predict with at="samples"'
            )
        samples = SAMPLES if samples is None else samples
        if at != "samples" or samples < 1:
            return super().predict(
                x, samples, batch_size, generator, at=at, link=link, keep_samples=keep_samples
            )
        seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
        with self.on_copy() as (model, flat), torch.no_grad():
            drop(model.net)
            if not is_loader(x):
                inputs = like_weights(as_inputs(x), flat.vector)
                parts = list(chunks(inputs, batch_size or BATCH_SIZE))
                return _predictive(model, parts, samples, seed, keep_samples)
            found = [
                _predictive(
                    model, [like_weights(inputs_alone(batch), flat.vector)], samples,
                    key_to_seed(seed, number), keep_samples,
                )
                for number, batch in enumerate(x)
            ]  # fmt: skip
        if not found:
            raise DataError("the loader yields no batches: there is nothing to predict")
        return Predictive.concatenate(found)

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that `save` writes."""
        tensors, meta = super().pack()
        return tensors, {**meta, "kind": "dropout", "inserted": self.inserted}

    @classmethod
    def of(cls, posterior: Posterior, inserted: float | None) -> DropoutPosterior:
        """The same weights with dropout left on.

        Args:
            posterior: A point mass.
            inserted: The probability, if it was set.
        """
        assert isinstance(posterior.q, Delta)
        found = cls(
            posterior.model, posterior.q, posterior.point, posterior.buffers, posterior.draws
        )
        found.inserted, found.history = inserted, posterior.history
        return found

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"MC dropout has no {name} over weights: its distribution is one of masks. "
            "posterior.q.mean are the trained weights; predict(x) averages over masks"
        )


def _predictive(
    model: Model, parts: list[Inputs], samples: int, seed: int, keep: bool
) -> Predictive:
    def stream() -> Iterator[Tensor]:
        for number in range(samples):
            torch.manual_seed(key_to_seed(seed, number))
            pieces = [model.outputs(part) for part in parts]
            yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        if keep:
            return Predictive(torch.stack(list(stream())), model.likelihood)
        return Predictive.from_stream(stream(), model.likelihood)
