r"""Maximum a posteriori: the mode, q = δ(w*).

    minimise  mean NLL(w) − (temperature/n)·log p(w)

symbols: w the random weights, n ``num_data``, p the model's prior. ``temperature=0`` drops the
prior: maximum likelihood, `MLE`. A flat prior on the point parameters (norm layers, learned noise).

With a ``penalty`` (`credo.penalties`) in the prior's place,

    minimise  mean NLL(w) + temperature·λ Σ_ℓ λ_ℓ·r(w_ℓ)

over the same weights; a penalty passes over biases.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Linear(1, 1)
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.MAP(lr=0.1), (x, 3 * x), epochs=150, progress=False)
    >>> round(net.weight.item(), 1)
    3.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.checks import positive
from credo.errors import DataError
from credo.families import Delta
from credo.method import Clock, Info, refuse_nonfinite, segment_norms
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.optim import by_name as optimizers
from credo.penalties import FlatPenalty, Kind, Penalty
from credo.posterior.posterior import Posterior
from credo.storage import under
from credo.temperature import Temperature, check_temperature, temperature_at, temperature_config
from credo.types import Batch, FlatDistribution, Json, Vector


@dataclass
class MAPState:
    """The weights live in the network; the state holds the optimizer and its gradient buffer."""

    model: Model
    flat: FlatParams
    random: Selection
    everything: Selection
    prior: FlatDistribution | FlatPenalty
    num_data: int
    optimizer: Optimizer
    gradient: Vector
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class MAP:
    """Point estimate by gradient descent on the log-posterior.

    ``penalty`` replaces the prior: a `credo.penalties.Penalty`, or the name of a kind for that
    penalty with the strength and factors that make it a prior.

    >>> MAP(penalty="group_lasso").config()["penalty"]["lam"]
    'bayesian'
    """

    temperature: Temperature = 1.0
    optimizer: optimizers.OptimizerSpec = "adam"
    lr: float = 3e-3
    default_epochs: int = 20
    penalty: Penalty | Kind | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        positive("lr", self.lr)
        if isinstance(self.penalty, str):
            object.__setattr__(self, "penalty", Penalty(self.penalty))
        if self.penalty is not None and not isinstance(self.penalty, Penalty):
            raise DataError(
                f'penalty={self.penalty!r} must be a name such as "l2", or a '
                "credo.penalties.Penalty"
            )

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> MAPState:
        """Start from the network's current weights."""
        flat = model.bind()
        flat.forget_gradients()
        gradient = torch.zeros_like(flat.vector)
        flat.vector.grad = gradient
        groups = [
            {"params": [flat.vector, *model.noise_parameters()], "lr": self.lr, "name": "mean"}
        ]
        return MAPState(
            model=model,
            flat=flat,
            random=model.random,
            everything=Selection.of(flat.segments),
            prior=self._pull(model, num_data),
            num_data=num_data,
            optimizer=optimizers.build(self.optimizer, groups),
            gradient=gradient,
        )

    def update(self, state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """One optimizer step on one minibatch."""
        state.clock.begin(state.num_data, len(batch[1]))
        loss = state.model.mean_nll(batch)
        nll = loss.item()
        refuse_nonfinite(nll, state.flat, state.clock)
        loss.backward()
        state.flat.gradient(state.everything, out=state.gradient)
        self._descend(state)
        return state, Info(nll, {})

    def finish(self, state: MAPState, data: Iterable[Batch]) -> MAPState:
        """Nothing is left to do."""
        return state

    def posterior(self, state: MAPState) -> Posterior:
        """The point mass at the weights reached."""
        return Posterior.at_network(state.model, Delta(state.random.read(state.flat.vector)))

    def summary(self, state: MAPState) -> dict[str, Any]:
        """−log prior (MAP's stand-in for the KL) or the penalty, temperature, gradient norms."""
        cost = -float(state.prior.log_prob(state.random.read(state.flat.vector)))
        return {
            **(
                {"negative_log_prior": cost}
                if self.penalty is None
                else {"penalty": cost / state.num_data}
            ),
            "temperature": self._temperature(state),
            "gradient_norm": segment_norms(state.gradient, state.everything),
        }

    def pack(self, state: MAPState) -> tuple[dict[str, Tensor], Json]:
        """Weights and optimizer."""
        tensors, meta = optimizers.pack(state.optimizer)
        return (
            {"weights": state.flat.vector, **{f"optimizer.{k}": v for k, v in tensors.items()}},
            {"optimizer": meta, "step": state.clock.step, "batch": state.clock.batch},
        )

    def unpack(self, state: MAPState, tensors: Mapping[str, Tensor], meta: Json) -> MAPState:
        """The inverse of ``pack``."""
        with state.flat.writing() as vector:
            vector.copy_(tensors["weights"])
        optimizers.unpack(state.optimizer, under("optimizer.", tensors), meta["optimizer"])
        state.clock.step, state.clock.batch = meta["step"], meta["batch"]
        return state

    def config(self) -> Json:
        """The settings, for the run folder."""
        return {
            "type": "MAP",
            "temperature": temperature_config(self.temperature),
            "optimizer": optimizers.describe(self.optimizer),
            "lr": self.lr,
            **({} if self._penalty is None else {"penalty": self._penalty.config()}),
        }

    @property
    def _penalty(self) -> Penalty | None:
        assert not isinstance(self.penalty, str)
        return self.penalty

    def _pull(self, model: Model, num_data: int) -> FlatDistribution | FlatPenalty:
        """What draws the weights to zero: the prior, or a penalty as the logarithm of one."""
        if self._penalty is None:
            return model.prior_over_weights()
        return self._penalty.on(model.random.segments, model.like, num_data)

    def _temperature(self, state: MAPState) -> float:
        clock = state.clock
        return temperature_at(self.temperature, state.random.segments, state.num_data, clock.epoch)

    def _descend(self, state: MAPState) -> None:
        """Add the prior's or penalty's pull to the gradient of the likelihood and step."""
        weight = self._temperature(state) / state.num_data
        if weight:
            self._add_prior(state, weight)
        with state.flat.writing():
            state.optimizer.step()
        for parameter in state.model.noise_parameters():
            parameter.grad = None
        state.clock.tick()

    @torch.no_grad()
    def _add_prior(self, state: MAPState, weight: float) -> None:
        if state.random.is_one_run:
            pull = state.prior.grad_log_prob(state.random.view(state.flat.vector))
            state.random.view(state.gradient).sub_(pull, alpha=weight)
            return
        pull = state.prior.grad_log_prob(state.random.read(state.flat.vector))
        state.random.write(state.gradient, state.random.read(state.gradient) - weight * pull)


def MLE(**settings: Any) -> MAP:
    """Maximum likelihood: `MAP` with temperature 0.

    >>> MLE(lr=0.1).temperature
    0.0
    """
    return MAP(temperature=0.0, **settings)
