r"""What continual learners are measured against: no memory, all data, some data.

=========== ================================================================ =====================
learner     trains task t on                                                 carries
=========== ================================================================ =====================
`Naive`     mean NLL of task t                                               nothing: the floor
`Joint`     mean NLL of tasks 1 … t together, from the first weights anew    all data: the ceiling
`Replay`    mean NLL of task t + ``weight``·mean NLL of remembered examples  ``size`` per task
=========== ================================================================ =====================

The remembered examples are a random choice from each task's training data, the same number of each
class (``choice="balanced"``) or as they come (``"random"``); each step sees ``batch_size`` of them.

    >>> import credo
    >>> model = credo.Model(torch.nn.Linear(64, 10), credo.likelihoods.Categorical())
    >>> learner = Replay(model, Training(epochs=1), size=20)
    >>> learner.learn(credo.continual.permuted("digits", num_data=100)[0], progress=False)
    >>> learner.memory_bytes                                      # of 20 images and their labels
    5280
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Generator, Tensor

from credo.checks import Count, Positive, checked
from credo.continual.learner import RegularisedLearner, Training
from credo.continual.memory import pack_batches, unpack_batches
from credo.continual.regularised import Regulariser
from credo.continual.tasks import Task
from credo.map import MAPState
from credo.model import Model
from credo.network.batches import batch_rows, joined
from credo.noise import key_to_seed
from credo.types import Batch, Json

Choice = Literal["balanced", "random"]


class Naive(RegularisedLearner):
    """Fine-tuning on every new task, without a thought for the old ones."""


class Joint(RegularisedLearner):
    """Training on all tasks so far together, each time from the weights the network began with.

    Args:
        model: What learns.
        training: How each task is trained.
    """

    def __init__(self, model: Model, training: Training | None = None) -> None:
        super().__init__(model, training)
        self.first = model.weights()
        self._batches: list[Batch] = []

    def data(self, task: Task) -> Batch:
        """All so far."""
        return joined([*self._batches, task.train_data])

    def regulariser(self, task: Task) -> Regulariser:
        """None; and the weights go back to the first ones."""
        with self.model.bind().writing() as vector:
            vector.copy_(self.first)
        return Regulariser()

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """Keep the data."""
        self._batches.append(task.train_data)

    def carried(self) -> dict[str, Tensor]:
        """First weights, and the data of all tasks."""
        return {"first": self.first, **pack_batches(self._batches)}

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        self.first = tensors["first"]
        self._batches = unpack_batches(tensors, self.model.like.device)


@checked
class Replay(RegularisedLearner):
    """Fine-tuning with remembered examples of the old tasks beside the new ones.

    Args:
        model: What learns.
        training: How each task is trained.
        size: Examples remembered of each task.
        weight: Of their loss beside the new task's.
        choice: "balanced", the same number of each class, or "random", as they come.
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        size: Count = 200,
        weight: Positive = 1.0,
        choice: Choice = "balanced",
    ) -> None:
        super().__init__(model, training)
        self.size, self.weight, self.choice = size, weight, choice
        self._batches: list[Batch] = []

    def regulariser(self, task: Task) -> Regulariser:
        """The loss of the remembered examples."""
        if not self._batches:
            return Regulariser()
        return Remembered(joined(self._batches), self.weight, self.training.batch_size, self.seed)

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """Remember some of the task's examples."""
        generator = torch.Generator().manual_seed(key_to_seed(self.seed, 3))
        rows = chosen_rows(task.train_data[1], self.size, self.choice, generator)
        self._batches.append(batch_rows(task.train_data, rows))

    def carried(self) -> dict[str, Tensor]:
        """The remembered examples."""
        return pack_batches(self._batches)

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        self._batches = unpack_batches(tensors, self.model.like.device)


class Remembered(Regulariser):
    """R = weight · mean NLL of a few remembered examples, others at every step.

    Args:
        memory: All remembered examples.
        weight: Of their loss.
        batch_size: Examples of them in a step.
        seed: Of the choice in each step.
    """

    def __init__(self, memory: Batch, weight: float, batch_size: int, seed: int) -> None:
        self.memory, self.weight, self.batch_size, self.seed = memory, weight, batch_size, seed

    def term(self, state: MAPState) -> Tensor:
        """The loss of this step's choice, which is a function of seed and step."""
        memory = self.memory
        if len(memory[1]) > self.batch_size:
            key = key_to_seed(self.seed, 4, state.clock.step)
            order = torch.randperm(len(memory[1]), generator=torch.Generator().manual_seed(key))
            memory = batch_rows(memory, order[: self.batch_size])
        return self.weight * state.model.mean_nll(memory)

    def value(self, state: MAPState) -> float:
        """The loss of this step's choice."""
        with torch.no_grad():
            return float(self.term(state))

    def config(self) -> Json:
        """Its settings."""
        return {"type": "Remembered", "weight": self.weight, "examples": len(self.memory[1])}


def chosen_rows(
    targets: Tensor, count: int, choice: Choice, generator: Generator | None = None
) -> Tensor:
    """Rows of a random choice of examples, balanced over integer labels or not.

    Args:
        targets: Of all examples.
        count: How many rows.
        choice: "balanced" or "random".
        generator: Of the choice.

    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
    >>> rows = chosen_rows(labels, 4, "balanced", torch.Generator().manual_seed(0))
    >>> sorted(labels[rows].tolist())
    [0, 0, 1, 1]
    """
    order = torch.randperm(len(targets), generator=generator)
    if choice == "random" or targets.is_floating_point() or targets.dim() > 1:
        return order[:count]
    labels = targets[order]
    # The k-th example of its class comes before any k+1-th.
    rank = torch.zeros(len(order), dtype=torch.long)
    for label in labels.unique():
        rank[labels == label] = torch.arange(int((labels == label).sum()))
    return order[rank.argsort(stable=True)[:count]]
