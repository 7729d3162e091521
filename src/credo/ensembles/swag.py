r"""SWAG: a Gaussian fitted to the weights that gradient descent passes through at a high rate.

    q = N(θ̄, ½ diag(s²) + DDᵀ/(2(K − 1)))

========== ================ ==============================================================
symbol     argument         meaning
========== ================ ==============================================================
θ̄, s²      ``iterates``     mean and variance of so many weights, evenly spaced in time
D, K       ``rank``         K of them, evenly spaced too, less θ̄: columns (P, K)
========== ================ ==============================================================

Training has two parts. In the first, a ``start`` of the whole, the rate of ``train`` goes, on half
a cosine wave, to ``rate`` times itself. In the second it stays there: descent no longer settles but
moves about the valley that it has come to, as wide as minibatches kick it, and where it was is
collected. One training, and a pass over the weights now and then, is all that it costs.

`credo.fit`'s ``schedule`` multiplies the rates of the first part and leaves the second alone:
weights collected at a rate that dies away would show no spread.

Beside the paper's arithmetic: s² is summed as deviations from the mean so far (Welford), because
the mean square less θ̄² cancels to noise in float32; D's columns are spread over the second part, as
its last K epochs are where it collects once an epoch, and are deviations from the final θ̄. Weights
without a distribution (norm layers) are averaged too.

Batch norm keeps statistics of the weights that it was trained with, and draws of q are others. So
where a network has such layers, ``draws`` draws are made at the end, the statistics of each and of
θ̄ gathered from up to ``examples`` training examples, and predictions are made with these draws:
see `credo.posterior.RefreshedPosterior`. Without such layers every prediction draws as it likes.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.SWAG(), (x, x**2), epochs=200, progress=False)
    >>> near, far = posterior.predict(torch.tensor([[0.5], [4.0]])).epistemic_std.flatten()
    >>> bool(near < far)
    True

``credo.Ensemble(credo.SWAG())`` is MultiSWAG (Wilson & Izmailov, 2020).

References: Maddox, Garipov, Izmailov, Vetrov & Wilson, "A simple baseline for Bayesian uncertainty
in deep learning", 2019 (arXiv:1902.02476); Wilson & Izmailov, "Bayesian deep learning and a
probabilistic perspective of generalization", 2020 (arXiv:2002.08791).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo.checks import Count, Decay, Positive, Range, checked
from credo.families import Delta, FactorGaussian, Family
from credo.map import MAP, MAPState
from credo.method import Clock, Info, State, TemperedMethod, refuse_unplanned
from credo.model import Model
from credo.network import Selection
from credo.network.batches import to_device
from credo.network.norm_statistics import gathering, norm_statistics
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.posterior.refreshed import RefreshedPosterior
from credo.schedules import cosine
from credo.temperature import Temperature
from credo.train.rates import START
from credo.types import Batch, Json, Vector

FEWEST = 10
"""Collected weights below which a warning says that their spread is a guess."""

LEAST_VARIANCE = 1e-16
"""A weight that never moved (of an input that is always 0) still has a density."""


@final
@dataclass
class Iterates:
    """Mean and summed squared deviations of the weights collected, and some of them."""

    count: int = 0
    mean: Vector = field(default_factory=lambda: torch.empty(0))
    squares: Vector = field(default_factory=lambda: torch.empty(0))
    columns: list[Vector] = field(default_factory=list)
    scratch: Vector | None = None

    def add(self, weights: Vector) -> None:
        """Count these weights, by Welford's rule."""
        self.count += 1
        if self.count == 1:
            self.mean, self.squares = weights.clone(), torch.zeros_like(weights)
            return
        if self.scratch is None:
            self.scratch = torch.empty_like(weights)
        away = torch.sub(weights, self.mean, out=self.scratch)
        self.mean.add_(away, alpha=1 / self.count)
        # (w − old mean)(w − new mean), without a second difference.
        self.squares.addcmul_(away, away, value=1 - 1 / self.count)

    def gaussian(self, random: Selection) -> Family:
        """q over the random weights; a point if there were too few."""
        mean = random.read(self.mean).clone()
        if len(self.columns) < 2:
            return Delta(mean)
        variance = random.read(self.squares) / self.count
        factor = torch.stack([random.read(column) for column in self.columns], 1)
        factor.sub_(mean.unsqueeze(-1)).div_(math.sqrt(2 * (len(self.columns) - 1)))
        return FactorGaussian(mean, factor, (variance / 2).clamp_min_(LEAST_VARIANCE))

    def move(self, device: torch.device) -> None:
        """To where the network is."""
        self.mean, self.squares = self.mean.to(device), self.squares.to(device)
        self.columns = [column.to(device) for column in self.columns]

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """For a checkpoint."""
        tensors = {"mean": self.mean, "squares": self.squares} if self.count else {}
        tensors |= {f"column.{k}": column for k, column in enumerate(self.columns)}
        return tensors, {"count": self.count, "columns": len(self.columns)}

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``."""
        self.count = meta["count"]
        if self.count:
            self.mean, self.squares = tensors["mean"].clone(), tensors["squares"].clone()
        self.columns = [tensors[f"column.{k}"].clone() for k in range(meta["columns"])]


@final
@dataclass
class SWAGState(State):
    """``training`` is that of `MAP`, whose clock this one shares.

    ``away`` are the weights at which training stands while the network is at the mean; ``kept`` the
    draws of a network with batch norm and what its statistics are there.
    """

    training: MAPState = field(metadata=STORED)
    seed: int
    iterates: Iterates = field(default_factory=Iterates, metadata=STORED)
    away: Vector | None = None
    kept: tuple[Tensor, dict[str, Tensor]] | None = None


@final
@checked
@dataclass(frozen=True)
class SWAG(TemperedMethod[SWAGState]):
    """A Gaussian fitted to the iterates of descent at a high rate (Maddox et al., 2019).

    Args:
        train: How the weights are trained.
        start: The share of training after which weights are collected.
        rate: The learning rate from then on, as a multiple of training's.
        iterates: How many weights are collected, evenly spaced in time.
        rank: How many of them are kept, for the part of the covariance of low rank.
        draws: For networks with batch norm: how many draws get statistics of their own, and are
            what predictions are made with.
        examples: For these: how many training examples the statistics are gathered from, at most.
    """

    train: MAP = field(default_factory=MAP)
    start: Decay = 0.75
    rate: Positive = 1.0
    iterates: Annotated[int, Range(2)] = 100
    rank: Annotated[int, Range(2)] = 20
    draws: Count = 20
    examples: Count = 2048

    spreads: ClassVar[bool] = True

    @property
    def plans(self) -> bool:
        """Yes: when to begin to collect."""
        return True

    @property
    def temperature(self) -> Temperature:  # type: ignore[override]
        """That of training."""
        return self.train.temperature

    def at(self, temperature: Temperature) -> Self:
        """The same with training at another temperature."""
        return replace(self, train=self.train.at(temperature))

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> SWAGState:
        """Start from the network's current weights."""
        seed = int(torch.randint(2**62, (), generator=generator))
        training = self.train.init(model, num_data, generator)
        return SWAGState(training=training, seed=seed, clock=training.clock)

    def update(self, state: SWAGState, batch: Batch) -> tuple[SWAGState, Info]:
        """One step of training, and a look at where it has come to."""
        training, clock = state.training, state.clock
        clock.begin(training.num_data, len(batch[1]))
        _back_to_training(state)
        with self._own_rates(training.optimizer, clock):
            state.training, info = self.train.update(training, batch)
        self._collect(state)
        return state, info

    def finish(self, state: SWAGState, data: Iterable[Batch]) -> SWAGState:
        """Where the network has batch norm: its statistics at the mean and at draws of q."""
        count = state.iterates.count
        if count < FEWEST:
            warnings.warn(
                f"SWAG collected the weights of {count} steps, and the spread of fewer than "
                f"{FEWEST} is a guess: train for more epochs, lower batch_size, or collect from "
                f"earlier on (start={self.start:g})",
                stacklevel=5,
            )
        if count and norm_statistics(state.training.model.net):
            state.kept = self._refresh(state, data)
        return state

    def posterior(self, state: SWAGState) -> Posterior:
        """q; the point where training is before anything was collected."""
        training, iterates = state.training, state.iterates
        refuse_unplanned(self, state.clock)
        if not iterates.count:
            return self.train.posterior(training)
        _to_mean(state)
        posterior = Posterior.at_network(training.model, iterates.gaussian(training.random))
        return posterior if state.kept is None else RefreshedPosterior.of(posterior, *state.kept)

    def summary(self, state: SWAGState, nll: float = math.nan) -> dict[str, Any]:
        """That of training, the multiple of its rate, and how many weights were collected."""
        return {
            **self.train.summary(state.training, nll),
            "rate_factor": self._factor(state.clock),
            "iterates": state.iterates.count,
        }

    @property
    def looks_at_start(self) -> bool:
        """Yes."""
        return True

    def optimizer_of(self, state: SWAGState) -> Optimizer:
        """That of training."""
        return state.training.optimizer

    def pack(self, state: SWAGState) -> tuple[dict[str, Tensor], Json]:
        """Training, where it stands, and what was collected; what `finish` finds is found again."""
        _back_to_training(state)
        return super().pack(state)

    def restored(self, state: SWAGState) -> None:
        """The network is where training stands, and what was collected on its device."""
        state.away, state.kept = None, None
        state.iterates.move(state.training.flat.vector.device)

    # --- inside -----------------------------------------------------------------------------------

    def _first(self, clock: Clock) -> int:
        """The step from which weights are collected; the end of time if training has none."""
        return int(self.start * clock.steps) if clock.steps else clock.step + 1

    def _factor(self, clock: Clock) -> float:
        """What the rate of training is multiplied by at this step."""
        first = self._first(clock)
        if not clock.steps:
            return 1.0
        if clock.step >= first:
            return self.rate
        return self.rate + (1 - self.rate) * cosine(clock.step / first)

    @contextmanager
    def _own_rates(self, optimizer: Optimizer, clock: Clock) -> Iterator[None]:
        """The rates of this step; what a schedule has set is put back."""
        rates = [group["lr"] for group in optimizer.param_groups]
        factor, collecting = self._factor(clock), clock.step >= self._first(clock)
        for group in optimizer.param_groups:
            group["lr"] = factor * (group.get(START, group["lr"]) if collecting else group["lr"])
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _collect(self, state: SWAGState) -> None:
        """After a step: of the L steps of the second part, min(L, ``iterates``) and ``rank``."""
        clock, iterates = state.clock, state.iterates
        first = self._first(clock)
        if clock.step <= first:
            return
        number, total = clock.step - first, clock.steps - first
        weights = state.training.flat.vector
        if _is_due(number, total, self.iterates):
            iterates.add(weights.detach())
        if _is_due(number, total, self.rank):
            iterates.columns.append(weights.detach().clone())

    @torch.no_grad()
    def _refresh(
        self, state: SWAGState, data: Iterable[Batch]
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Draws of q and the statistics at each, of all ranks; those at the mean stay in place."""
        model, ranks = state.training.model, state.training.ranks
        q = state.iterates.gaussian(state.training.random)
        batches, seen = [], 0
        for batch in data:
            batches.append(to_device(batch, model.like.device)[0])
            seen += len(batch[1])
            if seen * ranks.size >= self.examples:
                break
        _to_mean(state)
        flat, random = state.training.flat, state.training.random
        live = norm_statistics(model.net)

        def gathered() -> list[Tensor]:
            with gathering(model.net):
                for inputs in batches:
                    model.outputs(inputs)
            found = [buffer.clone() for buffer in live.values()]
            ranks.average_([values.view(-1) for values in found], float(seen))
            return found

        kept: Tensor | None = None
        if not isinstance(q, Delta):
            generator = torch.Generator(model.like.device).manual_seed(state.seed)
            kept = q.sample(self.draws, generator)
        rows = []
        for weights in [] if kept is None else kept:
            with flat.writing() as vector:
                random.write(vector, weights)
            rows.append(gathered())
        with flat.writing() as vector:
            random.write(vector, q.mean)
        for buffer, values in zip(live.values(), gathered(), strict=True):
            buffer.copy_(values)
        if kept is None:
            return None
        columns = (torch.stack(each) for each in zip(*rows, strict=True))
        return kept, dict(zip(live, columns, strict=True))


def _is_due(number: int, total: int, times: int) -> bool:
    """Whether step ``number`` (from 1) of ``total`` is one of so many, evenly spaced to the end.

    >>> [number for number in range(1, 9) if _is_due(number, 8, 3)]
    [3, 6, 8]
    """
    times = min(times, total)
    return number * times // total > (number - 1) * times // total


def _to_mean(state: SWAGState) -> None:
    """The network at the mean of what was collected; where training stands is kept aside."""
    flat = state.training.flat
    if state.away is None:
        state.away = flat.vector.detach().clone()
    with flat.writing() as vector:
        vector.copy_(state.iterates.mean)


def _back_to_training(state: SWAGState) -> None:
    """The network where training stands."""
    if state.away is not None:
        with state.training.flat.writing() as vector:
            vector.copy_(state.away)
        state.away = None
