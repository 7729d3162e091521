r"""The natural-gradient optimizers as methods for `credo.fit`: VOGN, IVON and Vadam.

Each minimises E_q[n·mean NLL] + temperature·KL(q‖prior) over q = N(m, diag σ²) by the learning
rule; the arithmetic is `credo.optim`'s, with the model's prior and the temperature of this step.
The prior is a Gaussian around zero with one scale for each parameter tensor, as `priors.Normal`
makes it. Point parameters (norm layers) are trained by the same optimizer without noise, learned
noise of the likelihood by Adam.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.IVON(lr=0.05), (x, 3 * x), epochs=150, progress=False)
    >>> round(float(posterior.mean[0]), 1)
    3.0
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from credo import optim
from credo.checks import Count, Decay, NotNegative, Positive, checked
from credo.families import DiagGaussian
from credo.kl import kl_per_segment
from credo.method import (
    NOISE_LR,
    Info,
    TemperedMethod,
    TrainedState,
    refuse_nonfinite,
    temperature_of,
)
from credo.model import Model
from credo.network import FlatParams
from credo.noise import Draws
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.priors.normal import gaussian_around_zero, precision_of_segments
from credo.temperature import DEFAULT_TEMPERATURE, Temperature
from credo.types import Batch
from credo.variational.elbo import elbo


@final
@dataclass
class NaturalState(TrainedState):
    """The weights live in the network, q's curvature in the optimizer."""

    flat: FlatParams = field(metadata=STORED)
    prior: DiagGaussian
    optimizer: NaturalOptimizer = field(metadata=STORED)
    noise_optimizer: Optimizer | None = field(metadata=STORED)


@dataclass(frozen=True)
class NaturalMethod(TemperedMethod[NaturalState]):
    """What the three share; each adds its own settings and builds its own optimizer.

    Args:
        lr: The optimizer's step size.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
    """

    lr: Positive
    betas: tuple[Decay, Decay]
    hess_init: NotNegative
    samples: Count = 1
    temperature: Temperature = DEFAULT_TEMPERATURE
    draws: Draws = "table"

    @abstractmethod
    def _optimizer(
        self, groups: list[Group], net: nn.Module, shared: dict[str, Any]
    ) -> NaturalOptimizer:
        """The optimizer over these groups; ``shared`` are the options that all have."""

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> NaturalState:
        """q centred on the network's current weights."""
        prior = gaussian_around_zero(model.prior_over_weights(), type(self).__name__)
        return self._start(model, num_data, prior, _groups(model, prior), generator)

    def _start(
        self,
        model: Model,
        num_data: int,
        prior: DiagGaussian,
        groups: list[Group],
        generator: Generator | None,
    ) -> NaturalState:
        """The state whose optimizer has these groups."""
        shared = {
            "lr": self.lr,
            "num_data": num_data,
            "betas": self.betas,
            "hess_init": self.hess_init,
            "draws": self.draws,
            "seed": int(torch.randint(2**62, (), generator=generator)),
        }
        noise = model.noise_parameters()
        return NaturalState(
            model=model,
            flat=model.bind(),
            random=model.random,
            prior=prior,
            num_data=num_data,
            optimizer=self._optimizer(groups, model.net, shared),
            noise_optimizer=torch.optim.Adam(noise, lr=NOISE_LR) if noise else None,
        )

    def update(self, state: NaturalState, batch: Batch) -> tuple[NaturalState, Info]:
        """One step on one minibatch."""
        clock, optimizer = state.clock, state.optimizer
        clock.begin(state.num_data, len(batch[1]))
        temperature = temperature_of(self.temperature, state)
        for group in optimizer.param_groups:
            group["temperature"] = temperature
        nll = 0.0
        for _ in range(self.samples):
            with optimizer.sampled():
                loss = state.model.mean_nll(batch)
                nll += loss.item() / self.samples
                loss.backward()
        refuse_nonfinite(nll, state.flat, clock)
        optimizer.step()
        optimizer.zero_grad()
        if state.noise_optimizer is not None:
            for parameter in state.model.noise_parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.samples
            state.noise_optimizer.step()
            state.noise_optimizer.zero_grad()
        clock.tick()
        return state, Info(nll)

    def posterior(self, state: NaturalState) -> Posterior:
        """q, with its own copies of all tensors."""
        return Posterior.at_network(state.model, self._q(state), draws=self.draws)

    def summary(self, state: NaturalState, nll: float = math.nan) -> dict[str, Any]:
        """KL, ELBO, temperature, scales; KL of each segment."""
        q, segments = self._q(state), state.random.segments
        values = kl_per_segment(q, state.prior, [s.size for s in segments]).tolist()
        kl, temperature = sum(values), temperature_of(self.temperature, state)
        return {
            "kl": kl,
            "temperature": temperature,
            "elbo": elbo(nll, kl, temperature, state.num_data),
            "mean_scale": float(q.scale.mean()),
            "kl_segments": dict(zip((s.name for s in segments), values, strict=True)),
        }

    def optimizer_of(self, state: NaturalState) -> Optimizer:
        """The natural-gradient one."""
        return state.optimizer

    def _q(self, state: NaturalState) -> DiagGaussian:
        q = state.optimizer.posterior(state.model.net, state.model.likelihood).q
        assert isinstance(q, DiagGaussian)
        return q


@final
@checked
@dataclass(frozen=True)
class VOGN(NaturalMethod):
    """Variational online Gauss–Newton: curvature from squared gradients of single examples.

    Args:
        lr: Step size.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        damping: Added to the mean's denominator only: the scales stay the posterior's.
    """

    lr: Positive = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    hess_init: Positive = 0.01
    damping: NotNegative = 1e-8

    def _optimizer(
        self, groups: list[Group], net: nn.Module, shared: dict[str, Any]
    ) -> NaturalOptimizer:
        return optim.VOGN(groups, damping=self.damping, module=net, **shared)


@final
@checked
@dataclass(frozen=True)
class IVON(NaturalMethod):
    """Improved variational online Newton: curvature read off gradient times noise.

    Args:
        lr: Step size, about that of SGD.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        clip_radius: The largest step of a weight, in units of the rate.
    """

    lr: Positive = 0.1
    betas: tuple[Decay, Decay] = (0.9, 0.99999)
    hess_init: Positive = 1.0
    clip_radius: Positive | None = None

    def _optimizer(
        self, groups: list[Group], net: nn.Module, shared: dict[str, Any]
    ) -> NaturalOptimizer:
        return optim.IVON(groups, clip_radius=self.clip_radius, **shared)


@final
@checked
@dataclass(frozen=True)
class Vadam(NaturalMethod):
    """Adam with weight noise: squared minibatch gradients for curvature, and a square root.

    Args:
        lr: Step size, that of Adam.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
    """

    lr: Positive = 3e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    hess_init: NotNegative = 0.0

    def _optimizer(
        self, groups: list[Group], net: nn.Module, shared: dict[str, Any]
    ) -> NaturalOptimizer:
        return optim.Vadam(groups, **shared)


def _groups(model: Model, prior: DiagGaussian) -> list[Group]:
    """The random parameters by the precision of their prior, and the point parameters."""
    flat = model.bind()
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    precisions = precision_of_segments(prior, model.random)
    for segment, precision in zip(model.random.segments, precisions, strict=True):
        groups.setdefault(precision, []).append((segment.name, flat.parameter_at[segment.start]))
    random: list[Group] = [{"params": some, "prior_precision": p} for p, some in groups.items()]
    points = [(s.name, flat.parameter_at[s.start]) for s in model.deterministic.segments]
    return [*random, *([{"params": points, "deterministic": True}] if points else [])]
