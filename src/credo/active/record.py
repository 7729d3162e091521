"""A run of active learning as a folder, which a failure at any moment leaves usable.

record.safetensors  what was asked and answered, the scores, and a question without an answer yet
start.safetensors   the network before the first round, which every round starts from anew
curve.json          the records of the rounds, to be read by people
training-007/       the checkpoints of `credo.fit` in the last round
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from credo import storage
from credo.errors import CheckpointError, DataError, FileFormatError
from credo.model import Model
from credo.network.batches import parts_of
from credo.storage import under
from credo.train.folder import differences
from credo.types import Inputs, Json

RECORD, START, CURVE = "record.safetensors", "start.safetensors", "curve.json"


@dataclass
class Record:
    """What is known so far.

    ``asked`` are pool indices in order, ``answers`` their labels, ``rounds`` the finished
    trainings; ``question`` are indices whose labels were asked for and have not come.
    """

    config: Json
    asked: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    answers: Tensor = field(default_factory=lambda: torch.empty(0))
    rounds: list[Json] = field(default_factory=list)
    question: list[int] | None = None

    @property
    def used(self) -> int:
        """How many of the labels the last training had."""
        return self.rounds[-1]["labels"] if self.rounds else 0

    def answer(self, labels: Tensor) -> None:
        """The question's labels have come."""
        assert self.question is not None
        if len(self.asked) and labels.shape[1:] != self.answers.shape[1:]:
            raise DataError(
                f"the oracle's labels now have shape {tuple(labels.shape)}; earlier ones had "
                f"{('n', *self.answers.shape[1:])}"
            )
        new = torch.tensor(self.question, dtype=torch.int64)
        self.answers = torch.cat([self.answers, labels]) if len(self.asked) else labels
        self.asked = torch.cat([self.asked, new])
        self.question = None


class Shelf:
    """Where the record of a run is kept; without a folder nowhere."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def open(self, config: Json, resume: bool) -> Record:
        """The record to continue from: the stored one, or an empty one."""
        if self.folder is None:
            return Record(config)
        path = self.folder / RECORD
        if not resume or not path.exists():
            for name in (RECORD, START, CURVE):
                (self.folder / name).unlink(missing_ok=True)
            self.drop_training(keep=None)
            return Record(config)
        tensors, meta = storage.read_tensors(path)
        kind, stored, rounds, question = storage.require(
            path, meta, ("kind", "config", "rounds", "question")
        )
        if kind != "active learning" or {"asked", "answers"} - tensors.keys():
            raise FileFormatError(f"{path} is not a record of active learning")
        different = differences(stored, json.loads(json.dumps(config)))
        if different:
            raise CheckpointError(
                f"{self.folder} holds a run with other settings: {'; '.join(different)}. Use "
                "another folder, or resume=False to start it anew."
            )
        return Record(config, tensors["asked"], tensors["answers"], rounds, question)

    def keep(self, record: Record) -> None:
        """Replace the stored record."""
        if self.folder is None:
            return
        meta = {
            "kind": "active learning",
            "config": record.config,
            "rounds": record.rounds,
            "question": record.question,
        }
        tensors = {"asked": record.asked, "answers": record.answers}
        storage.write_tensors(self.folder / RECORD, tensors, meta)
        text = json.dumps(record.rounds, indent=1) + "\n"
        storage.write_atomically(self.folder / CURVE, text.encode())

    def keep_start(self, start: NetworkState) -> NetworkState:
        """Store the weights of the first call, or bring them back in a later one."""
        if self.folder is None:
            return start
        path = self.folder / START
        if path.exists():
            return NetworkState(storage.read_tensors(path)[0])
        storage.write_tensors(path, start.tensors, {"kind": "start"})
        return start

    def training(self, number: int) -> Path | None:
        """The folder of a round's training."""
        return None if self.folder is None else self.folder / f"training-{number:03d}"

    def drop_training(self, keep: int | None) -> None:
        """Remove the checkpoints of all rounds but one."""
        if self.folder is None:
            return
        for path in self.folder.glob("training-*"):
            if path != (None if keep is None else self.training(keep)):
                shutil.rmtree(path)


@dataclass(frozen=True)
class NetworkState:
    """Everything that training changes in a model: weights, buffers, learned noise."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: Model) -> NetworkState:
        """A copy of what the model has now."""
        tensors = {"weights": model.weights()}
        tensors |= {f"buffer.{name}": b for name, b in model.buffers().items()}
        tensors |= {f"noise.{i}": p for i, p in enumerate(model.noise_parameters())}
        return cls({name: tensor.detach().clone() for name, tensor in tensors.items()})

    @torch.no_grad()
    def write(self, model: Model) -> None:
        """Put it back."""
        flat = model.bind()
        if self.tensors["weights"].shape != flat.vector.shape:
            raise CheckpointError(
                f"the stored network has {self.tensors['weights'].numel()} weights, this one "
                f"{flat.vector.numel()}; use another folder, or resume=False to start anew"
            )
        with flat.writing() as vector:
            vector.copy_(self.tensors["weights"])
        for name, value in under("buffer.", self.tensors).items():
            model.buffers()[name].copy_(value)
        for index, parameter in enumerate(model.noise_parameters()):
            parameter.copy_(self.tensors[f"noise.{index}"])


def fingerprint(inputs: Inputs) -> str:
    """A short text that another pool would not have.

    Args:
        inputs: The pool.
    """
    digest = hashlib.sha256()
    for part in parts_of(inputs):
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
