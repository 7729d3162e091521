"""What `credo run` shows while its seeds run in other processes: how far, and how long yet.

Seeds write their trainings as run folders, which are looked into from outside: a line of
``metrics.jsonl`` is an epoch. How many epochs a seed has in all is known once another seed is
finished; until then the time that the experiment is expected to take tells how far a seed is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from credo.sweep import Outcome
from credo.train.progress import progress_bar

SECONDS_BETWEEN_LOOKS = 0.5
PARTS = 1000
"""The bar's steps for each seed."""


@contextmanager
def watched(
    place: Path, seeds: int, jobs: int, epochs: int, expected: float | None, show: bool = True
) -> Iterator[Callable[[Outcome], str]]:
    """A bar with the remaining time while the seeds of an experiment run.

    Args:
        place: The folder in which each seed has its own, ``seed-…``.
        seeds: How many seeds there are.
        jobs: How many run at once.
        epochs: Those of one training, as the experiment's settings say.
        expected: How many seconds a seed takes, if that is known.
        show: Whether there is anything to see.

    Yields:
        What to call when a seed is over; it returns a line about it.
    """
    watch = _Watch(place, seeds, jobs, epochs, expected)
    over = threading.Event()
    with progress_bar(show, seeds * PARTS, f"seeds 0/{seeds}") as bar:

        def look() -> None:
            while not over.wait(SECONDS_BETWEEN_LOOKS):
                bar.show(watch.text(), done=int(PARTS * watch.seeds_done()))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield watch.end
        finally:
            over.set()
            watcher.join()
            bar.show(watch.text(), done=int(PARTS * watch.seeds_done()))


@dataclass
class _Watch:
    """The seeds' folders, seen from outside."""

    place: Path
    seeds: int
    jobs: int
    epochs: int
    expected: float | None
    finished: int = 0
    started: float = field(default_factory=time.time)

    def end(self, outcome: Outcome) -> str:
        self.finished += 1
        return f"seed {outcome.trial['seed']} done"

    def seeds_done(self) -> float:
        """Finished seeds, and the shares that are done of those under way."""
        return min(self.finished + sum(map(self._share, self._under_way())), self.seeds)

    def text(self) -> str:
        """As ``seeds 1/3 · seed 1: training 2, epoch 5/12``."""
        parts = [f"seeds {self.finished}/{self.seeds}"]
        with suppress(OSError):
            for seed in self._under_way()[:1]:
                trainings = sorted(seed.rglob("metrics.jsonl"), key=lambda p: p.stat().st_mtime)
                if trainings:
                    done = _count_lines(trainings[-1])
                    of = f"/{self.epochs}" if done <= self.epochs else ""
                    number = seed.name.split("-")[1]
                    parts.append(f"seed {number}: training {len(trainings)}, epoch {done}{of}")
        return " · ".join(parts)

    def _under_way(self) -> list[Path]:
        """The folders of seeds that were begun by this run and have not ended."""
        folders = []
        for seed in sorted(self.place.glob("seed-*")):
            with suppress(OSError):
                ended = (seed / "result.json").exists() or (seed / "error.txt").exists()
                # The file system's clock may be a little behind.
                begun = (seed / "config.json").stat().st_mtime > self.started - 2
                if begun and not ended:
                    folders.append(seed)
        return folders[: self.jobs]

    def _share(self, seed: Path) -> float:
        """How much of a seed is done: by its epochs, or else by its time."""
        whole = self._epochs_of_a_seed()
        with suppress(OSError):
            if whole:
                return min(_epochs(seed) / whole, 1.0)
            if self.expected:
                seconds = time.time() - (seed / "config.json").stat().st_mtime
                # Three quarters at the expected time, and never quite the whole.
                return 1 - math.exp(-1.4 * seconds / self.expected)
        return 0.0

    def _epochs_of_a_seed(self) -> int:
        for seed in self.place.glob("seed-*/result.json"):
            return _epochs(seed.parent)
        return 0


def _epochs(seed: Path) -> int:
    return sum(map(_count_lines, seed.rglob("metrics.jsonl")))


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
