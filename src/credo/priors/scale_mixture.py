"""A mixture of a wide and a narrow normal; spike-and-slab is a choice of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from torch import Generator, Tensor

from credo.checks import Positive, Range, Remedy, checked
from credo.families.base import check_count, check_points
from credo.priors.scales import FlatPrior, PriorRule, total_size
from credo.types import Segment, Vector


@checked
@dataclass(frozen=True)
class ScaleMixture(PriorRule):
    """pi·N(0, scale1²) + (1 − pi)·N(0, scale2²) on every weight; scales are standard deviations.

    Blundell et al. (2015), *Weight uncertainty in neural networks*, eq. 7.

    Args:
        pi: The probability of the first normal, strictly between 0 and 1.
        scale1: The first one's standard deviation.
        scale2: The second one's.

    >>> segment = Segment("w", (1,), 0, 1, fan_in=1, fan_out=1, layer="", layer_type="Linear")
    >>> prior = ScaleMixture(pi=0.25, scale1=2.0, scale2=1.0).on([segment], like=torch.zeros(1))
    >>> prior.scale ** 2                                      # ¼·4 + ¾·1
    tensor([1.7500])
    """

    pi: Annotated[
        float,
        Range(0, 1, open_low=True, open_high=True),
        Remedy(lambda _: "A mixture of one component is credo.priors.Normal(scale)"),
    ] = 0.5
    scale1: Positive = 1.0
    scale2: Positive = math.exp(-6)  # noqa: RUF009 - a number

    @classmethod
    def spike_and_slab(
        cls, slab_probability: float = 0.5, scale: float = 1.0, spike_scale: float = 1e-3
    ) -> Self:
        """A slab N(0, scale²) with the given probability, else a spike at zero.

        The spike is a NARROW NORMAL N(0, spike_scale²), not a point mass: a Dirac spike has no
        density, hence no gradient to train with. That makes this the same distribution as
        ``ScaleMixture(slab_probability, scale, spike_scale)`` and so the same object; draws are
        near zero, never exactly zero. The gradient inside the spike is as steep as
        1/spike_scale²: the narrower the spike, the smaller the learning rate it allows.

        Args:
            slab_probability: How probable it is that a weight comes from the slab.
            scale: The slab's standard deviation.
            spike_scale: The spike's.

        >>> ScaleMixture.spike_and_slab(0.1, scale=2.0)
        ScaleMixture(pi=0.1, scale1=2.0, scale2=0.001)
        """
        return cls(slab_probability, scale, spike_scale)

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatScaleMixture:
        """The density over these segments, one after the other."""
        std = math.sqrt(self.pi * self.scale1**2 + (1 - self.pi) * self.scale2**2)
        scale = like.new_full((), std).expand(total_size(segments))
        return FlatScaleMixture(self.pi, self.scale1, self.scale2, scale)


@dataclass(frozen=True, eq=False)
class FlatScaleMixture(FlatPrior):
    """Independent two-normal mixtures; ``scale`` (P,) is their standard deviation.

    Args:
        pi: The probability of the first normal.
        scale1: The first one's standard deviation.
        scale2: The second one's.
        scale: The mixture's, (P,).
    """

    pi: float
    scale1: float
    scale2: float
    scale: Vector

    def _log_component(self, w: Vector, probability: float, scale: float) -> Vector:
        log_height = math.log(probability / scale) - 0.5 * math.log(2 * math.pi)
        return log_height - 0.5 * (w / scale).square()

    def _log_components(self, w: Vector) -> tuple[Vector, Vector]:
        check_points(w, self.size)
        return (
            self._log_component(w, self.pi, self.scale1),
            self._log_component(w, 1 - self.pi, self.scale2),
        )

    def log_prob(self, w: Vector) -> Tensor:
        """Σ ln(pi·N(w; 0, scale1²) + (1 − pi)·N(w; 0, scale2²)): (..., P) → (...)."""
        return torch.logaddexp(*self._log_components(w)).sum(-1)

    def grad_log_prob(self, w: Vector) -> Tensor:
        """−w·(r/scale1² + (1 − r)/scale2²), r the posterior probability of the first component."""
        log_first, log_second = self._log_components(w)
        first = torch.sigmoid(log_first - log_second)
        second = torch.sigmoid(log_second - log_first)
        # Divided twice because 1/scale² may overflow where the whole term is zero.
        pull1 = w * first / self.scale1 / self.scale1
        pull2 = w * second / self.scale2 / self.scale2
        return -(pull1 + pull2)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """A component for every weight, then a normal draw from it: (n, P)."""
        check_count(n)
        draws = self.scale.new_empty(n, self.size).normal_(generator=generator)
        from_first = torch.empty_like(draws).bernoulli_(self.pi, generator=generator).bool()
        return torch.where(from_first, self.scale1 * draws, self.scale2 * draws)
