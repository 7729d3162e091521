r"""A rate that falls to zero again and again: several modes from one chain.

    lr_t = ½ lr₀ (cos(π r) + 1),      r = (t − 1 mod ⌈T/M⌉)/⌈T/M⌉

====== ============ ====================================================================
symbol argument     meaning
====== ============ ====================================================================
M      ``cycles``   how often the rate falls from lr₀ to zero
T                   steps in all
β      ``explore``  the share of a cycle, r < β, that is descent without noise
====== ============ ====================================================================

A cycle begins at a rate that is high enough to leave the mode of the last one, descends, and draws
samples once r ≥ β, where noise is added and the rate is small enough for little bias. Here cycle c
ends with step ⌊cT/M⌋, so that the last one is as long as the others where M does not divide T.

    >>> from credo.schedules import cosine
    >>> [round(cosine(place(step, 8, cycles=2).fraction), 2) for step in range(8)]
    [1.0, 0.85, 0.5, 0.15, 1.0, 0.85, 0.5, 0.15]

Reference: Zhang, Li, Zhang, Chen & Wilson, "Cyclical stochastic gradient MCMC for Bayesian deep
learning", 2020 (arXiv:1902.03932).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Place(NamedTuple):
    """Where a step is in its cycle: which one, the step's number in it, and how many it has."""

    cycle: int
    step: int
    steps: int

    @property
    def fraction(self) -> float:
        """r, from 0 to less than 1."""
        return self.step / self.steps


def place(step: int, steps: int, cycles: int) -> Place:
    """The place of a step.

    Args:
        step: Steps that were made before it.
        steps: Steps in all, at least one for each cycle; what comes after them is the last cycle's.
        cycles: M.

    >>> place(4, 10, 3)
    Place(cycle=1, step=1, steps=3)
    """
    last = min(step, steps - 1)
    cycle = ((last + 1) * cycles - 1) // steps
    first, end = cycle * steps // cycles, (cycle + 1) * steps // cycles
    return Place(cycle, last - first, end - first)


def is_sampling(at: Place, explore: float) -> bool:
    """Whether noise is added and draws are kept at this step: always at a cycle's last one.

    Args:
        at: The step's place.
        explore: β.
    """
    return at.step >= _first(at, explore)


def draws_here(at: Place, explore: float, most: int, thin: int) -> bool:
    """Whether the weights at this step are kept.

    In every cycle as many are, evenly spaced up to its end: one in ``thin`` steps of its sampling
    part, at most ``most``, and at least one.

    Args:
        at: The step's place.
        explore: β.
        most: Draws of a cycle, at most.
        thin: Steps between two of them, at least.

    >>> [step for step in range(10) if draws_here(Place(0, step, 10), 0.4, most=3, thin=1)]
    [5, 7, 9]
    """
    first = _first(at, explore)
    number, total = at.step - first + 1, at.steps - first
    times = max(1, min(most, total // thin))
    return number > 0 and number * times // total > (number - 1) * times // total


def _first(at: Place, explore: float) -> int:
    return min(math.ceil(explore * at.steps), at.steps - 1)
