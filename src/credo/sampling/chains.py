r"""What samplers share: the tempered posterior as a potential, the draws they keep, and a report.

    U(w) = (n/η)·mean NLL(w) − log p(w),      e^{−U} ∝ L(w)^{1/η} p(w)

symbols: n ``num_data``, η ``temperature``, L the likelihood of all data, p the prior. This is the
posterior that ELBO_η = −η·KL(q‖p) + E_q[log L] approximates: the prior keeps its weight. (Wenzel et
al. 2020 cool the prior too: their posterior at T is this one with a normal prior's s² times T.)

Samplers need a potential that is a function of the weights: the network runs in eval mode, so there
is no dropout and normalisation layers use the statistics that they have. Parameters that are not
random stay as they are; train them first, by `credo.MAP`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from credo.checks import positive
from credo.errors import UnsupportedError
from credo.families import Empirical
from credo.method import Clock, refuse_nonfinite
from credo.metrics import effective_sample_size, r_hat
from credo.metrics.chains import FEWEST_DRAWS
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.network.batches import input_rows, like_weights, pieces
from credo.network.state import evaluating
from credo.noise import GeneratorNoise
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.sampling.hamiltonian import Point
from credo.sampling.traced import Recorder
from credo.temperature import Balanced, Temperature, temperature_at
from credo.types import Batch, FlatDistribution, Inputs, Json, Vector

LARGEST_PASS = 8192
"""Examples in one forward pass; gradients of more are added up."""

PROBES = 32
"""Training inputs at which the predictions of the chains are compared."""

SMALL = 5_000_000
"""Weights times examples up to which all chains at once are faster than one by one: there the price
of a pass is that of calling torch. Measured on two-layer networks, four chains, one CPU thread."""

MOST_WEIGHTS = 1000
"""Weights whose R̂ is computed, evenly spaced among all: it takes a sort of the draws of each."""

UNMIXED = 1.05


@final
@dataclass
class Target:
    """The tempered posterior of a model's random weights, as a potential of several chains.

    Small networks run all chains at once, by vmap; others, and those that vmap can't run, one chain
    after the other. ``together`` is None until the first evaluation has found out. With ``record``
    what runs at once is recorded and replayed; see `credo.sampling.traced`.
    """

    model: Model
    flat: FlatParams
    random: Selection
    prior: FlatDistribution
    num_data: int
    temperature: float
    together: bool | None = None
    record: bool = False
    recorder: Recorder | None = None

    @classmethod
    def of(
        cls, model: Model, num_data: int, temperature: Temperature, method: str,
        record: bool = False,
    ) -> Target:  # fmt: skip
        """The posterior that ``method`` is to sample, or why it can't."""
        if callable(temperature) and not isinstance(temperature, Balanced):
            raise UnsupportedError(
                f"{method} samples one distribution, and a temperature that changes on the way "
                "makes many of it: give a number or credo.Balanced(tau)"
            )
        if model.noise_parameters():
            raise UnsupportedError(
                f"{method} samples the weights and learns nothing besides, but the likelihood has "
                "learned noise. Learn it by credo.MAP first, then freeze it: "
                "likelihood.requires_grad_(False)"
            )
        value = temperature_at(temperature, model.random.segments, num_data, 0.0)
        positive(f"the temperature of {method}", value)
        flat = model.bind()
        flat.forget_gradients()
        prior = model.prior_over_weights()
        return cls(model, flat, model.random, prior, num_data, value, record=record)

    def at(self, weights: Tensor, batch: Batch) -> Point:
        """NLL, U and ∇U at (chains, P); a minibatch stands for all data."""
        if self.together is None:
            self.together = self._can_go_together(weights, batch)
        slope = self._slope_together if self.together else self._slope_in_turn
        nll = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        gradient = torch.zeros_like(weights)
        for share, piece in _pieces(batch):
            values, slopes = slope(weights, piece)
            nll.add_(values, alpha=share)
            gradient.add_(slopes, alpha=share)
        scale = self.num_data / self.temperature
        energy = scale * nll - self.prior.log_prob(weights).double()
        gradient.mul_(scale).sub_(self.prior.grad_log_prob(weights))
        return Point(weights, nll, energy, gradient)

    def starts(self, chains: int, spread: float, noise: GeneratorNoise) -> Tensor:
        """The network's weights plus noise of ``spread`` prior scales, (chains, P)."""
        here = self.random.read(self.flat.vector)
        scale = torch.as_tensor(self.prior.scale, dtype=here.dtype, device=here.device)
        return here + spread * scale * noise.draw(here.new_empty(chains, here.numel()), 0, 2)

    def refuse_nonfinite(self, point: Point, clock: Clock) -> None:
        """Stop if the NLL of a chain is not a number, with its weights in the network."""
        for weights, nll in zip(point.weights, point.nll.tolist(), strict=True):
            if not math.isfinite(nll):
                with self.flat.writing() as vector:
                    self.random.write(vector, weights)
                refuse_nonfinite(nll, self.flat, clock)

    def evaluating(self) -> AbstractContextManager[None]:
        """The network without dropout and batch statistics; its modes are restored."""
        return evaluating(self.model.net, recurrent_gradients=True)

    def _can_go_together(self, weights: Tensor, batch: Batch) -> bool:
        if len(weights) == 1 or self.random.size * len(batch[1]) > SMALL:
            return False
        try:
            # vmap warns where it would be slow.
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self._slope_together(weights, batch)
        except (RuntimeError, ValueError, Warning):
            return False
        return True

    def _slope_together(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        function, data = self._mean_nll(batch)
        weights = weights.detach()
        first = self.recorder is None
        if self.record and not first and self.recorder is not None:
            found = self.recorder(weights, data)
            if found is not None:
                return found
        leaves = weights.requires_grad_()
        values = vmap(function, in_dims=(0, *(None for _ in data)))(leaves, *data)
        (gradient,) = torch.autograd.grad(values.sum(), leaves)
        found = values.detach(), gradient
        if self.record and first and weights.device.type == "cpu":
            self.recorder = Recorder(function)
            found = self.recorder(weights.detach(), data, check=found) or found
        return found

    def _mean_nll(self, batch: Batch) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """The mean NLL as a function of weights and data tensors, and the tensors of this batch."""
        inputs, targets = batch
        places, net = self.random.slices(), self.model.net
        keys = tuple(inputs) if isinstance(inputs, Mapping) else None
        if isinstance(inputs, Tensor):
            tensors: tuple[Tensor, ...] = (inputs,)
        else:
            tensors = tuple(inputs.values()) if isinstance(inputs, Mapping) else tuple(inputs)

        def mean_nll(vector: Vector, *data: Tensor) -> Tensor:
            *given, wanted = data
            parameters = {
                s.name: vector[places[s.name]].view(s.shape) for s in self.random.segments
            }
            args, named = (tuple(given), {}) if keys is None else \
                ((), dict(zip(keys, given, strict=True)))  # fmt: skip
            outputs = functional_call(net, parameters, args, named)
            return self.model.likelihood.mean_nll(outputs, wanted)

        return mean_nll, (*tensors, targets)

    def _slope_in_turn(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        parameters = [self.flat.parameter_at[s.start] for s in self.random.segments]
        values, gradient = [], torch.empty_like(weights)
        for chain, vector in enumerate(weights):
            with self.flat.writing() as shown:
                self.random.write(shown, vector)
            loss = self.model.mean_nll(batch)
            loss.backward(inputs=parameters)
            self.flat.gradient(self.random, out=gradient[chain])
            values.append(loss.detach())
        return torch.stack(values), gradient


@final
@dataclass
class Trace:
    """Draws of every chain, at most ``keep`` of each: when full, every second one is dropped.

    So what is kept covers the run evenly, whenever it ends. ``masses`` are the draws' weights.
    """

    keep: int
    stride: int
    device: torch.device | None = None
    seen: int = 0
    draws: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.draws)

    def offer(self, positions: Tensor, nll: Tensor, mass: float = 1.0) -> None:
        """Keep these weights (chains, P) and their NLL (chains,), if it is their turn."""
        if self.seen % self.stride == 0:
            self.draws.append(positions.clone())
            self.nll.append(nll.cpu())
            self.masses.append(mass)
            if len(self) > self.keep:
                self.stride *= 2
                self.draws, self.nll = self.draws[::2], self.nll[::2]
                self.masses = self.masses[::2]
        self.seen += 1

    def bag(self, otherwise: Tensor) -> Empirical:
        """All draws of all chains, one chain after the other; ``otherwise`` if there are none."""
        if not self.draws:
            return Empirical(otherwise.clone())
        samples = torch.stack(self.draws, 1).flatten(0, 1)
        if len(set(self.masses)) == 1:
            return Empirical(samples)
        masses = samples.new_tensor(self.masses).repeat(len(otherwise))
        return Empirical(samples, masses)

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything, for a checkpoint."""
        tensors = {"draws": torch.stack(self.draws), "nll": torch.stack(self.nll)} if self.draws \
            else {}  # fmt: skip
        return tensors, {"stride": self.stride, "seen": self.seen, "masses": self.masses}

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``."""
        self.stride, self.seen, self.masses = meta["stride"], meta["seen"], list(meta["masses"])
        self.draws = [d.to(self.device) for d in tensors["draws"]] if "draws" in tensors else []
        self.nll = list(tensors["nll"]) if "nll" in tensors else []


@final
@dataclass(frozen=True)
class ChainReport:
    """Whether the chains can be trusted.

    ``nll`` is the training NLL of every draw, (chains, draws). ``r_hat`` and ``ess`` have entries
    "nll", "weights_median" and "predictions_median", and the worst as "weights_max" and
    "predictions_max" or "weights_min" and "predictions_min"; none with fewer than four draws of a
    chain. Weights of a network have many equivalent places, so chains that differ in them may well
    agree in what they predict: predictions and NLL are what counts. ``gradients`` are those that
    the draws took, of all chains; None where a method does not count them.
    """

    nll: Tensor
    r_hat: dict[str, float] = field(default_factory=dict)
    ess: dict[str, float] = field(default_factory=dict)
    gradients: int | None = None

    @property
    def ess_per_gradient(self) -> dict[str, float]:
        """Effective draws for one gradient of all data, with the entries of ``ess``."""
        return {name: size / self.gradients for name, size in self.ess.items()} \
            if self.gradients else {}  # fmt: skip

    @property
    def converged(self) -> bool:
        """Whether R̂ of the NLL and of every prediction is at most 1.05."""
        return bool(self.r_hat) and not self.worst[1] > UNMIXED

    @property
    def worst(self) -> tuple[str, float]:
        """What the chains agree on least among NLL and predictions, and its R̂."""
        named = {"training NLL": "nll", "predictions": "predictions_max"}
        ratios = {name: self.r_hat[key] for name, key in named.items() if key in self.r_hat}
        return max(ratios.items(), key=lambda item: item[1])


@final
class ChainPosterior(Posterior):
    """A bag of draws that knows its chains; ``chains`` is None once it was saved and loaded."""

    chains: ChainReport | None = None


def posterior_of(trace: Trace, positions: Tensor, target: Target, report: ChainReport | None
                 ) -> ChainPosterior:  # fmt: skip
    """The bag of draws, leaving the network at its mean."""
    bag = trace.bag(positions)
    with target.flat.writing() as vector:
        target.random.write(vector, bag.mean)
    posterior = ChainPosterior.at_network(target.model, bag)
    assert isinstance(posterior, ChainPosterior)
    posterior.chains = report
    return posterior


def report_on(
    trace: Trace, target: Target, data: Iterable[Batch], gradients: int | None = None
) -> ChainReport | None:
    """R̂ and effective sizes of what was kept, None if nothing was."""
    if not trace.draws:
        return None
    nll = torch.stack(trace.nll, 1)
    if len(trace) < FEWEST_DRAWS:
        return ChainReport(nll, gradients=gradients)
    draws = torch.stack(trace.draws, 1)
    stride = -(-draws.shape[2] // MOST_WEIGHTS)
    quantities = {"weights": draws[:, :, ::stride]}
    first = next(iter(data), None)
    if first is not None:
        quantities["predictions"] = _predictions(target, draws, first[0])
    worst, sizes = {"nll": float(r_hat(nll))}, {"nll": float(effective_sample_size(nll))}
    for name, values in quantities.items():
        ratios, counts = np.asarray(r_hat(values)), np.asarray(effective_sample_size(values))
        worst |= {f"{name}_max": float(ratios.max()), f"{name}_median": float(np.median(ratios))}
        sizes |= {f"{name}_min": float(counts.min()), f"{name}_median": float(np.median(counts))}
    return ChainReport(nll, worst, sizes, gradients)


def warn_of(
    report: ChainReport | None, warmup: float, remedy: str, predictions: bool = False
) -> None:
    """Say so if there are no draws, or if the chains don't agree.

    ``predictions`` are looked at where chains are to be a reference; those of a large network by
    minibatches hardly ever agree on each one.
    """
    if report is None:
        warnings.warn(
            f"all of training was warm-up (warmup={warmup:g} epochs), so the posterior is the last "
            "weights of each chain. Call credo.fit with more epochs, or lower warmup.",
            stacklevel=6,
        )
    elif report.r_hat:
        name, ratio = report.worst if predictions else ("training NLL", report.r_hat["nll"])
        if not ratio <= UNMIXED:
            warnings.warn(
                f"the chains disagree: R-hat of the {name} is {ratio:.3g} (at most {UNMIXED} is "
                f"wanted), so the draws are not yet of one distribution. {remedy}",
                stacklevel=6,
            )


@torch.no_grad()
def _predictions(target: Target, draws: Tensor, inputs: Inputs) -> Tensor:
    """(chains, draws, ...): probabilities, or outputs where the likelihood has none."""
    probes = like_weights(input_rows(inputs, slice(PROBES)), target.flat.vector)
    likelihood = target.model.likelihood
    predictions = []
    with target.evaluating():
        for weights in draws.flatten(0, 1):
            with target.flat.writing() as vector:
                target.random.write(vector, weights)
            outputs = target.model.outputs(probes)
            if likelihood.kind == "classification":
                outputs = Predictive(outputs[None], likelihood).probs
            predictions.append(outputs.flatten())
    return torch.stack(predictions).unflatten(0, draws.shape[:2])


def _pieces(batch: Batch) -> Iterator[tuple[float, Batch]]:
    """Parts that a forward pass can take, with their share of the examples."""
    for part in pieces(batch, LARGEST_PASS):
        yield len(part[1]) / len(batch[1]), part
