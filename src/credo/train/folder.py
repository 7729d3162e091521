"""A run as a folder: configuration, environment, metrics, and the state to resume from.

config.json         what was asked for: a run resumes only under the same configuration
env.json            where it ran
metrics.jsonl       one line per epoch
state.safetensors   the last checkpoint, replaced atomically

A checkpoint has a version, `CHECKPOINT_VERSION`: it says how methods lay out their state, and one
of another version is refused by name rather than misread.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from credo import storage
from credo.errors import CheckpointError, FileFormatError
from credo.types import Json
from credo.version import __version__

CHECKPOINT_VERSION = 2
"""2: states are packed by their fields (`credo.packing`); 1, which had no number: by each method
itself."""


@final
class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state_path = self.path / "state.safetensors"
        self.best_path = self.path / "best.safetensors"
        self.metrics_path = self.path / "metrics.jsonl"

    def batch_size(self, asked: int, ranks: int) -> int:
        """The examples of a minibatch, all ranks together, if each was asked to take so many.

        A run keeps the minibatches it began with: the same call on another number of ranks shares
        those out.
        """
        began = (self._read_config() or {}).get("ranks", {})
        if began.get("batch_size") == asked:
            ranks = began["number"]
        return asked * ranks

    def holds(self, config: Json) -> bool:
        """Whether there is a run of this configuration to resume."""
        stored = self._read_config()
        if stored is None or not self.state_path.exists():
            return False
        self._refuse_other_version(stored.pop("checkpoint_version", 1))
        asked = json.loads(json.dumps(_plain(config)))
        # On which ranks it runs is no part of what a run is.
        before, now = stored.pop("ranks", None), asked.pop("ranks", None)
        different = differences(stored, asked)
        if different:
            remedy = ""
            if before and now and stored.get("num_batches") != asked.get("num_batches"):
                remedy = (
                    f"It began with batch_size={before['batch_size']} on each of "
                    f"{before['number']} ranks, and goes on with the same minibatches: leave "
                    "batch_size as it was, whatever the number of ranks. "
                )
            raise CheckpointError(
                f"{self.path} holds a run with other settings: {'; '.join(different)}. {remedy}"
                "Use another folder, or resume=False to start it anew."
            )
        return True

    def begin(self, config: Json) -> None:
        """Start a new run, in the place of what there is."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in (self.state_path, self.best_path, self.metrics_path):
            leftover.unlink(missing_ok=True)
        self._write_json("config.json", {"checkpoint_version": CHECKPOINT_VERSION, **config})
        self._write_json("env.json", storage.environment())

    def checkpoint(self, tensors: dict[str, Tensor], meta: Json) -> None:
        """Replace the checkpoint, unless the state is damaged: the last good one is worth more."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"{name} is not finite, so {self.state_path} was kept as it was"
                )
        storage.write_tensors(self.state_path, tensors, self._header("checkpoint") | meta)

    def restore(self) -> tuple[dict[str, Tensor], Json]:
        """The last checkpoint."""
        tensors, meta = storage.read_tensors(self.state_path)
        if meta.get("kind") != "checkpoint":
            raise FileFormatError(f"{self.state_path} is not a checkpoint of a run")
        self._refuse_other_version(meta.get("version", 1))
        return tensors, meta

    def keep_best(self, tensors: dict[str, Tensor], meta: Json) -> None:
        """Replace the best state so far; `best` reads it."""
        storage.write_tensors(self.best_path, tensors, self._header("best") | {"method": meta})

    def best(self) -> tuple[dict[str, Tensor], Json]:
        """The state that `keep_best` wrote."""
        tensors, meta = storage.read_tensors(self.best_path)
        if meta.get("kind") != "best":
            raise FileFormatError(f"{self.best_path} is not the best state of a run")
        self._refuse_other_version(meta.get("version", 1))
        return tensors, meta["method"]

    def append(self, record: Json) -> None:
        """One line of metrics."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record)) + "\n")

    def records_before(self, epoch: int) -> list[Json]:
        """The metrics of the epochs before this one; later ones are redone."""
        records = []
        lines = (
            self.metrics_path.read_text(encoding="utf-8").splitlines()
            if self.metrics_path.exists()
            else []
        )
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # a line cut off by the crash; everything after it is redone
            if record["epoch"] < epoch:
                records.append(record)
        return records

    def keep_records(self, records: list[Json]) -> None:
        """Replace the metrics by these."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        storage.write_atomically(self.metrics_path, text.encode())

    def _header(self, kind: str) -> Json:
        return {"kind": kind, "version": CHECKPOINT_VERSION}

    def _refuse_other_version(self, version: Any) -> None:
        if version == CHECKPOINT_VERSION:
            return
        try:
            writer = json.loads((self.path / "env.json").read_text(encoding="utf-8"))["credo"]
        except (OSError, ValueError, KeyError):
            writer = "unknown"
        raise CheckpointError(
            f"{self.path} holds a run whose checkpoint has version {version}, written by Credo "
            f"{writer}; this is Credo {__version__}, which reads version "
            f"{CHECKPOINT_VERSION}. Finish the run with the Credo that began it, or start it anew "
            "with resume=False or in another folder. Posteriors that were saved load as ever."
        )

    def _read_config(self) -> Json | None:
        path = self.path / "config.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read ({error}); use another folder") from error

    def _write_json(self, name: str, content: Json) -> None:
        text = json.dumps(_plain(content), indent=2) + "\n"
        storage.write_atomically(self.path / name, text.encode())


def differences(stored: Any, asked: Any, where: str = "") -> list[str]:
    """Where two configurations differ, in words."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        keys = sorted(stored.keys() | asked.keys())
        return [
            text
            for key in keys
            for text in differences(stored.get(key), asked.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if stored == asked else [f"{where} was {stored!r} and is now {asked!r}"]


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
