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

References: Loshchilov and Hutter 2017 (cosine); Smith 2017 (cyclic); document 003 §5.3 (separate
rates, training in turns, watching NLL and KL).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from credo.checks import positive
from credo.errors import DataError
from credo.types import Json


class ByEpoch(ABC):
    """A schedule that counts in epochs and not in fractions of the run."""

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """What the rates are multiplied by when ``epoch`` of ``epochs`` are done."""


def _between_0_and_1(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise DataError(f"{name}={value} must be 0 or more and less than 1")


@dataclass(frozen=True)
class Plateau:
    """Multiply the rates by ``factor`` when ``watch`` has not fallen for more than ``patience``.

    It has fallen if it is below the lowest so far by more than ``margin`` of that. ``lowest`` is
    the least factor. What it has seen is a `PlateauMemory`; this only says what to do with it.
    """

    watch: str
    patience: int
    factor: float
    lowest: float
    margin: float = 1e-4

    def __post_init__(self) -> None:
        _between_0_and_1("factor", self.factor)
        if self.patience < 0:
            raise DataError(f"patience={self.patience} must be a number of epochs, 0 or more")
        if not 0 <= self.lowest <= 1:
            raise DataError(f"lowest={self.lowest} is a factor on the rate, from 0 to 1")

    def after(self, memory: PlateauMemory, value: float) -> PlateauMemory:
        """The memory after an epoch whose record has this value."""
        best = memory.best
        # A value that is not a number is not an improvement.
        if math.isfinite(value) and (best is None or value < best - self.margin * abs(best)):
            return PlateauMemory(value, 0, memory.factor)
        if memory.waited < self.patience:
            return PlateauMemory(best, memory.waited + 1, memory.factor)
        return PlateauMemory(best, 0, max(self.lowest, memory.factor * self.factor))


@dataclass(frozen=True)
class PlateauMemory:
    """The lowest value so far, the epochs since, and the factor that has come of it."""

    best: float | None = None
    waited: int = 0
    factor: float = 1.0


Schedule: TypeAlias = Callable[[float], float] | ByEpoch | Plateau
ScheduleSpec: TypeAlias = str | Schedule | Mapping[str, "str | Schedule"]


def constant(fraction: float) -> float:
    """The rate as given.

    >>> constant(0.5)
    1.0
    """
    return 1.0


def cosine(fraction: float) -> float:
    """Half a wave from 1 down to 0.

    >>> [round(cosine(fraction), 2) for fraction in (0, 0.5, 1)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * fraction))


def linear(fraction: float) -> float:
    """A straight line from 1 down to 0.

    >>> linear(0.25)
    0.75
    """
    return 1 - fraction


def warmup(epochs: float, then: str | Schedule = "constant", start: float = 0.0) -> ByEpoch:
    """From ``start`` to 1 in a line over the first ``epochs``; ``then`` has the rest of the run.

    >>> rising = warmup(2, then="linear")
    >>> [rising.factor(epoch, 10) for epoch in (0, 1, 2, 6)]
    [0.0, 0.5, 1.0, 0.5]
    """
    return _WarmUp(positive("epochs", epochs), then, start)


def step(
    every: float | None = None, at: Sequence[float] | None = None, factor: float = 0.1
) -> ByEpoch:
    """Times ``factor`` after ``every`` so many epochs, or when the epochs ``at`` are done.

    >>> [round(step(at=(3, 5)).factor(epoch, 10), 4) for epoch in (2.9, 3, 7)]
    [1.0, 0.1, 0.01]
    """
    if (every is None) == (at is None):
        raise DataError("step takes either every=… or at=…, a number of epochs or a list of them")
    return _Step(
        None if every is None else positive("every", every), tuple(sorted(at or ())), factor
    )


def cyclic(period: float, low: float = 0.1) -> ByEpoch:
    """A triangle: from ``low`` up to 1 and down again in ``period`` epochs, and so on.

    >>> [round(cyclic(4).factor(epoch, 10), 2) for epoch in (0, 1, 2, 3, 4)]
    [0.1, 0.55, 1.0, 0.55, 0.1]
    """
    return _Cyclic(positive("period", period), low)


def plateau(
    watch: str = "nll", patience: int = 1, factor: float = 0.1, lowest: float = 1e-3
) -> Plateau:
    """Times ``factor`` once ``watch`` has not fallen for more than ``patience`` epochs.

    ``watch`` is a number in the epochs' records: "nll" of the training data, "kl", "val_nll" with
    ``val_data``. The factor never goes below ``lowest``.
    """
    return Plateau(watch, patience, factor, lowest)


def dual_plateau(
    patience: int = 1, factor: float = 0.1, lowest: float = 1e-3
) -> dict[str, Plateau]:
    """Means watch the NLL, which they are trained for, and scales the KL (document 003, fig. 5.11).

    >>> dual_plateau()["scale"].watch
    'kl'
    """
    return {
        "mean": plateau("nll", patience, factor, lowest),
        "scale": plateau("kl", patience, factor, lowest),
    }


def alternate(mean_epochs: float = 1, scale_epochs: float = 1) -> dict[str, ByEpoch]:
    """Train the means for some epochs, the scales at rest, then the other way round, in turns.

    >>> turns = alternate(mean_epochs=2, scale_epochs=1)
    >>> [turns["scale"].factor(epoch, 6) for epoch in range(6)]
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    """
    means, scales = positive("mean_epochs", mean_epochs), positive("scale_epochs", scale_epochs)
    return {
        "mean": _InTurns(means + scales, 0.0, means),
        "scale": _InTurns(means + scales, means, means + scales),
    }


BY_NAME: dict[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "plateau": plateau(),
}


def by_name(spec: str | Schedule) -> Schedule:
    """The schedule itself, or that of the name."""
    if not isinstance(spec, str):
        if callable(spec) or isinstance(spec, ByEpoch | Plateau):
            return spec
    elif spec in BY_NAME:
        return BY_NAME[spec]
    raise DataError(
        f"schedule={spec!r} is unknown; choose one of {sorted(BY_NAME)}, one of credo.schedules, "
        "or give a function from the fraction of training done to a factor on the rate"
    )


def for_groups(spec: ScheduleSpec, names: Sequence[str]) -> list[Schedule]:
    """The schedule of each of these groups; those that a mapping does not name are constant."""
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
    """What the rates are multiplied by when ``epoch`` of ``epochs`` are done."""
    if isinstance(schedule, Plateau):
        return memory.factor
    if isinstance(schedule, ByEpoch):
        return schedule.factor(epoch, epochs)
    return schedule(epoch / epochs)


def describe(spec: ScheduleSpec) -> Any:
    """What the run folder records."""
    if isinstance(spec, Mapping):
        return {name: describe(one) for name, one in spec.items()}
    return spec if isinstance(spec, str) else getattr(spec, "__qualname__", repr(spec))


def numbers_in(record: Json) -> list[str]:
    """What a plateau can watch."""
    return sorted(name for name, value in record.items() if isinstance(value, int | float))


@dataclass(frozen=True)
class _WarmUp(ByEpoch):
    epochs: float
    then: str | Schedule
    start: float
    _rest: Schedule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _between_0_and_1("start", self.start)
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


@dataclass(frozen=True)
class _Step(ByEpoch):
    every: float | None
    at: tuple[float, ...]
    by: float

    def __post_init__(self) -> None:
        positive("factor", self.by)

    def factor(self, epoch: float, epochs: int) -> float:
        if self.every is not None:
            return float(self.by ** math.floor(epoch / self.every))
        return float(self.by ** sum(epoch >= milestone for milestone in self.at))


@dataclass(frozen=True)
class _Cyclic(ByEpoch):
    period: float
    low: float

    def __post_init__(self) -> None:
        _between_0_and_1("low", self.low)

    def factor(self, epoch: float, epochs: int) -> float:
        place = math.fmod(epoch, self.period) / self.period
        return self.low + (1 - self.low) * (1 - abs(2 * place - 1))


@dataclass(frozen=True)
class _InTurns(ByEpoch):
    period: float
    begins: float
    ends: float

    def factor(self, epoch: float, epochs: int) -> float:
        return float(self.begins <= math.fmod(epoch, self.period) < self.ends)
