"""Independent trials on worker processes: resumable, and one failure costs one trial.

Each trial has a folder, <folder>/<label>-<key>, where key is a hash of its settings; what lies in
it is told in `credo.trials.attempt`.

A trial that raises is recorded and the others go on. If a worker process dies, the pool is lost,
and with it every trial that had begun: these are run again, one at a time, each in a process of its
own. The one that kills its process again is recorded as failed; then the pool goes on.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import joblib
import torch

from credo import workers as engines
from credo.checks import Count, checked
from credo.train.progress import progress_bar
from credo.trials.attempt import (
    Board,
    Function,
    Outcome,
    attempt,
    is_running,
    stored_error,
    stored_result,
    write_error,
)
from credo.types import Json

SECONDS_BETWEEN_LOOKS = 0.2


@checked
def run_many(
    function: Function,
    trials: Sequence[Json],
    jobs: Count | None = None,
    folder: str | Path | None = None,
    describe: Callable[[Json], str] = lambda trial: "trial",
    progress: bool = True,
    *,
    engine: engines.EngineName = "local",
    isolated: bool = False,
    notice: Callable[[Outcome], str] | None = None,
) -> list[Outcome]:
    """Call a function on every trial, several at a time, and return the outcomes in order.

    A trial that raises is recorded and the others go on; it is tried again by a later call. Torch
    gets an equal share of the cores in each process.

    Args:
        function: From a trial and its folder to its result, both JSON.
        trials: Dictionaries of settings.
        jobs: Processes at a time; None is one per core.
        folder: Where results are kept under a hash of the settings; a later call does not repeat
            them, and what another sweep is running in the same folder is waited for.
        describe: Gives a short label for folder and bar.
        progress: Whether to show a progress bar.
        engine: "local" processes, "ray" or "dask".
        isolated: With ``jobs=1``, too, in a process that may die.
        notice: Called with each outcome as it comes; returns the bar's text.

    >>> def square(trial, folder):
    ...     return {"square": trial["x"] ** 2}
    >>> [o.result["square"] for o in run_many(square, [{"x": 2}, {"x": 3}], 1, progress=False)]
    [4, 9]
    """
    places = [place_of(trial, folder, describe) for trial in trials]
    stored = {i: stored_result(place) for i, place in enumerate(places)}
    outcomes = {i: Outcome(trials[i], r) for i, r in stored.items() if r is not None}
    waiting = [i for i in range(len(trials)) if i not in outcomes]
    jobs = min(jobs or joblib.cpu_count(), max(1, len(waiting)))
    notice = notice or (lambda outcome: f"{describe(outcome.trial)} done")
    with progress_bar(progress, len(trials), "running", counted=True) as bar:
        for i in sorted(outcomes):
            bar.advance(notice(outcomes[i]))
        if waiting:
            with engines.start(engine, jobs, isolated) as pool, tempfile.TemporaryDirectory() as at:
                crew = _Crew(function, trials, places, jobs, pool, Board(Path(at)),
                             lambda outcome: bar.advance(notice(outcome)), outcomes)  # fmt: skip
                crew.finish(waiting)
    return [outcomes[i] for i in range(len(trials))]


def trial_key(trial: Json) -> str:
    """Twelve hexadecimal digits that depend on the settings but not on their order.

    Args:
        trial: Its settings.

    >>> trial_key({"lr": 0.1, "seed": 3}) == trial_key({"seed": 3, "lr": 0.1})
    True
    """
    return hashlib.sha256(json.dumps(trial, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class _Crew:
    """The trials of one call of `run_many`, and how they are brought to an end."""

    function: Function
    trials: Sequence[Json]
    places: Sequence[Path | None]
    jobs: int
    pool: engines.Pool
    board: Board
    tell: Callable[[Outcome], None]
    outcomes: dict[int, Outcome]
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, waiting: list[int]) -> None:
        """Until every trial has an outcome."""
        while waiting:
            error = self._pass(waiting, self.jobs)
            left = self._without_outcome(waiting)
            if error is not None:
                suspects = sorted(self.board.begun() & set(left))
                if not suspects and len(left) == len(waiting):
                    raise error  # nothing was begun, so no trial is to blame
                for i in suspects:
                    self._alone(i, error)
            elif left:
                self._wait_for_others(left)
            waiting = self._without_outcome(waiting)

    def _pass(self, indices: Sequence[int], at_once: int) -> Exception | None:
        """Hand the trials to the pool; returns the error that broke it, if one did."""
        # Never more than the caller allowed, by OMP_NUM_THREADS or torch.set_num_threads: two runs
        # beside each other that each take all cores wait for one another at every operation.
        threads = max(1, min(torch.get_num_threads(), joblib.cpu_count() // self.jobs))
        for i in indices:
            self.board.forget(i)
        calls = [
            joblib.delayed(attempt)(
                self.function, self.trials[i], self.places[i], threads, self.board, i
            )
            for i in indices
        ]
        with self._watching():
            try:
                # Trials catch their own errors, so what comes out of here is the engine's.
                for i, outcome in zip(indices, self.pool(calls, at_once), strict=True):
                    self._note(i, outcome)
            except Exception as error:
                return error
        return None

    def _alone(self, i: int, first: Exception) -> None:
        """Run a trial that had begun when the pool broke; it is guilty if the pool breaks again."""
        again = self._pass([i], at_once=1)
        if again is None or i in self.outcomes:
            return
        text = (
            "a worker process died while it ran this trial, and another one when it was tried "
            f"again by itself, perhaps for want of memory ({again or first})"
        )
        write_error(self.places[i], text + "\n")
        self._note(i, Outcome(self.trials[i], None, text))

    def _wait_for_others(self, indices: Sequence[int]) -> None:
        """Until one of the trials that another sweep has claimed is free; take what it left."""
        while True:
            free = [i for i in indices if (p := self.places[i]) is None or not is_running(p)]
            for i in free:
                result, error = stored_result(self.places[i]), stored_error(self.places[i])
                if result is not None or error is not None:
                    self._note(
                        i, Outcome(self.trials[i], result, error if result is None else None)
                    )
            if free:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _without_outcome(self, indices: Sequence[int]) -> list[int]:
        return [i for i in indices if i not in self.outcomes]

    def _note(self, i: int, outcome: Outcome) -> None:
        with self._noting:
            if outcome.known and i not in self.outcomes:
                self.outcomes[i] = outcome
                self.tell(outcome)

    def _look(self) -> None:
        for i, outcome in self.board.take().items():
            self._note(i, outcome)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note outcomes as the board shows them: not every engine hands results over one by one."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SECONDS_BETWEEN_LOOKS):
                self._look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self._look()


@overload
def place_of(trial: Json, folder: None, describe: Callable[[Json], str]) -> None: ...
@overload
def place_of(trial: Json, folder: str | Path, describe: Callable[[Json], str]) -> Path: ...
def place_of(
    trial: Json, folder: str | Path | None, describe: Callable[[Json], str]
) -> Path | None:
    """A trial's own folder, or None without one for all of them.

    Args:
        trial: Its settings.
        folder: That of all trials.
        describe: Gives a short label.
    """
    if folder is None:
        return None
    label = "".join(c if c.isalnum() or c in "-_." else "_" for c in describe(trial))
    return Path(folder) / f"{label}-{trial_key(trial)}"
