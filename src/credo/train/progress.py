"""What a person sees while training runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from credo.types import Json

SECONDS_BETWEEN_UPDATES = 0.1


class Reporter:
    """Silence; the base of `BarReporter`."""

    def step(self, epoch: int, batch: int, nll: float) -> None:
        """A step is done."""

    def epoch(self, record: Json) -> None:
        """An epoch is done."""


class BarReporter(Reporter):
    """One bar over all epochs, with the running loss beside it."""

    def __init__(self, bar: Progress, epochs: int, num_batches: int) -> None:
        self._bar, self._num_batches = bar, num_batches
        self._epochs = epochs
        self._task = bar.add_task("", total=max(1, epochs * num_batches))
        self._shown_at, self._last = 0.0, ""

    def step(self, epoch: int, batch: int, nll: float) -> None:
        """Move the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._shown_at < SECONDS_BETWEEN_UPDATES:
            return
        self._shown_at = now
        text = f"epoch {epoch + 1}/{self._epochs} · nll {nll:.4f}{self._last}"
        done = epoch * self._num_batches + batch
        self._bar.update(self._task, completed=done, description=text)

    def epoch(self, record: Json) -> None:
        """Show what the epoch's record says."""
        parts = [f" · {key} {record[name]:.4g}" for name, key in SHOWN.items() if name in record]
        self._last = "".join(parts)
        text = f"epoch {record['epoch'] + 1}/{self._epochs} · nll {record['nll']:.4f}{self._last}"
        done = (record["epoch"] + 1) * self._num_batches
        self._bar.update(self._task, completed=done, description=text)


SHOWN = {"kl": "kl", "temperature": "η", "val_nll": "val nll", "val_accuracy": "val acc"}


@contextmanager
def reporter(show: bool | Reporter, epochs: int, num_batches: int) -> Iterator[Reporter]:
    """A progress bar on stderr, silence, or a reporter of the caller's own."""
    if isinstance(show, Reporter):
        yield show
        return
    if not show or not epochs:
        yield Reporter()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield BarReporter(bar, epochs, num_batches)
