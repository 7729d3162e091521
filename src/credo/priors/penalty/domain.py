"""Where a density e^{−energy} lives: its centre, its length, its reach, and whether it has mass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from credo.priors.penalty.heat_flow import Array

RISE = 40.0
"""Nats above the minimum where a density counts as zero: e^{−40} = 4e-18."""

_OCTAVES = 12
_HEAVY_REACH = 64.0
_REFINEMENTS = 4


@dataclass(frozen=True)
class Domain:
    """``length``: where the energy has risen by ½, as a Gaussian's has after σ. ``reach``: by 40.

    ``rises`` are those of the last octaves, on the worse side: of a power law they are p·ln 2.
    """

    centre: float
    length: float
    reach: float
    normalisable: bool
    rises: tuple[float, ...] = ()


def find_domain(energy: Callable[[Array], Array], dim: int = 1, least: float = 0.0) -> Domain:
    """Search outwards from the lowest point of e^{−energy}; ``least`` bounds the reach from below.

    e^{−energy} has no finite integral if the energy neither rises by 40 nats nor, over the last
    octaves of 4096 lengths, as fast as that of a power law that has one.

    >>> domain = find_domain(lambda x: 0.5 * (x - 3) ** 2 / 0.25)       # N(3, ½²)
    >>> round(domain.length, 1), domain.normalisable
    (0.5, True)
    >>> find_domain(np.cos).normalisable
    False
    """
    centre = 0.0 if dim > 1 else _lowest(energy)
    floor = float(energy(np.array([centre]))[0])

    def rise(distances: Array) -> Array:
        right = energy(centre + distances) - floor
        return right if dim > 1 else np.stack([right, energy(centre - distances) - floor])

    lengths = np.geomspace(1e-9, 1e9, 240)
    risen = np.atleast_2d(rise(lengths)).mean(0) >= 0.5
    if not risen.any():
        return Domain(centre, 1.0, 1.0, False, tuple(_worst(rise, np.array([1.0, 1e3, 1e6]))))
    length = float(lengths[np.argmax(risen)])
    distances = length * np.geomspace(1, 2.0**_OCTAVES, 8 * _OCTAVES + 1)
    low = np.flatnonzero(_worst(rise, distances) < RISE)
    if len(low) == 0 or low[-1] + 1 < len(distances):
        reach = float(distances[low[-1] + 1] if len(low) else distances[0])
        return Domain(centre, length, max(reach, least), True)
    octaves = _worst(rise, length * np.exp2(np.arange(_OCTAVES - 4.0, _OCTAVES + 1)))
    gains = np.diff(octaves)
    heavy = bool((gains > 1.001 * dim * math.log(2)).all())
    return Domain(centre, length, max(_HEAVY_REACH * length, least), heavy, tuple(gains.tolist()))


def _worst(rise: Callable[[Array], Array], distances: Array) -> Array:
    return np.atleast_2d(rise(distances)).min(0)


def _lowest(energy: Callable[[Array], Array]) -> float:
    """The argument of the smallest value: on points that get denser towards 0, then between."""
    distances = np.geomspace(1e-4, 1e4, 161)
    points = np.concatenate([-distances[::-1], [0.0], distances])
    values = energy(points)
    best, zero = int(np.argmin(values)), values[len(distances)]
    # 0 is a point people mean: it is taken unless another is lower by more than rounding.
    if zero <= values[best] + 1e-12 * max(1.0, abs(zero)):
        return 0.0
    for _ in range(_REFINEMENTS):
        low, high = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
        points = np.linspace(low, high, 33)
        best = int(np.argmin(energy(points)))
    return float(points[best])
