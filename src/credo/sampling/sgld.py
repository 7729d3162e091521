r"""Stochastic gradient Langevin dynamics: draws of the tempered posterior from minibatches.

    w ← w − ½ε·G⊙∇Û(w) + √ε·√G⊙ξ,      Û(w) = (n/η)·(mean NLL of the batch) − log p(w)

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
η      ``temperature``    a number or `credo.Balanced`; draws are of L^{1/η}·p
ε      ``lr``             ε = 2·lr·η/n: ``lr`` is the rate of a gradient step on MAP's loss
G      ``precondition``   1 without; with it 1/√v, v the mean squared gradient in warm-up
ξ                         standard normal, a function of seed, step and chain
====== ================== ==============================================================

No step is ever refused, so the draws are biased: with exact gradients (a ``batch_size`` of all
data: Langevin Monte Carlo, γ = ε/2 in Huix et al. 2022) a posterior of precision A is sampled with
the covariance A⁻¹(I − εA/4)⁻¹ where G = 1, and the noise of minibatches, of covariance C in ∇Û,
adds ¼ε²C to the noise's εI. Less ``lr`` is less bias and slower chains. Where all data fit at once,
`credo.sampling.MALA` and `credo.HMC` have none.

What adapts is G, as in pSGLD: during ``warmup`` epochs v follows the squared gradients as in
RMSprop; then it stays. pSGLD lets it change for ever and neglects the term Γ = ½ε·∂G/∂w of its
drift; here Γ is zero once draws are kept. A falling rate is `credo.fit`'s ``schedule``; draws then
weigh as much as the step they were made with, as in Welling & Teh.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.5))
    >>> method = credo.SGLD(lr=0.1, precondition=False, warmup=20)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=220, batch_size=32, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]))
    (160, 3)

References: Welling & Teh 2011; Li et al. 2016 (pSGLD); Huix et al. 2022 (Langevin Monte Carlo).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Generator, Tensor
from torch.optim import SGD, Optimizer

from credo.checks import Count, NotNegative, Positive, checked
from credo.errors import DataError
from credo.method import Info, State, TemperedMethod
from credo.model import Model
from credo.noise import GeneratorNoise
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.sampling.chains import ChainReport, Target, Trace, posterior_of, report_on, warn_of
from credo.temperature import Temperature
from credo.types import Batch

MEMORY = 0.99
"""The share of v that a step keeps."""

SMALLEST_ROOT = 1e-5
"""Added to √v: a weight without gradients must not take infinite steps."""


@final
@dataclass
class SGLDState(State):
    """Where the chains are, (chains, P), v of their preconditioner, and what was kept.

    The optimizer is plain gradient descent on ``positions``; `credo.fit` changes its rate.
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


@final
@checked
@dataclass(frozen=True)
class SGLD(TemperedMethod[SGLDState]):
    """Langevin dynamics with minibatches and several chains, which see the same batches.

    Args:
        temperature: A number or `credo.Balanced`.
        lr: The rate of a gradient step on MAP's loss; it sets the step size.
        precondition: Whether each weight's step follows its mean squared gradient in warm-up.
        chains: How many.
        warmup: Epochs before draws are kept.
        thin: One in so many steps is kept after that.
        keep: At most so many draws of each chain: when there are more, every second is dropped.
        spread: Chains start at the network's weights plus noise of so many prior scales.
    """

    temperature: Temperature = 1.0
    lr: Positive = 1e-3
    precondition: bool = True
    chains: Count = 4
    warmup: NotNegative = 50.0
    thin: Count = 10
    keep: Count = 100
    spread: NotNegative = 1.0

    default_epochs: ClassVar[int] = 200

    def __post_init__(self) -> None:
        if self.precondition and not self.warmup:
            raise DataError(
                "precondition=True learns its scales during warm-up, and warmup=0 has none: give "
                "some epochs, or precondition=False"
            )

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> SGLDState:
        """The chains around the network's current weights."""
        target = Target.of(model, num_data, self.temperature, "SGLD")
        noise = GeneratorNoise(int(torch.randint(2**62, (), generator=generator)))
        positions = target.starts(self.chains, self.spread, noise)
        gradient = torch.zeros_like(positions)
        positions.grad = gradient
        return SGLDState(
            target=target,
            noise=noise,
            positions=positions,
            gradient=gradient,
            squares=torch.zeros_like(positions),
            optimizer=SGD([{"params": [positions], "lr": self.lr, "name": "mean"}]),
            trace=Trace(self.keep, self.thin, positions.device),
        )

    def update(self, state: SGLDState, batch: Batch) -> tuple[SGLDState, Info]:
        """One step of every chain on one minibatch."""
        clock, target = state.clock, state.target
        clock.begin(target.num_data, len(batch[1]))
        share = target.temperature / target.num_data
        with target.evaluating():
            point = target.at(state.positions, batch)
        target.refuse_nonfinite(point, clock)
        torch.mul(point.gradient, share, out=state.gradient)
        warming = clock.epoch < self.warmup
        rate = float(state.optimizer.param_groups[0]["lr"])
        if not warming:
            state.trace.offer(state.positions, point.nll, rate)
        kick = state.noise.draw(torch.empty_like(state.positions), clock.step)
        if self.precondition:
            if warming:
                state.squares.lerp_(state.gradient.square(), 1 - MEMORY)
                state.adapted += 1
            metric = self._metric(state)
            state.gradient.mul_(metric)
            kick.mul_(metric.sqrt())
        state.optimizer.step()
        state.positions.add_(kick, alpha=math.sqrt(2 * rate * share))
        clock.tick()
        return state, Info(float(point.nll.mean()))

    def finish(self, state: SGLDState, data: Iterable[Batch]) -> SGLDState:
        """Compare the chains; say so if they disagree."""
        state.report = report_on(state.trace, state.target, data)
        warn_of(
            state.report, self.warmup,
            "Run more epochs with more warmup, raise lr if the loss allows it, or lower spread to "
            "start nearer to the network's own weights.",
        )  # fmt: skip
        return state

    def posterior(self, state: SGLDState) -> Posterior:
        """The draws of all chains; during warm-up the weights where they are."""
        return posterior_of(state.trace, state.positions, state.target, state.report)

    def summary(self, state: SGLDState, nll: float = math.nan) -> dict[str, Any]:
        """Temperature, the step's mean size ε·G, and the draws that are kept of each chain."""
        share = state.target.temperature / state.target.num_data
        step = 2 * float(state.optimizer.param_groups[0]["lr"]) * share
        if self.precondition:
            step *= float(self._metric(state).mean())
        return {
            "temperature": state.target.temperature,
            "step_size": step,
            "kept": len(state.trace),
        }

    def optimizer_of(self, state: SGLDState) -> Optimizer:
        """Plain gradient descent, whose rate is that of the chains."""
        return state.optimizer

    def _metric(self, state: SGLDState) -> Tensor:
        """G, (chains, P), from v without the bias of its start at zero."""
        bias = 1 - MEMORY ** max(1, state.adapted)
        return 1 / ((state.squares / bias).sqrt() + SMALLEST_ROOT)
