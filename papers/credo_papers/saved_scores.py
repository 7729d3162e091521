"""One method's scores in a file: a run that was cut off goes on with the next method."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from credo import storage
from credo.types import Json
from credo_papers.experiment import Settings


def saved(path: Path, settings: Settings, make: Callable[[], Json]) -> Json:
    """What ``make()`` gives, from the file if that was written with the same settings.

    Args:
        path: Where it is kept.
        settings: Those of the experiment; a file of other settings is made anew.
        make: The numbers, and lists of numbers.
    """
    key = json.loads(json.dumps(asdict(settings)))
    if path.exists():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["settings"] == key:
                scores: Json = stored["scores"]
                return scores
        except (ValueError, KeyError, TypeError):
            pass  # damaged: it is made again
    scores = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"settings": key, "scores": scores}, allow_nan=False)
    storage.write_atomically(path, text.encode())
    return scores
