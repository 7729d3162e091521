"""Independent trials on joblib's worker processes: resumable, and one failure costs one trial.

<folder>/<label>-<key>/config.json    the trial's settings; key is a hash of them
                       env.json       where it ran
                       result.json    what the function returned: the trial is finished
                       error.txt      the traceback of a trial that failed
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import joblib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from credo import storage
from credo.errors import DataError, FileFormatError
from credo.train.folder import environment
from credo.types import Json

Function = Callable[[Json, Path | None], Json]
"""``function(trial, folder)`` → result; both are JSON, and ``folder`` is the trial's own."""


@dataclass(frozen=True)
class Outcome:
    """What became of one trial: a ``result``, or else the text of its ``error``."""

    trial: Json
    result: Json | None
    error: str | None = None


def run_many(
    function: Function,
    trials: Sequence[Json],
    jobs: int | None = None,
    folder: str | Path | None = None,
    describe: Callable[[Json], str] = lambda trial: "trial",
    progress: bool = True,
) -> list[Outcome]:
    """Call ``function`` on every trial, ``jobs`` at a time, and return the outcomes in order.

    A trial is a dictionary of settings. With a ``folder`` its result is kept there under a hash of
    the settings, and a later call does not repeat it. A trial that raises is recorded and the
    others go on; it is tried again by a later call. ``jobs=None`` is one process per core; torch
    gets an equal share of the cores in each. ``describe`` gives a short label for folder and bar.

    >>> def square(trial, folder):
    ...     return {"square": trial["x"] ** 2}
    >>> [o.result["square"] for o in run_many(square, [{"x": 2}, {"x": 3}], 1, progress=False)]
    [4, 9]
    """
    if jobs is not None and jobs < 1:
        raise DataError(f"jobs={jobs} must be at least 1, or None for one process per core")
    places = [_place(trial, folder, describe) for trial in trials]
    outcomes = {i: Outcome(trials[i], stored) for i, stored in _finished(places)}
    waiting = [i for i in range(len(trials)) if i not in outcomes]
    jobs = min(jobs or joblib.cpu_count(), max(1, len(waiting)))
    # Never more than the caller allowed, by OMP_NUM_THREADS or torch.set_num_threads: two runs
    # beside each other that each take all cores wait for one another at every operation.
    threads = max(1, min(torch.get_num_threads(), joblib.cpu_count() // jobs))
    calls = [joblib.delayed(_attempt)(function, trials[i], places[i], threads) for i in waiting]
    with _bar(progress, len(trials), len(outcomes)) as advance:
        try:
            finished = joblib.Parallel(n_jobs=jobs, return_as="generator")(calls)
            for i, outcome in zip(waiting, finished, strict=True):
                outcomes[i] = outcome
                advance(describe(trials[i]))
        except BrokenProcessPool as error:
            # Which trial killed its process is not known: all that had not reported are affected.
            text = f"a worker process died, perhaps for want of memory: {error}"
            lost = [i for i in waiting if i not in outcomes]
            outcomes |= {i: Outcome(trials[i], None, text) for i in lost}
            # A trial that finished while another died has its result on disk.
            outcomes |= {
                i: Outcome(trials[i], stored) for i, stored in _finished(places) if i in lost
            }
    return [outcomes[i] for i in range(len(trials))]


def trial_key(trial: Json) -> str:
    """Twelve hexadecimal digits that depend on the settings but not on their order.

    >>> trial_key({"lr": 0.1, "seed": 3}) == trial_key({"seed": 3, "lr": 0.1})
    True
    """
    return hashlib.sha256(json.dumps(trial, sort_keys=True).encode()).hexdigest()[:12]


def _place(trial: Json, folder: str | Path | None, describe: Callable[[Json], str]) -> Path | None:
    if folder is None:
        return None
    label = "".join(c if c.isalnum() or c in "-_." else "_" for c in describe(trial))
    return Path(folder) / f"{label}-{trial_key(trial)}"


def _finished(places: Iterable[Path | None]) -> Iterator[tuple[int, Json]]:
    """The results that are on disk already."""
    for index, place in enumerate(places):
        path = None if place is None else place / "result.json"
        if path is None or not path.exists():
            continue
        try:
            yield index, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FileFormatError(
                f"{path} can't be read ({error}); delete it, and the trial will be run again"
            ) from error


def _attempt(function: Function, trial: Json, place: Path | None, threads: int) -> Outcome:
    """One trial, in whatever process joblib chose; never raises on the trial's account."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if place is not None:
            _write(place / "config.json", trial)
            _write(place / "env.json", environment())
        result = function(trial, place)
        if place is not None:
            _write(place / "result.json", result)
            (place / "error.txt").unlink(missing_ok=True)
        return Outcome(trial, result)
    except Exception as error:
        if place is not None:
            storage.write_atomically(place / "error.txt", traceback.format_exc().encode())
        return Outcome(trial, None, f"{type(error).__name__}: {error}")
    finally:
        torch.set_num_threads(threads_before)


def _write(path: Path, content: Json) -> None:
    storage.write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def _bar(show: bool, total: int, completed: int) -> Iterator[Callable[[str], None]]:
    """A function that says a trial is done: on a progress bar on stderr, or to nobody."""
    if not show:
        yield lambda label: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("running", total=total, completed=completed)
        yield lambda label: bar.update(task, advance=1, description=f"{label} done")
