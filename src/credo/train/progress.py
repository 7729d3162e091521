"""What a person sees while something runs: one line on stderr, in a terminal or a notebook.

Every bar of the library is a `Bar`. Its text is cut to what the console has room for, so that bar
and remaining time are still seen at 80 columns; where stderr is a file, only the last line is
written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from credo.errors import DataError
from credo.types import Json

SECONDS_BETWEEN_UPDATES = 0.1
BAR_WIDTH = 20
TIME_WIDTH = 8
NOTEBOOK_WIDTH = 80


class Reporter:
    """What `credo.fit` tells while it trains; this one is silent.

    Derive from it and pass it as ``progress=`` to see training in a way of your own.
    """

    def step(self, epoch: int, batch: int, nll: float) -> None:
        """A step is done.

        Args:
            epoch: Epochs before this one.
            batch: Batches done in this epoch.
            nll: Mean negative log-likelihood of the epoch's batches so far.
        """

    def epoch(self, record: Json) -> None:
        """An epoch is done.

        Args:
            record: Its line of ``posterior.history``.
        """


class Bar:
    """How far something has come, in one line; without a ``progress`` nothing is shown.

    Args:
        progress: Where the line is drawn.
        total: How many steps there are, if that is known.
        text: What stands before the bar.
        room: How many characters fit there.
    """

    def __init__(
        self, progress: Progress | None, total: int | None, text: str = "", room: int = 0
    ) -> None:
        self._progress, self.room = progress, room
        if progress is not None:
            self._task = progress.add_task(_cut(text, room), total=total)

    def show(
        self, text: str | None = None, done: int | None = None, advance: int | None = None
    ) -> None:
        """Change the line.

        Args:
            text: What stands before the bar now.
            done: Steps done in all.
            advance: Steps done since.
        """
        if self._progress is not None:
            self._progress.update(
                self._task,
                description=None if text is None else _cut(text, self.room),
                completed=done,
                advance=advance,
            )

    def advance(self, text: str | None = None) -> None:
        """One step more.

        Args:
            text: What stands before the bar now.
        """
        self.show(text, advance=1)


@contextmanager
def progress_bar(
    show: bool,
    total: int | None,
    text: str = "",
    *,
    counted: bool = False,
    transient: bool = False,
    console: Console | None = None,
) -> Iterator[Bar]:
    """A bar while the block runs.

    Args:
        show: Whether there is anything to see.
        total: How many steps there are, if that is known.
        text: What stands before the bar.
        counted: Whether the numbers of steps stand beside the bar.
        transient: Whether the line vanishes at the end.
        console: Where it is drawn; stderr unless it is given.
    """
    if not show:
        yield Bar(None, total)
        return
    console = console or _console()
    # A name may have brackets in it, which are no markup.
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False), BarColumn(BAR_WIDTH)
    ]  # fmt: skip
    room = console.width - BAR_WIDTH - TIME_WIDTH - 2
    if counted:
        columns.append(MofNCompleteColumn())
        room -= 2 * len(str(total)) + 2
    columns.append(TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, transient=transient) as progress:
        yield Bar(progress, total, text, room)


class TrainingBar(Reporter):
    """One bar over all epochs, with the losses beside it.

    Args:
        bar: Where it is shown.
        epochs: Epochs in all.
        num_batches: Batches of an epoch.
    """

    def __init__(self, bar: Bar, epochs: int, num_batches: int) -> None:
        self._bar, self._epochs, self._num_batches = bar, epochs, num_batches
        self._shown_at, self._record = 0.0, Json()

    def step(self, epoch: int, batch: int, nll: float) -> None:
        """Move the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._shown_at >= SECONDS_BETWEEN_UPDATES:
            self._shown_at = now
            self._show(epoch, nll, epoch * self._num_batches + batch)

    def epoch(self, record: Json) -> None:
        """Show what the epoch's record says."""
        self._record = record
        self._show(record["epoch"], record["nll"], (record["epoch"] + 1) * self._num_batches)

    def _show(self, epoch: int, nll: float, done: int) -> None:
        parts = [f"epoch {epoch + 1}/{self._epochs}", f"nll {nll:.4f}"]
        parts += [f"{key} {self._record[name]:.4g}" for name, key in SHOWN if name in self._record]
        self._bar.show(_as_many_as_fit(parts, self._bar.room), done=done)


SHOWN = (
    ("val_nll", "val_nll"), ("val_accuracy", "val_acc"), ("kl", "kl"), ("temperature", "η")
)  # fmt: skip
"""Of an epoch's record, the most wanted first."""


@contextmanager
def reporter(show: bool | Reporter, epochs: int, num_batches: int) -> Iterator[Reporter]:
    """A progress bar on stderr, silence, or a reporter of the caller's own.

    Args:
        show: What `credo.fit` was given as ``progress``.
        epochs: Epochs in all.
        num_batches: Batches of an epoch.

    Raises:
        DataError: If ``show`` is neither a bool nor a `Reporter`.
    """
    if isinstance(show, Reporter):
        yield show
        return
    if not isinstance(show, bool):
        raise DataError(
            "progress must be True, False or a credo.train.Reporter of your own, but it is "
            f"{show!r}"
        )
    if not show or not epochs:
        yield Reporter()
        return
    with progress_bar(True, max(1, epochs * num_batches)) as bar:
        yield TrainingBar(bar, epochs, num_batches)


def _console() -> Console:
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:
        # Without widgets rich shows nothing and warns; a notebook's stderr does return to the
        # beginning of a line, which is all that one line needs.
        return Console(stderr=True, force_jupyter=False, force_terminal=True, width=NOTEBOOK_WIDTH)
    return console


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def _as_many_as_fit(parts: Sequence[str], room: int) -> str:
    """The parts, without those at the end for which there is no room.

    >>> _as_many_as_fit(["epoch 1/2", "nll 0.5", "kl 80"], room=20)
    'epoch 1/2 · nll 0.5'
    """
    text = parts[0]
    for part in parts[1:]:
        longer = f"{text} · {part}"
        if len(longer) > room:
            break
        text = longer
    return text
