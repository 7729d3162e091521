"""From a log-density on a grid to a prior of the library, or to the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from credo.errors import DataError, UnsupportedError
from credo.priors.laplace import Laplace
from credo.priors.normal import Normal
from credo.priors.penalty.curve import Curve, Tail
from credo.priors.penalty.deconvolution import fitted_polynomial
from credo.priors.penalty.heat_flow import Array, mean_abs
from credo.priors.penalty.tabulated import RadialTabulated, Tabulated
from credo.types import Prior, Segment, Vector

_MAX_KNOTS = 2049
_STRAIGHT = 0.05
"""A tail bends if its slope changes by more than this share of itself over the reach."""


@dataclass(frozen=True)
class NoPrior:
    """The penalty is not the KL to any prior: ``reason`` says why, ``evidence`` has the numbers.

    A value, not an error: it is false where a prior is true, and refuses to be used as one.

    Args:
        reason: Why there is none.
        evidence: The numbers that show it, by name.

    >>> answer = NoPrior("A depends on σ", {"sigma": (0.1, 0.5)})
    >>> bool(answer)
    False
    >>> print(answer)
    no prior: A depends on σ (sigma = 0.1, 0.5)
    """

    reason: str
    evidence: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        shown = [f"{name} = {_digits(value)}" for name, value in self.evidence.items()]
        return f"no prior: {self.reason}" + (f" ({'; '.join(shown)})" if shown else "")

    def on(self, segments: Sequence[Segment], like: Vector) -> NoReturn:
        """Refused."""
        raise UnsupportedError(f"this penalty can't be a prior. {self}")

    def config(self) -> NoReturn:
        """Refused."""
        raise UnsupportedError(f"this penalty can't be a prior. {self}")


def _digits(value: float | tuple[float, ...]) -> str:
    return ", ".join(f"{number:.4g}" for number in np.atleast_1d(value))


def conclude(
    points: Array,
    log_density: Array,
    averages: Mapping[float, Array],
    dim: int,
    tolerance: float,
    is_table: bool,
) -> Prior | NoPrior:
    """The prior e^A/∫e^A, in the library's own form where it has one.

    ``averages`` are −A averaged over N(0, σ²), by σ: a kink is told from them, because A itself is
    only known up to a highest frequency. Radii begin at 0.
    """
    normal = _as_normal(points, log_density, dim)
    if normal is not None:
        return normal
    laplace = _as_laplace(points, averages, tolerance) if dim == 1 else None
    if laplace is not None:
        return laplace
    centre = int(np.argmin(np.abs(points - 0.5 * (points[0] + points[-1])))) if dim == 1 else 0
    stride = math.ceil(len(points) / _MAX_KNOTS)
    knots = np.arange(centre % stride, len(points), stride)
    points, log_density = points[knots], log_density[knots]
    step = float(points[1] - points[0])
    reach = float(points[-1] if dim > 1 else 0.5 * (points[-1] - points[0]))
    left, right = (_tail(values, step, reach) for values in (log_density[::-1], log_density))
    for tail in (right,) if dim > 1 else (left, right):
        if not tail.is_integrable(reach, dim):
            slopes = {"slope_outwards": (left.slope, right.slope)[dim > 1 :]}
            return NoPrior("e^A has no finite integral", slopes)
    values = tuple((log_density - log_density.max()).tolist())
    prior: Tabulated | RadialTabulated
    if dim == 1:
        ends = (left.slope, left.curvature), (right.slope, right.curvature)
        prior = Tabulated(float(points[0]), step, values, *ends)
    else:
        slope = -left.slope if abs(left.slope) > 1e-4 * abs(right.slope) else 0.0
        prior = RadialTabulated(dim, step, values, (right.slope, right.curvature), slope)
    if is_table:
        _check_mass_is_inside(prior.curve)
    return prior


def _as_normal(points: Array, log_density: Array, dim: int) -> Prior | NoPrior | None:
    middle = 0.0 if dim > 1 else 0.5 * float(points[0] + points[-1])
    polynomial = fitted_polynomial(points - middle, log_density, dim)
    if polynomial is None or len(polynomial) > 3:
        return None
    _, slope, curvature = np.append(polynomial, [0.0, 0.0])[:3]
    if curvature >= 0:
        shape = {"slope": float(slope), "curvature": float(2 * curvature)}
        return NoPrior("e^A has no finite integral", shape)
    scale = float(1 / math.sqrt(-2 * curvature))
    mean = middle - float(slope / (2 * curvature))
    return Normal(_neat(scale), 0.0 if abs(mean) < 1e-9 * scale else _neat(mean))


def _neat(value: float) -> float:
    """Without the rounding errors of the fit, which no digit beyond the twelfth survives."""
    return float(f"{value:.12g}")


def _as_laplace(points: Array, averages: Mapping[float, Array], tolerance: float) -> Prior | None:
    """Laplace around 0, if every average is E|θ|/b and a constant common to all."""
    sigma, energy = min(averages.items())
    rate = (energy[-1] - energy[-2]) / (points[-1] - points[-2])
    if rate <= 0:
        return None
    constant = energy[-1] - rate * mean_abs(points[-1:], sigma)[0]
    size = max(1.0, float(np.ptp(energy)))
    for sigma, energy in averages.items():
        if np.abs(energy - constant - rate * mean_abs(points, sigma)).max() > tolerance * size:
            return None
    return Laplace(_neat(math.sqrt(2) / float(rate)))


def _tail(values: Array, step: float, reach: float) -> Tail:
    """How the values go on beyond the last one."""
    near = np.polynomial.Polynomial.fit(step * np.arange(-4.0, 1.0), values[-5:], 3)
    slope = float(near.deriv()(0.0))
    count = max(8, len(values) // 16)
    wide = np.polynomial.Polynomial.fit(step * np.arange(1.0 - count, 1.0), values[-count:], 2)
    curvature = float(wide.deriv(2)(0.0))
    bends = abs(curvature) * reach > _STRAIGHT * abs(slope)
    return Tail(slope, curvature if bends else 0.0)


def _check_mass_is_inside(curve: Curve) -> None:
    table = curve.table
    beyond = (table.edges[1:] <= curve.start) | (table.edges[:-1] >= curve.end)
    share = float(table.mass[beyond].sum())
    if share > 0.01:
        raise DataError(
            f"the table is too short: {100 * share:.0f} % of the prior would lie beyond "
            f"[{curve.start:.6g}, {curve.end:.6g}], where it is known; go on further"
        )


def sigma_dependent(
    points: Array, sigmas: Sequence[float], curves: Array, spread: float
) -> NoPrior:
    """(★) fails: A_ν is another for another ν."""
    zero = int(np.argmin(np.abs(points)))
    evidence: dict[str, Any] = {
        "sigma": tuple(sigmas),
        "A_at_0": tuple(curves[:, zero].tolist()),
        "spread": spread,
    }
    return NoPrior("A depends on σ, which is trained", evidence)
