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
    >>> method = credo.HMC(leapfrog=5, warmup=80)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=180, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]), 1)
    (400, 3.0)

References: Neal 2011; Hoffman & Gelman 2014 (step size); Izmailov et al. 2021; document 000, which
names HMC as what variational inference is to replace.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from credo.checks import positive
from credo.errors import DataError
from credo.method import Clock, Info
from credo.model import Model
from credo.noise import GeneratorNoise, key_to_seed
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
from credo.storage import under
from credo.temperature import Temperature, check_temperature, temperature_config
from credo.types import Batch, Json

_STEP_TENSORS = ("centre", "log_step", "mean", "error")

SHORTEST_WINDOW = 10
"""Fewer draws than that tell nothing of variances."""

SHRINKAGE = 5.0
"""Estimated variances are drawn to their geometric mean as if so many draws had shown it."""


@dataclass
class HMCState:
    """Where the chains are, (chains, P), their steps and masses, and what was kept.

    ``moments`` are count, mean and summed squares of the weights in the current window of warm-up;
    ``accepted`` sums acceptance probabilities since warm-up.
    """

    target: Target
    noise: GeneratorNoise
    positions: Tensor
    inverse_mass: Tensor
    steps: DualAveraging
    moments: tuple[int, Tensor, Tensor]
    trace: Trace
    accepted: Tensor
    divergences: int = 0
    report: ChainReport | None = None
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo with several chains, all data at each step.

    Chains start at the network's weights plus noise of ``spread`` prior scales: starts wider than
    the posterior are what makes R̂ tell. Every ``thin``-th transition after warm-up is kept, and at
    most ``keep`` of each chain.
    """

    temperature: Temperature = 1.0
    chains: int = 4
    leapfrog: int = 20
    target_accept: float = 0.8
    mass: Literal["adapted", "prior"] = "adapted"
    warmup: int = 500
    thin: int = 1
    keep: int = 1000
    spread: float = 1.0
    default_epochs: int = 1000

    needs_all_data: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        for name in ("chains", "leapfrog", "thin", "keep"):
            if positive(name, getattr(self, name)) != int(getattr(self, name)):
                raise DataError(f"{name}={getattr(self, name)} must be a whole number")
        if not 0 < self.target_accept < 1:
            raise DataError(f"target_accept={self.target_accept} must lie between 0 and 1")
        if self.warmup < 0 or self.warmup != int(self.warmup):
            raise DataError(f"warmup={self.warmup} must be a whole number of epochs, 0 or more")
        if not 0 <= self.spread < math.inf:
            raise DataError(f"spread={self.spread} must be a finite number of prior scales")
        if self.mass not in ("adapted", "prior"):
            raise DataError(f'mass={self.mass!r} must be "adapted" or "prior"')

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
            moments=_no_moments(positions),
            trace=Trace(self.keep, self.thin),
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
        return state, Info(float(point.nll.mean()), {})

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
                stacklevel=4,
            )
        return state

    def posterior(self, state: HMCState) -> Posterior:
        """The draws of all chains; during warm-up the weights where they are."""
        return posterior_of(state.trace, state.positions, state.target, state.report)

    def summary(self, state: HMCState) -> dict[str, Any]:
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

    def pack(self, state: HMCState) -> tuple[dict[str, Tensor], Json]:
        """Chains, adaptation and draws."""
        tensors, trace = state.trace.pack()
        count, mean, squares = state.moments
        own = {
            "positions": state.positions,
            "inverse_mass": state.inverse_mass,
            "mean": mean,
            "squares": squares,
            "accepted": state.accepted,
            **{f"steps.{name}": getattr(state.steps, name) for name in _STEP_TENSORS},
        }
        return (
            {**own, **{f"trace.{name}": tensor for name, tensor in tensors.items()}},
            {
                "trace": trace,
                "adapted": state.steps.count,
                "moments": count,
                "divergences": state.divergences,
                "step": state.clock.step,
                "batch": state.clock.batch,
                "seed": state.noise.seed,
            },
        )

    def unpack(self, state: HMCState, tensors: Mapping[str, Tensor], meta: Json) -> HMCState:
        """The inverse of ``pack``."""
        like = state.positions
        state.positions = tensors["positions"].to(like)
        state.inverse_mass = tensors["inverse_mass"].to(like)
        state.trace.unpack(under("trace.", tensors), meta["trace"], like)
        state.moments = (meta["moments"], tensors["mean"].to(like), tensors["squares"].to(like))
        steps = {name: tensors[f"steps.{name}"].to(like.device) for name in _STEP_TENSORS}
        state.steps = DualAveraging(**steps, count=meta["adapted"])
        state.accepted = tensors["accepted"].to(like.device)
        state.divergences = meta["divergences"]
        state.clock.step, state.clock.batch = meta["step"], meta["batch"]
        state.noise = GeneratorNoise(meta["seed"])
        return state

    def config(self) -> Json:
        """The settings, for the run folder."""
        names = ("chains", "leapfrog", "target_accept", "mass", "warmup", "thin", "keep", "spread")
        return {
            "type": "HMC",
            "temperature": temperature_config(self.temperature),
            **{name: getattr(self, name) for name in names},
        }

    def _transition(self, state: HMCState, batch: Batch) -> tuple[Point, Tensor, Tensor]:
        """Where the chains go, their probabilities of moving, and which trajectories diverged."""
        potential: Potential = partial(state.target.at, batch=batch)
        start, clock = potential(state.positions), state.clock
        state.target.refuse_nonfinite(start, clock)
        momentum = self._momentum(state)
        if not state.steps.count and clock.step < max(1, self.warmup):
            found = first_step(potential, start, momentum, state.inverse_mass)
            state.steps = DualAveraging.starting_at(found)
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
        count, mean, squares = state.moments
        count += 1
        change = state.positions - mean
        mean = mean + change / count
        squares = squares + change * (state.positions - mean)
        state.moments = (count, mean, squares)
        if step + 1 not in (2 * quarter, 3 * quarter):
            return
        state.moments = _no_moments(state.positions)
        draws = count * self.chains
        logarithms = (squares.sum(0) / (draws - self.chains)).log()
        shrunk = (draws * logarithms + SHRINKAGE * logarithms.mean()) / (draws + SHRINKAGE)
        if bool(torch.isfinite(shrunk).all()):
            state.inverse_mass = shrunk.exp().expand_as(state.positions).clone()
        state.steps.count = 0


def MALA(**settings: Any) -> HMC:
    """The Metropolis-adjusted Langevin algorithm: `HMC` with trajectories of one step.

    w' = w − ½s²v⊙∇U(w) + s√v⊙ξ, accepted with the probability that makes e^{−U} stationary; about
    0.57 of the proposals are best. Document 000's Langevin Monte Carlo, without its bias.

    >>> MALA(chains=2).leapfrog
    1
    """
    return HMC(leapfrog=1, **{"target_accept": 0.57, **settings})


def _no_moments(positions: Tensor) -> tuple[int, Tensor, Tensor]:
    return 0, torch.zeros_like(positions), torch.zeros_like(positions)


def _choose(moves: Tensor, end: Point, start: Point) -> Point:
    """The end of the trajectory for chains that move, its start for the others."""
    return Point(
        torch.where(moves[:, None], end.weights, start.weights),
        torch.where(moves, end.nll, start.nll),
        torch.where(moves, end.energy, start.energy),
        torch.where(moves[:, None], end.gradient, start.gradient),
    )
