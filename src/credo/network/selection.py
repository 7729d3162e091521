"""Which part of the flat vector is meant: a list of segments, as runs of contiguous memory."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from credo.errors import DataError
from credo.network.execution import whole_layer
from credo.types import Segment, Vector

Selector: TypeAlias = str | Iterable[str] | Callable[[Segment], bool] | None
"""None (all but norm layers), "all", "last_layer", a name or glob, several, or a predicate."""

NORM_NAMES = frozenset(
    name
    for name in dir(nn)
    if name.endswith("Norm") or "BatchNorm" in name or "InstanceNorm" in name
)


@dataclass(frozen=True)
class Selection:
    """Some segments of the flat vector, (P,) when read out.

    Args:
        segments: The selected ones, in the vector's order.
        runs: The maximal contiguous stretches; with one run, reading is a view.
        size: P, the number of scalars.
    """

    segments: tuple[Segment, ...]
    runs: tuple[tuple[int, int], ...]
    size: int

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Selection:
        """Merge neighbouring segments into runs.

        Args:
            segments: The selected ones, in any order.
        """
        ordered = tuple(sorted(segments, key=lambda s: s.start))
        runs: list[tuple[int, int]] = []
        for s in ordered:
            if runs and runs[-1][1] == s.start:
                runs[-1] = (runs[-1][0], s.stop)
            else:
                runs.append((s.start, s.stop))
        return cls(ordered, tuple(runs), sum(s.size for s in ordered))

    @property
    def is_one_run(self) -> bool:
        """Whether `view` is possible."""
        return len(self.runs) <= 1

    def view(self, vector: Vector) -> Vector:
        """The selected part without a copy; only for one run.

        Args:
            vector: Of all parameters, (..., T).
        """
        start, stop = self.runs[0] if self.runs else (0, 0)
        return vector[..., start:stop]

    def read(self, vector: Vector) -> Vector:
        """A copy of the selected part, (..., P).

        Args:
            vector: Of all parameters, (..., T).
        """
        if not self.runs:
            return vector.new_empty(*vector.shape[:-1], 0)
        return torch.cat([vector[..., a:b] for a, b in self.runs], -1)

    def write(self, vector: Vector, values: Vector) -> None:
        """Put values in their places; a view of itself costs nothing.

        Args:
            vector: Of all parameters, (..., T).
            values: Of the selected ones, (..., P).
        """
        if self.is_one_run:
            target = self.view(vector)
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)
            return
        offset = 0
        for a, b in self.runs:
            vector[..., a:b].copy_(values[..., offset : offset + b - a])
            offset += b - a

    def slices(self) -> dict[str, slice]:
        """Where each segment lies in a vector that was read out, by name."""
        result, offset = {}, 0
        for s in self.segments:
            result[s.name] = slice(offset, offset + s.size)
            offset += s.size
        return result


def is_norm(segment: Segment) -> bool:
    """Whether the segment is the gain or shift of a normalisation layer."""
    return segment.layer_type in NORM_NAMES


def select(
    segments: Sequence[Segment], selector: Selector = None, last_layer: str | None = None
) -> Selection:
    """The segments that a selector means.

    Args:
        segments: All that can be chosen.
        selector: None for all but norm layers, "all", "last_layer", a name or glob or several of
            them, or a predicate.
        last_layer: The path of the layer that "last_layer" means; segments don't know it, but
            `credo.network.last_layer` finds it.

    Raises:
        DataError: If nothing is chosen, or a name fits nothing.

    >>> from credo.types import Segment
    >>> a = Segment("body.weight", (2, 2), 0, 4, 2, 2, "body", "Linear")
    >>> b = Segment("head.weight", (1, 2), 4, 6, 2, 1, "head", "Linear")
    >>> [select([a, b], s).size for s in (None, "head", "body.*", lambda s: s.fan_out == 1)]
    [6, 2, 4, 2]
    """
    if selector is None:
        chosen = [s for s in segments if not is_norm(s)]
    elif isinstance(selector, str) and selector == "all":
        chosen = list(segments)
    elif isinstance(selector, str) and selector == "last_layer":
        if last_layer is None:
            raise DataError(
                "segments don't tell which layer runs last: give its path, which "
                "credo.network.last_layer(net, inputs) finds"
            )
        chosen = [s for s in segments if whole_layer(s.layer) == last_layer and not is_norm(s)]
    elif callable(selector):
        chosen = [s for s in segments if selector(s)]
    else:
        patterns = [selector] if isinstance(selector, str) else list(selector)
        chosen = [s for s in segments if any(_matches(s, pattern) for pattern in patterns)]
        idle = [p for p in patterns if not any(_matches(s, p) for s in segments)]
        if idle:
            names = ", ".join(s.name for s in segments[:8]) + (", …" if len(segments) > 8 else "")
            raise DataError(f"no parameter matches {idle}; the trainable ones are {names}")
    if not chosen:
        raise DataError(
            "the selection leaves no random parameter; choose by name, glob, predicate, "
            f'"last_layer" or "all" from {[s.name for s in segments]}'
        )
    return Selection.of(chosen)


def _matches(segment: Segment, pattern: str) -> bool:
    return segment.layer == pattern or fnmatch.fnmatchcase(segment.name, pattern)
