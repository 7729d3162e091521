"""One trial in whatever process an engine chose: claimed, run, written down.

<place>/claim.lock     locked by the process that runs the trial, for as long as it lives
        config.json    the trial's settings
        env.json       where it ran: versions, host, process
        result.json    what the function returned: the trial is finished
        error.txt      the traceback of a trial that failed

The claim is a lock of the operating system, so one process at a time runs a trial, also when two
sweeps share a folder, and a claim can't outlive its process: a killed trial is free at once.
"""

from __future__ import annotations

import json
import os
import platform
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from credo import storage
from credo.errors import FileFormatError
from credo.types import Json

Function = Callable[[Json, Path | None], Json]
"""``function(trial, folder)`` → result; both are JSON, and ``folder`` is the trial's own."""


@dataclass(frozen=True)
class Outcome:
    """What became of one trial.

    Args:
        trial: Its settings.
        result: What its function returned, None if it failed.
        error: The text of its error, None if it did not fail.
    """

    trial: Json
    result: Json | None
    error: str | None = None

    @property
    def known(self) -> bool:
        """False for a trial that another process was running."""
        return self.result is not None or self.error is not None


class Board:
    """A folder of one sweep's own where workers say what they began and how it ended.

    It outlives a worker that dies, and it is there before the engine hands results back. Workers
    on other machines may not see it; then the sweep knows of results only what they return.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, index: int) -> None:
        """This trial is on its way."""
        with suppress(OSError):
            (self.path / f"{index}.begun").touch()

    def end(self, index: int, outcome: Outcome) -> None:
        """This trial is over."""
        # A result that is not JSON, without a folder to keep it in, travels with the return value.
        with suppress(OSError, TypeError):
            data = json.dumps(asdict(outcome)).encode()
            part = self.path / f"{index}.part"
            part.write_bytes(data)
            part.replace(self.path / f"{index}.json")

    def begun(self) -> set[int]:
        """The trials that were begun."""
        return {int(path.stem) for path in self.path.glob("*.begun")}

    def take(self) -> dict[int, Outcome]:
        """The outcomes since the last look."""
        outcomes = {}
        for path in self.path.glob("*.json"):
            outcomes[int(path.stem)] = Outcome(**json.loads(path.read_bytes()))
            path.unlink()
        return outcomes

    def forget(self, index: int) -> None:
        """The trial will be begun again."""
        (self.path / f"{index}.begun").unlink(missing_ok=True)


def attempt(
    function: Function, trial: Json, place: Path | None, threads: int, board: Board, index: int
) -> Outcome:
    """Run the trial unless another process is at it; never raises on the trial's account."""
    board.begin(index)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with claimed(place) as free:
            outcome = _run(function, trial, place) if free else Outcome(trial, None)
    finally:
        torch.set_num_threads(threads_before)
    board.end(index, outcome)
    return outcome


@contextmanager
def claimed(place: Path | None) -> Iterator[bool]:
    """Whether the trial is ours for the time being; False if another process has it."""
    if place is None:
        yield True
        return
    place.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place / "claim.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_running(place: Path) -> bool:
    """Whether a process has the trial now."""
    if not (place / "claim.lock").exists():
        return False
    with claimed(place) as free:
        return not free


def stored_result(place: Path | None) -> Json | None:
    """The result that is on disk, if the trial was finished."""
    path = None if place is None else place / "result.json"
    if path is None or not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(
            f"{path} can't be read ({error}); delete it, and the trial will be run again"
        ) from error


def stored_error(place: Path | None) -> str | None:
    """The last line of the traceback that a failed trial left."""
    path = None if place is None else place / "error.txt"
    if path is None or not path.exists():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "failed without saying why"


def write_error(place: Path | None, text: str) -> None:
    """Record a failure, if the trial has a place to."""
    if place is not None:
        storage.write_atomically(place / "error.txt", text.encode())


def _run(function: Function, trial: Json, place: Path | None) -> Outcome:
    try:
        if place is None:
            return Outcome(trial, function(trial, None))
        # Another sweep may have finished it since ours looked.
        result = stored_result(place)
        if result is None:
            (place / "error.txt").unlink(missing_ok=True)
            _write(place / "config.json", trial)
            _write(
                place / "env.json",
                {**storage.environment(), "host": platform.node(), "process": os.getpid()},
            )
            result = function(trial, place)
            _write(place / "result.json", result)
        return Outcome(trial, result)
    except Exception as error:
        write_error(place, traceback.format_exc())
        return Outcome(trial, None, f"{type(error).__name__}: {error}")


def _write(path: Path, content: Json) -> None:
    storage.write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
