"""Verdicts as small JSON files: the ones committed with the package, and those of local runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from credo import storage
from credo.errors import FileFormatError
from credo.types import Json
from credo_papers.experiment import PRESETS, VERDICTS, Experiment, Verdict

KEYS = (
    "id", "paper", "claim", "verdict", "numbers", "seeds", "scale", "theorem", "ours", "command"
)  # fmt: skip


def row(experiment: Experiment[Any], preset: str, seeds: Sequence[int], verdict: Verdict) -> Json:
    """What the ledger keeps of a run. Numbers that are not finite become null."""
    return {
        "id": experiment.id,
        "paper": experiment.paper,
        "claim": experiment.claim,
        "verdict": verdict.verdict,
        "numbers": {k: v if math.isfinite(v) else None for k, v in verdict.numbers.items()},
        "seeds": list(seeds),
        "scale": experiment.scale(preset),
        "theorem": experiment.theorem,
        "ours": experiment.ours,
        "command": command(experiment, preset, max(seeds) + 1),
    }


def row_without_run(experiment: Experiment[Any]) -> Json:
    """What there is to say of an experiment that nobody has run yet: its verdict is None."""
    return {
        "id": experiment.id,
        "paper": experiment.paper,
        "claim": experiment.claim,
        "verdict": None,
        "numbers": {},
        "seeds": [],
        "scale": experiment.scale("quick"),
        "theorem": experiment.theorem,
        "ours": experiment.ours,
        "command": command(experiment, "quick", 3),
    }


def command(experiment: Experiment[Any], preset: str, seeds: int) -> str:
    """What to type to run it again."""
    return f"credo run {experiment.id} --preset {preset} --seeds {seeds}"


def write(path: Path, entry: Json) -> None:
    """One verdict, atomically."""
    text = json.dumps(entry, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    storage.write_atomically(path, text.encode())


def committed() -> dict[str, Json]:
    """The verdicts of the project's own runs, by id."""
    folder = files("credo_papers") / "ledger"
    entries = [_read(file) for file in folder.iterdir() if file.name.endswith(".json")]
    return {entry["id"]: entry for entry in sorted(entries, key=lambda e: e["id"])}


def local(folder: str | Path) -> dict[str, Json]:
    """The verdicts under ``folder``, by id: a run at the paper's setting before a quick one.

    They are marked by ``scale["run"] == "local"``.
    """
    entries: dict[str, Json] = {}
    for preset in PRESETS:
        for path in sorted(Path(folder).glob(f"*/{preset}/verdict.json")):
            entry = _read(path)
            entries[entry["id"]] = entry | {"scale": {**entry["scale"], "run": "local"}}
    return entries


def _read(path: Path | Traversable) -> Json:
    try:
        # Before statements were marked as our own, all were the papers'.
        entry = {"ours": False} | json.loads(path.read_text(encoding="utf-8"))
        if entry["verdict"] not in VERDICTS or not isinstance(entry["scale"], dict):
            raise ValueError(f"its verdict is {entry['verdict']!r}")
        return {key: entry[key] for key in KEYS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{path} is not a verdict ({type(error).__name__}: {error}); delete it, or run its "
            "experiment again"
        ) from error
