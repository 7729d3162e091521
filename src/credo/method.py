"""What a method is: the contract between an algorithm and `credo.fit`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Generator, Tensor

from credo.errors import NonFiniteError
from credo.network import FlatParams, Selection
from credo.types import Batch, Json, Vector


@dataclass
class Clock:
    """Where training stands; `credo.fit` keeps it, and a bare loop advances it by `tick`.

    ``num_batches`` is the number of minibatches in an epoch, 0 while unknown.
    """

    step: int = 0
    batch: int = 0
    num_batches: int = 0

    def begin(self, num_data: int, batch_size: int) -> None:
        """Infer the number of minibatches from the first one, unless `credo.fit` said it."""
        if not self.num_batches:
            self.num_batches = max(1, -(-num_data // batch_size))

    def tick(self) -> None:
        """One update is done."""
        self.step += 1
        self.batch = (self.batch + 1) % max(1, self.num_batches)

    @property
    def epoch(self) -> float:
        """Epochs done, with fraction."""
        return self.step / max(1, self.num_batches)


@dataclass
class Info:
    """What one update reports: mean negative log-likelihood of the batch, and named scalars."""

    nll: float
    extra: dict[str, float]


class Method(Protocol):
    """An algorithm that turns a model and data into a posterior.

    The state is tensors plus JSON: ``pack`` gives both, ``unpack`` restores a freshly initialised
    state from them, so that any run can be checkpointed without pickle.
    """

    @property
    def default_epochs(self) -> int:
        """How long `credo.fit` trains when it is not told."""
        ...

    def init(self, model: Any, num_data: int, generator: Generator | None = None) -> Any:
        """The state before the first update, from the network's current weights."""
        ...

    def update(self, state: Any, batch: Batch) -> tuple[Any, Info]:
        """One step on one minibatch."""
        ...

    def finish(self, state: Any, data: Iterable[Batch]) -> Any:
        """What needs a last pass over the data; most methods return the state unchanged."""
        ...

    def posterior(self, state: Any) -> Any:
        """The posterior that the state stands for."""
        ...

    def summary(self, state: Any) -> dict[str, Any]:
        """Diagnostics logged once per epoch (KL, temperature, per-segment norms)."""
        ...

    def pack(self, state: Any) -> tuple[dict[str, Tensor], Json]:
        """Everything a resumed run needs."""
        ...

    def unpack(self, state: Any, tensors: Mapping[str, Tensor], meta: Json) -> Any:
        """The inverse of ``pack``, into a state from ``init`` on the same model."""
        ...

    def config(self) -> Json:
        """JSON that names the method and its settings, for the run folder."""
        ...


def refuse_nonfinite(nll: float, flat: FlatParams, clock: Clock) -> None:
    """Stop before an update if the loss is not a number; say where it came from."""
    if math.isfinite(nll):
        return
    largest = {s.name: float(flat.vector[s.slice].abs().max()) for s in flat.segments if s.size}
    bad = [name for name, size in largest.items() if not math.isfinite(size)]
    if bad:
        cause = (
            f"the weights of {', '.join(bad[:5])} are not finite: an earlier step diverged. "
            "Lower lr, or warm the KL up"
        )
    else:
        name = max(largest, key=largest.__getitem__)
        cause = (
            f"all weights are finite, the largest in {name} ({largest[name]:.3g}). If that is far "
            "too large, lower lr; otherwise look at the inputs of this batch"
        )
    raise NonFiniteError(
        f"the loss is {nll} at step {clock.step} (epoch {int(clock.epoch)}, batch {clock.batch}): "
        f"{cause}."
    )


def segment_norms(vector: Vector, selection: Selection) -> dict[str, float]:
    """The Euclidean norm of each segment of a vector that was read out."""
    return {name: float(vector[place].norm()) for name, place in selection.slices().items()}
