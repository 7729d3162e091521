r"""Hamiltonian Monte Carlo: exact draws of the tempered posterior, for small networks.

    U(w) = (n/η)·mean NLL(w) − log p(w),      draws of  e^{−U} ∝ L^{1/η}·p

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
η      ``temperature``    a number or `credo.Balanced`; 1 is Bayes's posterior
L      ``leapfrog``       None: until the trajectory would turn back (`credo.sampling.nuts`);
                          a number: leapfrog steps of a trajectory, on average
δ      ``target_accept``  mean acceptance probability wanted; the step size follows
====== ================== ==============================================================

One epoch is one transition of every chain: draw momenta, follow the dynamics of U, go to a point of
the trajectory. By default that is the No-U-Turn sampler, which finds the length of every trajectory
by itself; with ``leapfrog`` it is a random number of steps between L/2 and 3L/2 (a fixed one may
resonate), whose end is accepted with probability min(1, e^{−ΔH}). Each gradient takes all data,
which `credo.fit` hands over whole, whatever its ``batch_size``. Small networks run all chains at
once: there 8 or 16 chains cost little more than 4.

During ``warmup`` epochs each chain adapts its step size by dual averaging, and all chains their
masses to the variances of the weights (``mass="adapted"``, see `credo.sampling.masses`; "prior"
leaves them at the prior's). Afterwards nothing changes, so that the chain has the posterior as its
stationary law; in float32 up to the rounding of U, which cold posteriors of much data notice: use
``net.double()``. Warm-up is a number and no share of the run, so that a run may be resumed or
lengthened.

``posterior.chains`` says whether to trust the draws (R̂, effective sample sizes, also per gradient);
`credo.fit` warns where chains disagree, trajectories diverged or had to be cut short, and says what
to do. The epochs' records have acceptance, step sizes, gradients, divergences and, every 50
transitions, R̂ and the effective sample size of the training NLL.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1).double(), credo.likelihoods.Gaussian(scale=0.1))
    >>> method = credo.HMC(warmup=80)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=180, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]), 1)
    (400, 3.0)
    >>> posterior.chains.r_hat["nll"] < 1.05
    True

References: Neal 2011; Hoffman & Gelman 2014 (the No-U-Turn sampler, the step size); Betancourt
2017; Izmailov et al. 2021; Huix et al. 2022, who name HMC as what variational inference is to
replace.
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
from credo.metrics import effective_sample_size, r_hat
from credo.metrics.chains import FEWEST_DRAWS
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
from credo.sampling.masses import Moments, windows
from credo.sampling.nuts import Trajectory, no_u_turn
from credo.temperature import Temperature
from credo.types import Batch

CHECK_EVERY = 50
"""R̂ and effective size go into the record once in so many draws: they sort all of them."""

WORTH_RECORDING = 50
"""Warm-ups from which on recording the network's operations, which takes seconds, is worth it."""

FEW_CUT = 0.05
"""The share of trajectories that may end before they turn without anybody being told."""


@final
@dataclass
class HMCState(State):
    """Where the chains are, their steps and masses, and what was kept.

    ``point`` has weights, energies and gradients there, the latter from the first update on.
    ``accepted`` sums acceptance probabilities since warm-up; ``gradients`` counts those of all
    chains since then, ``divergences`` and ``cut`` trajectories. ``mixing`` is R̂ and effective size
    of the NLL, once there are enough draws.
    """

    target: Target
    noise: GeneratorNoise
    point: Point = field(metadata=STORED)
    inverse_mass: Tensor = field(metadata=STORED)
    steps: DualAveraging = field(metadata=STORED)
    moments: Moments = field(metadata=STORED)
    trace: Trace = field(metadata=STORED)
    accepted: Tensor = field(metadata=STORED)
    gradients: int = field(default=0, metadata=STORED)
    divergences: int = field(default=0, metadata=STORED)
    cut: int = field(default=0, metadata=STORED)
    mixing: list[float] = field(default_factory=list, metadata=STORED)
    report: ChainReport | None = None

    @property
    def positions(self) -> Tensor:
        """The weights of every chain, (chains, P)."""
        return self.point.weights


@final
@checked
@dataclass(frozen=True)
class HMC(TemperedMethod[HMCState]):
    """Hamiltonian Monte Carlo with several chains, all data at each step; by default it is NUTS.

    Args:
        temperature: A number or `credo.Balanced`; 1 is Bayes's posterior.
        chains: How many.
        leapfrog: Leapfrog steps of a trajectory, on average; None lets every trajectory go on until
            it would turn back (NUTS).
        max_depth: With ``leapfrog=None`` a trajectory has at most 2^max_depth − 1 steps.
        target_accept: Mean acceptance probability wanted; the step size follows.
        mass: "adapted" to the variances seen in warm-up, or "prior".
        warmup: Epochs before draws are kept.
        thin: One in so many transitions is kept after that.
        keep: At most so many draws of each chain: when there are more, every second is dropped.
        spread: Chains start at the network's weights plus noise of so many prior scales: starts
            wider than the posterior are what makes R̂ tell.
    """

    temperature: Temperature = 1.0
    chains: Count = 4
    leapfrog: Count | None = None
    max_depth: Count = 10
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
        record = self.warmup >= WORTH_RECORDING
        target = Target.of(model, num_data, self.temperature, "HMC", record)
        noise = GeneratorNoise(int(torch.randint(2**62, (), generator=generator)))
        positions = target.starts(self.chains, self.spread, noise)
        zeros = torch.zeros(self.chains, dtype=torch.float64, device=positions.device)
        variance = torch.as_tensor(target.prior.scale).to(positions).square()
        return HMCState(
            target=target,
            noise=noise,
            point=Point(positions, zeros.clone(), zeros.clone(), torch.zeros_like(positions)),
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
        with state.target.evaluating():
            found = self._transition(state, batch)
        state.point = found.point
        if clock.step < self.warmup:
            state.steps.observe(found.acceptance, self.target_accept)
            if self.mass == "adapted":
                self._learn_masses(state)
        else:
            state.accepted = state.accepted + found.acceptance
            state.gradients += int(found.gradients.sum())
            state.divergences += int(found.divergent.sum())
            state.cut += int(found.cut.sum())
            state.trace.offer(found.point.weights, found.point.nll)
            self._look_at_chains(state)
        clock.tick()
        return state, Info(float(found.point.nll.mean()))

    def finish(self, state: HMCState, data: Iterable[Batch]) -> HMCState:
        """Compare the chains; say so if they disagree, diverged or were cut short."""
        state.report = report_on(state.trace, state.target, data, state.gradients)
        longer = "" if self.leapfrog is None else "set leapfrog=None, "
        warn_of(
            state.report, self.warmup,
            f"Run more epochs with more warmup, {longer}or lower spread to start nearer to the "
            "network's own weights.",
            predictions=True,
        )  # fmt: skip
        trajectories = self._transitions(state) * self.chains
        if state.divergences:
            warnings.warn(
                f"{state.divergences} of {trajectories} trajectories "
                "diverged: the steps are too long for where U is steepest, and such places are "
                "visited too rarely. Raise target_accept or warmup.",
                stacklevel=5,
            )
        if state.cut and state.cut > FEW_CUT * trajectories:
            warnings.warn(
                f"{state.cut} of {trajectories} trajectories were cut after "
                f"{2**self.max_depth - 1:,} steps, before they would turn back: the draws are "
                "right but depend on each other. Raise max_depth or warmup.",
                stacklevel=5,
            )
        return state

    def posterior(self, state: HMCState) -> Posterior:
        """The draws of all chains; during warm-up the weights where they are."""
        return posterior_of(state.trace, state.positions, state.target, state.report)

    def summary(self, state: HMCState, nll: float = math.nan) -> dict[str, Any]:
        """Temperature, step sizes and, after warm-up, acceptance, divergences, R̂ and its like."""
        record: dict[str, Any] = {
            "temperature": state.target.temperature,
            "step_size": self._step_sizes(state).tolist(),
            "kept": len(state.trace),
        }
        done = self._transitions(state)
        if done > 0:
            record["acceptance"] = (state.accepted / done).tolist()
            record["gradients"] = state.gradients
            record["divergences"] = state.divergences
        if state.mixing:
            worst, size = state.mixing
            record |= {"r_hat": worst, "ess": size, "ess_per_gradient": size / state.gradients}
        return record

    def _transition(self, state: HMCState, batch: Batch) -> Trajectory:
        """Where the chains go, and how they came there."""
        potential: Potential = partial(state.target.at, batch=batch)
        clock, start = state.clock, state.point
        if not clock.step:
            start = potential(start.weights)
            state.target.refuse_nonfinite(start, clock)
        momentum = self._momentum(state)
        if not state.steps.count and clock.step < max(1, self.warmup):
            sizes = first_step(potential, start, momentum, state.inverse_mass)
            state.steps = DualAveraging.starting_at(sizes)
        generator = Generator().manual_seed(key_to_seed(state.noise.seed, clock.step, 1))
        sizes = self._step_sizes(state)
        if self.leapfrog is None:
            return no_u_turn(
                potential, start, momentum, state.inverse_mass, sizes, self.max_depth, generator
            )
        shortest = (self.leapfrog + 1) // 2
        longest = 2 * self.leapfrog - shortest
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        coins = torch.rand(self.chains, dtype=torch.float64, generator=generator)
        end = leapfrog(potential, start, momentum, state.inverse_mass, sizes, length)
        change = energy_change((start, momentum), end, state.inverse_mass)
        acceptance = (-change.clamp(min=0.0)).exp()
        return Trajectory(
            _choose(coins.to(change) < acceptance, end[0], start), acceptance, change > DIVERGENT,
            torch.full_like(change, length), torch.zeros_like(change, dtype=torch.bool),
        )  # fmt: skip

    def _momentum(self, state: HMCState) -> Tensor:
        """Draws of N(0, 1/v)."""
        normal = state.noise.draw(torch.empty_like(state.positions), state.clock.step)
        return normal / state.inverse_mass.sqrt()

    def _step_sizes(self, state: HMCState) -> Tensor:
        adapting = state.clock.step < self.warmup
        return (state.steps.log_step if adapting else state.steps.mean).exp()

    def _transitions(self, state: HMCState) -> int:
        return state.clock.step - self.warmup

    def _look_at_chains(self, state: HMCState) -> None:
        done = self._transitions(state) + 1
        if done % CHECK_EVERY == 0 and len(state.trace) >= FEWEST_DRAWS:
            nll = torch.stack(state.trace.nll, 1)
            state.mixing = [float(r_hat(nll)), float(effective_sample_size(nll))]

    def _learn_masses(self, state: HMCState) -> None:
        """Collect variances in windows of warm-up; use each one's from its end on."""
        step = state.clock.step
        for begin, end in windows(self.warmup):
            if not begin <= step < end:
                continue
            state.moments.observe(state.positions)
            if step + 1 == end:
                variances = state.moments.variances()
                state.moments = Moments.of_nothing(state.positions)
                if variances is not None:
                    state.inverse_mass = variances.expand_as(state.positions).clone()
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
