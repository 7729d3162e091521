"""Run folders of `credo.fit` as evidence: what was asked for, where it ran, how training went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from credo.errors import DataError
from credo.report.evidence import Run
from credo.report.figures_of_scores import RECORDS
from credo.report.scores import is_number

CONFIG, METRICS, ENVIRONMENT = "config.json", "metrics.jsonl", "env.json"
LARGEST = 100_000_000
"""Bytes of a file of records; a longer one is something else."""


def read_runs(folder: str | Path) -> list[Run]:
    """All runs of `credo.fit` in a folder, itself included, named by their paths.

    A run that has no records yet, or whose files can't be read, is one that failed and says why; a
    last line that a crash cut off is left out.

    Args:
        folder: A run's folder, or one that holds such folders at any depth.

    Returns:
        The runs, by name. Their scores are the last epoch's records.

    Raises:
        DataError: There is no such folder, or no run in it.

    >>> import tempfile
    >>> read_runs(tempfile.mkdtemp())
    Traceback (most recent call last):
        ...
    credo.errors.DataError: ... holds no run of credo.fit: no folder in it has a config.json ...
    """
    top = Path(folder)
    if not top.is_dir():
        raise DataError(f"{top} is no folder: name one that credo.fit(…, folder=…) wrote to")
    runs = [_run(top, place) for place in _places(top)]
    if not runs:
        raise DataError(
            f"{top} holds no run of credo.fit: no folder in it has a {CONFIG} and a {METRICS}"
        )
    return runs


def _places(top: Path) -> Iterator[Path]:
    for config in sorted(top.rglob(CONFIG)):
        if config.is_file() and (config.parent / METRICS).is_file():
            yield config.parent


def _run(top: Path, place: Path) -> Run:
    name = place.relative_to(top).as_posix() if place != top else top.resolve().name
    try:
        config = json.loads(_text(place / CONFIG))
        if not isinstance(config, Mapping):
            raise ValueError(f"{CONFIG} is no object")
        history = _records(place / METRICS)
    except (OSError, ValueError) as error:
        return Run(name, 0, error=f"can't be read: {error}")
    seed = config.get("seed", 0)
    seed = seed if isinstance(seed, int) else 0
    made = {key: value for key, value in config.items() if key not in ("network", "random")}
    made["environment"] = _environment(place)
    if not history:
        return Run(name, seed, settings=made, error="no epoch has ended yet")
    record = history[-1]
    last = {"epochs": float(len(history))}
    last |= {
        title: float(record[key]) for key, title in RECORDS.items() if is_number(record.get(key))
    }
    seconds = [record["seconds"] for record in history if is_number(record.get("seconds"))]
    if seconds:
        last["train_seconds"] = float(max(seconds))
    return Run(name, seed, last, history=history, settings=made)


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in _text(path).splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # cut off by a crash; what follows was not finished either
        if not isinstance(record, dict):
            raise ValueError(f"{path.name} has a line that is no record")
        records.append(record)
    return records


def _environment(place: Path) -> Any:
    try:
        return json.loads(_text(place / ENVIRONMENT))
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, too many for records")
    return path.read_text(encoding="utf-8")
