r"""The heat flow exp(½vΔ): averaging over N(0, v·I) for v > 0, and its undoing for v < 0.

A penalty that is the KL to a prior is the prior's −log α, averaged over the approximate posterior.
For Gaussians the average is this flow with v = σ², so the prior is found by the flow backwards:

    μ^k   ↦ σ^k He_k(μ/σ)            (μ² ↦ μ² − σ²,  μ⁴ ↦ μ⁴ − 6σ²μ² + 3σ⁴)
    cos kμ ↦ e^{σ²k²/2} cos kμ

It is exact on polynomials. On a grid it multiplies each frequency ω by e^{σ²ω²/2}, which blows up
whatever is not a Gaussian average: hence a cut-off. In d dimensions functions of the radius stay
such, and d enters the Laplacian only.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

Array: TypeAlias = NDArray[np.float64]


def normal_entropy(sigma: float, dim: int = 1) -> float:
    """½d ln 2πeσ², in nats.

    >>> round(normal_entropy(1.0), 4)
    1.4189
    """
    return dim * (0.5 * math.log(2 * math.pi * math.e) + math.log(sigma))


def polynomial_flow(coefficients: Array, variance: float, dim: int = 1) -> Array:
    """exp(½·variance·Δ) on Σ c_k μ^k, where Δμ^k = k(k + dim − 2)μ^(k−2); lowest power first.

    In several dimensions μ is the radius, and the powers must be even.

    >>> polynomial_flow(np.array([0.0, 0, 0, 0, 1]), variance=-2.0)     # σ² = 2: μ⁴ − 12μ² + 12
    array([ 12.,   0., -12.,   0.,   1.])
    """
    total = term = np.asarray(coefficients, dtype=np.float64)
    powers = np.arange(len(total))
    for order in range(1, len(total) // 2 + 1):
        laplacian = (powers * (powers + dim - 2) * term)[2:]
        term = 0.5 * variance / order * np.append(laplacian, [0.0, 0.0])[: len(total)]
        total = total + term
    return total


def fourier_flow(
    values: Array, spacing: float, variance: float, highest: float = math.inf
) -> Array:
    """exp(½·variance·Δ) on a periodic even grid of any dimension, frequencies ≤ ``highest`` only.

    The backward flow of σ with the cut-off c (σ²ω²/2 ≤ c) has ``variance`` = −σ² and ``highest`` =
    √(2c)/σ, as `highest_frequency` says.

    >>> x = np.arange(64) * 2 * np.pi / 64
    >>> flown = fourier_flow(np.cos(3 * x), x[1], variance=-0.1, highest=10.0)
    >>> bool(np.allclose(flown, np.exp(0.1 * 9 / 2) * np.cos(3 * x)))
    True
    """
    squares = np.zeros(())
    for axis, size in enumerate(values.shape):
        last = axis == values.ndim - 1
        frequencies = (fft.rfftfreq if last else fft.fftfreq)(size, spacing) * 2 * np.pi
        squares = np.add.outer(squares, frequencies**2)
    kept = squares <= highest**2
    factor = np.exp(-0.5 * variance * np.where(kept, squares, 0.0)) * kept
    return fft.irfftn(fft.rfftn(values) * factor, s=values.shape)


def highest_frequency(sigma: float, cutoff: float) -> float:
    """The ω at which e^{σ²ω²/2} = e^{cutoff}."""
    return math.sqrt(2 * cutoff) / sigma


def mean_abs(mu: Array, sigma: float) -> Array:
    """E|θ| for θ ~ N(μ, σ²): |μ| made smooth; |μ| itself for σ = 0.

    >>> mean_abs(np.array([0.0, 30.0]), 1.0)              # √(2/π) at the kink, |μ| far away
    array([ 0.79788456, 30. ])
    """
    if sigma == 0:
        return np.abs(mu)
    z = mu / sigma
    return sigma * math.sqrt(2 / math.pi) * np.exp(-0.5 * z**2) + mu * special.erf(z / math.sqrt(2))
