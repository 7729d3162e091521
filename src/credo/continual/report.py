"""One learner on one stream: what it knows of every task after every task, and how sure it is.

    >>> import torch, credo
    >>> from credo.continual import Naive, Training, permuted, run
    >>> stream = permuted("digits", tasks=3, num_data=300)
    >>> net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> report = run(Naive(model, Training(epochs=2)), stream, progress=False)
    >>> report.accuracy.shape
    (3, 3)
    >>> sorted(report.summary())[:4]
    ['average_accuracy', 'average_ece', 'average_nll', 'backward_transfer']

Row i of each matrix belongs to the time after task i, column j to the test set of task j; future
tasks are tested too, which is what forward transfer is made of. With several heads those of the
future are untrained, and forward transfer says little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from credo import storage
from credo.continual.learner import Learner
from credo.continual.tasks import Task
from credo.display import Display, Displayed
from credo.errors import CheckpointError, UnsupportedError
from credo.metrics import accuracy, ece, nll
from credo.metrics._inputs import FloatArray
from credo.metrics.forgetting import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from credo.train.progress import Bar, Reporter, progress_bar
from credo.types import Json

SCORES = ("accuracy", "nll", "ece")
REPORT = "report.json"


@dataclass(repr=False)
class Report(Displayed):
    """What a learner knew of all tasks after each of them.

    Args:
        learner: Its name.
        tasks: Their names.
        before: Scores by name on each task before the first was learned, (T,).
        rows: The same after each task.
        seconds: That each task took.
        memory_bytes: What the learner carried after each task.
    """

    learner: str
    tasks: list[str]
    before: dict[str, list[float]]
    rows: list[dict[str, list[float]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    @property
    def accuracy(self) -> FloatArray:
        """Accuracy on task j after task i."""
        return self._matrix("accuracy")

    @property
    def nll(self) -> FloatArray:
        """Negative log-likelihood on task j after task i."""
        return self._matrix("nll")

    @property
    def ece(self) -> FloatArray:
        """Expected calibration error on task j after task i."""
        return self._matrix("ece")

    def summary(self) -> dict[str, float]:
        """Single numbers: those of `credo.metrics.forgetting`, and calibration at the end."""
        return {
            "average_accuracy": average_accuracy(self.accuracy),
            "backward_transfer": backward_transfer(self.accuracy),
            "forward_transfer": forward_transfer(self.accuracy, self.before["accuracy"]),
            "forgetting": forgetting(self.accuracy),
            "average_nll": float(self.nll[-1].mean()),
            "average_ece": float(self.ece[-1].mean()),
            "seconds": sum(self.seconds),
            "memory_bytes": float(self.memory_bytes[-1]),
        }

    def to_json(self) -> Json:
        """All of it."""
        return {
            "learner": self.learner,
            "tasks": self.tasks,
            "before": self.before,
            "rows": self.rows,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_json(cls, content: Json) -> Report:
        """The inverse of `to_json`.

        Args:
            content: What `to_json` gave.
        """
        return cls(**content)

    def table(self) -> Table:
        """Accuracy matrix, with the calibration of the end below it, for a terminal."""
        numbers = self.summary()
        table = Table(
            title=f"{self.learner}: {100 * numbers['average_accuracy']:.1f} % on average, "
            f"forgetting {100 * numbers['forgetting']:.1f}, "
            f"backward {100 * numbers['backward_transfer']:+.1f}, "
            f"forward {100 * numbers['forward_transfer']:+.1f} points, "
            f"memory {self.memory_bytes[-1] / 1e6:.2f} MB",
            title_justify="left",
        )
        table.add_column("after")
        for name in self.tasks:
            table.add_column(name, justify="right")
        for index, row in enumerate(self.rows):
            cells = [
                f"[dim]{100 * value:.1f}[/dim]" if j > index else f"{100 * value:.1f}"
                for j, value in enumerate(row["accuracy"])
            ]
            table.add_row(self.tasks[index], *cells)
        table.add_section()
        table.add_row("NLL at the end", *(f"{value:.3f}" for value in self.rows[-1]["nll"]))
        table.add_row("ECE at the end", *(f"{value:.3f}" for value in self.rows[-1]["ece"]))
        return table

    def _display(self) -> Display:
        done = len(self.rows)
        known = self.rows[-1]["accuracy"][:done] if done else []
        average = f", accuracy {sum(known) / done:.3f} on average" if done else ""
        return Display(
            f"Report of {self.learner}: {done} of {len(self.tasks)} tasks learned{average}",
            "report.summary(), report.table()",
            rows=[
                [task, *(f"{value:.3f}" for value in row["accuracy"])]
                for task, row in zip(self.tasks, self.rows, strict=False)
            ],
            header=["after", *self.tasks],
        )

    def _matrix(self, score: str) -> FloatArray:
        return np.array([row[score] for row in self.rows])


def run(
    learner: Learner,
    stream: Sequence[Task],
    folder: str | Path | None = None,
    progress: bool = True,
) -> Report:
    """Learn the tasks one after the other and test on all of them each time.

    Args:
        learner: Made anew, or restored from ``folder``.
        stream: The tasks.
        folder: With one it can be killed at any moment and called again, with a learner made in the
            same way: tasks that were learned are not learned again, and one that was begun is
            resumed.
        progress: Whether to show a progress bar.
    """
    tasks = list(stream)
    if learner.model.likelihood.kind != "classification":
        raise UnsupportedError(
            "the report is about accuracy and calibration of classes; for other likelihoods call "
            "learner.learn and learner.predict yourself"
        )
    path = None if folder is None else Path(folder) / REPORT
    if folder is not None and not learner.learned:
        learner.restore(folder)
    report = _begun(path, learner, tasks)
    with progress_bar(progress, len(tasks)) as line:
        bar = _StreamBar(line, learner.name, tasks)
        for index, task in enumerate(tasks):
            bar.enter(index)
            started = time.monotonic()
            if index >= len(learner.learned):
                learner.learn(task, folder, progress=bar)
            elif learner.learned[index] != task.name:
                raise CheckpointError(
                    f"task {index} of this learner was {learner.learned[index]!r}, not "
                    f"{task.name!r}: use another folder for another stream"
                )
            if index >= len(report.rows):
                report.seconds.append(time.monotonic() - started)
                report.rows.append(scores(learner, tasks))
                report.memory_bytes.append(learner.memory_bytes)
                _write(path, report)
    return report


def scores(learner: Learner, tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Accuracy, NLL and ECE on the test set of each task, by name.

    Args:
        learner: What predicts.
        tasks: Whose test sets are asked.
    """
    by_name: dict[str, list[float]] = {name: [] for name in SCORES}
    for task in tasks:
        x, y = task.test
        probs = learner.predict(x, task).probs
        by_name["accuracy"].append(float(accuracy(probs, y)))
        by_name["nll"].append(float(nll(probs, y)))
        by_name["ece"].append(float(ece(probs, y)))
    return by_name


def _begun(path: Path | None, learner: Learner, tasks: Sequence[Task]) -> Report:
    """The report on disk, or a new one."""
    names = [task.name for task in tasks]
    if path is not None and path.exists():
        report = Report.from_json(json.loads(path.read_text(encoding="utf-8")))
        if report.learner != learner.name or report.tasks != names:
            raise CheckpointError(
                f"{path} is the report of {report.learner} on {report.tasks}; use another folder"
            )
        # What the learner does not know any more is learned, and tested, again.
        done = len(learner.learned)
        del report.rows[done:], report.seconds[done:], report.memory_bytes[done:]
        return report
    report = Report(learner.name, names, scores(learner, tasks))
    _write(path, report)
    return report


def _write(path: Path | None, report: Report) -> None:
    if path is not None:
        storage.write_atomically(path, json.dumps(report.to_json(), indent=2).encode())


class _StreamBar(Reporter):
    """One bar over all tasks; `credo.fit` moves it."""

    def __init__(self, bar: Bar, learner: str, tasks: Sequence[Task]) -> None:
        self._bar, self._learner, self._tasks, self._index = bar, learner, tasks, 0

    def enter(self, index: int) -> None:
        """A task begins."""
        self._index = index
        self._show("")

    def epoch(self, record: Json) -> None:
        """An epoch is done."""
        self._show(f" · epoch {record['epoch'] + 1} · nll {record['nll']:.4f}")

    def _show(self, more: str) -> None:
        text = f"{self._learner} · {self._tasks[self._index].name}{more}"
        self._bar.show(text, done=self._index)
