"""What `credo run` shows of seeds that run elsewhere."""

import json
import time
from pathlib import Path

import pytest

from credo.sweep import Outcome
from credo_papers.run_progress import _Watch


def write_seed(place: Path, number: int, epochs: tuple[int, ...], finished: bool = False) -> Path:
    """A seed's folder with trainings of so many epochs."""
    seed = place / f"seed-{number}-abc"
    seed.mkdir(parents=True)
    (seed / "config.json").write_text("{}")
    for training, count in enumerate(epochs):
        folder = seed / f"training{training}"
        folder.mkdir()
        lines = "".join(json.dumps({"epoch": epoch}) + "\n" for epoch in range(count))
        (folder / "metrics.jsonl").write_text(lines)
    if finished:
        (seed / "result.json").write_text("{}")
    return seed


def test_a_finished_seed_tells_how_many_epochs_the_others_have(tmp_path: Path) -> None:
    watch = _Watch(tmp_path, seeds=3, jobs=2, epochs=12, expected=None)
    assert watch.seeds_done() == 0
    assert watch.text() == "seeds 0/3"
    write_seed(tmp_path, 0, (12, 12), finished=True)
    assert watch.end(Outcome({"seed": 0}, {})) == "seed 0 done"
    write_seed(tmp_path, 1, (6,))
    assert watch.seeds_done() == pytest.approx(1.25)
    assert watch.text() == "seeds 1/3 · seed 1: training 1, epoch 6/12"


def test_without_a_finished_seed_the_expected_time_is_what_there_is(tmp_path: Path) -> None:
    watch = _Watch(tmp_path, seeds=1, jobs=1, epochs=12, expected=3600.0)
    write_seed(tmp_path, 0, (1,))
    assert 0 < watch.seeds_done() < 0.01
    watch.expected = 1e-6
    assert watch.seeds_done() <= 1
    watch.expected = None
    assert watch.seeds_done() == 0


def test_what_an_interrupted_run_left_is_not_under_way(tmp_path: Path) -> None:
    write_seed(tmp_path, 0, (3,))
    watch = _Watch(tmp_path, 2, 1, 12, 60.0, started=time.time() + 3600)
    assert watch.seeds_done() == 0
    assert watch.text() == "seeds 0/2"
