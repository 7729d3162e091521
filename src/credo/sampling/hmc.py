r"""Hamiltonian Monte Carlo: exact draws of the tempered posterior, for small networks.

    U(w) = (n/η)·mean NLL(w) − log p(w),      draws of  e^{−U} ∝ L^{1/η}·p

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
η      ``temperature``    a number or `credo.Balanced`; 1 is Bayes's posterior
L      ``leapfrog``       leapfrog steps of a trajectory, on average
δ      ``target_accept``  share of trajectories to be accepted; the step size follows
====== ================== ==============================================================

One epoch is one transition of every chain: draw momenta, follow the dynamics of U for a random
number of leapfrog steps between L/2 and 3L/2 (a fixed one may resonate), accept with probability
min(1, e^{−ΔH}). Each gradient takes all data, which `credo.fit` hands over whole, whatever its
``batch_size``.

During ``warmup`` epochs each chain adapts its step size by dual averaging and, in the middle half
of it, all chains their masses to the variances of the weights (``mass="adapted"``; "prior" leaves
them at the prior's). Afterwards nothing changes, so that the chain has the posterior as its
stationary law; in float32 up to the rounding of U, which cold posteriors of much data notice: use
``net.double()``.
Warm-up is a number and no share of the run, so that a run may be resumed or lengthened.

``posterior.chains`` says whether to trust the draws (R̂, effective sample sizes); `credo.fit` warns
where chains disagree or trajectories diverged.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1).double(), credo.likelihoods.Gaussian(scale=0.1))
    >>> method = credo.HMC(leapfrog=10, warmup=100)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=400, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]), 1)
    (1200, 3.0)

References: Neal 2011; Hoffman & Gelman 2014 (step size); Izmailov et al. 2021; Huix et al. 2022,
who name HMC as what variational inference is to replace.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Generator, Tensor

from credo.checks import Count, Index, NotNegative, Probability, checked
from credo.errors import DataError
from credo.method import Info, State, TemperedMethod
from credo.model import Model
from credo.noise import GeneratorNoise, key_to_seed
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.sampling.chains import ChainReport, Target, Trace, posterior_of, report_on, warn_of
from credo.sampling.hamiltonian import (
    DIVERGENT,
    DualAveraging,
    Point,
    Potential,
    energy_change,
    first_step,
    leapfrog,
)
from credo.temperature import Temperature
from credo.types import Batch

SHORTEST_WINDOW = 10
"""Fewer draws than that tell nothing of variances."""

SHRINKAGE = 5.0
"""Estimated variances are drawn to their geometric mean as if so many draws had shown it."""


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


@final
@dataclass
class HMCState(State):
    """Where the chains are, (chains, P), their steps and masses, and what was kept.

    ``accepted`` sums acceptance probabilities since warm-up.
    """

    target: Target
    noise: GeneratorNoise
    positions: Tensor = field(metadata=STORED)
    inverse_mass: Tensor = field(metadata=STORED)
    steps: DualAveraging = field(metadata=STORED)
    moments: Moments = field(metadata=STORED)
    trace: Trace = field(metadata=STORED)
    accepted: Tensor = field(metadata=STORED)
    divergences: int = field(default=0, metadata=STORED)
    report: ChainReport | None = None


@final
@checked
@dataclass(frozen=True)
class HMC(TemperedMethod[HMCState]):
    """Hamiltonian Monte Carlo with several chains, all data at each step.

    Args:
        temperature: A number or `credo.Balanced`; 1 is Bayes's posterior.
        chains: How many.
        leapfrog: Leapfrog steps of a trajectory, on average.
        target_accept: Share of trajectories to be accepted; the step size follows.
        mass: "adapted" to the variances seen in warm-up, or "prior".
        warmup: Epochs before draws are kept.
        thin: One in so many transitions is kept after that.
        keep: At most so many draws of each chain: when there are more, every second is dropped.
        spread: Chains start at the network's weights plus noise of so many prior scales: starts
            wider than the posterior are what makes R̂ tell.
    """

    temperature: Temperature = 1.0
    chains: Count = 4
    leapfrog: Count = 20
    target_accept: Probability = 0.8
    mass: Literal["adapted", "prior"] = "adapted"
    warmup: Index = 500
    thin: Count = 1
    keep: Count = 1000
    spread: NotNegative = 1.0

    needs_all_data: ClassVar[bool] = True
    default_epochs: ClassVar[int] = 1000

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> HMCState:
        """The chains around the network's current weights."""
        target = Target.of(model, num_data, self.temperature, "HMC")
        noise = GeneratorNoise(int(torch.randint(2**62, (), generator=generator)))
        positions = target.starts(self.chains, self.spread, noise)
        zeros = torch.zeros(self.chains, dtype=torch.float64, device=positions.device)
        variance = torch.as_tensor(target.prior.scale).to(positions).square()
        return HMCState(
            target=target,
            noise=noise,
            positions=positions,
            inverse_mass=variance.expand_as(positions).clone(),
            steps=DualAveraging.starting_at(torch.ones_like(zeros)),
            moments=Moments.of_nothing(positions),
            trace=Trace(self.keep, self.thin, positions.device),
            accepted=zeros,
        )

    def update(self, state: HMCState, batch: Batch) -> tuple[HMCState, Info]:
        """One transition of every chain."""
        clock, num_data = state.clock, state.target.num_data
        clock.begin(num_data, len(batch[1]))
        if len(batch[1]) != num_data:
            raise DataError(
                f"a batch of {len(batch[1])} of {num_data} examples: HMC accepts or refuses by the "
                f"likelihood of all data. Use batch_size={num_data} in your DataLoader, or "
                "credo.SGLD, which takes minibatches"
            )
        warming = clock.step < self.warmup
        with state.target.evaluating():
            point, acceptance, divergent = self._transition(state, batch)
        state.positions = point.weights
        if warming:
            state.steps.observe(acceptance, self.target_accept)
            if self.mass == "adapted":
                self._learn_masses(state)
        else:
            state.accepted = state.accepted + acceptance
            state.divergences += int(divergent.sum())
            state.trace.offer(point.weights, point.nll)
        clock.tick()
        return state, Info(float(point.nll.mean()))

    def finish(self, state: HMCState, data: Iterable[Batch]) -> HMCState:
        """Compare the chains; say so if they disagree or diverged."""
        state.report = report_on(state.trace, state.target, data)
        warn_of(
            state.report, self.warmup,
            "Run more epochs with more warmup, raise leapfrog, or lower spread to start nearer to "
            "the network's own weights.",
        )  # fmt: skip
        if state.divergences:
            warnings.warn(
                f"{state.divergences} of {self._transitions(state) * self.chains} trajectories "
                "diverged: the steps are too long for where U is steepest, and such places are "
                "visited too rarely. Raise target_accept or warmup.",
                stacklevel=5,
            )
        return state

    def posterior(self, state: HMCState) -> Posterior:
        """The draws of all chains; during warm-up the weights where they are."""
        return posterior_of(state.trace, state.positions, state.target, state.report)

    def summary(self, state: HMCState, nll: float = math.nan) -> dict[str, Any]:
        """Temperature, step sizes and, after warm-up, acceptance and divergences."""
        record: dict[str, Any] = {
            "temperature": state.target.temperature,
            "step_size": self._step_sizes(state).tolist(),
            "kept": len(state.trace),
        }
        done = self._transitions(state)
        if done > 0:
            record["acceptance"] = (state.accepted / done).tolist()
            record["divergences"] = state.divergences
        return record

    def _transition(self, state: HMCState, batch: Batch) -> tuple[Point, Tensor, Tensor]:
        """Where the chains go, their probabilities of moving, and which trajectories diverged."""
        potential: Potential = partial(state.target.at, batch=batch)
        start, clock = potential(state.positions), state.clock
        state.target.refuse_nonfinite(start, clock)
        momentum = self._momentum(state)
        if not state.steps.count and clock.step < max(1, self.warmup):
            sizes = first_step(potential, start, momentum, state.inverse_mass)
            state.steps = DualAveraging.starting_at(sizes)
        generator = Generator().manual_seed(key_to_seed(state.noise.seed, clock.step, 1))
        shortest = (self.leapfrog + 1) // 2
        longest = 2 * self.leapfrog - shortest
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        coins = torch.rand(self.chains, dtype=torch.float64, generator=generator)
        end = leapfrog(
            potential, start, momentum, state.inverse_mass, self._step_sizes(state), length
        )
        change = energy_change((start, momentum), end, state.inverse_mass)
        acceptance = (-change.clamp(min=0.0)).exp()
        return _choose(coins.to(change) < acceptance, end[0], start), acceptance, change > DIVERGENT

    def _momentum(self, state: HMCState) -> Tensor:
        """Draws of N(0, 1/v)."""
        normal = state.noise.draw(torch.empty_like(state.positions), state.clock.step)
        return normal / state.inverse_mass.sqrt()

    def _step_sizes(self, state: HMCState) -> Tensor:
        adapting = state.clock.step < self.warmup
        return (state.steps.log_step if adapting else state.steps.mean).exp()

    def _transitions(self, state: HMCState) -> int:
        return state.clock.step - self.warmup

    def _learn_masses(self, state: HMCState) -> None:
        """Collect variances in two windows; use each one's from its end on.

        They are taken around each chain's own mean and averaged over the chains: one chain's few
        dependent draws would say little, and chains in different modes share a scale, not a place.
        """
        step, quarter = state.clock.step, self.warmup // 4
        if quarter < SHORTEST_WINDOW or not quarter <= step < 3 * quarter:
            return
        state.moments.observe(state.positions)
        if step + 1 not in (2 * quarter, 3 * quarter):
            return
        moments, state.moments = state.moments, Moments.of_nothing(state.positions)
        draws = moments.count * self.chains
        logarithms = (moments.squares.sum(0) / (draws - self.chains)).log()
        shrunk = (draws * logarithms + SHRINKAGE * logarithms.mean()) / (draws + SHRINKAGE)
        if bool(torch.isfinite(shrunk).all()):
            state.inverse_mass = shrunk.exp().expand_as(state.positions).clone()
        state.steps.count = 0


def MALA(**settings: Any) -> HMC:
    """The Metropolis-adjusted Langevin algorithm: `HMC` with trajectories of one step.

    w' = w − ½s²v⊙∇U(w) + s√v⊙ξ, accepted with the probability that makes e^{−U} stationary; about
    0.57 of the proposals are best. The Langevin Monte Carlo of Huix et al. 2022, without its bias.

    Args:
        settings: Those of `HMC` but ``leapfrog``.

    >>> MALA(chains=2).leapfrog
    1
    """
    return HMC(leapfrog=1, **{"target_accept": 0.57, **settings})


def _choose(moves: Tensor, end: Point, start: Point) -> Point:
    """The end of the trajectory for chains that move, its start for the others."""
    return Point(
        torch.where(moves[:, None], end.weights, start.weights),
        torch.where(moves, end.nll, start.nll),
        torch.where(moves, end.energy, start.energy),
        torch.where(moves[:, None], end.gradient, start.gradient),
    )
