"""All trials of a folder in one table, rebuilt from what lies in their folders.

trials.csv     one row per trial: folder, number, status, seed, the settings, the numbers that came
               out, the error
trials.jsonl   the same as one object per line, with everything that is not a single number, too

A status is "finished", "failed", "running", "unfinished" (its process was killed, or it waits to be
run again) or "damaged" (a file in its folder can't be read).
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from credo import storage
from credo.errors import FileFormatError
from credo.trials.attempt import is_running, stored_error, stored_result
from credo.types import Json


def rebuild(folder: str | Path) -> list[Json]:
    """Write both files, each all at once, and return the rows."""
    folder = Path(folder)
    rows = collect(folder)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    storage.write_atomically(folder / "trials.jsonl", lines.encode())
    storage.write_atomically(folder / "trials.csv", to_csv(rows).encode())
    return rows


def collect(folder: Path) -> list[Json]:
    """A row for every trial in the folder, by number."""
    places = sorted(path.parent for path in folder.glob("*/config.json"))
    return sorted(map(_row, places), key=lambda row: row.get("number", 0))


def to_csv(rows: list[Json]) -> str:
    """The rows' single values; a column for every name that any of them has.

    >>> print(to_csv([{"number": 0, "lr": 0.1}, {"number": 1, "loss": 2.5, "curve": [3, 2]}]))
    number,lr,loss
    0,0.1,
    1,,2.5
    <BLANKLINE>
    """
    simple = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in rows]
    columns = list(dict.fromkeys(name for row in simple for name in row if name != "error"))
    if any("error" in row for row in simple):
        columns.append("error")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(simple)
    return text.getvalue()


def _row(place: Path) -> Json:
    row: Json = {"folder": place.name}
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        row |= {"number": int(config["number"]), "status": "", "seed": config["seed"]}
        row |= config["settings"]
        result = stored_result(place)
    except (OSError, ValueError, KeyError, TypeError, FileFormatError) as error:
        return {**row, "status": "damaged", "error": str(error)}
    if result is not None:
        return {**row, "status": "finished", **_apart(row, result)}
    error_text = stored_error(place)
    if error_text is not None:
        return {**row, "status": "failed", "error": error_text}
    return {**row, "status": "running" if is_running(place) else "unfinished"}


def _apart(row: Json, result: Json) -> dict[str, Any]:
    """A result that is called like a setting does not take its place."""
    return {f"result.{name}" if name in row else name: value for name, value in result.items()}
