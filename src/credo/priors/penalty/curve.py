"""A log-density known at even knots: a cubic spline between them, a tail beyond each end.

Numbers only; `credo.priors.penalty.tabulated` makes priors of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import gamma
from torch import Generator, Tensor

from credo.checks import Finite, checked, finite, positive
from credo.errors import DataError
from credo.priors.penalty.heat_flow import Array

_NEGLIGIBLE = 45.0
"""How far the log-density falls, in nats, before what lies beyond is left out of integrals."""

_TAIL_CELLS = 1024


@checked
@dataclass(frozen=True)
class Tail:
    """How the log-density goes on beyond an end: ``slope`` outwards, and ``curvature``.

    At a distance t, where the table reaches ``reach`` from its centre:

        slope·t + ½·curvature·t²                    curvature ≤ 0: Gaussian, or exponential for 0
        slope·reach·ln(1 + t/reach)                 curvature > 0: a power law

    The value and the slope are continuous.
    """

    slope: Finite
    curvature: Finite

    def is_integrable(self, reach: float, dim: int) -> bool:
        """Whether its exponential has a finite integral in ``dim`` dimensions."""
        return self.slope < 0 and (self.curvature <= 0 or -self.slope * reach > dim)

    def change(self, t: Tensor, reach: float) -> Tensor:
        """What is added to the log-density at the end."""
        if self.curvature > 0:
            return self.slope * reach * torch.log1p(t / reach)
        return t * (self.slope + 0.5 * self.curvature * t)

    def steepness(self, t: Tensor, reach: float) -> Tensor:
        """The derivative by t."""
        if self.curvature > 0:
            return self.slope / (1 + t / reach)
        return self.slope + self.curvature * t

    def edges(self, reach: float) -> Array:
        """Distances, from 0 to where nothing is left, between which the tail is smooth."""
        if self.curvature > 0:
            decades = 16.0
            return reach * np.expm1(np.linspace(0, decades * math.log(10), _TAIL_CELLS + 1))
        fall = max(-self.slope, math.sqrt(-self.curvature))
        return np.linspace(0, _NEGLIGIBLE / fall, _TAIL_CELLS + 1)


@dataclass(frozen=True)
class Curve:
    """ln α up to a constant: knots at ``start`` + i·``step``, tails beyond, normalised on demand.

    ``dim`` > 1 is a function of the radius, with ``start`` = 0: then ``left`` only gives its slope
    at the origin, −slope: 0 where it is smooth.
    """

    start: float
    step: float
    values: tuple[float, ...]
    left: Tail
    right: Tail
    dim: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(map(float, self.values)))
        finite("start", self.start)
        positive("step", self.step)
        if len(self.values) < 4 or not np.isfinite(self.values).all():
            raise DataError(
                "a tabulated log-density needs at least 4 finite values, but it has "
                f"{len(self.values)}, of which {int(np.isfinite(self.values).sum())} are finite"
            )
        tails = (self.right,) if self.dim > 1 else (self.left, self.right)
        if not all(tail.is_integrable(self.reach, self.dim) for tail in tails):
            raise DataError(
                f"the tails {tails} don't fall fast enough for a density in {self.dim} dimension(s)"
            )

    @property
    def end(self) -> float:
        """The last knot."""
        return self.start + self.step * (len(self.values) - 1)

    @property
    def reach(self) -> float:
        """From the centre to the end."""
        return self.end if self.dim > 1 else 0.5 * (self.end - self.start)

    @cached_property
    def pieces(self) -> Tensor:
        """Coefficients (knots − 1, 4) of the cubics in the distance from their knot, top first."""
        # Imported here because it is slow to import, and most priors have no table.
        from scipy.interpolate import CubicSpline

        knots = self.start + self.step * np.arange(len(self.values))
        ends = ((1, -self.left.slope), (1, self.right.slope))
        return torch.from_numpy(CubicSpline(knots, self.values, bc_type=ends).c.T.copy())

    def evaluate(self, x: Tensor, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """The unnormalised log-density and its slope, elementwise; ``pieces`` cast to match x."""
        inside = x.clamp(self.start, self.end)
        cell = torch.nan_to_num((inside - self.start) / self.step)
        cell = cell.floor().clamp(0, len(pieces) - 1)
        c3, c2, c1, c0 = pieces[cell.long()].unbind(-1)
        t = inside - (self.start + cell * self.step)
        value = ((c3 * t + c2) * t + c1) * t + c0
        slope = (3 * c3 * t + 2 * c2) * t + c1
        below, above = (self.start - x).clamp_min(0), (x - self.end).clamp_min(0)
        value = value + self.left.change(below, self.reach) + self.right.change(above, self.reach)
        slope = torch.where(x > self.end, self.right.steepness(above, self.reach), slope)
        return value, torch.where(x < self.start, -self.left.steepness(below, self.reach), slope)

    @cached_property
    def table(self) -> MassTable:
        """Its integrals."""
        knots = self.start + self.step * np.arange(len(self.values))
        above = self.end + self.right.edges(self.reach)[1:]
        if self.dim == 1:
            knots = np.concatenate([self.start - self.left.edges(self.reach)[:0:-1], knots])
        return MassTable.of(self, np.concatenate([knots, above]))


@dataclass(frozen=True, eq=False)
class MassTable:
    """Where the mass of a curve lies: ``mass`` (m,) of each cell between ``edges`` (m + 1,).

    ``density`` (m + 1,) is that at the edges, on the line or of the radius; ``log_total`` is
    ln ∫e^curve over all dimensions; ``mean`` and ``scale`` are those of one coordinate.
    """

    edges: Tensor
    density: Tensor
    mass: Tensor
    log_total: float
    mean: float
    scale: float

    @classmethod
    def of(cls, curve: Curve, edges: Array) -> MassTable:
        """Gauss–Legendre in every cell."""
        nodes, weights = np.polynomial.legendre.leggauss(5)
        widths = np.diff(edges)
        points = edges[:-1, None] + 0.5 * widths[:, None] * (nodes + 1)
        highest = max(curve.values)

        def density(x: Array) -> Array:
            log_value = curve.evaluate(torch.from_numpy(x), curve.pieces)[0].numpy() - highest
            return np.exp(log_value) * np.abs(x) ** (curve.dim - 1)

        amounts = density(points) * weights * 0.5 * widths[:, None]
        total = amounts.sum()
        mean = float((amounts * points).sum() / total) if curve.dim == 1 else 0.0
        second = float((amounts * (points - mean) ** 2).sum() / total)
        sphere = 2 * math.pi ** (curve.dim / 2) / gamma(curve.dim / 2) if curve.dim > 1 else 1.0
        mass = amounts.sum(1) / total
        heavy = any(
            tail.curvature > 0 and -tail.slope * curve.reach <= curve.dim + 2
            for tail in (curve.left, curve.right)
        )
        scale = _half_width(mass, edges) if heavy else math.sqrt(second / curve.dim)
        return cls(
            torch.from_numpy(edges), torch.from_numpy(density(edges)), torch.from_numpy(mass),
            highest + math.log(total * sphere), mean, scale,
        )  # fmt: skip

    def sample(self, shape: tuple[int, ...], generator: Generator | None, like: Tensor) -> Tensor:
        """Points drawn by inverting the distribution function; linear densities inside cells."""
        device = like.device
        u = torch.empty(shape, dtype=torch.float64, device=device).uniform_(generator=generator)
        reached = self.mass.cumsum(0).to(device)
        cell = torch.searchsorted(reached, u).clamp_max(len(reached) - 1)
        mass, edges, density = (t.to(device) for t in (self.mass, self.edges, self.density))
        tiny = torch.finfo(torch.float64).tiny
        part = (1 - (reached[cell] - u) / mass[cell].clamp_min(tiny)).clamp(0, 1)
        first, second = density[cell], density[cell + 1]
        root = (first**2 + part * (second**2 - first**2)).sqrt()
        part = (first + second) * part / (first + root).clamp_min(tiny)
        return (edges[cell] + part * (edges[cell + 1] - edges[cell])).to(like.dtype)


def _half_width(mass: Array, edges: Array) -> float:
    """Half the width of the middle 68 %: what stands for σ where the variance is infinite."""
    low, high = np.interp([0.1587, 0.8413], np.append(0.0, mass.cumsum()), edges)
    return float(0.5 * (high - low))
