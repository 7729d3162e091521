"""Masses that follow the variances of the weights, learned in growing windows of warm-up.

A first stretch of warm-up lets the chains come down to where the posterior is, a last one lets the
step size settle, and the middle is cut into windows of doubling length, the last one stretched to
the end: each window's variances replace those of the one before, which saw less of the posterior.

Reference: Stan Development Team, "Stan reference manual", chapter "HMC algorithm parameters" (75
transitions, windows from 25 on, 50 transitions). A warm-up below 500 has 15 and 10 % at its ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from credo.packing import STORED

COMING, SETTLING, FIRST_WINDOW = 75, 50, 25
SHORTEST_WINDOW = 20
"""Fewer draws than that tell nothing of variances."""

SHRINKAGE = 5.0
"""Estimated variances are drawn to their geometric mean as if so many draws had shown it."""


def windows(warmup: int) -> list[tuple[int, int]]:
    """First transition and end of each window.

    >>> windows(500)
    [(75, 100), (100, 150), (150, 250), (250, 450)]
    >>> windows(160), windows(60), windows(20)
    ([(24, 49), (49, 144)], [(9, 54)], [])
    """
    begin, last = min(COMING, int(0.15 * warmup)), warmup - min(SETTLING, int(0.1 * warmup))
    found: list[tuple[int, int]] = []
    length = FIRST_WINDOW
    if last - begin < SHORTEST_WINDOW:
        return found
    while begin < last:
        end = begin + length
        length *= 2
        # A next window that does not fit as a whole makes this one longer.
        end = last if end + length > last else end
        found.append((begin, end))
        begin = end
    return found


@final
@dataclass
class Moments:
    """Count, mean and summed squares of the weights in the current window of warm-up."""

    mean: Tensor = field(metadata=STORED)
    squares: Tensor = field(metadata=STORED)
    count: int = field(default=0, metadata=STORED)

    @classmethod
    def of_nothing(cls, positions: Tensor) -> Moments:
        """Before the first of these weights, (chains, P)."""
        return cls(torch.zeros_like(positions), torch.zeros_like(positions))

    def observe(self, positions: Tensor) -> None:
        """Take the weights of one transition into account."""
        self.count += 1
        change = positions - self.mean
        self.mean = self.mean + change / self.count
        self.squares = self.squares + change * (positions - self.mean)

    def variances(self) -> Tensor | None:
        """Of every weight, (P,); None if some weight never moved.

        They are taken around each chain's own mean and averaged over the chains: one chain's few
        dependent draws would say little, and chains in different modes share a scale, not a place.
        """
        chains = len(self.mean)
        draws = self.count * chains
        logarithms = (self.squares.sum(0) / (draws - chains)).log()
        shrunk = (draws * logarithms + SHRINKAGE * logarithms.mean()) / (draws + SHRINKAGE)
        return shrunk.exp() if bool(torch.isfinite(shrunk).all()) else None
