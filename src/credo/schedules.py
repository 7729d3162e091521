r"""How learning rates change over a run: factors on the rates that the method was given.

`credo.fit` takes a schedule by name, as a function, or one for each group of parameters ("mean",
"scale"), so that means and scales can rise, fall and rest apart:

=============== =================================================================================
schedule        factor
=============== =================================================================================
"constant"      1
"cosine"        (1 + cos πf)/2, f the fraction of training done
"linear"        1 − f
`warmup`        rises in a line over some epochs, then any of the others
`step`          times a number every few epochs, or at given ones
`cyclic`        a triangle up and down, again and again
`plateau`       times a number whenever the epochs' NLL, KL, … has stopped falling
`alternate`     means for some epochs, then scales, in turns: for VI and VariationalLaplace
`dual_plateau`  means watch the NLL and scales the KL: for the same
any function    of f
=============== =================================================================================

    >>> import torch, credo
    >>> x = torch.randn(64, 2); y = (x[:, 0] > 0).long()
    >>> model = credo.Model(torch.nn.Linear(2, 2), credo.likelihoods.Categorical())
    >>> posterior = credo.fit(model, credo.VI(), (x, y), epochs=2, progress=False,
    ...                       schedule={"mean": credo.schedules.warmup(1, then="cosine"),
    ...                                 "scale": "constant"})

A resumed run goes on exactly: what a plateau has seen is part of the checkpoint.

References: Loshchilov & Hutter 2017 (cosine); Smith 2017 (cyclic); Book 2020, §5.3 (separate rates,
training in turns, watching NLL and KL).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from credo.checks import Decay, Index, NotNegative, Positive, Share, checked, nearest
from credo.errors import DataError
from credo.types import Json


class ByEpoch(ABC):
    """A schedule that counts in epochs and not in fractions of the run."""

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """What the rates are multiplied by when ``epoch`` of ``epochs`` are done.

        Args:
            epoch: Epochs done, not only whole ones.
            epochs: Epochs that there will be.
        """


@final
@checked
@dataclass(frozen=True)
class Plateau:
    """Multiply the rates by ``factor`` when ``watch`` has not fallen for more than ``patience``.

    What it has seen is a `PlateauMemory`; this only says what to do with it.

    Args:
        watch: A number in the epochs' records.
        patience: Epochs without a fall that are let pass.
        factor: What the rates are multiplied by.
        lowest: The least factor that comes of it.
        margin: The share of the lowest value so far by which a fall has to be below it.
    """

    watch: str
    patience: Index
    factor: Decay
    lowest: Share
    margin: NotNegative = 1e-4

    def after(self, memory: PlateauMemory, value: float) -> PlateauMemory:
        """The memory after an epoch whose record has this value.

        Args:
            memory: What was seen before.
            value: The watched number of this epoch.
        """
        best = memory.best
        # A value that is not a number is not an improvement.
        if math.isfinite(value) and (best is None or value < best - self.margin * abs(best)):
            return PlateauMemory(value, 0, memory.factor)
        if memory.waited < self.patience:
            return PlateauMemory(best, memory.waited + 1, memory.factor)
        return PlateauMemory(best, 0, max(self.lowest, memory.factor * self.factor))


@final
@dataclass(frozen=True)
class PlateauMemory:
    """The lowest value so far, the epochs since, and the factor that has come of it.

    Args:
        best: The lowest value; None before the first.
        waited: Epochs since it.
        factor: What the rates are multiplied by now.
    """

    best: float | None = None
    waited: int = 0
    factor: float = 1.0


Schedule: TypeAlias = Callable[[float], float] | ByEpoch | Plateau
ScheduleSpec: TypeAlias = str | Schedule | Mapping[str, str | Schedule]


def constant(fraction: float) -> float:
    """The rate as given.

    Args:
        fraction: How much of training is done, from 0 to 1.

    >>> constant(0.5)
    1.0
    """
    return 1.0


def cosine(fraction: float) -> float:
    """Half a wave from 1 down to 0.

    Args:
        fraction: How much of training is done, from 0 to 1.

    >>> [round(cosine(fraction), 2) for fraction in (0, 0.5, 1)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * fraction))


def linear(fraction: float) -> float:
    """A straight line from 1 down to 0.

    Args:
        fraction: How much of training is done, from 0 to 1.

    >>> linear(0.25)
    0.75
    """
    return 1 - fraction


@checked
def warmup(epochs: Positive, then: str | Schedule = "constant", start: Decay = 0.0) -> ByEpoch:
    """From ``start`` to 1 in a line over the first ``epochs``; ``then`` has the rest of the run.

    Args:
        epochs: How long the rates rise.
        then: The schedule that follows.
        start: The first factor.

    >>> rising = warmup(2, then="linear")
    >>> [rising.factor(epoch, 10) for epoch in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.5]
    """
    return _WarmUp(epochs, then, start)


@checked
def step(
    every: Positive | None = None, at: Sequence[float] | None = None, factor: Positive = 0.1
) -> ByEpoch:
    """Times ``factor`` after ``every`` so many epochs, or when the epochs ``at`` are done.

    Args:
        every: Epochs between two changes.
        at: The epochs after which to change, in place of ``every``.
        factor: What the rates are multiplied by each time.

    >>> [round(step(at=(3, 5)).factor(epoch, 10), 4) for epoch in (2.9, 3, 7)]
    [1.0, 0.1, 0.01]
    """
    if (every is None) == (at is None):
        raise DataError("step takes either every=… or at=…, a number of epochs or a list of them")
    return _Step(every, tuple(sorted(at or ())), factor)


@checked
def cyclic(period: Positive, low: Decay = 0.1) -> ByEpoch:
    """A triangle: from ``low`` up to 1 and down again in ``period`` epochs, and so on.

    Args:
        period: Epochs from one low point to the next.
        low: The least factor.

    >>> [round(cyclic(4).factor(epoch, 10), 2) for epoch in (0, 1, 2, 3, 4)]
    [0.1, 0.55, 1.0, 0.55, 0.1]
    """
    return _Cyclic(period, low)


@checked
def plateau(
    watch: str = "nll", patience: Index = 1, factor: Decay = 0.1, lowest: Share = 1e-3
) -> Plateau:
    """Times ``factor`` once ``watch`` has not fallen for more than ``patience`` epochs.

    Args:
        watch: A number in the epochs' records: "nll" of the training data, "kl", "val_nll" with
            ``val_data``.
        patience: Epochs without a fall that are let pass.
        factor: What the rates are multiplied by.
        lowest: The least factor that comes of it.
    """
    return Plateau(watch, patience, factor, lowest)


@checked
def dual_plateau(
    patience: Index = 1, factor: Decay = 0.1, lowest: Share = 1e-3
) -> dict[str, Plateau]:
    """Means watch the NLL, which they are trained for, and scales the KL (Book 2020, fig. 5.11).

    Args:
        patience: Epochs without a fall that are let pass.
        factor: What the rates are multiplied by.
        lowest: The least factor that comes of it.

    >>> dual_plateau()["scale"].watch
    'kl'
    """
    return {
        "mean": plateau("nll", patience, factor, lowest),
        "scale": plateau("kl", patience, factor, lowest),
    }


@checked
def alternate(mean_epochs: Positive = 1, scale_epochs: Positive = 1) -> dict[str, ByEpoch]:
    """Train the means for some epochs, the scales at rest, then the other way round, in turns.

    Args:
        mean_epochs: How long the means' turn is.
        scale_epochs: How long the scales' turn is.

    >>> turns = alternate(mean_epochs=2, scale_epochs=1)
    >>> [turns["scale"].factor(epoch, 6) for epoch in range(6)]
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """
    period = mean_epochs + scale_epochs
    return {
        "mean": _InTurns(period, 0.0, mean_epochs),
        "scale": _InTurns(period, mean_epochs, period),
    }


BY_NAME: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "plateau": plateau(),
}


def by_name(spec: str | Schedule) -> Schedule:
    """The schedule itself, or that of the name.

    Args:
        spec: A name or a schedule.
    """
    if not isinstance(spec, str):
        if callable(spec) or isinstance(spec, ByEpoch | Plateau):
            return spec
    elif spec in BY_NAME:
        return BY_NAME[spec]
    hint = nearest(spec, BY_NAME) if isinstance(spec, str) else ""
    raise DataError(
        f"schedule={spec!r} is unknown.{hint} Choose one of {sorted(BY_NAME)}, one of "
        "credo.schedules, or give a function from the fraction of training done to a factor on the "
        "rate"
    )


def for_groups(spec: ScheduleSpec, names: Sequence[str]) -> list[Schedule]:
    """The schedule of each of these groups; those that a mapping does not name are constant.

    Args:
        spec: One schedule for all, or a mapping from groups' names.
        names: The groups, in the optimizer's order.
    """
    if not isinstance(spec, Mapping):
        return [by_name(spec)] * len(names)
    strangers = sorted(set(spec) - set(names))
    if strangers:
        raise DataError(
            f"schedule names the parameter groups {strangers}, but this method has "
            f"{sorted(set(names))}"
        )
    return [by_name(spec.get(name, constant)) for name in names]


def factor_at(schedule: Schedule, epoch: float, epochs: int, memory: PlateauMemory) -> float:
    """What the rates are multiplied by when ``epoch`` of ``epochs`` are done.

    Args:
        schedule: The schedule.
        epoch: Epochs done, not only whole ones.
        epochs: Epochs that there will be.
        memory: What a `Plateau` has seen.
    """
    if isinstance(schedule, Plateau):
        return memory.factor
    if isinstance(schedule, ByEpoch):
        return schedule.factor(epoch, epochs)
    return schedule(epoch / epochs)


def numbers_in(record: Json) -> list[str]:
    """What a plateau can watch.

    Args:
        record: An epoch's record.
    """
    return sorted(name for name, value in record.items() if isinstance(value, int | float))


@final
@dataclass(frozen=True)
class _WarmUp(ByEpoch):
    epochs: float
    then: str | Schedule
    start: float
    _rest: Schedule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rest = by_name(self.then)
        if isinstance(rest, Plateau):
            raise DataError(
                "a warm-up can't be followed by a plateau, which would take the rising rates for "
                "its own: use schedule=credo.schedules.plateau(…) alone"
            )
        object.__setattr__(self, "_rest", rest)

    def factor(self, epoch: float, epochs: int) -> float:
        if epoch < self.epochs:
            return self.start + (1 - self.start) * epoch / self.epochs
        left = epochs - self.epochs
        if isinstance(self._rest, ByEpoch):
            return self._rest.factor(epoch - self.epochs, math.ceil(left))
        assert not isinstance(self._rest, Plateau)
        return self._rest((epoch - self.epochs) / left if left > 0 else 1.0)


@final
@dataclass(frozen=True)
class _Step(ByEpoch):
    every: float | None
    at: tuple[float, ...]
    by: float

    def factor(self, epoch: float, epochs: int) -> float:
        if self.every is not None:
            return float(self.by ** math.floor(epoch / self.every))
        return float(self.by ** sum(epoch >= milestone for milestone in self.at))


@final
@dataclass(frozen=True)
class _Cyclic(ByEpoch):
    period: float
    low: float

    def factor(self, epoch: float, epochs: int) -> float:
        place = math.fmod(epoch, self.period) / self.period
        return self.low + (1 - self.low) * (1 - abs(2 * place - 1))


@final
@dataclass(frozen=True)
class _InTurns(ByEpoch):
    period: float
    begins: float
    ends: float

    def factor(self, epoch: float, epochs: int) -> float:
        return float(self.begins <= math.fmod(epoch, self.period) < self.ends)
