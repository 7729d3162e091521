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

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.checks import Positive, checked
from credo.families import Delta
from credo.method import (
    Info,
    TemperedMethod,
    TrainedState,
    refuse_nonfinite,
    segment_norms,
    temperature_of,
)
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.optim import by_name as optimizers
from credo.packing import STORED
from credo.penalties import FlatPenalty, Kind, Penalty
from credo.posterior.posterior import Posterior
from credo.temperature import Temperature
from credo.types import Batch, FlatDistribution, Vector


@final
@dataclass
class MAPState(TrainedState):
    """The weights live in the network; the state holds the optimizer and its gradient buffer."""

    flat: FlatParams = field(metadata=STORED)
    everything: Selection
    prior: FlatDistribution | FlatPenalty
    optimizer: Optimizer = field(metadata=STORED)
    gradient: Vector


@dataclass(frozen=True)
class PointMethod(TemperedMethod[MAPState]):
    """Gradient descent to a point: what `MAP` and its regularised relatives share."""

    temperature: Temperature = 1.0
    optimizer: optimizers.OptimizerSpec = "adam"
    lr: Positive = 3e-3

    @abstractmethod
    def _gradient(self, state: MAPState, batch: Batch) -> float:
        """Leave the loss's gradient, prior aside, in ``state.gradient``; the batch's mean NLL."""

    def _pull(self, model: Model, num_data: int) -> FlatDistribution | FlatPenalty:
        """What draws the weights to zero, as a log-density: the prior."""
        return model.prior_over_weights()

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
        nll = self._gradient(state, batch)
        weight = temperature_of(self.temperature, state) / state.num_data
        if weight:
            self._add_prior(state, weight)
        with state.flat.writing():
            state.optimizer.step()
        for parameter in state.model.noise_parameters():
            parameter.grad = None
        state.clock.tick()
        return state, Info(nll)

    def posterior(self, state: MAPState) -> Posterior:
        """The point mass at the weights reached."""
        return Posterior.at_network(state.model, Delta(state.random.read(state.flat.vector)))

    def summary(self, state: MAPState, nll: float = math.nan) -> dict[str, Any]:
        """−log prior (a point's stand-in for the KL), temperature, gradient norms."""
        return {
            "negative_log_prior": self._pull_now(state),
            "temperature": temperature_of(self.temperature, state),
            "gradient_norm": segment_norms(state.gradient, state.everything),
        }

    def optimizer_of(self, state: MAPState) -> Optimizer:
        """The one over the weights."""
        return state.optimizer

    def _backward(self, state: MAPState, loss: Tensor) -> float:
        """Leave the loss's gradient in ``state.gradient``, if it is a number; the loss itself."""
        value = loss.item()
        refuse_nonfinite(value, state.flat, state.clock)
        loss.backward()
        state.flat.gradient(state.everything, out=state.gradient)
        return value

    def _pull_now(self, state: MAPState) -> float:
        return -float(state.prior.log_prob(state.random.read(state.flat.vector)))

    @torch.no_grad()
    def _add_prior(self, state: MAPState, weight: float) -> None:
        if state.random.is_one_run:
            pull = state.prior.grad_log_prob(state.random.view(state.flat.vector))
            state.random.view(state.gradient).sub_(pull, alpha=weight)
            return
        pull = state.prior.grad_log_prob(state.random.read(state.flat.vector))
        state.random.write(state.gradient, state.random.read(state.gradient) - weight * pull)


@final
@checked
@dataclass(frozen=True)
class MAP(PointMethod):
    """Point estimate by gradient descent on the log-posterior.

    Args:
        temperature: Weight of the prior: a number, a schedule, or `credo.Balanced`.
        optimizer: A name such as "adam", a callable that is given the parameter groups, or one of
            these for each group.
        lr: Its learning rate.
        penalty: In the prior's place: a `credo.penalties.Penalty`, or the name of a kind for that
            penalty with the strength and factors that make it a prior.

    >>> MAP(penalty="group_lasso").config()["penalty"]["lam"]
    'bayesian'
    """

    penalty: Penalty | Kind | None = None

    def __post_init__(self) -> None:
        if isinstance(self.penalty, str):
            object.__setattr__(self, "penalty", Penalty(self.penalty))

    def summary(self, state: MAPState, nll: float = math.nan) -> dict[str, Any]:
        """−log prior (MAP's stand-in for the KL) or the penalty, temperature, gradient norms."""
        record = super().summary(state, nll)
        if self.penalty is not None:
            record["penalty"] = record.pop("negative_log_prior") / state.num_data
        return record

    def _gradient(self, state: MAPState, batch: Batch) -> float:
        return self._backward(state, state.model.mean_nll(batch))

    def _pull(self, model: Model, num_data: int) -> FlatDistribution | FlatPenalty:
        """The prior, or a penalty as the logarithm of one."""
        if self.penalty is None:
            return super()._pull(model, num_data)
        assert isinstance(self.penalty, Penalty)  # __post_init__ made it one
        return self.penalty.on(model.random.segments, model.like, num_data)


def MLE(**settings: Any) -> MAP:
    """Maximum likelihood: `MAP` with temperature 0.

    Args:
        settings: Those of `MAP`.

    >>> MLE(lr=0.1).temperature
    0.0
    """
    return MAP(temperature=0.0, **settings)
