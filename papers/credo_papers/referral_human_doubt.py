r"""Filos et al. (2019) on photographs: does a network refer those that people doubt too?

The same question as `credo_papers.referral`, asked of CIFAR-10 with LeNet-5, where some fifty
people have labelled every test image (CIFAR-10H: J. Peterson et al., "Human uncertainty makes
classification more robust", 2019, arXiv:1908.07086). A referred image is decided by people: it is
right as often as they were. Rules, written before any run, each with 95 % confidence over seeds:

1. ``beats_random``: every method's accuracy of the kept exceeds that of all images;
2. ``ensemble_dropout_wins``: ensemble MC dropout's exceeds the best of the others';
3. ``doubts_agree``: for every method the rank correlation of its entropy with that of people's
   labels is above 0.

Reported: accuracy of network and people together when half of the images are referred: those of
largest entropy (``team``), or those that people are surest of (``team_by_people``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

import credo
from credo.data.npz import read_npz
from credo.data.sets import data_root, first_existing
from credo.method import Method
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict
from credo_papers.memorable_examples import SOFT_LABELS
from credo_papers.referral import (
    CAPTIONS,
    judged,
    methods,
    present,
    referral_figure,
    referral_scores,
)
from credo_papers.saved_scores import saved
from credo_papers.shift_setup import schedule_of, small_network


@dataclass(frozen=True, kw_only=True)
class HumanDoubtSettings(Settings):
    """``num_data`` images to train on, ``test_images`` of the first ones to test on."""

    net: str = "LeNet-5"
    num_data: int
    epochs: int
    batch_size: int = 128
    members: int = 5
    dropout: float = 0.1
    prediction_samples: int
    test_images: int


def human_counts() -> NDArray[Any]:
    """How many people gave each test image each label, (10000, 10)."""
    path = first_existing(data_root(None, "cifar10h"), [SOFT_LABELS], "cifar10h")
    return read_npz(path, ["counts"])["counts"]


def run_one(settings: HumanDoubtSettings, seed: int, folder: Path) -> Json:
    """Every method on the same images, from the same weights."""
    result: Json = {"skipped": []}
    for name, method in methods(settings.dropout, settings.members).items():
        if method is None:
            result["skipped"].append(f"{name}: this version of the library has no credo.SWAG")
            continue
        result |= saved(
            folder / name / "scores.json",
            settings,
            lambda name=name, method=method: _scores(settings, name, method, seed, folder),  # type: ignore[misc]
        )
    return result


def _scores(
    settings: HumanDoubtSettings, name: str, method: Method[Any], seed: int, folder: Path
) -> Json:
    data = credo.data.load("cifar10")
    order = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(seed))
    chosen = order[: settings.num_data]
    count = settings.test_images
    x, x_test = credo.data.standardise(data.train[0][chosen], data.test[0][:count])
    y, y_test = data.train[1][chosen], data.test[1][:count]
    posterior = credo.fit(
        credo.Model(small_network(x.shape[1:], seed), credo.likelihoods.Categorical()), method,
        (x, y), epochs=settings.epochs, batch_size=settings.batch_size, seed=seed,
        folder=folder / name / "run", progress=False, schedule=schedule_of(name),
    )  # fmt: skip
    pred = posterior.predict(x_test, samples=settings.prediction_samples, keep_samples=False)
    people = human_counts()[: len(y_test)].astype(float)
    people /= people.sum(1, keepdims=True)
    doubt = stats.entropy(people, axis=1)
    entropy = pred.entropy.numpy()
    right = (pred.probs.argmax(1) == y_test).numpy().astype(float)
    people_right = people[np.arange(len(y_test)), y_test.numpy()]
    scores = referral_scores(pred.probs, y_test, binary=False) | {
        "agreement": float(stats.spearmanr(entropy, doubt).statistic),
        "team": team_accuracy(right, people_right, entropy),
        "team_by_people": team_accuracy(right, people_right, -doubt),
        "people": float(people_right.mean()),
    }
    return {f"{name}_{key}": value for key, value in scores.items()}


def team_accuracy(
    right: NDArray[Any], people_right: NDArray[Any], unsure: NDArray[Any], share: float = 0.5
) -> float:
    """Where people decide this share of the images, the most uncertain, and the network the others.

    >>> team_accuracy(np.array([1.0, 0.0]), np.array([0.9, 0.8]), np.array([0.1, 0.7]))
    0.9
    """
    referred = np.argsort(-unsure, kind="stable")[: round(share * len(unsure))]
    decided = right.copy()
    decided[referred] = people_right[referred]
    return float(decided.mean())


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    names = present(results)
    rivals = [name for name in names if name != "ensemble_dropout"]
    return {
        "beats_random": [
            min(float(r[f"{n}_accuracy_kept"] - r[f"{n}_accuracy_all"]) for n in names)
            for r in results
        ],
        "ensemble_dropout_wins": [
            r["ensemble_dropout_accuracy_kept"] - max(r[f"{n}_accuracy_kept"] for n in rivals)
            for r in results
        ],
        "doubts_agree": [min(float(r[f"{n}_agreement"]) for n in names) for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""
    return judged(results, margins(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Accuracy and NLL of the kept images against the share that is kept."""
    panels = {"accuracy": "accuracy", "nll": "NLL"}
    return [referral_figure(results, folder / "referral-human-doubt.png", panels, CAPTIONS)]


EXPERIMENT = Experiment(
    id="004-referral-human-doubt",
    paper="004",
    claim="Khan (2019), with the study of Filos et al. (2019): referring what is most uncertain "
    "makes predictions for the rest better than referral at random does, and ensemble MC dropout's "
    "uncertainty is the best. Here on CIFAR-10, where CIFAR-10H tells which images people doubt: "
    "uncertainty must rank as their doubt does.",
    theorem=False,
    needs=("cifar10", "cifar10h"),
    minutes=4,
    presets={
        "quick": HumanDoubtSettings(
            num_data=10_000, epochs=8, prediction_samples=16, test_images=2000
        ),
        "paper": HumanDoubtSettings(
            num_data=50_000, epochs=60, prediction_samples=128, test_images=10_000
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
