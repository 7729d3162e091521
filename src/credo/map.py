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
from typing import Any, ClassVar, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.checks import Positive, checked
from credo.families import Delta, DiagGaussian
from credo.method import (
    Info,
    TemperedMethod,
    TrainedState,
    average_over_ranks,
    refuse_nonfinite,
    segment_norms,
    temperature_of,
)
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.network.flat import Gathering
from credo.optim import by_name as optimizers
from credo.packing import STORED
from credo.penalties import FlatPenalty, Kind, Penalty
from credo.posterior.posterior import Posterior
from credo.temperature import Temperature
from credo.types import Batch, FlatDistribution, Vector


@final
class PriorPull:
    """Adds −weight·∇log p(w) to a gradient; that of a Gaussian around zero in one pass."""

    def __init__(
        self, prior: FlatDistribution | FlatPenalty, random: Selection, w: Vector, gradient: Vector
    ) -> None:
        self.prior, self._random = prior, random
        self._all = w, gradient
        self._parts = (random.view(w), random.view(gradient)) if random.is_one_run else None
        self._precision: Tensor | None = None
        if isinstance(prior, DiagGaussian) and not bool(prior.mean.any()):
            precision = prior.precision
            # 1/scale² may overflow where dividing twice by the scale does not.
            self._precision = precision if bool(precision.isfinite().all()) else None

    def add_(self, weight: float) -> None:
        """To the gradient that it was made with, at the weights as they are."""
        if self._parts is None:
            w, gradient = (self._random.read(vector) for vector in self._all)
        else:
            w, gradient = self._parts
        if self._precision is not None:
            gradient.addcmul_(self._precision, w, value=weight)
        else:
            gradient.sub_(self.prior.grad_log_prob(w), alpha=weight)
        if self._parts is None:
            self._random.write(self._all[1], gradient)


@final
@dataclass
class MAPState(TrainedState):
    """The weights live in the network; the state holds the optimizer and its gradient buffer.

    ``pull`` is that of the ``prior``, made anew where another one is set.
    """

    flat: FlatParams = field(metadata=STORED)
    everything: Selection
    prior: FlatDistribution | FlatPenalty
    optimizer: Optimizer = field(metadata=STORED)
    gradient: Vector
    gathering: Gathering
    pull: PriorPull | None = None


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
        everything = Selection.of(flat.segments)
        return MAPState(
            model=model,
            flat=flat,
            random=model.random,
            everything=everything,
            gathering=Gathering(flat, everything, gradient),
            prior=self._pull(model, num_data),
            num_data=num_data,
            optimizer=optimizers.build(self.optimizer, groups),
            gradient=gradient,
        )

    def update(self, state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """One optimizer step on one minibatch."""
        clock, flat = state.clock, state.flat
        clock.begin(state.num_data, len(batch[1]))
        nll = self._gradient(state, batch)
        if state.ranks.several:
            nll = average_over_ranks(state, [state.gradient], nll)
            refuse_nonfinite(nll, flat, clock)
        weight = temperature_of(self.temperature, state) / state.num_data
        if weight:
            if state.pull is None or state.pull.prior is not state.prior:
                state.pull = PriorPull(state.prior, state.random, flat.vector, state.gradient)
            state.pull.add_(weight)
        # Once an epoch all is looked at; in between, what gradients and addresses tell.
        if clock.batch == 0 or not flat.is_in_place():
            flat.check()
        try:
            state.optimizer.step()
        finally:
            flat.tell()
        for parameter in state.noise:
            parameter.grad = None
        clock.tick()
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

    @property
    def looks_at_start(self) -> bool:
        """Yes."""
        return True

    def optimizer_of(self, state: MAPState) -> Optimizer:
        """The one over the weights."""
        return state.optimizer

    def _backward(self, state: MAPState, loss: Tensor) -> float:
        """Leave the loss's gradient in ``state.gradient``, if it is a number; the loss itself."""
        value = loss.item()
        # Several ranks stop together, when they know each other's loss.
        if not state.ranks.several:
            refuse_nonfinite(value, state.flat, state.clock)
        loss.backward()
        state.gathering.take()
        return value

    def _pull_now(self, state: MAPState) -> float:
        return -float(state.prior.log_prob(state.random.read(state.flat.vector)))


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

    spreads: ClassVar[bool] = True

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
