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
data, document 000's Langevin Monte Carlo with γ = ε/2) a posterior of precision A is sampled with
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

References: Welling & Teh 2011; Li et al. 2016 (pSGLD); document 000, "Langevin Monte Carlo".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import SGD

from credo.checks import positive
from credo.errors import DataError
from credo.method import Clock, Info
from credo.model import Model
from credo.noise import GeneratorNoise
from credo.optim import by_name as optimizers
from credo.posterior.posterior import Posterior
from credo.sampling.chains import ChainReport, Target, Trace, posterior_of, report_on, warn_of
from credo.storage import under
from credo.temperature import Temperature, check_temperature, temperature_config
from credo.types import Batch, Json

MEMORY = 0.99
"""The share of v that a step keeps."""

SMALLEST_ROOT = 1e-5
"""Added to √v: a weight without gradients must not take infinite steps."""


@dataclass
class SGLDState:
    """Where the chains are, (chains, P), v of their preconditioner, and what was kept.

    The optimizer is plain gradient descent on ``positions``; `credo.fit` changes its rate.
    """

    target: Target
    noise: GeneratorNoise
    positions: Tensor
    gradient: Tensor
    squares: Tensor
    optimizer: SGD
    trace: Trace
    adapted: int = 0
    report: ChainReport | None = None
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class SGLD:
    """Langevin dynamics with minibatches and several chains.

    Chains start at the network's weights plus noise of ``spread`` prior scales and see the same
    batches. After ``warmup`` epochs every ``thin``-th step is kept, and at most ``keep`` of each
    chain: when there are more, every second one is dropped.
    """

    temperature: Temperature = 1.0
    lr: float = 1e-3
    precondition: bool = True
    chains: int = 4
    warmup: float = 50.0
    thin: int = 10
    keep: int = 100
    spread: float = 1.0
    default_epochs: int = 200

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        positive("lr", self.lr)
        for name in ("chains", "thin", "keep"):
            if positive(name, getattr(self, name)) != int(getattr(self, name)):
                raise DataError(f"{name}={getattr(self, name)} must be a whole number")
        for name in ("warmup", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DataError(f"{name}={getattr(self, name)} must be finite and not negative")
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
            trace=Trace(self.keep, self.thin),
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
        return state, Info(float(point.nll.mean()), {})

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

    def summary(self, state: SGLDState) -> dict[str, Any]:
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

    def pack(self, state: SGLDState) -> tuple[dict[str, Tensor], Json]:
        """Chains, preconditioner, rate and draws."""
        tensors, trace = state.trace.pack()
        _, rate = optimizers.pack(state.optimizer)
        own = {"positions": state.positions, "squares": state.squares}
        return (
            {**own, **{f"trace.{name}": tensor for name, tensor in tensors.items()}},
            {
                "trace": trace,
                "optimizer": rate,
                "adapted": state.adapted,
                "step": state.clock.step,
                "batch": state.clock.batch,
                "seed": state.noise.seed,
            },
        )

    def unpack(self, state: SGLDState, tensors: Mapping[str, Tensor], meta: Json) -> SGLDState:
        """The inverse of ``pack``."""
        state.positions.copy_(tensors["positions"])
        state.squares.copy_(tensors["squares"])
        state.trace.unpack(under("trace.", tensors), meta["trace"], state.positions)
        optimizers.unpack(state.optimizer, {}, meta["optimizer"])
        state.adapted = meta["adapted"]
        state.clock.step, state.clock.batch = meta["step"], meta["batch"]
        state.noise = GeneratorNoise(meta["seed"])
        return state

    def config(self) -> Json:
        """The settings, for the run folder."""
        names = ("lr", "precondition", "chains", "warmup", "thin", "keep", "spread")
        return {
            "type": "SGLD",
            "temperature": temperature_config(self.temperature),
            **{name: getattr(self, name) for name in names},
        }

    def _metric(self, state: SGLDState) -> Tensor:
        """G, (chains, P), from v without the bias of its start at zero."""
        bias = 1 - MEMORY ** max(1, state.adapted)
        return 1 / ((state.squares / bias).sqrt() + SMALLEST_ROOT)
