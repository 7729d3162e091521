"""The point mass: what MAP training returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import Atomic, check_count, check_floating
from credo.noise import NoiseSource
from credo.types import Vector


@dataclass(frozen=True, eq=False)
class Delta(Atomic):
    """All mass at ``mean`` (P,).

    It has no density and its entropy is −∞, so ``log_prob`` and ``entropy`` are refused.

    Args:
        mean: Where all mass is, (P,).

    >>> Delta(torch.tensor([1.0, 2.0])).sample(2)
    tensor([[1., 2.],
            [1., 2.]])
    """

    mean: Vector

    _why_no_density: ClassVar[str] = (
        "a point mass is no density. For MAP, score the mean under the prior: prior.log_prob(mean)"
    )

    def __post_init__(self) -> None:
        check_floating(mean=self.mean)
        if self.mean.dim() != 1:
            raise DataError(f"mean must be a vector (P,), got shape {tuple(self.mean.shape)}")

    @property
    def points(self) -> int:
        """One."""
        return 1

    @property
    def variance(self) -> Vector:
        """Zero."""
        return torch.zeros_like(self.mean)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """The mean, n times: (n, P)."""
        check_count(n)
        return self.mean.repeat(n, 1)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """The mean, once: every draw is the same."""
        check_count(n)
        yield self.mean
