r"""Undoing a Gaussian average numerically, and knowing whether there was one.

    f = exp(½σ²Δ)g  with f on an even grid,  g unknown

1. A polynomial is fitted, removed, and treated exactly: what grows would not be periodic.
2. The rest is faded out towards the ends by a window that is itself a Gaussian average, so that it
   has an exact backward flow; its price is a margin of `MARGIN`·σ at each end.
3. Frequencies are multiplied by e^{σ²ω²/2}, those with σ²ω²/2 ≤ c only.
4. g is averaged again and compared with f: the residual. And g must settle as c grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.polynomial.chebyshev import cheb2poly, chebvander
from numpy.polynomial.polynomial import polyval
from scipy import special

from credo.priors.penalty.heat_flow import Array, fourier_flow, highest_frequency, polynomial_flow

MARGIN = 20.0
"""σ's between the end of the grid and the part where g is known.

The window falls over √2σ, 8 of its widths inside the grid to reach 1e-15 at the end (a jump there
would be multiplied by e^c). Undone it falls over σ, and e^c shifts it by up to √(2c)σ = 6.3σ.
"""

_INNER = 9.0
"""σ's of the margin inside the window's half height."""

_TREND_DEGREE = 4

MAX_DEGREE = 8
"""The highest power that `fitted_polynomial` tries."""

_EXACT = 1e-10
"""What a polynomial fit may miss, relative to the largest value, and be called exact."""


def fitted_polynomial(x: Array, values: Array, dim: int = 1) -> Array | None:
    """Coefficients, lowest power first, if the values are a polynomial of degree ≤ `MAX_DEGREE`.

    In several dimensions only even powers of the radius count as one.

    >>> x = np.linspace(-3, 3, 50)
    >>> np.round(fitted_polynomial(x, 2 * x**2 - 1), 9) + 0
    array([-1.,  0.,  2.])
    >>> fitted_polynomial(x, np.abs(x)) is None
    True
    """
    allowed = _EXACT * (np.abs(values).max() or 1.0)

    def fit(degree: int) -> Array | None:
        polynomial = _fit(x, values, degree, even=dim > 1)
        return polynomial if np.abs(polyval(x, polynomial) - values).max() <= allowed else None

    if fit(MAX_DEGREE) is None:
        return None
    fits = map(fit, range(0, MAX_DEGREE + 1, 1 if dim == 1 else 2))
    return next(polynomial for polynomial in fits if polynomial is not None)


def _fit(x: Array, values: Array, degree: int, even: bool) -> Array:
    """The least-squares polynomial, lowest power first, without coefficients that are rounding."""
    reach = np.abs(x).max()
    columns = chebvander(x / reach, degree)
    columns = columns[:, ::2] if even else columns
    # Thousands of points say no more about nine coefficients than the normal equations hold, and a
    # Chebyshev basis keeps those well conditioned.
    solved = np.linalg.solve(columns.T @ columns, columns.T @ values)
    coefficients = np.zeros(degree + 1)
    coefficients[:: 2 if even else 1] = solved
    scaled = cheb2poly(coefficients)
    scaled = np.append(scaled, np.zeros(degree + 1 - len(scaled)))
    scaled[np.abs(scaled) < 1e-13 * np.abs(scaled).max()] = 0.0
    return scaled / reach ** np.arange(degree + 1)


@dataclass(frozen=True)
class Deconvolution:
    """f taken apart, ready to flow; make one with `Deconvolution.of`.

    ``x`` (n,) is even and symmetric around 0 in several dimensions, where functions depend on the
    radius |x|: then ``rest`` is (n, n) in two dimensions, and x·f(|x|) in three, which obeys the
    one-dimensional equation. ``inside`` are the points of x where g is known.
    """

    x: Array
    sigma: float
    dim: int
    trend: Array
    rest: Array
    inside: Array

    @classmethod
    def of(
        cls, x: Array, values: Array, sigma: float, margin: float, dim: int = 1
    ) -> Deconvolution:
        """Split f into trend and windowed rest, leaving ``margin`` ≥ `MARGIN`·σ at the ends."""
        along = values[len(x) // 2] if dim == 2 else values
        trend = _fit(x, along, _TREND_DEGREE, even=dim > 1)
        places = np.hypot.outer(x, x) if dim == 2 else x
        centre = 0.0 if dim > 1 else 0.5 * (x[0] + x[-1])
        half = x[-1] if dim > 1 else 0.5 * (x[-1] - x[0])
        edge = half - margin + _INNER * margin / MARGIN
        from_centre = np.abs(places - centre)
        window = 0.5 * special.erfc((from_centre - edge) / (2 * sigma))
        rest = (values - polyval(places, trend)) * window
        if dim == 3:
            rest = rest * x
        inside = np.abs(x - centre) <= half - margin
        return cls(x, sigma, dim, trend, rest, inside)

    def at(self, variance: float, cutoff: float) -> Array:
        """g averaged over N(0, variance) on the points inside: g itself for 0, f for σ²."""
        change = variance - self.sigma**2
        highest = highest_frequency(self.sigma, cutoff)
        flown = fourier_flow(self.rest, self.x[1] - self.x[0], change, highest)
        middle = len(self.x) // 2
        if self.dim == 2:
            flown = flown[middle]
        if self.dim == 3:
            flown = np.divide(flown, self.x, out=np.zeros_like(flown), where=self.x != 0)
            near = flown[middle + 1 : middle + 4]
            flown[middle] = np.dot([1.5, -0.6, 0.1], near)  # the even parabola of degree 4
        trend = polyval(self.x, polynomial_flow(self.trend, change, self.dim))
        return (flown + trend)[self.inside]
