r"""The prior behind an elastic net: a Laplace density with a Gaussian's tails.

    p(w) = e^(−λ(ρ|w| + (1−ρ)w²))/Z,    Z = √(π/b)·e^{a²/4b}·erfc(a/(2√b))

symbols: ρ ``l1_ratio``, a = λρ, b = λ(1 − ρ). With s² = 1/(2b) and α = as the density of |w|/s is
∝ e^(−αu − u²/2), a normal cut off at zero: its variance is s²·(1 + α² − α·h(α)), h the normal
distribution's hazard rate. λ is chosen for the standard deviation to be ``scale``.

Reference: H. Zou and T. Hastie, "Regularization and variable selection via the elastic net", 2005.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Self, TypeAlias

import torch
from scipy import optimize, special
from torch import Generator, Tensor

from credo.checks import Range, Remedy, checked
from credo.families.base import check_count, check_points
from credo.priors.scales import FanIn, FlatPrior, PriorRule, Scale, flat_scales, segment_scales
from credo.types import Segment, Vector

Ratio: TypeAlias = Annotated[
    float,
    Range(0, 1, open_low=True, open_high=True),
    Remedy(lambda _: 'For 1 take "l1" or credo.priors.Laplace, for 0 "l2" or credo.priors.Normal'),
]
"""The share of absolute values, strictly between 0 and 1: both parts have a weight."""

_CANCELLATION = 10.0
"""From this α on 1 + α² − α·h(α) loses more digits than Tricomi's function has wrong."""


@checked
@dataclass(frozen=True)
class ElasticNet(PriorRule):
    """Density ∝ e^(−λ(ρ|w| + (1−ρ)w²)) on every weight, ρ ``l1_ratio`` strictly between 0 and 1.

    ``scale`` is the standard deviation, a number or a rule of `credo.priors.scales`, and decides λ.
    There is no ½ before the square: scikit-learn's ``ElasticNet`` has one.

    Args:
        scale: The standard deviation: a number, or a rule of `credo.priors.scales`.
        l1_ratio: The share ρ of the absolute values, strictly between 0 and 1; the rest is the
            squares'.

    >>> segment = Segment("w", (1,), 0, 1, fan_in=1, fan_out=1, layer="", layer_type="Linear")
    >>> ElasticNet(scale=1.0).on([segment], like=torch.zeros(1)).grad_log_prob(torch.ones(1))
    tensor([-1.0789])
    """

    scale: Scale = 1.0
    l1_ratio: Ratio = 0.5

    @classmethod
    def fan_in(cls, gain: float = 1.0, l1_ratio: float = 0.5) -> Self:
        """Variance gain²/fan_in.

        Args:
            gain: The standard deviation, times √fan_in.
            l1_ratio: The share ρ of the absolute values, strictly between 0 and 1; the rest is the
                squares'.
        """
        return cls(FanIn(gain), l1_ratio)

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatElasticNet:
        """The density over these segments, one after the other."""
        scale = flat_scales(self.scale, segments, like)
        rates = [elastic_rate(s, self.l1_ratio) for s in segment_scales(self.scale, segments)]
        sizes = torch.tensor([segment.size for segment in segments], device=like.device)
        rate = like.new_tensor(rates).repeat_interleave(sizes, output_size=len(scale))
        return FlatElasticNet(self.l1_ratio * rate, (1 - self.l1_ratio) * rate, scale)


def elastic_variance(rate: float, l1_ratio: float) -> float:
    """The variance of the density with this λ.

    >>> round(elastic_variance(elastic_rate(0.3, 0.5), 0.5), 12)
    0.09
    """
    steepness = rate * l1_ratio / math.sqrt(2 * rate * (1 - l1_ratio))
    if steepness < _CANCELLATION:
        hazard = math.sqrt(2 / math.pi) / special.erfcx(steepness / math.sqrt(2))
        relative = 1 + steepness**2 - steepness * hazard
    else:
        # ∫u^k e^(−αu − u²/2)du is a parabolic cylinder function, and so Tricomi's.
        x = steepness**2 / 2
        relative = special.hyperu(1.5, 0.5, x) / special.hyperu(0.5, 0.5, x)
    return float(relative) / (2 * rate * (1 - l1_ratio))


@lru_cache(maxsize=4096)
def elastic_rate(scale: float, l1_ratio: float) -> float:
    """λ, at which the density has the standard deviation ``scale``."""
    variance = scale**2
    # Either part alone leaves a larger variance than both: 2/a² and 1/(2b).
    high = min(math.sqrt(2) / scale / l1_ratio, 0.5 / variance / (1 - l1_ratio))
    low = high
    while elastic_variance(low, l1_ratio) < variance:
        low /= 2

    def excess(log_rate: float) -> float:
        return math.log(elastic_variance(math.exp(log_rate), l1_ratio) / variance)

    if low == high:
        return high
    return math.exp(optimize.brentq(excess, math.log(low), math.log(high), xtol=1e-15))


@dataclass(frozen=True, eq=False)
class FlatElasticNet(FlatPrior):
    """Independent densities ∝ e^(−a|w| − bw²) with a ``absolute`` and b ``square``, all (P,).

    Args:
        absolute: a, the coefficients of |w|.
        square: b, the coefficients of w².
        scale: The standard deviations.
    """

    absolute: Vector
    square: Vector
    scale: Vector

    @property
    def steepness(self) -> Vector:
        """α = a/√(2b), (P,): how Laplace-like the density is."""
        return self.absolute / (2 * self.square).sqrt()

    def log_prob(self, w: Vector) -> Tensor:
        """−Σ (a|w| + bw² + ln Z): (..., P) → (...)."""
        check_points(w, self.size)
        normaliser = (
            0.5 * (math.pi / self.square).log()
            + torch.special.erfcx(self.steepness / math.sqrt(2)).log()
        )
        return -(self.absolute * w.abs() + self.square * w.square()).sum(-1) - normaliser.sum()

    def grad_log_prob(self, w: Vector) -> Tensor:
        """−a·sign(w) − 2bw; at the kink w = 0 the subgradient 0."""
        check_points(w, self.size)
        return -(self.absolute * w.sign() + 2 * self.square * w)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """By rejection from an exponential or, below α = 1, a half-normal: (n, P).

        Of the one e^(−u²/2) is accepted, of the other e^(−αu): at least half of the draws.
        """
        check_count(n)
        steepness = self.steepness.expand(n, self.size).reshape(-1)
        magnitudes = torch.empty_like(steepness)
        left = torch.arange(len(steepness), device=steepness.device)
        while len(left):
            alpha = steepness[left]
            exponential = torch.empty_like(alpha).exponential_(generator=generator) / alpha
            normal = torch.empty_like(alpha).normal_(generator=generator).abs()
            uniform = torch.empty_like(alpha).uniform_(generator=generator)
            steep = alpha >= 1
            proposed = torch.where(steep, exponential, normal)
            cost = torch.where(steep, proposed.square() / 2, alpha * proposed)
            accepted = uniform < torch.exp(-cost)
            magnitudes[left[accepted]] = proposed[accepted]
            left = left[~accepted]
        signs = torch.empty_like(magnitudes).bernoulli_(0.5, generator=generator) * 2 - 1
        return (signs * magnitudes).view(n, self.size) / (2 * self.square).sqrt()
