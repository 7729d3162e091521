r"""The original Variational Laplace: a full covariance that follows from the mean.

    maximise  log p(y | μ) + η·log p(μ) − (η/2)·ln|S(μ)|,      q = N(μ, S⁻¹)
    S(μ) = −∇² log p(y | μ)/η − ∇² log p(μ)

symbols: μ the random weights, η ``temperature``, p(μ) the model's normal prior. It is the tempered
ELBO with the likelihood expanded to second order at μ and the covariance at its optimum.

It needs the whole Hessian (P² numbers, differentiated again) and all data at once, because ln|S| of
a sum is no sum of ln|S|: a comparison for small networks. Where the Hessian is so indefinite that S
has no logarithm the iteration stops with `ConvergenceError`; starting from a `MAP` fit helps.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 16, dtype=torch.float64)[:, None]
    >>> net = torch.nn.Linear(1, 1).double()
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1), credo.priors.Normal(10.0))
    >>> method = FullVariationalLaplace(lr=0.1)
    >>> q = credo.fit(model, method, (x, 3 * x), epochs=200, progress=False).q
    >>> type(q).__name__, round(float(q.mean[0]), 2)
    ('FullGaussian', 3.0)

References: Friston et al. 2007; document 002 §3, eq. 9 with the sign it lacks: −½ ln|−H|.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.autodiff.smoothing import refuse_kinks
from credo.autodiff.twice_differentiable import plain_attention
from credo.checks import positive
from credo.errors import ConvergenceError, DataError, UnsupportedError
from credo.families import DiagGaussian, FullGaussian
from credo.kl import kl
from credo.method import Clock, Info, refuse_nonfinite
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.optim import by_name as optimizers
from credo.posterior.posterior import Posterior
from credo.storage import under
from credo.temperature import Temperature, check_temperature, temperature_at, temperature_config
from credo.types import Batch, Json, Vector

MOST_WEIGHTS = 2000
"""Beyond it the graph of the Hessian takes gigabytes."""


@dataclass
class FullVariationalLaplaceState:
    """The mean lives in the network; ``precision`` is the last S, at first the prior's."""

    model: Model
    flat: FlatParams
    everything: Selection
    random: Selection
    prior: DiagGaussian
    num_data: int
    gradient: Vector
    precision: Tensor
    optimizer: Optimizer
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class FullVariationalLaplace:
    """A Gaussian with the inverse Hessian as covariance, centred where the expanded ELBO is best.

    Give `credo.fit` a ``batch_size`` of at least the number of examples.
    """

    temperature: Temperature = 1.0
    optimizer: optimizers.OptimizerSpec = "adam"
    lr: float = 3e-3
    default_epochs: int = 500

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        positive("lr", self.lr)

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> FullVariationalLaplaceState:
        """Start from the network's current weights."""
        flat, prior, size = model.bind(), model.prior_over_weights(), model.random.size
        flat.forget_gradients()
        if not isinstance(prior, DiagGaussian):
            raise UnsupportedError(
                f"the original Variational Laplace is written for a normal prior, not for "
                f"{type(prior).__name__}: use credo.priors.Normal, or credo.VariationalLaplace"
            )
        if size > MOST_WEIGHTS:
            raise UnsupportedError(
                f"{size} random weights have a Hessian of {size**2:.1e} numbers, which is to be "
                f"differentiated: {MOST_WEIGHTS} are the most. Use credo.VariationalLaplace, or "
                'fewer random weights, as with credo.Model(..., random="last_layer")'
            )
        gradient = torch.zeros_like(flat.vector)
        flat.vector.grad = gradient
        trained = [flat.vector, *model.noise_parameters()]
        groups = [{"params": trained, "lr": self.lr, "name": "mean"}]
        return FullVariationalLaplaceState(
            model=model,
            flat=flat,
            everything=Selection.of(flat.segments),
            random=model.random,
            prior=prior,
            num_data=num_data,
            gradient=gradient,
            precision=torch.diag(prior.precision),
            optimizer=optimizers.build(self.optimizer, groups),
        )

    def update(
        self, state: FullVariationalLaplaceState, batch: Batch
    ) -> tuple[FullVariationalLaplaceState, Info]:
        """One optimizer step on all data."""
        inputs, targets = batch
        state.clock.begin(state.num_data, len(targets))
        if len(targets) != state.num_data:
            raise DataError(
                f"a batch of {len(targets)} of {state.num_data} examples: ln|S| can't be split "
                f"over minibatches. Call credo.fit with batch_size={state.num_data}"
            )
        weight = self._temperature(state) / state.num_data
        with plain_attention():
            outputs = state.model.outputs(inputs)
        if not state.clock.step:
            refuse_kinks(outputs, "Variational Laplace")
        nll = state.model.likelihood.mean_nll(outputs, targets)
        refuse_nonfinite(nll.item(), state.flat, state.clock)
        precision = _hessian(nll, state) / weight + torch.diag(state.prior.precision)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if failed:
            raise ConvergenceError(
                f"the Hessian of the log joint is indefinite at step {state.clock.step}: ln|S| "
                "does not exist there. Fit credo.MAP first and start from it, lower lr, or use "
                "credo.VariationalLaplace, whose Fisher information is never negative"
            )
        (nll + weight * factor.diagonal().log().sum()).backward()
        state.precision = precision.detach()
        self._step(state, weight)
        return state, Info(nll.item(), {})

    def finish(
        self, state: FullVariationalLaplaceState, data: Iterable[Batch]
    ) -> FullVariationalLaplaceState:
        """The covariance at the mean that was reached, as far as S is definite there."""
        for inputs, targets in data:
            if len(targets) != state.num_data:
                continue
            with plain_attention():
                nll = state.model.likelihood.mean_nll(state.model.outputs(inputs), targets)
            weight = self._temperature(state) / state.num_data
            precision = _hessian(nll, state).detach() / weight + torch.diag(state.prior.precision)
            if not torch.linalg.cholesky_ex(precision)[1]:
                state.precision = precision
        return state

    def posterior(self, state: FullVariationalLaplaceState) -> Posterior:
        """q, with its own copies of all tensors."""
        return Posterior.at_network(state.model, self._q(state))

    def summary(self, state: FullVariationalLaplaceState) -> dict[str, Any]:
        """KL, temperature, scales."""
        q = self._q(state)
        return {
            "kl": float(kl(q, state.prior)),
            "temperature": self._temperature(state),
            "mean_scale": float(q.scale.mean()),
        }

    def pack(self, state: FullVariationalLaplaceState) -> tuple[dict[str, Tensor], Json]:
        """Weights, precision and optimizer."""
        tensors, meta = optimizers.pack(state.optimizer)
        own = {"weights": state.flat.vector, "precision": state.precision}
        return (
            {**own, **{f"optimizer.{k}": v for k, v in tensors.items()}},
            {"optimizer": meta, "step": state.clock.step, "batch": state.clock.batch},
        )

    def unpack(
        self, state: FullVariationalLaplaceState, tensors: Mapping[str, Tensor], meta: Json
    ) -> FullVariationalLaplaceState:
        """The inverse of ``pack``."""
        with state.flat.writing() as vector:
            vector.copy_(tensors["weights"])
        state.precision.copy_(tensors["precision"])
        optimizers.unpack(state.optimizer, under("optimizer.", tensors), meta["optimizer"])
        state.clock.step, state.clock.batch = meta["step"], meta["batch"]
        return state

    def config(self) -> Json:
        """The settings, for the run folder."""
        return {
            "type": "FullVariationalLaplace",
            "temperature": temperature_config(self.temperature),
            "optimizer": optimizers.describe(self.optimizer),
            "lr": self.lr,
        }

    def _step(self, state: FullVariationalLaplaceState, weight: float) -> None:
        random = state.random
        state.flat.gradient(state.everything, out=state.gradient)
        with state.flat.writing() as vector:
            pull = state.prior.grad_log_prob(random.read(vector))
            random.write(state.gradient, random.read(state.gradient) - weight * pull)
            state.optimizer.step()
        for parameter in state.model.noise_parameters():
            parameter.grad = None
        state.clock.tick()

    def _temperature(self, state: FullVariationalLaplaceState) -> float:
        value = temperature_at(
            self.temperature, state.random.segments, state.num_data, state.clock.epoch
        )
        return positive("the temperature of the original Variational Laplace", value)

    def _q(self, state: FullVariationalLaplaceState) -> FullGaussian:
        return FullGaussian(state.random.read(state.flat.vector), state.precision.clone())


def _hessian(nll: Tensor, state: FullVariationalLaplaceState) -> Tensor:
    """∇² of the mean NLL in the random weights, (P, P), symmetric and differentiable."""
    parameters = [state.flat.parameter_at[s.start] for s in state.random.segments]
    gradient = _flat_gradient(nll, parameters)
    rows = [_flat_gradient(element, parameters) for element in gradient]
    hessian = torch.stack(rows)
    return 0.5 * (hessian + hessian.T)


def _flat_gradient(value: Tensor, parameters: list[torch.nn.Parameter]) -> Vector:
    if not value.requires_grad:
        return torch.cat([torch.zeros_like(p).reshape(-1) for p in parameters])
    gradients = torch.autograd.grad(
        value, parameters, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.reshape(-1) for g in gradients])
