"""One training that goes on from temperature to temperature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.families import Delta
from credo.method import Info, Method, TemperedMethod
from credo.metrics import accuracy, ece
from credo.model import Model
from credo.posterior.posterior import Posterior
from credo.temperature import Balanced, temperature_at
from credo.tools.held_out import Split
from credo.tools.temperature_search import TemperatureRow
from credo.train import fit
from credo.train.feed import make_feed
from credo.types import Batch, Json

SCORING_BATCH = 1024


@final
class _Continued(Method[Any]):
    """A method whose ``init`` goes on from a state, so that `fit` needs no second loop."""

    def __init__(self, method: Method[Any], state: Any) -> None:
        self._method, self.state = method, state
        # What `fit` asks of a class is here asked of the method inside.
        self.needs_all_data, self.default_epochs = (  # type: ignore[misc]
            method.needs_all_data, method.default_epochs
        )  # fmt: skip

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> Any:
        """The state of the value before; at the first value, that of the method."""
        if self.state is None:
            self.state = self._method.init(model, num_data, generator)
        return self.state

    def update(self, state: Any, batch: Batch) -> tuple[Any, Info]:
        """The method's."""
        return self._method.update(state, batch)

    def finish(self, state: Any, data: Iterable[Batch]) -> Any:
        """The method's."""
        return self._method.finish(state, data)

    def summary(self, state: Any, nll: float = math.nan) -> dict[str, Any]:
        """The method's."""
        return self._method.summary(state, nll)

    def optimizer_of(self, state: Any) -> Optimizer | None:
        """The method's."""
        return self._method.optimizer_of(state)

    def posterior(self, state: Any) -> Posterior:
        """The method's; the state is kept for the next value."""
        self.state = state
        return self._method.posterior(state)


class TemperaturePath:
    """One state, trained on at one temperature after the other."""

    def __init__(
        self,
        model: Model,
        method: TemperedMethod[Any],
        split: Split,
        samples: int,
        how: dict[str, Any],
    ) -> None:
        self.model, self.method, self.split, self.samples, self.how = (
            model, method, split, samples, how
        )  # fmt: skip
        self.rows: list[TemperatureRow] = []
        self._state: Any = None
        self._best: tuple[float, Posterior, Snapshot, list[warnings.WarningMessage]]
        self._lowest = math.inf

    def train_on(self, temperature: float | Balanced, epochs: int, seed: int) -> None:
        """Add the row of this temperature."""
        continued = _Continued(self.method.at(temperature), self._state)
        # Warnings on a posterior that is not chosen would only confuse.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = fit(
                self.model, continued, self.split.train, epochs=epochs, seed=seed,
                **self.how,
            )  # fmt: skip
        self._state = continued.state
        nll, calibration, correct = _scores(posterior, self.split.held_out, self.samples)
        if nll < self._lowest or not self.rows:
            self._lowest, self._best = nll, (nll, posterior, Snapshot.of(self.model), caught)
        tau = temperature.tau if isinstance(temperature, Balanced) else None
        eta = temperature_at(temperature, self.model.random.segments, self.split.num_data, 0.0)
        last: Json = {"seconds": 0.0, "nll": None}
        last |= posterior.history[-1] if posterior.history else {}
        self.rows.append(
            TemperatureRow(
                tau, eta, nll, calibration, correct, last["seconds"], epochs, last["nll"]
            )
        )

    def leave_at_best(self) -> Posterior:
        """The posterior with the lowest NLL; the network is left at its mean."""
        _, posterior, snapshot, caught = self._best
        snapshot.restore(self.model)
        for warning in caught:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        return posterior


def _scores(
    posterior: Posterior, held_out: Any, samples: int
) -> tuple[float, float | None, float | None]:
    """NLL, ECE and accuracy; the latter two for classifiers."""
    likelihood = posterior.model.likelihood
    log_probs, probs, labels = [], [], []
    draws = 1 if isinstance(posterior.q, Delta) else samples
    feed = make_feed(held_out, SCORING_BATCH, posterior.model)
    for inputs, targets in feed.batches(seed=0, epoch=0):
        predicted = posterior.predict(inputs, samples=draws)
        log_probs.append(predicted.log_prob(targets.to(predicted.outputs.device)))
        if likelihood.kind == "classification":
            probs.append(predicted.probs.cpu())
            labels.append(targets.cpu())
    nll = -float(torch.cat(log_probs).mean())
    if not probs:
        return nll, None, None
    ignored = likelihood.ignore_index
    every, truth = torch.cat(probs), torch.cat(labels)
    return nll, ece(every, truth, ignore_index=ignored), accuracy(every, truth, ignored)


@dataclass(frozen=True)
class Snapshot:
    """Everything that training changes in a model."""

    weights: Tensor
    buffers: dict[str, Tensor]
    noise: list[Tensor]

    @classmethod
    def of(cls, model: Model) -> Snapshot:
        """As the model is now."""
        return cls(
            model.weights(),
            {name: buffer.detach().clone() for name, buffer in model.buffers().items()},
            [parameter.detach().clone() for parameter in model.noise_parameters()],
        )

    def restore(self, model: Model) -> None:
        """Make the model that again."""
        with model.bind().writing() as vector:
            vector.copy_(self.weights)
        with torch.no_grad():
            for name, buffer in model.buffers().items():
                buffer.copy_(self.buffers[name])
            for parameter, value in zip(model.noise_parameters(), self.noise, strict=True):
                parameter.copy_(value)
