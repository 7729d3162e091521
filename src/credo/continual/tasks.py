"""A task, and a stream of them: what a continual learner is given, one after the other.

A task is a training and a test set. With several heads it also names the one its outputs come
from, and its labels count from 0 within that head; a network with heads (`credo.continual.heads`)
is called with the inputs and, for each example, the head, so that examples of different tasks can
share a batch.

    >>> import torch
    >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    >>> task = Task("zeros and ones", (x, y), (x, y), classes=(0, 1), head=3)
    >>> inputs, heads = task.inputs(x[:2])
    >>> heads
    tensor([3, 3])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import DataError
from credo.types import Batch, Inputs

Examples = tuple[Tensor, Tensor]
"""Inputs (N, ...) and targets (N, ...)."""


@dataclass(frozen=True)
class Task:
    """One data set of a stream.

    Args:
        name: Different for each task of a stream.
        train: Inputs and targets to learn from.
        test: Inputs and targets to be tested on.
        classes: Those of the source that the labels 0, 1, … of this task stand for; empty for
            regression.
        head: Where its outputs come from; None where all tasks share theirs.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[int, ...] = ()
    head: int | None = None

    def __post_init__(self) -> None:
        for part, (x, y) in (("training", self.train), ("test", self.test)):
            if len(x) != len(y) or not len(x):
                raise DataError(
                    f"the {part} set of task {self.name!r} has {len(x)} inputs and {len(y)} "
                    "targets; there must be as many of one as of the other, and some"
                )

    @property
    def num_data(self) -> int:
        """Training examples."""
        return len(self.train[1])

    def inputs(self, x: Tensor) -> Inputs:
        """What the network is called with: x, and with several heads the head of each example.

        Args:
            x: Inputs (B, ...).
        """
        if self.head is None:
            return x
        return x, torch.full((len(x),), self.head, dtype=torch.long, device=x.device)

    @property
    def train_data(self) -> Batch:
        """The training set as `credo.fit` takes it."""
        return self.inputs(self.train[0]), self.train[1]

    @property
    def test_data(self) -> Batch:
        """The test set in the same form."""
        return self.inputs(self.test[0]), self.test[1]


@dataclass(frozen=True)
class Stream(Sequence[Task]):
    """Tasks in the order in which they are learned.

    Args:
        name: For tables.
        tasks: In their order.
    """

    name: str
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError(f"the stream {self.name!r} has no tasks")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise DataError(f"the tasks of stream {self.name!r} need different names, not {names}")
        if len({task.head is None for task in self.tasks}) > 1:
            raise DataError(f"either all tasks of stream {self.name!r} have a head, or none")

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @property
    def multi_head(self) -> bool:
        """Whether each task has outputs of its own."""
        return self.tasks[0].head is not None

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """How many outputs each head needs; with a single head, how many it needs for all tasks.

        Empty for regression.
        """
        if not self.multi_head:
            shared = max((len(task.classes) for task in self.tasks), default=0)
            return (shared,) if shared else ()
        sizes: dict[int, int] = {}
        for task in self.tasks:
            assert task.head is not None
            sizes[task.head] = max(len(task.classes), sizes.get(task.head, 0))
        return tuple(sizes.get(head, 1) for head in range(max(sizes) + 1))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example, without its head."""
        return tuple(self.tasks[0].train[0].shape[1:])
