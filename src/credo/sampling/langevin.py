"""What samplers by minibatches share: chains around the network, a preconditioner, kept draws."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Generator, Tensor
from torch.optim import SGD, Optimizer

from credo.checks import Count, Decay, NotNegative, Positive
from credo.errors import DataError
from credo.method import Clock, Info, State, TemperedMethod, refuse_unplanned
from credo.model import Model
from credo.noise import GeneratorNoise
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.sampling.chains import ChainReport, Target, Trace, posterior_of, report_on, warn_of
from credo.sampling.cyclical import Place, draws_here, is_sampling, place
from credo.schedules import cosine
from credo.temperature import Temperature
from credo.types import Batch, Json

MEMORY = 0.99
"""The share of v that a step keeps."""

WARM_UP = 0.25
"""The share of training that is warm-up, unless it is said."""

SMALLEST_ROOT = 1e-5
"""Added to √v: a weight without gradients must not take infinite steps."""


@dataclass
class LangevinState(State):
    """Where the chains are, (chains, P), v of their preconditioner, and what was kept.

    ``gradient`` is that of MAP's loss. The optimizer is plain gradient descent on ``positions``;
    `credo.fit` changes its rate.
    """

    target: Target
    noise: GeneratorNoise
    positions: Tensor = field(metadata=STORED)
    gradient: Tensor
    squares: Tensor = field(metadata=STORED)
    optimizer: SGD = field(metadata=STORED)
    trace: Trace = field(metadata=STORED)
    adapted: int = field(default=0, metadata=STORED)
    report: ChainReport | None = None


S = TypeVar("S", bound=LangevinState)


@dataclass(frozen=True)
class LangevinMethod(TemperedMethod[S]):
    """Several chains, which see the same batches; each subclass moves them by a rule of its own.

    Args:
        temperature: A number or `credo.Balanced`.
        lr: The rate of a gradient step on MAP's loss; it sets the step size.
        precondition: Whether each weight's step follows its mean squared gradient in warm-up.
        chains: How many.
        warmup: Epochs before draws are kept; None is a quarter of them, or what ``cycles`` explore.
        thin: One in so many steps is kept after that.
        keep: At most so many draws of each chain: when there are more, every second is dropped; of
            each cycle as many.
        spread: Chains start at the network's weights plus noise of so many prior scales.
        cycles: How often the rate falls to zero, for draws from several modes; None is a rate that
            `credo.fit`'s ``schedule`` says.
        explore: The share of a cycle that is descent without noise, before draws are kept.
    """

    temperature: Temperature = 1.0
    lr: Positive = 1e-3
    precondition: bool = True
    chains: Count = 4
    warmup: NotNegative | None = None
    thin: Count = 10
    keep: Count = 100
    spread: NotNegative = 1.0
    cycles: Count | None = None
    explore: Decay = 0.8

    default_epochs: ClassVar[int] = 200

    def __post_init__(self) -> None:
        if self.precondition and self.warmup == 0:
            raise DataError(
                "precondition=True learns its scales during warm-up, and warmup=0 has none: give "
                "some epochs, or precondition=False"
            )
        if self.cycles is None:
            return
        if self.warmup is not None:
            raise DataError(
                f"warmup={self.warmup:g} and cycles={self.cycles} both say when draws are kept: "
                "give cycles and explore, or warmup alone"
            )
        if self.precondition and not self.explore:
            raise DataError(
                "precondition=True learns its scales while a cycle explores, and explore=0 leaves "
                "no time for it: give a share of a cycle, or precondition=False"
            )
        if self.keep < self.cycles:
            raise DataError(
                f"keep={self.keep} draws can't be of all {self.cycles} cycles: keep at least one "
                "of each"
            )

    @property
    def plans(self) -> bool:
        """Whether the length of training says when draws are kept."""
        return self.warmup is None

    @abstractmethod
    def _move(self, state: S, noise: Tensor | None, rate: float, share: float) -> None:
        """One step of every chain from ``state.gradient``.

        Args:
            state: Whose positions move.
            noise: Standard normal, times √G; it may be used up. None for a step without.
            rate: The learning rate of this step.
            share: η/n, by which MAP's loss is the potential's n-th part.
        """

    def _start(self, model: Model, num_data: int, generator: Generator | None) -> Json:
        """The fields of the state that all have: chains around the network's current weights."""
        target = Target.of(model, num_data, self.temperature, type(self).__name__)
        noise = GeneratorNoise(int(torch.randint(2**62, (), generator=generator)))
        positions = target.starts(self.chains, self.spread, noise)
        positions.grad = torch.zeros_like(positions)
        return {
            "target": target,
            "noise": noise,
            "positions": positions,
            "gradient": positions.grad,
            "squares": torch.zeros_like(positions),
            "optimizer": SGD([{"params": [positions], "lr": self.lr, "name": "mean"}]),
            "trace": Trace(self.keep, 1 if self.cycles else self.thin, positions.device),
        }

    def update(self, state: S, batch: Batch) -> tuple[S, Info]:
        """One step of every chain on one minibatch."""
        clock, target = state.clock, state.target
        clock.begin(target.num_data, len(batch[1]))
        self._check_length(clock)
        share = target.temperature / target.num_data
        with target.evaluating():
            point = target.at(state.positions, batch)
        target.refuse_nonfinite(point, clock)
        torch.mul(point.gradient, share, out=state.gradient)
        warming, rate = self._is_warming(clock), self._rate(state)
        if not warming:
            self._offer(state, point.nll, rate)
        # A cycle descends without noise; chains without cycles have it from the start.
        kick = None
        if not (warming and self.cycles):
            kick = state.noise.draw(torch.empty_like(state.positions), clock.step)
        if self.precondition:
            if warming:
                state.squares.lerp_(state.gradient.square(), 1 - MEMORY)
                state.adapted += 1
            metric = self._metric(state)
            state.gradient.mul_(metric)
            if kick is not None:
                kick.mul_(metric.sqrt())
        self._move(state, kick, rate, share)
        clock.tick()
        return state, Info(float(point.nll.mean()))

    def finish(self, state: S, data: Iterable[Batch]) -> S:
        """Compare the chains; say so if they disagree."""
        state.report = report_on(state.trace, state.target, data)
        longer = "longer cycles" if self.cycles else "more warmup"
        warn_of(
            state.report, self._warmup(state.clock),
            f"Run more epochs with {longer}, raise lr if the loss allows it, or lower spread to "
            "start nearer to the network's own weights.",
        )  # fmt: skip
        return state

    def posterior(self, state: S) -> Posterior:
        """The draws of all chains; during warm-up the weights where they are."""
        refuse_unplanned(self, state.clock)
        return posterior_of(state.trace, state.positions, state.target, state.report)

    def summary(self, state: S, nll: float = math.nan) -> dict[str, Any]:
        """Temperature, the step's mean size ε·G, and the draws that are kept of each chain."""
        share = state.target.temperature / state.target.num_data
        step = 2 * self._rate(state) * share
        if self.precondition:
            step *= float(self._metric(state).mean())
        return {
            "temperature": state.target.temperature,
            "step_size": step,
            "kept": len(state.trace),
        }

    def optimizer_of(self, state: S) -> Optimizer:
        """Plain gradient descent, whose rate is that of the chains."""
        return state.optimizer

    # --- inside -----------------------------------------------------------------------------------

    def _warmup(self, clock: Clock) -> float:
        """Epochs before draws are kept, where there are no cycles."""
        if self.warmup is not None:
            return self.warmup
        return WARM_UP * clock.epochs if clock.epochs else math.inf

    def _is_warming(self, clock: Clock) -> bool:
        """Whether this step is before draws are kept, or before those of its cycle are."""
        if self.cycles is None or not clock.steps:
            return clock.epoch < self._warmup(clock)
        return not is_sampling(self._place(clock), self.explore)

    def _rate(self, state: S) -> float:
        """The learning rate of this step."""
        rate = float(state.optimizer.param_groups[0]["lr"])
        if self.cycles is None or not state.clock.steps:
            return rate
        return rate * cosine(self._place(state.clock).fraction)

    def _offer(self, state: S, nll: Tensor, rate: float) -> None:
        """Keep the weights that this step begins with, if it is their turn."""
        if self.cycles is None:
            state.trace.offer(state.positions, nll, rate)
        elif draws_here(
            self._place(state.clock), self.explore, self.keep // self.cycles, self.thin
        ):
            state.trace.offer(state.positions, nll)

    def _place(self, clock: Clock) -> Place:
        assert self.cycles is not None
        return place(clock.step, clock.steps, self.cycles)

    def _check_length(self, clock: Clock) -> None:
        if self.cycles is not None and clock.step == 0 and 0 < clock.steps < self.cycles:
            raise DataError(
                f"{self.cycles} cycles don't fit into {clock.steps} steps: train for more epochs, "
                "lower batch_size, or ask for fewer cycles"
            )

    def _metric(self, state: S) -> Tensor:
        """G, (chains, P), from v without the bias of its start at zero."""
        bias = 1 - MEMORY ** max(1, state.adapted)
        return 1 / ((state.squares / bias).sqrt() + SMALLEST_ROOT)
