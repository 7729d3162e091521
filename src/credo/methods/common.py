"""Small things that every gradient method does the same way."""

from __future__ import annotations

import math

import torch

from credo.errors import NonFiniteError
from credo.params import FlatParams, Selection
from credo.types import Clock, Vector


def refuse_nonfinite(nll: float, flat: FlatParams, clock: Clock) -> None:
    """Stop before an update if the loss is not a number; say where it came from."""
    if math.isfinite(nll):
        return
    bad = [
        segment.name
        for segment in flat.segments
        if not bool(torch.isfinite(flat.vector[segment.slice]).all())
    ]
    cause = (
        f"the weights of {', '.join(bad[:5])} are not finite: an earlier step diverged. Lower lr, "
        "or warm the KL up"
        if bad
        else "all weights are finite, so this batch or the likelihood's noise makes it so. Look at "
        "the inputs of this batch, or lower lr"
    )
    raise NonFiniteError(
        f"the loss is {nll} at step {clock.step} (epoch {int(clock.epoch)}, batch {clock.batch}): "
        f"{cause}."
    )


def segment_norms(vector: Vector, selection: Selection) -> dict[str, float]:
    """The Euclidean norm of each segment of a vector that was read out."""
    return {name: float(vector[place].norm()) for name, place in selection.slices().items()}
