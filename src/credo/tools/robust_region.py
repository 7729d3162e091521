r"""Which rates and momenta make gradient descent forget its start equally fast for all curvatures.

On a quadratic of curvature h a step of momentum descent, w ← w − αhw + μ(w − w₋), multiplies
(w, w₋) by a matrix whose spectral radius is √μ exactly, whatever h, as long as

    (1 − √μ)² ≤ αh ≤ (1 + √μ)²

For curvatures from h₁ to h₂ such rates exist if √μ ≥ (√κ − 1)/(√κ + 1), κ = h₂/h₁, and are those
between (1 − √μ)²/h₁ and (1 + √μ)²/h₂. The smallest such μ has a single rate, (2/(√h₁ + √h₂))²,
which is optimal for all quadratics in the range (Polyak).

symbols: h₁, h₂ ``curvature_min``, ``curvature_max``; α ``lr`` and μ ``momentum`` of
`torch.optim.SGD`. `credo.tools.extreme_eigenvalues` measures the curvatures of a network.

Document 003 (3.2) states the region for one h and finds its lower edge in experiments, its upper
one not: stochastic gradients diverge along α = a(1 − μ) before.

Reference: Zhang and Mitliagkas, 2017 (arXiv:1706.03471), lemma 3.

    >>> region = robust_region(1.0, 9.0)
    >>> round(region.least_momentum, 6), region.rates(momentum=0.25)
    (0.25, (0.25, 0.25))
    >>> region.contains(lr=0.25, momentum=0.25), region.contains(lr=0.25, momentum=0.2)
    (True, False)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from credo.checks import finite, positive
from credo.errors import DataError


@dataclass(frozen=True)
class RobustRegion:
    """The pairs (rate, momentum) that are robust for all curvatures from ``min`` to ``max``."""

    curvature_min: float
    curvature_max: float

    @property
    def least_momentum(self) -> float:
        """Below it no rate serves all the curvatures."""
        root = math.sqrt(self.curvature_max / self.curvature_min)
        return ((root - 1.0) / (root + 1.0)) ** 2

    def rates(self, momentum: float) -> tuple[float, float]:
        """The smallest and the largest rate; the former is the larger one where there is none."""
        root = math.sqrt(_momentum(momentum))
        return (1.0 - root) ** 2 / self.curvature_min, (1.0 + root) ** 2 / self.curvature_max

    def contains(self, lr: float, momentum: float) -> bool:
        """Whether this pair is robust, but for rounding."""
        low, high = self.rates(momentum)
        return low * (1.0 - 1e-12) <= lr <= high * (1.0 + 1e-12)


def robust_region(curvature_min: float, curvature_max: float) -> RobustRegion:
    """The robust pairs for curvatures in a range, e.g. the extreme eigenvalues of a Hessian."""
    low, high = positive("curvature_min", curvature_min), positive("curvature_max", curvature_max)
    if low > high:
        raise DataError(f"curvature_min={low} is above curvature_max={high}")
    return RobustRegion(low, high)


def spectral_radius(lr: float, momentum: float, curvature: float) -> float:
    """By what a step of momentum descent on a quadratic of this curvature shrinks, in the long run.

    >>> round(spectral_radius(1.0, 0.5, curvature=1.0), 4)      # inside: √μ
    0.7071
    >>> round(spectral_radius(0.05, 0.5, curvature=1.0), 3)
    0.885
    """
    trace = 1.0 - lr * curvature + momentum
    inside = trace * trace - 4.0 * momentum
    if inside <= 0:
        return math.sqrt(momentum)
    return (abs(trace) + math.sqrt(inside)) / 2.0


def _momentum(value: float) -> float:
    if not 0 <= finite("momentum", value) < 1:
        raise DataError(f"momentum must be at least 0 and below 1, but it is {value!r}")
    return value
