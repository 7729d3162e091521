r"""Which rates and momenta make gradient descent forget its start equally fast for all curvatures.

On a quadratic of curvature h a step of momentum descent, w ← w − αhw + μ(w − w₋), multiplies
(w, w₋) by a matrix whose spectral radius is √μ exactly, whatever h, as long as

    (1 − √μ)² ≤ αh ≤ (1 + √μ)²

For curvatures from h₁ to h₂ such rates exist if √μ ≥ (√κ − 1)/(√κ + 1), κ = h₂/h₁, and are those
between (1 − √μ)²/h₁ and (1 + √μ)²/h₂. The smallest such μ has a single rate, (2/(√h₁ + √h₂))²,
which is optimal for all quadratics in the range (Polyak).

symbols: h₁, h₂ ``curvature_min``, ``curvature_max``; α ``lr`` and μ ``momentum`` of
`torch.optim.SGD`. `credo.tools.extreme_eigenvalues` measures the curvatures of a network.

Book (2020, 3.2) states the region for one h and finds its lower edge in experiments, its upper
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

from credo.checks import Decay, Positive, checked
from credo.errors import DataError


@checked
@dataclass(frozen=True)
class RobustRegion:
    """The pairs (rate, momentum) that are robust for all curvatures in a range.

    Args:
        curvature_min: The smallest curvature.
        curvature_max: The largest curvature.
    """

    curvature_min: Positive
    curvature_max: Positive

    @property
    def least_momentum(self) -> float:
        """Below it no rate serves all the curvatures."""
        root = math.sqrt(self.curvature_max / self.curvature_min)
        return ((root - 1.0) / (root + 1.0)) ** 2

    @checked
    def rates(self, momentum: Decay) -> tuple[float, float]:
        """The smallest and the largest rate; the former is the larger one where there is none.

        Args:
            momentum: From 0 to below 1.
        """
        root = math.sqrt(momentum)
        return (1.0 - root) ** 2 / self.curvature_min, (1.0 + root) ** 2 / self.curvature_max

    def contains(self, lr: float, momentum: float) -> bool:
        """Whether this pair is robust, but for rounding.

        Args:
            lr: The rate.
            momentum: From 0 to below 1.
        """
        low, high = self.rates(momentum)
        return low * (1.0 - 1e-12) <= lr <= high * (1.0 + 1e-12)


@checked
def robust_region(curvature_min: Positive, curvature_max: Positive) -> RobustRegion:
    """The robust pairs for curvatures in a range, e.g. the extreme eigenvalues of a Hessian.

    Args:
        curvature_min: The smallest curvature.
        curvature_max: The largest curvature.
    """
    if curvature_min > curvature_max:
        raise DataError(f"curvature_min={curvature_min} is above curvature_max={curvature_max}")
    return RobustRegion(float(curvature_min), float(curvature_max))
