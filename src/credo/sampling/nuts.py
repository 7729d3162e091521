r"""Trajectories that end where they would turn back: the No-U-Turn sampler, all chains at once.

A trajectory grows from its start by doubling: 2ʲ leapfrog steps forward or backward, as a coin
says, for j = 0, 1, …. It ends when its ends move towards each other,

    v⊙p₋ · ρ̄ ≤ 0   or   v⊙p₊ · ρ̄ ≤ 0,      ρ̄ = Σ_i p_i − ½(p₋ + p₊)

with p₋, p₊ the momenta at its ends and the sum over all of its points; when a part of it that was
itself made by doubling does, or one of the two halves of such a part together with the nearest
point of the other (without which orbits whose period is near a power of two go round and round); or
when it diverges. The part that was growing then is not used.
The next weights are drawn from the points with probabilities ∝ e^{−H}: within a new part exactly,
between it and what was there with a preference for the new, min(1, W_new/W_old), which leaves
e^{−U} stationary and moves farther.

All chains double together, so that one evaluation of the network serves all that still grow, and
the checks within a part need 3·log₂ of its points in memory: a point with an even number is kept,
with the one before it, until the last part that begins with it is complete.

References: Hoffman & Gelman, "The No-U-Turn Sampler", JMLR 2014; Betancourt, "A conceptual
introduction to Hamiltonian Monte Carlo", 2017 (arXiv:1701.02434; the sum, the draw); Stan's
reference manual (the halves); Phan, Pradhan & Jankowiak, "Composable effects for flexible and
accelerated probabilistic programming in NumPyro", 2019 (arXiv:1912.11554; the loop in place of a
recursion).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self, final

import torch
from torch import Generator, Tensor

from credo.sampling.hamiltonian import DIVERGENT, Point, Potential, kinetic


@final
@dataclass(frozen=True)
class Trajectory:
    """What came of one trajectory of every chain; tensors are (chains,).

    Args:
        point: Where the chains go.
        acceptance: The mean over a trajectory's new points of min(1, e^{−ΔH}).
        divergent: Whether it left the level set of H.
        gradients: How many it took.
        cut: Whether it was still growing when it had to end.
    """

    point: Point
    acceptance: Tensor
    divergent: Tensor
    gradients: Tensor
    cut: Tensor


@dataclass
class _Rows:
    """Tensors whose first dimension is the chain."""

    def at(self, rows: Tensor) -> Self:
        """Of these chains, by number or by mask."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def put(self, rows: Tensor, other: Self) -> None:
        """Write those of ``other`` at these chains."""
        for f in fields(self):
            getattr(self, f.name)[rows] = getattr(other, f.name)


@final
@dataclass
class _End(_Rows):
    """An end of a trajectory."""

    weights: Tensor
    momentum: Tensor
    gradient: Tensor


@final
@dataclass
class _Choice(_Rows):
    """The point that a trajectory would go to now, ln of the summed e^{−ΔH} of all, and Σ p."""

    weights: Tensor
    nll: Tensor
    energy: Tensor
    gradient: Tensor
    log_weight: Tensor
    total: Tensor

    def choose(self, moves: Tensor, other: _Choice) -> None:
        """Go to the other's point where ``moves`` is true."""
        wide = moves[:, None]
        self.weights = torch.where(wide, other.weights, self.weights)
        self.gradient = torch.where(wide, other.gradient, self.gradient)
        self.nll = torch.where(moves, other.nll, self.nll)
        self.energy = torch.where(moves, other.energy, self.energy)


@final
@dataclass
class _Chains(_Rows):
    """What a growing part needs to know of its chains."""

    row: Tensor
    velocity_scale: Tensor
    step: Tensor
    initial: Tensor


def no_u_turn(
    potential: Potential,
    start: Point,
    momentum: Tensor,
    inverse_mass: Tensor,
    step: Tensor,
    max_depth: int,
    generator: Generator,
) -> Trajectory:
    """One trajectory of every chain, of at most 2^max_depth − 1 leapfrog steps.

    Args:
        potential: U and its gradient at weights of some of the chains.
        start: Where the chains are.
        momentum: Their momenta, (chains, P).
        inverse_mass: v, (chains, P).
        step: Sizes of the leapfrog steps, (chains,).
        max_depth: How often a trajectory may double.
        generator: Where directions and draws come from.

    >>> spring = lambda w: Point(w, w[:, 0], 0.5 * w.double().square().sum(1), w)
    >>> here, momentum = torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[0.0, 1.0]] * 2)
    >>> steps, coins = torch.tensor([0.1, 0.2]), torch.Generator().manual_seed(0)
    >>> found = no_u_turn(spring, spring(here), momentum, torch.ones(2, 2), steps, 10, coins)
    >>> found.gradients.tolist()     # the last doubling passes half an orbit: 31 and 16 steps
    [63, 31]
    """
    chains = len(momentum)
    zeros = torch.zeros(chains, dtype=torch.float64, device=momentum.device)
    ends = [_End(start.weights.clone(), momentum.clone(), start.gradient.clone()) for _ in range(2)]
    tree = _Choice(
        start.weights.clone(), start.nll.clone(), start.energy.clone(), start.gradient.clone(),
        zeros.clone(), momentum.clone(),
    )  # fmt: skip
    everyone = _Chains(
        torch.arange(chains, device=momentum.device), inverse_mass, step,
        start.energy + kinetic(momentum, inverse_mass),
    )  # fmt: skip
    sums = _Sums(zeros.clone(), zeros.long(), zeros.bool())
    growing = everyone.row
    for depth in range(max_depth):
        coins = torch.rand(2**depth + 2, chains, dtype=torch.float64, generator=generator)
        coins = coins.to(momentum.device)
        forward = coins[0, growing] < 0.5
        there = everyone.at(growing)
        there.step = torch.where(forward, there.step, -there.step)
        begin = ends[1].at(growing)
        back = growing[~forward]
        begin.put(~forward, ends[0].at(back))
        part, end, first, rows = _grow(potential, begin, there, depth, coins[2:], sums)
        if not len(rows):
            growing = rows
            break
        survives = torch.isin(growing, rows)
        onward, joint = forward[survives], begin.momentum[survives]
        ends[1].put(rows[onward], end.at(onward))
        ends[0].put(rows[~onward], end.at(~onward))
        old = tree.at(rows)
        old.choose(coins[1, rows] < (part.log_weight - old.log_weight).exp(), part)
        old.log_weight = torch.logaddexp(old.log_weight, part.log_weight)
        far = torch.where(onward[:, None], ends[0].momentum[rows], ends[1].momentum[rows])
        turned = _turns(
            torch.stack([far, far, joint]),
            torch.stack([end.momentum, first, end.momentum]),
            torch.stack([old.total + part.total, old.total + first, joint + part.total]),
            inverse_mass[rows],
        ).any(0)
        old.total = old.total + part.total
        tree.put(rows, old)
        growing = rows[~turned]
        if not len(growing):
            break
    cut = zeros.bool()
    cut[growing] = True
    return Trajectory(
        Point(tree.weights, tree.nll, tree.energy, tree.gradient),
        sums.acceptance / sums.gradients.clamp(min=1),
        sums.divergent, sums.gradients, cut,
    )  # fmt: skip


@final
@dataclass
class _Sums:
    """Of the whole trajectory of every chain: Σ min(1, e^{−ΔH}), gradients, whether it diverged."""

    acceptance: Tensor
    gradients: Tensor
    divergent: Tensor


def _grow(
    potential: Potential, end: _End, chains: _Chains, depth: int, coins: Tensor, sums: _Sums
) -> tuple[_Choice, _End, Tensor, Tensor]:
    """2^depth more points; returned for the chains that neither turned nor diverged in them.

    Returns:
        What is chosen of them, the last, the momentum at the first, and the chains' numbers.
    """
    like = end.momentum
    # Of points with even numbers: the momentum, the one before it, the sum of all before it.
    kept = like.new_zeros(3, max(1, depth), len(like), like.shape[1])
    part: _Choice | None = None
    before = like
    for number in range(2**depth):
        size = chains.step[:, None].to(like)
        half = end.momentum - 0.5 * size * end.gradient
        point = potential(end.weights + size * chains.velocity_scale * half)
        end = _End(point.weights, half - 0.5 * size * point.gradient, point.gradient)
        change = point.energy + kinetic(end.momentum, chains.velocity_scale) - chains.initial
        change = torch.nan_to_num(change, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        sums.acceptance[chains.row] += (-change.clamp(min=0.0)).exp()
        sums.gradients[chains.row] += 1
        bad = change > DIVERGENT
        leaf = _Choice(
            point.weights, point.nll, point.energy, point.gradient, -change, end.momentum
        )
        if part is None:
            part = leaf
        else:
            part.log_weight = torch.logaddexp(part.log_weight, leaf.log_weight)
            part.total = part.total + leaf.total
            odds = (leaf.log_weight - part.log_weight).exp()
            part.choose(coins[number, chains.row] < odds, leaf)
        slots = _slots(number)
        if number % 2 == 0:
            kept[:, slots.start] = torch.stack([end.momentum, before, part.total - end.momentum])
            stops = bad
        else:
            stops = bad | _turns_in_parts(kept[:, slots], end.momentum, part.total, chains)
        before = end.momentum
        if bool(stops.any()):
            sums.divergent[chains.row] |= bad
            stay = ~stops
            part, end, chains = part.at(stay), end.at(stay), chains.at(stay)
            kept, before = kept[:, :, stay], before[stay]
            if not len(chains.row):
                break
    assert part is not None
    return part, end, kept[0, 0], chains.row


def _turns_in_parts(kept: Tensor, last: Tensor, total: Tensor, chains: _Chains) -> Tensor:
    """Whether a part that ends here turns, or one of its halves with the other's nearest point.

    ``kept`` are of the points at which those parts begin, the longest part's first; each but the
    longest is the second half of the one before it.
    """
    first, before, earlier = kept
    last = last.expand_as(first)
    turned = _turns(first, last, total - earlier, chains.velocity_scale).any(0)
    if len(first) > 1:
        middle, joint, until = first[1:], before[1:], earlier[1:]
        left = until - earlier[:-1] + middle
        turned |= _turns(first[:-1], middle, left, chains.velocity_scale).any(0)
        turned |= _turns(joint, last[1:], total - until + joint, chains.velocity_scale).any(0)
    return turned


def _slots(number: int) -> slice:
    """Where a point is kept if its number is even, and else which points begin what it ends.

    A part of 2ᵏ points that ends with ``number`` begins 2ᵏ − 1 before it: there is one for every
    trailing one in the binary digits of ``number``.

    >>> [(n, _slots(n).start, _slots(n).stop) for n in (0, 1, 2, 3, 6, 7)]
    [(0, 0, 1), (1, 0, 1), (2, 1, 2), (3, 0, 2), (6, 2, 3), (7, 0, 3)]
    """
    last = (number >> 1).bit_count()
    if number % 2 == 0:
        return slice(last, last + 1)
    trailing = (~number & (number + 1)).bit_length() - 1
    return slice(last - trailing + 1, last + 1)


def _turns(first: Tensor, last: Tensor, total: Tensor, inverse_mass: Tensor) -> Tensor:
    """Whether the ends of trajectories (..., P) move towards each other, (...)."""
    between = inverse_mass * (total - 0.5 * (first + last))
    return ((first * between).sum(-1) <= 0) | ((last * between).sum(-1) <= 0)
