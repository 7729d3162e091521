"""How wide a prior is at each layer: a number, or a rule that reads it off the layer's shape."""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from credo.checks import Finite, Positive, checked, positive
from credo.errors import DataError
from credo.packing import settings_of
from credo.types import FlatDistribution, Json, Segment, Vector


@dataclass(frozen=True)
class ScaleRule(ABC):
    """A prior standard deviation for every segment."""

    @abstractmethod
    def scale(self, segment: Segment) -> float:
        """The standard deviation of this segment's weights."""

    def config(self) -> Json:
        """JSON from which `scale_from_config` builds the same rule again."""
        return {"rule": type(self).__name__, **settings_of(self)}


Scale: TypeAlias = Positive | ScaleRule
"""A standard deviation for all weights, or a rule that gives each segment its own."""


@checked
@dataclass(frozen=True)
class FanIn(ScaleRule):
    """Variance gain²/fan_in, so that a unit's input keeps its size whatever the width."""

    gain: Positive = 1.0

    def scale(self, segment: Segment) -> float:
        """gain/√fan_in."""
        return self.gain / math.sqrt(segment.fan_in)


@dataclass(frozen=True)
class Glorot(ScaleRule):
    """Variance 2/(fan_in + fan_out)."""

    def scale(self, segment: Segment) -> float:
        """√(2/(fan_in + fan_out))."""
        return math.sqrt(2.0 / (segment.fan_in + segment.fan_out))


@checked
@dataclass(frozen=True)
class Kaiming(ScaleRule):
    """Variance 2/((1 + a²)·fan_in), ``a`` the activation's negative slope: 0 for ReLU."""

    a: Finite = 0.0

    def scale(self, segment: Segment) -> float:
        """√(2/((1 + a²)·fan_in))."""
        return math.sqrt(2.0 / ((1.0 + self.a**2) * segment.fan_in))


@dataclass(frozen=True)
class PerLayer(ScaleRule):
    """Pairs of a layer's name, a parameter's name or a glob over those, and its scale.

    An exact name wins over a glob, an earlier glob over a later one. What nothing matches gets
    ``default``, and is an error if that is None. A key may match nothing, because a prior is also
    asked about parts of a network. Pairs, not a mapping, because their order counts and JSON
    objects may lose it.
    """

    table: tuple[tuple[str, float], ...]
    default: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", tuple((str(key), value) for key, value in self.table))
        for key, value in self.table:
            positive(f"the scale of {key!r}", value)
        if self.default is not None:
            positive("default", self.default)

    def scale(self, segment: Segment) -> float:
        """The entry that names or matches the segment."""
        for key, value in self.table:
            if key in (segment.layer, segment.name):
                return value
        for key, value in self.table:
            if fnmatch.fnmatchcase(segment.name, key):
                return value
        if self.default is None:
            raise DataError(
                f"no entry of the prior's scales {[key for key, _ in self.table]} matches "
                f"{segment.name!r} of layer {segment.layer!r}; add one, or give a default"
            )
        return self.default


RULES: dict[str, type[ScaleRule]] = {
    rule.__name__: rule for rule in (FanIn, Glorot, Kaiming, PerLayer)
}


class PriorRule(ABC):
    """A prior for any network: a dataclass whose fields are its settings."""

    @abstractmethod
    def on(self, segments: Sequence[Segment], like: Vector) -> FlatDistribution:
        """The density over these segments, one after the other."""

    def config(self) -> Json:
        """The type's name and the settings."""
        return {"type": type(self).__name__, **settings_of(self)}


class FlatPrior:
    """What a `PriorRule` gives over a flat vector, with a standard deviation for every weight."""

    scale: Vector

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return self.scale.shape[-1]


def scale_from_config(config: float | Json) -> Scale:
    """The scale whose config, or number, this is.

    >>> scale_from_config({"rule": "FanIn", "gain": 2.0})
    FanIn(gain=2.0)
    """
    if not isinstance(config, dict):
        return config
    settings = dict(config)
    name = settings.pop("rule", None)
    if not isinstance(name, str) or name not in RULES:
        raise DataError(f"no rule for a prior's scale is called {name!r}; known: {sorted(RULES)}")
    try:
        return RULES[name](**settings)
    except (TypeError, ValueError) as error:
        raise DataError(f"the rule {name} can't be built from {settings}: {error}") from error


def total_size(segments: Sequence[Segment]) -> int:
    """The number of weights in these segments, at least one."""
    size = sum(segment.size for segment in segments)
    if size == 0:
        raise DataError("a prior needs at least one weight, but the segments given hold none")
    return size


def segment_scales(scale: Scale, segments: Sequence[Segment]) -> list[float]:
    """The standard deviation of each segment."""
    if not isinstance(scale, ScaleRule):
        return [scale] * len(segments)
    try:
        return [scale.scale(segment) for segment in segments]
    except ZeroDivisionError:
        empty = [segment.name for segment in segments if segment.fan_in == 0]
        raise DataError(
            f"{type(scale).__name__} scales by the number of inputs, and {empty} have none; "
            "make them deterministic or give the prior a number for a scale"
        ) from None


def flat_scales(scale: Scale, segments: Sequence[Segment], like: Vector) -> Vector:
    """Standard deviations of the concatenated segments, (P,), like ``like``.

    A scale that is the same everywhere is one number, expanded: it takes no memory. The segments
    are taken in the order given; where they lie in the whole flat vector doesn't matter here.
    """
    size = total_size(segments)
    scales = segment_scales(scale, segments)
    if len(set(scales)) == 1:
        return like.new_full((), scales[0]).expand(size)
    sizes = torch.tensor([segment.size for segment in segments], device=like.device)
    return like.new_tensor(scales).repeat_interleave(sizes, output_size=size)
