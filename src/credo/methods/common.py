"""Small things that every gradient method does the same way."""

from __future__ import annotations

import math

from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.families import DiagGaussian
from credo.params import FlatParams, Selection
from credo.types import Clock, FlatDistribution, Vector


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


def scale_rate(
    lr: float, scale_lr: float | None, scale_ratio: float | None, default_ratio: float
) -> float:
    """The rate of the scales: given itself, as a multiple of ``lr``, or by the default multiple.

    >>> scale_rate(0.01, None, None, default_ratio=10.0)
    0.1
    """
    for name, value in (("scale_lr", scale_lr), ("scale_ratio", scale_ratio)):
        if value is not None and not 0 <= value < math.inf:
            raise DataError(f"{name}={value} must be 0 (scales fixed) or more")
    if scale_lr is not None and scale_ratio is not None:
        raise DataError(
            f"scale_lr={scale_lr} and scale_ratio={scale_ratio} both say what the scales' rate is; "
            "give one of them"
        )
    if scale_lr is not None:
        return scale_lr
    return lr * (default_ratio if scale_ratio is None else scale_ratio)


def segment_norms(vector: Vector, selection: Selection) -> dict[str, float]:
    """The Euclidean norm of each segment of a vector that was read out."""
    return {name: float(vector[place].norm()) for name, place in selection.slices().items()}


def gaussian_around_zero(prior: FlatDistribution, method: str) -> DiagGaussian:
    """The prior, if it is what methods that know its pull and curvature take."""
    if isinstance(prior, DiagGaussian) and not bool(prior.mean.any()):
        return prior
    raise UnsupportedError(
        f"{method} takes a Gaussian prior around zero, whose pull and curvature it knows; this one "
        f"is a {type(prior).__name__}. Use credo.priors.Normal, or VI, which takes any prior"
    )


def precision_of_segments(prior: DiagGaussian, selection: Selection) -> list[float]:
    """The prior precision of each parameter tensor, which must be one number."""
    found = []
    for name, place in selection.slices().items():
        precisions = prior.precision[place]
        first = float(precisions[0])
        if not bool((precisions == first).all()):
            raise UnsupportedError(
                f"the prior gives the weights of {name} different scales; this method takes one "
                "for each tensor, as credo.priors.Normal makes them. VI takes any prior"
            )
        found.append(first)
    return found
