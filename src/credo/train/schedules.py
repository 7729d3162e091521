"""How learning rates change over a run: factors on the rates that the method was given.

A schedule is a function from the fraction of training done, in [0, 1), to a factor. `fit` takes one
by name, one as a callable, or one for each group of parameters ("mean", "scale"):

    >>> import torch, credo
    >>> x = torch.randn(64, 2); y = (x[:, 0] > 0).long()
    >>> model = credo.Model(torch.nn.Linear(2, 2), credo.likelihoods.Categorical())
    >>> posterior = credo.fit(model, credo.VI(), (x, y), epochs=2, progress=False,
    ...                       schedule={"mean": "cosine", "scale": "constant"})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer

from credo.errors import DataError, UnsupportedError

Schedule: TypeAlias = Callable[[float], float]
ScheduleSpec: TypeAlias = str | Schedule | Mapping[str, "str | Schedule"]

START = "initial_lr"
"""Where a group keeps its own rate: torch's name, so that torch's schedulers find it too."""


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


BY_NAME: dict[str, Schedule] = {"constant": constant, "cosine": cosine, "linear": linear}


class RateSchedule:
    """Sets the rates of an optimizer's groups before each step."""

    def __init__(self, spec: ScheduleSpec, optimizer: Optimizer | None) -> None:
        if spec != "constant" and optimizer is None:
            raise UnsupportedError(
                f"schedule={describe(spec)!r} needs a method that trains by an optimizer; this one "
                "has none"
            )
        self.optimizer = None if spec == "constant" else optimizer
        names = [group.get("name", "mean") for group in self._groups]
        schedules = _by_group(spec, names)
        self.schedules = [schedules.get(name, constant) for name in names]
        for group in self._groups:
            group.setdefault(START, group["lr"])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        # Asked for anew: a restored optimizer has new groups.
        return [] if self.optimizer is None else self.optimizer.param_groups

    def set(self, fraction: float) -> None:
        """The rates at this fraction of training."""
        for group, schedule in zip(self._groups, self.schedules, strict=True):
            group["lr"] = group[START] * schedule(fraction)


def describe(spec: ScheduleSpec) -> Any:
    """What the run folder records."""
    if isinstance(spec, Mapping):
        return {name: describe(one) for name, one in spec.items()}
    return spec if isinstance(spec, str) else getattr(spec, "__qualname__", repr(spec))


def _by_group(spec: ScheduleSpec, names: list[str]) -> dict[str, Schedule]:
    if not isinstance(spec, Mapping):
        return dict.fromkeys(names, _one(spec))
    strangers = sorted(set(spec) - set(names))
    if strangers:
        raise DataError(
            f"schedule names the parameter groups {strangers}, but this method has "
            f"{sorted(set(names))}"
        )
    return {name: _one(schedule) for name, schedule in spec.items()}


def _one(spec: str | Schedule) -> Schedule:
    if callable(spec):
        return spec
    if spec not in BY_NAME:
        raise DataError(
            f"schedule={spec!r} is unknown; choose one of {sorted(BY_NAME)}, or give a function "
            "from the fraction of training done to a factor on the rate"
        )
    return BY_NAME[spec]
