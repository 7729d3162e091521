"""What a method is: the contract between an algorithm and `credo.fit`.

A method is a frozen dataclass whose fields are its settings, and its state a dataclass whose
`credo.packing.STORED` fields are what a resumed run needs. Configuration and checkpoints follow
from the two; `init`, `update` and `posterior` are the algorithm.

    >>> import torch, credo
    >>> from dataclasses import dataclass, field
    >>> from credo.method import Info, Method, State
    >>> from credo.packing import STORED
    >>> @dataclass
    ... class AverageState(State):
    ...     model: credo.Model
    ...     mean: torch.Tensor = field(metadata=STORED)
    >>> @dataclass(frozen=True)
    ... class Average(Method[AverageState]):
    ...     '''The mean of the targets, whatever the inputs.'''
    ...     decay: float = 0.9
    ...     def init(self, model, num_data, generator=None):
    ...         return AverageState(model, torch.zeros(1))
    ...     def update(self, state, batch):
    ...         state.mean.lerp_(batch[1].mean(), 1 - self.decay)
    ...         state.clock.tick()
    ...         return state, Info(nll=0.0)
    ...     def posterior(self, state):
    ...         return credo.Posterior.at_network(state.model, credo.families.Delta(state.mean))
    >>> Average().config()
    {'type': 'Average', 'decay': 0.9}
    >>> state = Average().init(None, num_data=8)
    >>> Average().pack(state)
    ({'mean': tensor([0.])}, {'clock': {'step': 0, 'batch': 0}})
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar, final

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from credo import packing
from credo.collectives import Ranks
from credo.errors import DataError, NonFiniteError
from credo.families import Gaussian
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.temperature import Temperature, temperature_at
from credo.types import Batch, Json, Vector

NOISE_LR = 3e-3
"""Adam's rate for the learned noise of a likelihood, where a method has no Adam of its own."""


@final
@dataclass
class Clock:
    """Where training stands; `credo.fit` keeps it, and a bare loop advances it by `tick`.

    ``num_batches`` is the number of minibatches in an epoch, ``epochs`` how many epochs there will
    be, both 0 while unknown; ``weight`` what this rank's part of a minibatch counts among the
    others', its number of examples.
    """

    step: int = field(default=0, metadata=STORED)
    batch: int = field(default=0, metadata=STORED)
    num_batches: int = 0
    epochs: int = 0
    weight: float = 1.0

    def begin(self, num_data: int, batch_size: int) -> None:
        """Infer the number of minibatches from the first one, unless `credo.fit` said it."""
        if not self.num_batches:
            self.num_batches = max(1, -(-num_data // batch_size))

    def tick(self) -> None:
        """One update is done."""
        self.step += 1
        self.batch = (self.batch + 1) % max(1, self.num_batches)

    @property
    def epoch(self) -> float:
        """Epochs done, with fraction."""
        return self.step / max(1, self.num_batches)

    @property
    def steps(self) -> int:
        """Updates that there will be in all; 0 while that is unknown."""
        return self.epochs * self.num_batches


@final
@dataclass(frozen=True)
class Info:
    """What one update reports.

    ``nll`` is the mean negative log-likelihood of the batch, that of all ranks. It and the named
    numbers of ``extra`` are averaged over the epoch's batches into its record.
    """

    nll: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class State:
    """What every method's state has: where training stands."""

    clock: Clock = field(default_factory=Clock, metadata=STORED)


@dataclass(kw_only=True)
class TrainedState(State):
    """The state of a method that trains one distribution of a network's weights.

    ``random`` are the weights that have a distribution, ``num_data`` the training examples in all,
    ``ranks`` the processes that train them together, ``noise`` the likelihood's learned parameters,
    ``resolved`` a temperature that does not change with the epoch, and its value.
    """

    model: Model
    random: Selection
    num_data: int
    ranks: Ranks = field(default_factory=Ranks)
    resolved: tuple[Temperature, float] | None = None
    noise: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.noise = self.model.noise_parameters()


S = TypeVar("S", bound=State)


class Method(ABC, Generic[S]):
    """An algorithm that turns a model and data into a posterior, by way of a state of type S.

    Subclasses are frozen dataclasses: their fields are the settings.
    """

    needs_all_data: ClassVar[bool] = False
    """Whether a step takes all examples at once, whatever ``batch_size`` says."""
    default_epochs: ClassVar[int] = 20
    """How long `credo.fit` trains when it is not told."""
    spreads: ClassVar[bool] = False
    """Whether several ranks can train together.

    `update` is then given this rank's part of a minibatch and makes the same step on every rank:
    that of the whole minibatch. `finish` is given this rank's part of the data. What a state stores
    is the same on every rank, so that the first one's is the run's."""

    splits_batches: ClassVar[bool] = True
    """Whether several ranks share every minibatch.

    Otherwise each is given the whole of it and trains what is its own, until `meet`."""

    @property
    def plans(self) -> bool:
        """Whether its steps depend on how many epochs there will be, which ``state.clock`` says.

        A run of another length is then another run: a folder resumes the one it was begun as."""
        return False

    @property
    def orders(self) -> int:
        """In how many orders a step sees the data.

        Where there are several and `credo.fit` has the order in its hands, `update` is given a list
        of as many minibatches."""
        return 1

    @property
    def resamples(self) -> bool:
        """Whether each order is of a sample of the examples with replacement, as many as there are.

        Such a sample is drawn once for a run, and the first order is of one too."""
        return False

    @property
    def takes_over(self) -> bool:
        """Whether `credo.fit` hands the whole run to `whole_run`, as one not made of steps here."""
        return False

    def whole_run(
        self, fit: Callable[..., Posterior], model: Model, train_data: Any, **arguments: Any
    ) -> Posterior:
        """What `credo.fit` returns, where the method `takes_over`.

        Args:
            fit: `credo.fit` itself, for runs that this one is made of.
            model: Its argument.
            train_data: Its argument.
            arguments: Its other ones, by name.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no run over")

    @abstractmethod
    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> S:
        """The state before the first update, from the network's current weights.

        Args:
            model: Network, likelihood and prior.
            num_data: Training examples in all.
            generator: Where seeds come from; torch's own if None.
        """

    @abstractmethod
    def update(self, state: S, batch: Batch) -> tuple[S, Info]:
        """One step on one minibatch; the state may be changed in place.

        Args:
            state: What `init` returned, or the update before.
            batch: Inputs and targets.
        """

    def finish(self, state: S, data: Iterable[Batch]) -> S:
        """What needs a last pass over the data; most methods need none.

        Args:
            state: The state after the last update.
            data: The training data, batch by batch.
        """
        return state

    @abstractmethod
    def posterior(self, state: S) -> Posterior:
        """The posterior that the state stands for; the network is left at its mean.

        Args:
            state: The state to read.
        """

    def summary(self, state: S, nll: float = math.nan) -> dict[str, Any]:
        """Diagnostics logged once per epoch (KL, ELBO, temperature, norms of segments).

        Args:
            state: At the end of the epoch.
            nll: The mean NLL over the epoch's batches.
        """
        return {}

    def meet(self, state: S) -> None:
        """Give every rank what the others trained by themselves; nothing where they share batches.

        Called on all ranks at once, at the end of each epoch and before each checkpoint.

        Args:
            state: Each rank's own.
        """
        return None

    @property
    def looks_at_start(self) -> bool:
        """Whether `credo.fit` warns, in words of `when_stuck`, if nothing is learned at first."""
        return False

    def when_stuck(self, state: S) -> str:
        """Which setting to change if nothing is learned at first, as a clause for a warning.

        Args:
            state: After the first steps.
        """
        return "look at the data, and at the rate by credo.lr_range_test"

    def optimizer_of(self, state: S) -> Optimizer | None:
        """The optimizer whose rates a schedule may change; None if there is none.

        Args:
            state: The state to look into.
        """
        return None

    def pack(self, state: S) -> tuple[dict[str, Tensor], Json]:
        """Everything a resumed run needs, as tensors and JSON: the state's stored fields.

        Args:
            state: The state to write.
        """
        return packing.pack(state)

    def unpack(self, state: S, tensors: Mapping[str, Tensor], meta: Json) -> S:
        """The inverse of ``pack``, into a state from ``init`` on the same model.

        Args:
            state: A state of the same model, which is filled.
            tensors: What `pack` gave.
            meta: The JSON beside it.
        """
        packing.unpack(state, tensors, meta)
        self.restored(state)
        return state

    def restored(self, state: S) -> None:
        """Make what is not stored follow from what was read back; often nothing does.

        Args:
            state: The state that was filled.
        """

    def config(self) -> Json:
        """JSON that names the method and its settings, for the run folder."""
        return {"type": type(self).__name__, **packing.settings_of(self)}


class TemperedMethod(Method[S]):
    """A method that weighs the prior, or the KL to it, by a temperature."""

    temperature: Temperature

    def at(self, temperature: Temperature) -> Self:
        """The same method at another temperature.

        Args:
            temperature: The weight of the KL, as the method takes it.
        """
        return replace(self, temperature=temperature)  # type: ignore[type-var]


def temperature_of(temperature: Temperature, state: TrainedState) -> float:
    """η at this point of training."""
    if state.resolved is not None and state.resolved[0] is temperature:
        return state.resolved[1]
    segments, epoch = state.random.segments, state.clock.epoch
    value = temperature_at(temperature, segments, state.num_data, epoch)
    if not callable(temperature):
        state.resolved = (temperature, value)
    return value


def average_over_ranks(state: TrainedState, gradients: Sequence[Vector], nll: float) -> float:
    """Make the gradients of this rank's batch those of all ranks' batches, and the NLL as well.

    The gradients of a likelihood's learned noise are in ``.grad`` and go along. On one rank nothing
    happens.
    """
    if not state.ranks.several:
        return nll
    vectors = list(gradients)
    for parameter in state.noise:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        vectors.append(parameter.grad.view(-1))
    with torch.no_grad():
        vectors = vectors or [state.model.like]
        (mean,) = state.ranks.average_(vectors, state.clock.weight, [nll])
    return mean


def refuse_unplanned(method: Method[Any], clock: Clock) -> None:
    """Refuse what a method that plans has made of a training of unknown length."""
    if method.plans and clock.step and not clock.steps:
        raise DataError(
            f"{type(method).__name__} keeps weights from the later parts of training, and was not "
            "told how long that is: set state.clock.epochs before the first update, or use "
            "credo.fit"
        )


def refuse_nonfinite(nll: float, flat: FlatParams, clock: Clock) -> None:
    """Stop before an update if the loss is not a number; say where it came from."""
    if math.isfinite(nll):
        return
    largest = {s.name: float(flat.vector[s.slice].abs().max()) for s in flat.segments if s.size}
    bad = [name for name, size in largest.items() if not math.isfinite(size)]
    if bad:
        cause = (
            f"the weights of {', '.join(bad[:5])} are not finite: an earlier step diverged. "
            "Lower lr, or warm the KL up"
        )
    else:
        name = max(largest, key=largest.__getitem__)
        cause = (
            f"all weights are finite, the largest in {name} ({largest[name]:.3g}). If that is far "
            "too large, lower lr; otherwise look at the inputs of this batch"
        )
    raise NonFiniteError(
        f"the loss is {nll} at step {clock.step} (epoch {int(clock.epoch)}, batch {clock.batch}): "
        f"{cause}."
    )


def segment_norms(vector: Vector, selection: Selection) -> dict[str, float]:
    """The Euclidean norm of each segment of a vector that was read out."""
    return {name: float(vector[place].norm()) for name, place in selection.slices().items()}


def drowned_layer(q: Gaussian, selection: Selection) -> tuple[str, float]:
    """The weight matrix whose noise is largest beside its weights, and the ratio of their sizes."""
    noise, mean = q.variance, q.mean
    ratios = {
        segment.name: float((noise[place].mean() / mean[place].square().mean()).sqrt())
        for segment, place in zip(selection.segments, selection.slices().values(), strict=True)
        if len(segment.shape) > 1
    }
    if not ratios:
        return "", 0.0
    name = max(ratios, key=ratios.__getitem__)
    return name, ratios[name]


DROWNED = 0.5
"""Noise beyond this share of a layer's weights is said to drown them."""
