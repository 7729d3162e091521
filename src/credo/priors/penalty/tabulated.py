"""Priors without a formula: a table of ln α, over each weight or over the radius of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from torch import Generator, Tensor

from credo.checks import Range, check
from credo.errors import DataError
from credo.families.base import check_count, check_points
from credo.priors.penalty.curve import Curve, Tail
from credo.priors.scales import PriorRule, total_size
from credo.types import Segment, Vector


@dataclass(frozen=True)
class Tabulated(PriorRule):
    """The same density e^A on every weight, A known at the knots ``start`` + i·``step``.

    Between the knots A is a cubic spline, beyond them it goes on as ``left`` and ``right`` say, the
    pairs (outward slope, curvature) of `Tail`. ``log_density`` need not be normalised.
    `credo.priors.from_penalty` makes these; so can you, of any density on a line:

    >>> import numpy as np, torch
    >>> x = np.linspace(-3, 3, 241)
    >>> tail = (-108.0, -108.0)
    >>> prior = Tabulated(-3.0, 0.025, tuple(-(x**4)), left=tail, right=tail)
    >>> weight = Segment("w", (1,), 0, 1, fan_in=1, fan_out=1, layer="", layer_type="Linear")
    >>> flat = prior.on([weight], like=torch.zeros(1, dtype=torch.float64))
    >>> round(float(flat.log_prob(torch.zeros(1, dtype=torch.float64)).exp()), 6)   # 1/(2Γ(5/4))
    0.551631

    Args:
        start: The first knot.
        step: The distance from knot to knot.
        log_density: A at the knots, up to a constant.
        left: Outward slope and curvature of A to the left of them.
        right: The same to the right.
    """

    start: float
    step: float
    log_density: tuple[float, ...]
    left: tuple[float, float]
    right: tuple[float, float]

    def __post_init__(self) -> None:
        _make_tuples_of_floats(self, "log_density", "left", "right")
        _ = self.curve  # built here, so that a bad table is refused here

    @cached_property
    def curve(self) -> Curve:
        """The table as a function."""
        left, right = Tail(*self.left), Tail(*self.right)
        return Curve(self.start, self.step, self.log_density, left, right)

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatTabulated:
        """The density over these segments, one after the other."""
        return FlatTabulated(self.curve, self.curve.pieces.to(like), total_size(segments))


@dataclass(frozen=True)
class RadialTabulated(PriorRule):
    """Density e^{A(‖w‖)} on every group of ``dim`` weights, A known at the radii i·``step``.

    A group is ``dim`` consecutive weights of a parameter, so every parameter's size must be a
    multiple of ``dim``. ``right`` is the tail's (outward slope, curvature); ``slope`` is dA/dr at
    the origin: 0 where the density is smooth, −λ for e^{−λ‖w‖}.

    Args:
        dim: How many weights make a group, 2 or more.
        step: The distance from radius to radius; the first is 0.
        log_density: A at the radii, up to a constant.
        right: Outward slope and curvature of A beyond them.
        slope: dA/dr at the origin.
    """

    dim: int
    step: float
    log_density: tuple[float, ...]
    right: tuple[float, float]
    slope: float = 0.0

    def __post_init__(self) -> None:
        check("dim", self.dim, Annotated[int, Range(2)])
        _make_tuples_of_floats(self, "log_density", "right")
        _ = self.curve  # built here, so that a bad table is refused here

    @cached_property
    def curve(self) -> Curve:
        """The table as a function of the radius."""
        left, right = Tail(-self.slope, 0.0), Tail(*self.right)
        return Curve(0.0, self.step, self.log_density, left, right, self.dim)

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatRadial:
        """The density over these segments, one after the other."""
        for segment in segments:
            if segment.size % self.dim:
                raise DataError(
                    f"{segment.name} has {segment.size} weights, which can't be split into groups "
                    f"of {self.dim}; give it a prior of its own or make it deterministic"
                )
        return FlatRadial(self.curve, self.curve.pieces.to(like), total_size(segments))


def _make_tuples_of_floats(table: Tabulated | RadialTabulated, *names: str) -> None:
    """JSON has lists where a frozen dataclass needs tuples."""
    for name in names:
        try:
            numbers = tuple(float(value) for value in getattr(table, name))
        except (TypeError, ValueError) as error:
            raise DataError(f"{name} of a {type(table).__name__} must be numbers") from error
        object.__setattr__(table, name, numbers)


@dataclass(frozen=True, eq=False)
class FlatTabulated:
    """Independent weights, each with the density of ``curve``; ``pieces`` are its cubics.

    Args:
        curve: The density's logarithm A.
        pieces: Its cubics, with the dtype and device of the weights.
        size: P, the number of weights.
    """

    curve: Curve
    pieces: Tensor
    size: int

    @property
    def scale(self) -> Vector:
        """The standard deviation, (P,).

        A power-law tail may have none: then half the width of the middle 68 %.
        """
        return self.pieces.new_full((), self.curve.table.scale).expand(self.size)

    def log_prob(self, w: Vector) -> Tensor:
        """Σ A(w) − P ln ∫e^A: (..., P) → (...)."""
        check_points(w, self.size)
        value, _ = self.curve.evaluate(w, self.pieces)
        return value.sum(-1) - self.size * self.curve.table.log_total

    def grad_log_prob(self, w: Vector) -> Tensor:
        """A'(w), that of the spline."""
        check_points(w, self.size)
        return self.curve.evaluate(w, self.pieces)[1]

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """By the inverse of the distribution function, (n, P)."""
        check_count(n)
        return self.curve.table.sample((n, self.size), generator, self.pieces)


@dataclass(frozen=True, eq=False)
class FlatRadial:
    """Independent groups of ``curve.dim`` weights, each with a density of its radius.

    Args:
        curve: The density's logarithm A, of the radius.
        pieces: Its cubics, with the dtype and device of the weights.
        size: P, the number of weights.
    """

    curve: Curve
    pieces: Tensor
    size: int

    @property
    def scale(self) -> Vector:
        """The standard deviation of one weight, (P,)."""
        return self.pieces.new_full((), self.curve.table.scale).expand(self.size)

    def _groups(self, w: Vector) -> tuple[Tensor, Tensor]:
        check_points(w, self.size)
        groups = w.unflatten(-1, (-1, self.curve.dim))
        return groups, groups.norm(dim=-1)

    def log_prob(self, w: Vector) -> Tensor:
        """Σ over groups of A(‖w‖) − ln ∫e^A: (..., P) → (...)."""
        _, radius = self._groups(w)
        value, _ = self.curve.evaluate(radius, self.pieces)
        return value.sum(-1) - radius.shape[-1] * self.curve.table.log_total

    def grad_log_prob(self, w: Vector) -> Tensor:
        """A'(‖w‖)·w/‖w‖; 0 at the origin, where a cusp has no gradient."""
        groups, radius = self._groups(w)
        _, slope = self.curve.evaluate(radius, self.pieces)
        along = slope / radius.clamp_min(1e-30)
        return (groups * along.unsqueeze(-1)).flatten(-2)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """A radius by the inverse of its distribution function, in a uniform direction: (n, P)."""
        check_count(n)
        shape = (n, self.size // self.curve.dim)
        radius = self.curve.table.sample(shape, generator, self.pieces)
        normal = self.pieces.new_empty(*shape, self.curve.dim).normal_(generator=generator)
        return (normal * (radius.unsqueeze(-1) / normal.norm(dim=-1, keepdim=True))).flatten(-2)
