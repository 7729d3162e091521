"""What every continual learner is: `learn` a task, `predict` on any task so far, carry little.

    >>> import torch, credo
    >>> from credo.continual import Naive, Training, split
    >>> stream = split("digits", num_data=100)
    >>> body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> net = credo.continual.MultiHead(body, 32, stream.head_sizes)
    >>> learner = Naive(credo.Model(net, credo.likelihoods.Categorical()), Training(epochs=2))
    >>> for task in stream[:2]:
    ...     learner.learn(task, progress=False)
    >>> learner.learned, learner.memory_bytes
    (['digits 0 1', 'digits 2 3'], 0)
    >>> learner.predict(stream[0].test[0], stream[0]).probs.shape
    torch.Size([88, 2])

**Folders.** With a ``folder``, `learn` trains in ``folder/task-000``, ``task-001``, … (those of
`credo.fit`: a killed training resumes inside of the task, bit for bit) and then replaces
``folder/learner.safetensors`` by all that the next task needs. `restore` goes on from there.

**Two bases.** `Learner` leaves the training to its subclass (`_train`). `RegularisedLearner` trains
by `RegularisedMAP` and leaves to its subclass what regularises a task (`regulariser`) and what is
kept of it afterwards (`consolidate`). What is carried from task to task, beside the network, is
tensors by name: `carried` gives them, `receive` takes them back, and ``memory_bytes`` is their
size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor

from credo import storage
from credo.checks import Count, NotNegative, Positive, checked
from credo.continual.regularised import RegularisedMAP, Regulariser
from credo.continual.tasks import Task
from credo.errors import CheckpointError, DataError
from credo.families import Delta
from credo.model import Model
from credo.noise import key_to_seed
from credo.optim import by_name as optimizers
from credo.packing import as_json
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.storage import under
from credo.train import fit
from credo.train.progress import Reporter
from credo.types import Batch, Json

STATE = "learner.safetensors"


@checked
@dataclass(frozen=True)
class Training:
    """How each task is trained: the arguments of `credo.fit` and of `RegularisedMAP`.

    The optimizer is a new one for each task.

    Args:
        epochs: Of each task.
        batch_size: Examples of a step.
        lr: The optimizer's rate.
        optimizer: Its name.
        clip: The largest norm that a gradient may have; None leaves all as they are.
        temperature: The weight of the model's prior; 0 for maximum likelihood, which the papers
            have.
        seed: Of the first task; later ones have seeds of their own that follow from it.
    """

    epochs: Count = 10
    batch_size: Count = 128
    lr: Positive = 1e-3
    optimizer: str = "adam"
    clip: Positive | None = None
    temperature: NotNegative = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer.lower() not in optimizers.BY_NAME:
            raise DataError(
                f"optimizer={self.optimizer!r} must be one of {sorted(optimizers.BY_NAME)}"
            )


class Learner(ABC):
    """A model that learns one task after the other.

    Args:
        model: What learns; its network is trained in place.
        training: How each task is trained; the defaults of `Training` if it isn't given.
    """

    def __init__(self, model: Model, training: Training | None = None) -> None:
        self.model = model
        self.training = training or Training()
        self.learned: list[str] = []
        """The names of the tasks so far."""

    @property
    def name(self) -> str:
        """For tables."""
        return type(self).__name__

    def learn(
        self, task: Task, folder: str | Path | None = None, progress: bool | Reporter = True
    ) -> None:
        """Train on the task's data, which need not be there afterwards.

        Args:
            task: The next one of the stream.
            folder: With one it can be killed and called again; see the module's text.
            progress: What `credo.fit` takes.
        """
        if task.name in self.learned:
            raise DataError(
                f"the task {task.name!r} was learned already; a stream's tasks have different names"
            )
        inside = None if folder is None else Path(folder) / f"task-{len(self.learned):03d}"
        self._train(task, inside, progress)
        self.learned.append(task.name)
        if folder is not None:
            self.save(folder)

    @abstractmethod
    def _train(self, task: Task, folder: Path | None, progress: bool | Reporter) -> None:
        """Train on the task, and take along what later tasks need."""

    def predict(self, x: Tensor, task: Task) -> Predictive:
        """The predictive distribution at some inputs of a task.

        Args:
            x: The inputs, without heads.
            task: Which task they belong to.
        """
        return self.posterior().predict(task.inputs(x), samples=1)

    def posterior(self) -> Posterior:
        """What the learner believes of the weights now: the point they are at, if no more."""
        model = self.model
        return Posterior.at_network(model, Delta(model.weights(model.random)))

    # --- what is carried from task to task --------------------------------------------------------

    def carried(self) -> dict[str, Tensor]:
        """All tensors, beside the network, that the next task needs."""
        return {}

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:  # noqa: B027
        """The inverse of ``carried`` and ``facts``, into a learner that was just made.

        Args:
            tensors: What ``carried`` gave.
            meta: What ``facts`` gave.
        """

    def facts(self) -> Json:
        """What the next task needs and is no tensor."""
        return {}

    @property
    def memory_bytes(self) -> int:
        """The size of what is ``carried``; the network's own weights do not count."""
        return sum(t.numel() * t.element_size() for t in self.carried().values())

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Network and memory, as tensors and JSON."""
        model = self.model
        tensors = {"weights": model.weights()}
        tensors |= {f"buffer.{name}": b for name, b in model.buffers().items()}
        tensors |= {f"noise.{index}": p for index, p in enumerate(model.noise_parameters())}
        tensors |= {f"memory.{name}": t for name, t in self.carried().items()}
        return tensors, {"learned": self.learned, "facts": self.facts(), "config": self.config()}

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``, into a learner that was just made.

        Args:
            tensors: Those of ``pack``.
            meta: The JSON of ``pack``.
        """
        if meta["config"] != self.config():
            raise CheckpointError(
                f"this is the state of another learner: {meta['config']}, not {self.config()}"
            )
        model = self.model
        if tensors["weights"].shape != model.bind().vector.shape:
            raise CheckpointError(
                f"this is the state of a network with {len(tensors['weights'])} weights; this one "
                f"has {model.weights().numel()}"
            )
        with model.bind().writing() as vector:
            vector.copy_(tensors["weights"])
        with torch.no_grad():
            for name, buffer in model.buffers().items():
                buffer.copy_(tensors[f"buffer.{name}"])
            for index, parameter in enumerate(model.noise_parameters()):
                parameter.copy_(tensors[f"noise.{index}"])
        self.receive(under("memory.", tensors), meta["facts"])
        self.learned = list(meta["learned"])

    def save(self, folder: str | Path) -> None:
        """Replace the state in this folder.

        Args:
            folder: Where `restore` finds it.
        """
        tensors, meta = self.pack()
        storage.write_tensors(Path(folder) / STATE, tensors, {"kind": "learner", **meta})

    def restore(self, folder: str | Path) -> bool:
        """Go on from the state in this folder, if there is one.

        Args:
            folder: Where `save` wrote.

        Returns:
            Whether there was one.
        """
        path = Path(folder) / STATE
        if not path.exists():
            return False
        tensors, meta = storage.read_tensors(path)
        kind, _, _, _ = storage.require(path, meta, ("kind", "learned", "facts", "config"))
        if kind != "learner":
            raise CheckpointError(f"{path} holds a {kind}, not a continual learner")
        self.unpack(tensors, meta)
        return True

    def config(self) -> Json:
        """The settings: a learner goes on from a state of the same settings only.

        Beside ``training`` they are the constructor's keyword-only parameters, each an attribute.
        """
        parameters = signature(type(self)).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        settings = {name: as_json(getattr(self, name)) for name in own}
        return {"type": type(self).__name__, "training": asdict(self.training), **settings}

    # --- for subclasses ---------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Of the next task's training; the first task's is that of ``training``."""
        done = len(self.learned)
        return key_to_seed(self.training.seed, done) if done else self.training.seed


class RegularisedLearner(Learner):
    """A learner that trains by `RegularisedMAP`; as it stands, without a regulariser."""

    def regulariser(self, task: Task) -> Regulariser:
        """R of this task, made before its training at the weights that the last one left.

        Args:
            task: That is about to be learned.
        """
        return Regulariser()

    def data(self, task: Task) -> Batch:
        """What is trained on.

        Args:
            task: That is about to be learned.
        """
        return task.train_data

    def prior_weight(self, task: Task) -> float:
        """How much the model's prior counts in this task; 0 where the regulariser holds it.

        Args:
            task: That is about to be learned.
        """
        return self.training.temperature

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """After training: keep what later tasks need.

        Args:
            task: That was just learned.
            regulariser: That it was learned with.
        """

    def _train(self, task: Task, folder: Path | None, progress: bool | Reporter) -> None:
        regulariser = self.regulariser(task)
        settings = self.training
        method = RegularisedMAP(
            temperature=self.prior_weight(task),
            optimizer=settings.optimizer,
            lr=settings.lr,
            clip=settings.clip,
            regulariser=regulariser,
        )
        fit(
            self.model,
            method,
            self.data(task),
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            seed=self.seed,
            folder=folder,
            progress=progress,
        )
        self.consolidate(task, regulariser)
