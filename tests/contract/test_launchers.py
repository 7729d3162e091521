"""The launchers in examples/: parts of batches, checkpoints, and whole runs on two ranks.

The whole runs are of real processes under torchrun, on a handful of images.
"""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from credo.errors import CheckpointError
from credo.storage import read_tensors, under
from credo_papers.recipes import Recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CPU = torch.device("cpu")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import ranks

    return ranks


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run an example in this process, which is quicker, and give what it prints."""

    def launch(example: str, *options: object) -> str:
        monkeypatch.setattr(sys, "argv", [example, *map(str, options)])
        importlib.import_module(example).main()
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(EXAMPLES)
    return launch


def on_two_ranks(example: str, *options: object) -> str:
    """What the example prints under torchrun; it has to end well."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run = subprocess.run(
        [sys.executable, *map(str, (*torchrun, EXAMPLES / f"{example}.py", *options))],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_batches_that_do_not_depend_on_their_number(
    ranks: ModuleType, size: int
) -> None:
    def parts(rank: int, size: int, epoch: int = 4, skip: int = 0) -> list[torch.Tensor]:
        place = ranks.Place(rank, size, CPU)
        return list(ranks.parts_of_epoch(32, 6, epoch, 0, place, skip))

    whole = parts(0, 1)
    assert len(whole) == 5
    assert len(set(torch.cat(whole).tolist())) == 30
    together = zip(*(parts(rank, size) for rank in range(size)), strict=True)
    assert all(torch.equal(torch.cat(p), w) for p, w in zip(together, whole, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(parts(0, 1, skip=2), whole[2:], strict=True))
    assert not torch.equal(parts(0, 1, epoch=5)[0], whole[0])


# --- checkpoints ----------------------------------------------------------------------------------

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
RECIPE = Recipe(lr=0.05, epochs=3, batch_size=6, weight_decay=1e-3, hess_init=0.5, samples=2)


def make_run(ranks: ModuleType, checkpoint: Path, method: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = ranks.optimizer_for(method, RECIPE, net, 24, 0)
    run = ranks.Run(ranks.Place(0, 1, CPU), method, RECIPE, net, optimizer, 24, 0, checkpoint)
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def batches_for(ranks: ModuleType, killed_at: tuple[int, int] | None = None) -> Any:
    def batches(epoch: int, skip: int) -> Any:
        parts = ranks.parts_of_epoch(24, 6, epoch, 0, ranks.Place(0, 1, CPU), skip)
        for batch, part in enumerate(parts, skip):
            if (epoch, batch) == killed_at:
                raise KeyboardInterrupt
            yield X[part], Y[part]

    return batches


@pytest.mark.parametrize("method", ["ivon", "vogn", "adam"])
def test_a_killed_run_goes_on_exactly_also_within_an_epoch(
    ranks: ModuleType, method: str, tmp_path: Path
) -> None:
    whole = make_run(ranks, tmp_path / "whole.safetensors", method)
    whole.to_the_end(batches_for(ranks))
    path = tmp_path / "killed.safetensors"
    killed = make_run(ranks, path, method, minutes=0.0)  # a checkpoint after every step
    with pytest.raises(KeyboardInterrupt):
        killed.to_the_end(batches_for(ranks, killed_at=(1, 2)))
    resumed = make_run(ranks, path, method)
    resumed.to_the_end(batches_for(ranks))
    for (name, one), other in zip(
        resumed.net.state_dict().items(), whole.net.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    assert (resumed.epoch, resumed.batch) == (3, 0)


def test_a_checkpoint_of_another_run_is_refused(ranks: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    make_run(ranks, path, "ivon").save()
    with pytest.raises(CheckpointError, match="run with method 'ivon', not 'adam'"):
        make_run(ranks, path, "adam").resume()
    with pytest.raises(CheckpointError, match="run with seed 0, not 1"):
        make_run(ranks, path, "ivon", seed=1).resume()
    other = replace(RECIPE, batch_size=4)
    with pytest.raises(CheckpointError, match="run with batch_size 6, not 4"):
        make_run(ranks, path, "ivon", recipe=other).resume()
    another = make_run(ranks, path, "ivon")
    another.net = nn.Linear(5, 3)
    with pytest.raises(CheckpointError, match="does not fit this network"):
        another.resume()


def test_unequal_shares_are_refused(ranks: ModuleType) -> None:
    with pytest.raises(SystemExit, match="can't be shared by 3 ranks"):
        ranks.refuse_batch_size(16, 100, 3)
    with pytest.raises(SystemExit, match="must be 1 to 10"):
        ranks.refuse_batch_size(16, 10, 2)


# --- whole runs -----------------------------------------------------------------------------------


def test_two_ranks_of_adam_average_their_gradients(
    launched: Callable[..., str], tmp_path: Path
) -> None:
    """With group norm, one step on two halves of a batch is that on the whole."""
    found = []
    for size, launch in ((1, launched), (2, on_two_ranks)):
        path = tmp_path / f"{size}.safetensors"
        said = launch(
            "train_cifar10_ranks", "--synthetic", "--preset", "quick", "--method", "adam",
            "--norm", "group", "--epochs", 1, "--batch-size", 40, "--samples", 1,
            "--checkpoint", path,
        )  # fmt: skip
        assert f"{size} rank(s), from epoch 0 of 1" in said
        assert "accuracy" in said
        found.append(under("optimizer.", read_tensors(path)[0]))
    gradients = [name for name in found[0] if name.endswith("exp_avg")]
    assert len(gradients) > 20
    for name in gradients:
        # Float32 sums of 40 examples in another order; Adam's first average is 0.1 times the mean.
        scale = float(found[0][name].abs().max())
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-4 * scale)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Red and blue noise as JPEGs, of which one to train on and one to validate on are broken."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for channel, name in ((0, "red"), (2, "blue")):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (30 + i, 40, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / f"{i}.JPEG")
    images = tmp_path / "images"
    (images / "train" / "red" / "2.JPEG").write_bytes(b"\xff\xd8 no more")
    (images / "val" / "red" / "1.JPEG").write_bytes(b"")
    return images


def test_imagenets_launcher_trains_on_two_ranks_and_goes_on_with_one(
    launched: Callable[..., str], photographs: Path, tmp_path: Path
) -> None:
    example = "train_imagenet_ranks"
    options = ["--data", photographs, "--preset", "quick", "--method", "vogn", "--side", 32,
               "--batch-size", 6, "--samples", 2, "--bf16",
               "--checkpoint", tmp_path / "run.safetensors"]  # fmt: skip
    said = on_two_ranks(example, *options, "--epochs", 1, "--workers", 1)
    assert "2 rank(s), from epoch 0 of 1" in said
    assert "1 unreadable image(s) in train" in said
    assert "train/red/2.JPEG: this should be a JPEG or PNG image" in said
    assert "1 unreadable image(s) in val" in said
    assert "accuracy" in said
    assert "5 of 6 images" in said

    # Now a validation set without labels: the images lie in the folder itself.
    for name in ("red", "blue"):
        for file in (photographs / "val" / name).iterdir():
            file.rename(photographs / "val" / f"{name}{file.name}")
        shutil.rmtree(photographs / "val" / name)
    table = tmp_path / "predictions.csv"
    said = launched(example, *options, "--epochs", 2, "--workers", 0, "--predictions", table)
    assert "1 rank(s), from epoch 1 of 2" in said
    assert "epoch 2: loss" in said
    assert "no labels: mean confidence" in said
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 5
    assert {row["class"] for row in rows} <= {"red", "blue"}
    assert all(0.5 <= float(row["confidence"]) <= 1 for row in rows)
    assert not any("red1.JPEG" in row["file"] for row in rows)
