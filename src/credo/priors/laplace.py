"""The Laplace prior: the sparse, heavy-tailed prior behind an L1 penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Generator, Tensor

from credo.checks import checked
from credo.families.base import check_count, check_points
from credo.priors.scales import FanIn, FlatPrior, PriorRule, Scale, flat_scales
from credo.types import Segment, Vector


@checked
@dataclass(frozen=True)
class Laplace(PriorRule):
    """Density e^(−|w|/b)/(2b) on every weight, with **b = scale/√2**.

    ``scale`` is a STANDARD DEVIATION, as everywhere in Credo; it is *not* the b of textbooks and of
    ``torch.distributions.Laplace(0, b)``, which has standard deviation √2·b. An L1 penalty λ‖w‖₁ is
    the prior with scale = √2/λ. ``scale`` may be a rule of `credo.priors.scales`.

    Args:
        scale: The standard deviation, √2·b: a number, or a rule of `credo.priors.scales`.

    >>> import torch
    >>> segment = Segment("w", (1,), 0, 1, fan_in=1, fan_out=1, layer="", layer_type="Linear")
    >>> Laplace(scale=2.0).on([segment], like=torch.zeros(1)).log_prob(torch.tensor([2.0]))
    tensor(-2.4539)
    >>> torch.distributions.Laplace(0.0, 2.0 / 2**0.5).log_prob(torch.tensor(2.0))
    tensor(-2.4539)
    """

    scale: Scale = 1.0

    @classmethod
    def fan_in(cls, gain: float = 1.0) -> Self:
        """Variance gain²/fan_in: the prior of an L1 penalty λ = √(2·fan_in)/gain.

        Args:
            gain: The standard deviation, times √fan_in.
        """
        return cls(FanIn(gain))

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatLaplace:
        """The density over these segments, one after the other."""
        return FlatLaplace(flat_scales(self.scale, segments, like))


@dataclass(frozen=True, eq=False)
class FlatLaplace(FlatPrior):
    """Independent centred Laplace densities with standard deviations ``scale`` (P,).

    Args:
        scale: Standard deviations, (P,).
    """

    scale: Vector

    @property
    def decay(self) -> Vector:
        """b = scale/√2, the distance over which the density falls by e."""
        return self.scale / math.sqrt(2)

    def log_prob(self, w: Vector) -> Tensor:
        """−Σ |w|/b − Σ ln 2b: (..., P) → (...)."""
        check_points(w, self.size)
        return -(w.abs() / self.decay).sum(-1) - (2 * self.decay).log().sum()

    def grad_log_prob(self, w: Vector) -> Tensor:
        """−sign(w)/b; at the kink w = 0 the subgradient 0."""
        check_points(w, self.size)
        return -w.sign() / self.decay

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """b times the difference of two unit exponentials, (n, P)."""
        check_count(n)
        first, second = self.scale.new_empty(2, n, self.size).exponential_(generator=generator)
        return (first - second) * self.decay
