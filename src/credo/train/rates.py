"""The learning rates of a run, set before each step as `credo.schedules` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, final

from torch.optim import Optimizer

from credo.errors import DataError, UnsupportedError
from credo.packing import as_json
from credo.schedules import (
    Plateau,
    PlateauMemory,
    ScheduleSpec,
    factor_at,
    for_groups,
    numbers_in,
)
from credo.types import Json

START = "initial_lr"
"""Where a group keeps its own rate: torch's name, so that torch's schedulers find it too."""


@final
class Rates:
    """The rates of an optimizer's groups under a schedule, and what its plateaus have seen.

    ``constant`` says that there is nothing to set.
    """

    def __init__(self, spec: ScheduleSpec, optimizer: Optimizer | None) -> None:
        if spec != "constant" and optimizer is None:
            raise UnsupportedError(
                f"schedule={as_json(spec)!r} needs a method that trains by an optimizer; this one "
                "has none"
            )
        self.constant = spec == "constant"
        self.optimizer = None if self.constant else optimizer
        self.names = [group.get("name", "mean") for group in self._groups]
        self.schedules = for_groups(spec, self.names)
        self.memories = [PlateauMemory()] * len(self.schedules)
        for group in self._groups:
            group.setdefault(START, group["lr"])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        # Asked for anew: a restored optimizer has new groups.
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def watching(self) -> bool:
        """Whether a plateau looks at the records."""
        return any(isinstance(schedule, Plateau) for schedule in self.schedules)

    def set(self, epoch: float, epochs: int) -> None:
        """The rates when ``epoch`` of ``epochs`` are done."""
        for group, schedule, memory in zip(
            self._groups, self.schedules, self.memories, strict=True
        ):
            group["lr"] = group[START] * factor_at(schedule, epoch, epochs, memory)

    def learn(self, record: Json) -> None:
        """Show an epoch's record to the plateaus."""
        self.memories = [
            schedule.after(memory, _watched(schedule, record))
            if isinstance(schedule, Plateau)
            else memory
            for schedule, memory in zip(self.schedules, self.memories, strict=True)
        ]

    def check(self, record: Json) -> None:
        """Refuse a plateau that watches what records don't have, before an epoch is trained."""
        for schedule in self.schedules:
            if isinstance(schedule, Plateau):
                _watched(schedule, record)

    def summary(self) -> Json:
        """The rates of the last step, by group, for the record; nothing if they are constant."""
        rates = {name: group["lr"] for name, group in zip(self.names, self._groups, strict=True)}
        return {"rates": rates} if rates else {}

    def pack(self) -> list[Json]:
        """For the checkpoint."""
        return [asdict(memory) for memory in self.memories]

    def unpack(self, memories: list[Mapping[str, Any]]) -> None:
        """The inverse of ``pack``."""
        self.memories = [PlateauMemory(**memory) for memory in memories]


def _watched(schedule: Plateau, record: Json) -> float:
    value = record.get(schedule.watch)
    if not isinstance(value, int | float):
        raise DataError(
            f"a plateau watches {schedule.watch!r}, which this run does not record; it records "
            f"{', '.join(numbers_in(record))}"
        )
    return float(value)
