"""A bag of weight samples: what ensembles and Markov chains return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import Atomic, check_count, check_floating
from credo.noise import NoiseSource
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class Empirical(Atomic):
    """Mass weights_s / Σ weights at each row of ``samples`` (S, P); equal masses without weights.

    ``mean`` and ``variance`` are the moments of this discrete distribution itself (divided by S,
    not by S − 1). ``bag[i]`` is the i-th sample, a view; ``len(bag)`` is S.

    Args:
        samples: One sample in each row, (S, P).
        weights: Their masses up to a factor, (S,); equal if None.

    >>> bag = Empirical(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    >>> bag.mean, bag.variance, len(bag)
    (tensor([1., 1.]), tensor([1., 0.]), 2)
    """

    samples: Tensor
    weights: Tensor | None = None
    mean: Vector = field(init=False)

    _why_no_density: ClassVar[str] = (
        "a bag of samples puts all its mass on finitely many points. Where a density is needed, "
        "fit one to it: DiagGaussian(bag.mean, bag.variance.sqrt())"
    )

    def __post_init__(self) -> None:
        check_floating(samples=self.samples)
        if self.samples.dim() != 2 or len(self.samples) == 0:
            raise DataError(
                f"samples must be (S, P) with S ≥ 1, got shape {tuple(self.samples.shape)}"
            )
        if self.weights is None:
            mean = self.samples.mean(0)
        else:
            self._check_weights(self.weights)
            # Only a vector over weights may be stored as one number; see Family.pack.
            object.__setattr__(self, "weights", self.weights.contiguous())
            mean = self._weighted_mean(self.samples, self.weights)
        object.__setattr__(self, "mean", mean)

    def _check_weights(self, weights: Tensor) -> None:
        check_floating(samples=self.samples, weights=weights)
        if weights.shape != self.samples.shape[:1]:
            raise DataError(
                f"weights must be ({len(self.samples)},), one per sample, "
                f"got shape {tuple(weights.shape)}"
            )
        if not (torch.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
            raise DataError("weights must be finite, not negative, and not all zero")

    @staticmethod
    def _weighted_mean(values: Tensor, weights: Tensor) -> Vector:
        return (weights / weights.sum()) @ values

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Vector:
        return self.samples[index]

    @property
    def points(self) -> int:
        """S."""
        return len(self)

    @property
    def variance(self) -> Vector:
        """E(w − mean)² over the bag."""
        if self.weights is None:
            return self.samples.var(0, correction=0)
        return self._weighted_mean((self.samples - self.mean).square(), self.weights)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Rows drawn with replacement, (n, P)."""
        check_count(n)
        if self.weights is None:
            device = self.samples.device
            rows = torch.randint(len(self), (n,), generator=generator, device=device)
        else:
            rows = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        return self.samples[rows]

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """Every sample once where they weigh the same and n reaches their number, n of them else.

        More draws of a bag tell nothing new, and drawing with replacement would count some twice.
        Of weighted samples each comes ⌊n·mass⌋ or ⌈n·mass⌉ times, n in all (systematic resampling:
        one uniform number shifts n equally spaced ones, and the masses below each are counted).
        """
        check_count(n)
        if self.weights is None and n >= len(self):
            yield from self.samples
            return
        generator = torch.Generator(self.samples.device).manual_seed(noise.seed)
        if self.weights is None:
            device = self.samples.device
            for row in torch.randperm(len(self), generator=generator, device=device)[:n].tolist():
                yield self.samples[row]
            return
        masses = (self.weights.double() / self.weights.double().sum()).cumsum(0)
        shift = torch.rand((), generator=generator, dtype=torch.float64, device=masses.device)
        marks = (torch.arange(n, dtype=torch.float64, device=masses.device) + shift) / n
        for row in torch.searchsorted(masses, marks).clamp(max=len(self) - 1).tolist():
            yield self.samples[row]
