r"""The natural-gradient optimizers as methods for `credo.fit`: VOGN, IVON, EVON and Vadam.

Each minimises E_q[n·mean NLL] + temperature·KL(q‖prior) by the learning rule, over
q = N(m, diag σ²) or, `EVON`, over Gaussians that are diagonal in eigenbases of each layer; the
arithmetic is `credo.optim`'s, with the model's prior and the temperature of this step. The prior is
a Gaussian around zero with one scale for each parameter tensor, as `priors.Normal` makes it. Point
parameters (norm layers) are trained by the same optimizer without noise, learned noise of the
likelihood by Adam.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.IVON(lr=1.0), (x, 3 * x), epochs=600, progress=False)
    >>> round(float(posterior.mean[0]), 1)
    3.0
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo import optim
from credo.checks import Count, Decay, NotNegative, Positive, Radius, checked
from credo.errors import DataError
from credo.families import DiagGaussian, EigenKroneckerGaussian
from credo.kl import kl_per_segment
from credo.method import (
    DROWNED,
    NOISE_LR,
    Info,
    TemperedMethod,
    TrainedState,
    average_over_ranks,
    drowned_layer,
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
from credo.temperature import NATURAL_TEMPERATURE, Temperature, temperature_at
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
    """What they share; each adds its own settings and builds its own optimizer.

    Args:
        lr: The optimizer's step size.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value; None starts at a tenth of the prior's scale, see
            `credo.optim.by_layer`.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
    """

    lr: Positive
    betas: tuple[Decay, Decay]
    hess_init: Positive | None = None
    samples: Count = 1
    temperature: Temperature = NATURAL_TEMPERATURE
    draws: Draws = "table"
    shared_noise: bool = False

    spreads: ClassVar[bool] = True

    @abstractmethod
    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> NaturalOptimizer:
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
            "temperature": self._first_temperature(model, num_data),
            "draws": self.draws,
            "seed": int(torch.randint(2**62, (), generator=generator)),
            "shared_noise": self.shared_noise,
            "module": model.net,
        }
        noise = model.noise_parameters()
        return NaturalState(
            model=model,
            flat=model.bind(),
            random=model.random,
            prior=prior,
            num_data=num_data,
            optimizer=self._optimizer(groups, shared),
            noise_optimizer=torch.optim.Adam(noise, lr=NOISE_LR) if noise else None,
        )

    def _first_temperature(self, model: Model, num_data: int) -> float:
        """η at the start, from which the first curvature follows."""
        found = temperature_at(self.temperature, model.random.segments, num_data, epoch=0.0)
        if not found > 0:
            raise DataError(
                f"{type(self).__name__} needs a positive temperature, and it is {found} at the "
                "start: the posterior's width is in proportion to its root. A warm-up may begin at "
                "a small number; for a point estimate take credo.MAP"
            )
        return found

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
        if state.ranks.several:
            nll = average_over_ranks(state, [], nll)
            optimizer.rank_weight = clock.weight
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

    @property
    def looks_at_start(self) -> bool:
        """Yes."""
        return True

    def when_stuck(self, state: NaturalState) -> str:
        """Wide draws want a larger first curvature or a lower temperature, else it is the rate."""
        name, ratio = drowned_layer(self._q(state), state.random)
        if ratio < DROWNED:
            return f"try another lr than {self.lr:g}, which credo.lr_range_test finds"
        temperature = temperature_of(self.temperature, state)
        start = max(group["hess_init"] for group in state.optimizer.param_groups)
        return (
            f"the draws drown the weights, in {name} they are {ratio:.2g} times as large. Lower "
            f"the temperature (now {temperature:.2g}) or raise hess_init (now up to {start:.2g}; "
            "None lets the layers decide), or take a narrower prior"
        )

    def optimizer_of(self, state: NaturalState) -> Optimizer:
        """The natural-gradient one."""
        return state.optimizer

    def _q(self, state: NaturalState) -> DiagGaussian | EigenKroneckerGaussian:
        q = state.optimizer.posterior(state.model.net, state.model.likelihood).q
        assert isinstance(q, DiagGaussian | EigenKroneckerGaussian)
        return q


@final
@checked
@dataclass(frozen=True)
class VOGN(NaturalMethod):
    """Variational online Gauss–Newton: curvature from squared gradients of single examples.

    Args:
        lr: Step size.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value; None starts at a tenth of the prior's scale, see
            `credo.optim.by_layer`.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
        damping: Added to the mean's denominator only: the scales stay the posterior's.
        clip_radius: Natural gradients beyond it are cut, and ``lr`` is the largest step of a
            weight; None is 0.01, or no bound where ``hess_init`` is given.
    """

    lr: Positive = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    damping: NotNegative = 1e-8
    clip_radius: Radius | None = None

    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> NaturalOptimizer:
        return optim.VOGN(groups, damping=self.damping, clip_radius=self.clip_radius, **shared)


@final
@checked
@dataclass(frozen=True)
class IVON(NaturalMethod):
    """Improved variational online Newton: curvature read off gradient times noise.

    Args:
        lr: Step size, about that of SGD.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value; None starts at a tenth of the prior's scale, see
            `credo.optim.by_layer`.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
        clip_radius: The largest step of a weight, in units of the rate; None is 0.01, or no bound
            where ``hess_init`` is given.
    """

    lr: Positive = 0.1
    betas: tuple[Decay, Decay] = (0.9, 0.99999)
    clip_radius: Radius | None = None

    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> NaturalOptimizer:
        return optim.IVON(groups, clip_radius=self.clip_radius, **shared)


@final
@checked
@dataclass(frozen=True)
class EVON(NaturalMethod):
    """IVON in the eigenbases of a layer's gradients: q has correlated weights.

    Args:
        lr: Step size; twice IVON's, because a bound on a direction holds many weights at once.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value; None starts at a tenth of the prior's scale, see
            `credo.optim.by_layer`.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
        clip_radius: The largest step in a direction of the basis, in units of the rate; None is
            0.01, or no bound where ``hess_init`` is given.
        basis_beta: Share that the averages of the gradients' second moments keep.
        refresh: Steps from one refresh of the bases to the next; None leaves them the identity.
        max_size: The longest axis of a weight matrix that gets a basis.
        one_sided: Give a basis to the shorter axis of a matrix only.
        hess_clip: Hold the curvature of a step within this times what it was; None doesn't.
    """

    lr: Positive = 0.2
    betas: tuple[Decay, Decay] = (0.9, 0.99999)
    clip_radius: Radius | None = None
    basis_beta: Decay = 0.95
    refresh: Count | None = 10
    max_size: Count = 256
    one_sided: bool = False
    hess_clip: Positive | None = None

    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> NaturalOptimizer:
        return optim.EVON(
            groups,
            clip_radius=self.clip_radius,
            basis_beta=self.basis_beta,
            refresh=self.refresh,
            max_size=self.max_size,
            one_sided=self.one_sided,
            hess_clip=self.hess_clip,
            **shared,
        )


@final
@checked
@dataclass(frozen=True)
class Vadam(NaturalMethod):
    """Adam with weight noise: squared minibatch gradients for curvature, and a square root.

    Args:
        lr: Step size, that of Adam.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: The curvature's first value; None starts at a tenth of the prior's scale, see
            `credo.optim.by_layer`.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
    """

    lr: Positive = 2e-3
    betas: tuple[Decay, Decay] = (0.9, 0.999)

    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> NaturalOptimizer:
        return optim.Vadam(groups, **shared)


def _groups(model: Model, prior: DiagGaussian) -> list[Group]:
    """The random parameters by the precision of their prior, and the point parameters."""
    flat = model.bind()
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    precisions = precision_of_segments(prior, model.random)
    for segment, precision in zip(model.random.segments, precisions, strict=True):
        groups.setdefault(precision, []).append((segment.name, flat.parameter_at[segment.start]))
    random: list[Group] = [
        {"params": some, "prior_precision": p, "deterministic": False} for p, some in groups.items()
    ]
    points = [(s.name, flat.parameter_at[s.start]) for s in model.deterministic.segments]
    return [*random, *([{"params": points, "deterministic": True}] if points else [])]
