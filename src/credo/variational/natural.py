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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from credo import optim
from credo.checks import positive
from credo.families import DiagGaussian
from credo.kl import kl_per_segment
from credo.method import Clock, Info, refuse_nonfinite
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.noise import Draws
from credo.optim import by_name as optimizers
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group
from credo.posterior.posterior import Posterior
from credo.priors.normal import gaussian_around_zero, precision_of_segments
from credo.storage import under
from credo.temperature import (
    Balanced,
    Temperature,
    check_temperature,
    temperature_at,
    temperature_config,
)
from credo.types import Batch, Json

DEFAULT_TEMPERATURE = Balanced(tau=0.1)
"""That of `VI`."""
NOISE_LR = 3e-3
"""Adam's rate for learned noise: that of `MAP`."""


@dataclass
class NaturalState:
    """The weights live in the network, q's curvature in the optimizer."""

    model: Model
    flat: FlatParams
    random: Selection
    prior: DiagGaussian
    num_data: int
    optimizer: NaturalOptimizer
    noise_optimizer: Optimizer | None
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class NaturalMethod(ABC):
    """What the three share; each adds its own settings and builds its own optimizer.

    ``lr`` is the optimizer's step size, ``betas`` the shares that the averages of gradient and
    curvature keep, ``samples`` the draws in each step, ``draws`` the noise source.
    """

    lr: float
    betas: tuple[float, float]
    hess_init: float
    samples: int = 1
    temperature: Temperature = DEFAULT_TEMPERATURE
    draws: Draws = "table"
    default_epochs: int = 20

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        positive("lr", self.lr)
        positive("samples", self.samples)

    @abstractmethod
    def _optimizer(self, groups: list[Group], net: nn.Module, shared: dict[str, Any]) -> Any:
        """The optimizer over these groups; ``shared`` are the options that all have."""

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> NaturalState:
        """q centred on the network's current weights."""
        prior = gaussian_around_zero(model.prior_over_weights(), type(self).__name__)
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
            optimizer=self._optimizer(_groups(model, prior), model.net, shared),
            noise_optimizer=torch.optim.Adam(noise, lr=NOISE_LR) if noise else None,
        )

    def update(self, state: NaturalState, batch: Batch) -> tuple[NaturalState, Info]:
        """One step on one minibatch."""
        clock, optimizer = state.clock, state.optimizer
        clock.begin(state.num_data, len(batch[1]))
        temperature = self._temperature(state)
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
        return state, Info(nll, {})

    def finish(self, state: NaturalState, data: Iterable[Batch]) -> NaturalState:
        """Nothing is left to do: the network is at the mean."""
        return state

    def posterior(self, state: NaturalState) -> Posterior:
        """q, with its own copies of all tensors."""
        return Posterior.at_network(state.model, self._q(state), draws=self.draws)

    def summary(self, state: NaturalState) -> dict[str, Any]:
        """KL, temperature, scales; KL of each segment."""
        q, segments = self._q(state), state.random.segments
        values = kl_per_segment(q, state.prior, [s.size for s in segments]).tolist()
        return {
            "kl": sum(values),
            "temperature": self._temperature(state),
            "mean_scale": float(q.scale.mean()),
            "kl_segments": dict(zip((s.name for s in segments), values, strict=True)),
        }

    def pack(self, state: NaturalState) -> tuple[dict[str, Tensor], Json]:
        """Weights and optimizers."""
        tensors, meta = optimizers.pack(state.optimizer)
        packed = {"weights": state.flat.vector}
        packed |= {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
        more: Json = {"optimizer": meta, "step": state.clock.step, "batch": state.clock.batch}
        if state.noise_optimizer is not None:
            tensors, more["noise"] = optimizers.pack(state.noise_optimizer)
            packed |= {f"noise.{name}": tensor for name, tensor in tensors.items()}
        return packed, more

    def unpack(
        self, state: NaturalState, tensors: Mapping[str, Tensor], meta: Json
    ) -> NaturalState:
        """The inverse of ``pack``."""
        with state.flat.writing() as vector:
            vector.copy_(tensors["weights"])
        optimizers.unpack(state.optimizer, under("optimizer.", tensors), meta["optimizer"])
        if state.noise_optimizer is not None:
            optimizers.unpack(state.noise_optimizer, under("noise.", tensors), meta["noise"])
        state.clock.step, state.clock.batch = meta["step"], meta["batch"]
        return state

    def config(self) -> Json:
        """The settings, for the run folder."""
        settings = {name: value for name, value in asdict(self).items() if name != "default_epochs"}
        settings["temperature"] = temperature_config(self.temperature)
        return {"type": type(self).__name__, **settings, "betas": list(self.betas)}

    def _q(self, state: NaturalState) -> DiagGaussian:
        q = state.optimizer.posterior(state.model.net, state.model.likelihood).q
        assert isinstance(q, DiagGaussian)
        return q

    def _temperature(self, state: NaturalState) -> float:
        clock = state.clock
        return temperature_at(self.temperature, state.random.segments, state.num_data, clock.epoch)


@dataclass(frozen=True)
class VOGN(NaturalMethod):
    """Variational online Gauss–Newton: curvature from squared gradients of single examples."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    hess_init: float = 0.01
    damping: float = 1e-8

    def _optimizer(self, groups: list[Group], net: nn.Module, shared: dict[str, Any]) -> Any:
        return optim.VOGN(groups, damping=self.damping, module=net, **shared)


@dataclass(frozen=True)
class IVON(NaturalMethod):
    """Improved variational online Newton: curvature read off gradient times noise."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99999)
    hess_init: float = 1.0
    clip_radius: float | None = None

    def _optimizer(self, groups: list[Group], net: nn.Module, shared: dict[str, Any]) -> Any:
        return optim.IVON(groups, clip_radius=self.clip_radius, **shared)


@dataclass(frozen=True)
class Vadam(NaturalMethod):
    """Adam with weight noise: squared minibatch gradients for curvature, and a square root."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    hess_init: float = 0.0

    def _optimizer(self, groups: list[Group], net: nn.Module, shared: dict[str, Any]) -> Any:
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
