"""A penalty as users have it (a function, a sympy expression, a table) as numbers on a grid."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import fft

from credo.errors import DataError, UnsupportedError
from credo.priors.penalty.deconvolution import MARGIN
from credo.priors.penalty.domain import Domain, find_domain
from credo.priors.penalty.heat_flow import Array, normal_entropy

Energy: TypeAlias = Callable[[Array, float], Array]
"""(μ, σ) ↦ penalty + entropy, which a prior would make the average of −ln α."""

_SINGLE_PRECISION = (8.0, 1e-4)
"""Cut-off and tolerance for tables in float32, whose rounding e^20 would blow up."""

_MAX_HALF = {1: 4096, 2: 320, 3: 4096}
"""Points on each side of the centre, by dimension: two dimensions need a square of them."""

_LEAST_HALF = 1024

_SIGMAS = (1 / 32, 1 / 8, 1 / 2)
"""The σ's at which a trained σ is tested, in lengths over which the energy rises."""

_SIGMAS_IN_THE_PLANE = (1 / 4, 1 / 3, 1 / 2)
"""The same where a square of points allows no finer ones."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Energies e_ν(centre + x), one array for each of the ``sigmas``, smallest first.

    σ = 0 is the Dirac family. In several dimensions x is symmetric and the centre is 0; in two, the
    arrays are over the plane. ``margin`` is what deconvolution can't use at each end.
    """

    x: Array
    centre: float
    sigmas: tuple[float, ...]
    energies: tuple[Array, ...]
    dim: int
    margin: float
    precision: tuple[float, float] = (20.0, 1e-6)
    is_table: bool = False

    @property
    def lines(self) -> list[Array]:
        """The energies along one axis through the origin."""
        return [e[len(self.x) // 2] if e.ndim == 2 else e for e in self.energies]


def is_expression(r: object) -> bool:
    """Whether r is sympy's, without importing it: nobody has an expression who hasn't."""
    sympy = sys.modules.get("sympy")
    return sympy is not None and isinstance(r, sympy.Basic)


def as_function(r: Callable[..., Any]) -> Energy:
    """r as a function of arrays in float64 that raises `DataError` where it is undefined.

    It is called with numpy arrays, and with tensors if it refuses those; (μ) alone also serves.
    """
    try:
        named = inspect.signature(r).parameters
        positional = [a for a in named.values() if a.kind < a.VAR_POSITIONAL]
        required = [a for a in positional if a.default is a.empty]
        alone = len(required) == 1 and "sigma" not in named
    except (TypeError, ValueError):  # torch's own functions have no signature
        alone = True

    def call(mu: Any, sigma: float) -> Any:
        return r(mu) if alone else r(mu, sigma)

    def evaluate(mu: Array, sigma: float) -> Array:
        with np.errstate(all="ignore"):
            try:
                values = call(mu, sigma)
            except (TypeError, AttributeError):
                values = call(torch.from_numpy(mu), sigma)
        values = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
        try:
            numbers = np.broadcast_to(np.asarray(values, dtype=np.float64), mu.shape)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the penalty must return a number for every μ, but for μ of shape {mu.shape} it "
                f"returned {type(values).__name__} of shape {np.shape(values)}; write it with "
                "numpy's or torch's functions"
            ) from error
        if np.isnan(numbers).any():
            where = float(mu[np.isnan(numbers)][0])
            raise DataError(
                f"the penalty is not a number at μ = {where:.6g}, σ = {sigma:.6g}; it must be "
                "defined for every μ (for the Dirac family at σ = 0 too)"
            )
        return numbers

    return evaluate


def energy_of(r: Energy, dim: int) -> Energy:
    """r plus the entropy of N(μ, σ²I); r alone for σ = 0."""
    return lambda mu, sigma: r(mu, sigma) + (normal_entropy(sigma, dim) if sigma else 0.0)


def sample_function(
    energy: Energy, sigmas: Sequence[float] | None, dim: int
) -> tuple[Samples | None, Domain]:
    """The energies on a grid that fits them; no samples if they don't rise enough to end anywhere.

    ``sigmas`` None chooses three, for a family whose σ is trained: the smallest far below the
    length over which the energy rises, because it limits what can be resolved.
    """
    domain, chosen = _fitting(energy, sigmas, dim)
    if not domain.normalisable:
        return None, domain
    margin = MARGIN * chosen[-1]
    half = domain.reach + margin
    limit = _MAX_HALF.get(dim, _MAX_HALF[1]) if chosen[-1] else _LEAST_HALF
    wanted = max(_LEAST_HALF, 6 * half / chosen[0]) if chosen[0] else limit
    count = fft.next_fast_len(math.ceil(min(wanted, limit)))
    step = half / count
    x = step * np.arange(-count, count)
    if dim == 2 and chosen[-1]:
        # The corners beyond the circle are windowed to nothing, and may overflow before that.
        places = np.minimum(np.hypot.outer(x, x), half)
    else:
        places = np.abs(x) if dim > 1 else x + domain.centre
    energies = tuple(_finite(energy(places, sigma), places, sigma) for sigma in chosen)
    return Samples(x, domain.centre, chosen, energies, dim, margin), domain


def _fitting(
    energy: Energy, sigmas: Sequence[float] | None, dim: int
) -> tuple[Domain, tuple[float, ...]]:
    if sigmas is not None:
        chosen = tuple(sorted(sigmas))
        return find_domain(lambda mu: energy(mu, chosen[0]), dim, 4 * chosen[-1]), chosen
    parts = _SIGMAS_IN_THE_PLANE if dim == 2 else _SIGMAS
    sigma = 1.0
    for _ in range(8):
        domain = find_domain(lambda mu: energy(mu, sigma), dim)  # noqa: B023 - called at once
        wanted = parts[0] * domain.length
        if 0.5 < sigma / wanted < 2:
            break
        sigma = wanted
    sigma = max(sigma, 3 * domain.reach / _MAX_HALF.get(dim, _MAX_HALF[1]))
    return domain, tuple(sigma * part / parts[0] for part in parts)


def _finite(values: Array, places: Array, sigma: float) -> Array:
    if not np.isfinite(values).all():
        where = float(places[~np.isfinite(values)][0])
        raise DataError(
            f"the penalty is infinite at μ = {where:.6g}, σ = {sigma:.6g}, inside of what the "
            "deconvolution needs; give it as a sympy expression, whose growth is treated exactly"
        )
    return values


def sample_table(points: Any, values: Any, sigmas: Sequence[float], dim: int) -> Samples:
    """The same from a table: ``points`` (n,), ``values`` (n,) or (number of sigmas, n)."""
    single = np.asarray(values).dtype == np.float32
    points, values = np.asarray(points, np.float64), np.asarray(values, np.float64)
    if points.ndim != 1 or len(points) < 16:
        raise DataError(f"a table needs at least 16 points (n,), got shape {points.shape}")
    values = values[None] if values.ndim == 1 else values
    if values.shape != (len(sigmas), len(points)):
        raise DataError(
            f"the table's values must be ({len(sigmas)}, {len(points)}), a row for each of the "
            f"sigmas {tuple(sigmas)} and a column for each point, got shape {values.shape}"
        )
    if not (np.isfinite(points).all() and np.isfinite(values).all()):
        raise DataError("the table has points or values that are not finite; leave them out")
    steps = np.diff(points)
    step = (points[-1] - points[0]) / (len(points) - 1)
    if step <= 0 or np.abs(steps - step).max() > 1e-6 * step:
        raise DataError(
            "the table's points must rise in equal steps, as numpy.linspace makes them; theirs "
            f"are between {steps.min():.6g} and {steps.max():.6g}. Sort and resample them, or give "
            "the penalty as a function"
        )
    order = np.argsort(sigmas)
    sigmas, values = tuple(float(sigmas[i]) for i in order), values[order]
    entropies = [normal_entropy(sigma, dim) if sigma else 0.0 for sigma in sigmas]
    values = values + np.array(entropies)[:, None]
    centre = 0.0
    if dim > 1:
        if abs(points[0]) > 1e-9 * step:
            raise DataError(f"a table of radii must begin at 0, but it begins at {points[0]:.6g}")
        points = np.concatenate([-points[:0:-1], points])
        values = np.concatenate([values[:, :0:-1], values], axis=1)
    else:
        centre = float(points[len(points) // 2])
    precision = {"precision": _SINGLE_PRECISION} if single else {}
    return Samples(
        points - centre, centre, sigmas, tuple(values), dim, MARGIN * sigmas[-1],
        is_table=True, **precision,
    )  # fmt: skip


def check_deconvolvable(samples: Samples) -> None:
    """Refuse what the deconvolution can't do: too many dimensions, too short a table."""
    if samples.dim > 3:
        raise UnsupportedError(
            f"a penalty of the radius in {samples.dim} dimensions is solved if it is a polynomial "
            "in ‖μ‖², or for the Dirac family; others are deconvolved in 1, 2 and 3 dimensions only"
        )
    if samples.dim == 2 and samples.is_table:
        raise UnsupportedError(
            "in two dimensions the penalty is needed off the axis too; give it as a function of "
            "the radius instead of a table"
        )
    width = float(samples.x[-1] - samples.x[0])
    if samples.is_table and width < 2.5 * samples.margin:
        raise DataError(
            f"the table covers {width:.6g} and a deconvolution with σ = {samples.sigmas[-1]:.6g} "
            f"loses {MARGIN:.0f}σ = {samples.margin:.6g} at each end; go on to at least "
            f"{1.25 * samples.margin:.6g} on each side, or take smaller sigmas"
        )
