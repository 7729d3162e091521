r"""Hamiltonian dynamics of a potential U: the leapfrog map, and how long its steps may be.

    H(w, p) = U(w) + ½ Σ_i v_i p_i²,      v the inverse masses

    p ← p − ½s∇U(w);   w ← w + s·v⊙p;   p ← p − ½s∇U(w)

The map is reversible (negate p, go back), keeps volume, and conserves H to O(s²). One step from
p = ξ/√v is w ← w − ½s²v⊙∇U(w) + s√v⊙ξ, a Langevin step of size s².

All chains move at once: weights, momenta and inverse masses are (chains, P), step sizes (chains,).

Reference: Neal, "MCMC using Hamiltonian dynamics", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from credo.packing import STORED

DIVERGENT = 1000.0
"""A trajectory whose H grew by more has left the level set: its steps are too long."""


@final
@dataclass(frozen=True)
class Point:
    """Weights of each chain (chains, P) with mean NLL and U (chains,) and ∇U (chains, P)."""

    weights: Tensor = field(metadata=STORED)
    nll: Tensor = field(metadata=STORED)
    energy: Tensor = field(metadata=STORED)
    gradient: Tensor = field(metadata=STORED)


Potential: TypeAlias = Callable[[Tensor], Point]


def kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """½ Σ v p², (chains,)."""
    return 0.5 * (inverse_mass * momentum.square()).double().sum(1)


def leapfrog(
    potential: Potential,
    point: Point,
    momentum: Tensor,
    inverse_mass: Tensor,
    step: Tensor,
    steps: int,
) -> tuple[Point, Tensor]:
    """Where ``steps`` leapfrog steps lead, and with which momentum.

    >>> spring = lambda w: Point(w, w[:, 0], 0.5 * w.square().sum(1), w)
    >>> one = torch.ones(1, 1)
    >>> there, p = leapfrog(spring, spring(one), 0 * one, one, torch.tensor([0.1]), 20)
    >>> back, p = leapfrog(spring, there, -p, one, torch.tensor([0.1]), 20)
    >>> round(float(there.weights), 2), round(float(back.weights), 5)
    (-0.42, 1.0)
    """
    size = step[:, None].to(momentum)
    momentum = momentum - 0.5 * size * point.gradient
    for index in range(steps):
        point = potential(point.weights + size * inverse_mass * momentum)
        share = 0.5 if index == steps - 1 else 1.0
        momentum = momentum - share * size * point.gradient
    return point, momentum


def energy_change(
    before: tuple[Point, Tensor], after: tuple[Point, Tensor], inverse_mass: Tensor
) -> Tensor:
    """H after minus H before, (chains,); ∞ where it is not a number."""
    potential = after[0].energy - before[0].energy
    motion = kinetic(after[1], inverse_mass) - kinetic(before[1], inverse_mass)
    return torch.nan_to_num(potential + motion, nan=math.inf, posinf=math.inf, neginf=-math.inf)


def first_step(
    potential: Potential, point: Point, momentum: Tensor, inverse_mass: Tensor
) -> Tensor:
    """Step sizes whose one leapfrog step is accepted with probability ½ or more, doubled not."""
    step = torch.full_like(point.energy, 0.1)
    direction = torch.zeros_like(step)
    moving = torch.ones_like(step, dtype=torch.bool)
    for _ in range(60):
        end = leapfrog(potential, point, momentum, inverse_mass, step, 1)
        fine = energy_change((point, momentum), end, inverse_mass) < math.log(2)
        wanted = torch.where(fine, 1.0, -1.0).to(step)
        direction = torch.where(direction == 0, wanted, direction)
        moving &= wanted == direction
        if not bool(moving.any()):
            break
        step = torch.where(moving, step * 2.0**direction, step)
    return torch.where(direction > 0, step / 2, step)


@final
@dataclass
class DualAveraging:
    r"""The step size of each chain at which trajectories are accepted as often as wanted.

    With a_t the acceptance probability of transition t and δ the target,

        h ← (1 − 1/(t + t₀))·h + (δ − a_t)/(t + t₀),      ln s = centre − (√t/γ)·h

    and ``mean`` is the average of ln s with weights that forget the beginning. Tensors are
    (chains,). Reference: Hoffman & Gelman, "The No-U-Turn Sampler", JMLR 2014, §3.2, with its
    constants.
    """

    centre: Tensor = field(metadata=STORED)
    log_step: Tensor = field(metadata=STORED)
    mean: Tensor = field(metadata=STORED)
    error: Tensor = field(metadata=STORED)
    count: int = field(default=0, metadata=STORED)

    @classmethod
    def starting_at(cls, step: Tensor) -> DualAveraging:
        """Around these step sizes; the paper aims ten times higher, too far for a short warm-up."""
        return cls(step.log(), step.log(), step.log(), torch.zeros_like(step))

    def observe(self, acceptance: Tensor, target: float) -> None:
        """Take the acceptance probabilities of one transition into account."""
        pull, delay, forgetting = 0.05, 10, 0.75
        self.count += 1
        self.error = self.error + (target - acceptance - self.error) / (self.count + delay)
        self.log_step = self.centre - math.sqrt(self.count) / pull * self.error
        self.mean = self.mean + self.count**-forgetting * (self.log_step - self.mean)
