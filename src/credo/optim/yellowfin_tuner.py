r"""What YellowFin measures of gradients, and the rate and momentum that it concludes.

With h = ‖g‖² and ⟨x⟩ for the exponential average of x that keeps the share β, divided by 1 − βᵗ:

    h_min, h_max = exp⟨log min⟩, exp⟨log max⟩      min and max over the last ``window`` of h
    C = ⟨h⟩ − ‖⟨g⟩‖²                               variance of the gradient, summed over weights
    D = ⟨ ⟨‖g‖⟩ / ⟨h⟩ ⟩                            distance to the optimum

    √μ = max( argmin_x x²D² + (1 − x)⁴C/h_min²,  (√κ − 1)/(√κ + 1) ),      κ = h_max/h_min
    α = (1 − √μ)²/h_min

That is one step of momentum descent from distance D with noise C, made as good as it can be inside
the robust region of all curvatures that were measured (`credo.tools.robust_region`): the first
argument of the maximum is the best, the second the region's edge. That ‖g‖² stands for the
curvature is right for negative log-likelihoods near their optimum, where both are the Fisher
information. Far from it ‖g‖² is much larger, and the rate much too small; of a minibatch's mean it
is smaller.

The minimum solves px = (1 − x)³, p = D²h_min²/(2C), a cubic with one real root.

Corrections to Book, 2020, appendix C: C has the *vector* average of g, not that of its norm;
h_min and h_max are windowed squared norms averaged by their logarithms; the cubic is left out
there; "learning rate" and "momentum" are no hyperparameters but the values of the first step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Self

from credo.types import Json


def best_root_momentum(p: float) -> float:
    """x in [0, 1] with px = (1 − x)³, for p ≥ 0, by the cubic's hyperbolic closed form.

    Vieta's formula, which the authors use, subtracts two large numbers where p is large. This one
    gives z = 1 − x with all its digits; where x is small it is z³/p, which keeps them.

    >>> best_root_momentum(0.0), round(best_root_momentum(0.5), 9), best_root_momentum(1e40)
    (1.0, 0.410245488, 1e-40)
    """
    if p < 1e-300:
        return 1.0
    z = 2.0 * math.sqrt(p / 3.0) * math.sinh(math.asinh(1.5 * math.sqrt(3.0 / p)) / 3.0)
    return min(z**3 / p if p > 1.0 else 1.0 - z, 1.0)


def least_root_momentum(curvature_min: float, curvature_max: float) -> float:
    """√μ at the edge of the robust region."""
    root = math.sqrt(max(curvature_max / curvature_min, 1.0))
    return (root - 1.0) / (root + 1.0)


@dataclass(frozen=True)
class Measurements:
    """The averages of a group's gradients after ``step`` steps, not yet divided by 1 − βᵗ.

    ``window`` has the last squared norms, the oldest first.
    """

    step: int = 0
    window: tuple[float, ...] = ()
    log_min: float = 0.0
    log_max: float = 0.0
    square: float = 0.0
    norm: float = 0.0
    distance: float = 0.0

    def after(self, squared_norm: float, beta: float, width: int, eps: float) -> Measurements:
        """With one more gradient."""
        window = (*self.window, squared_norm)[-width:]
        square = _average(self.square, squared_norm, beta)
        norm = _average(self.norm, math.sqrt(squared_norm), beta)
        lack = 1.0 - beta ** (self.step + 1)
        return Measurements(
            step=self.step + 1,
            window=window,
            log_min=_average(self.log_min, math.log(min(window) + eps), beta),
            log_max=_average(self.log_max, math.log(max(window) + eps), beta),
            square=square,
            norm=norm,
            distance=_average(self.distance, (norm / lack) / (square / lack + eps), beta),
        )

    def curvatures(self, beta: float) -> tuple[float, float]:
        """h_min and h_max."""
        lack = 1.0 - beta**self.step
        return math.exp(self.log_min / lack), math.exp(self.log_max / lack)

    def tuned(self, squared_norm_of_average: float, beta: float, eps: float) -> tuple[float, float]:
        """α and μ, given the squared norm of the average of g, not yet divided by 1 − βᵗ."""
        lack = 1.0 - beta**self.step
        low, high = self.curvatures(beta)
        variance = max(self.square / lack - squared_norm_of_average / lack**2, eps)
        distance = self.distance / lack + eps
        best = best_root_momentum((distance * low) ** 2 / (2.0 * variance))
        root = max(best, least_root_momentum(low, high))
        return (1.0 - root) ** 2 / low, root**2

    def as_json(self) -> Json:
        """For the optimizer's state."""
        return {**asdict(self), "window": list(self.window)}

    @classmethod
    def from_json(cls, stored: Json) -> Self:
        """The inverse of ``as_json``."""
        return cls(**{**stored, "window": tuple(stored["window"])})


def _average(old: float, new: float, beta: float) -> float:
    return beta * old + (1.0 - beta) * new
