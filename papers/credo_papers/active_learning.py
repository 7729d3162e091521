r"""Khan (2019), "active deep learning": labels that uncertainty asks for teach more than others.

The tutorial's first table credits Bayes with active learning and denies it to deep learning, and
its last pages rank examples by Λ, "what do we need to know?". It shows pictures, no numbers. Here a
network begins with a few random labels of a pool, asks for some more, round after round, and is
trained anew each time; acquisitions differ in nothing but which labels they ask for:

* MNIST digits, Laplace's approximation of the last layer: random; the top of entropy, tr Λ
  ("relevance", the tutorial's measure), BALD and leverage; BatchBALD and the determinant, which
  choose a batch together;
* concrete strength (UCI), Laplace's approximation of all weights: random; the largest predictive
  variance (leverage gives the same order where the noise is the same everywhere); the determinant.
  Targets are scaled by the pool's mean and deviation, the same for all.

A curve's score is the area under it over the number of labels, divided by the width: test accuracy
on MNIST, RMSE on concrete. The rules, written before any run, ask with 95 % confidence over seeds
whether

1. ``relevance_helps``: tr Λ has the larger area than random on MNIST;
2. ``bald_helps``: so has BALD;
3. ``variance_helps``: the largest variance has the smaller area than random on concrete.

Reproduced if all hold, not reproduced if one is refuted. The other acquisitions are reported.

The prior's scale was chosen before, by the accuracy of 20 and 200 random labels on images that are
in neither pool nor test set (0.2, 0.5 and 1 were tried): under Kaiming's prior the mode of so few
labels predicts all classes alike. (To check the code, seed 100 was run for four rounds; the rules
stayed as they were.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import nn

import credo
from credo.active import History, learn
from credo.active.acquisitions import Name
from credo.report.style import BLACK, blank_figure, coloured, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)
from credo_papers.networks import build
from credo_papers.uci_tables import uci

DIGITS: tuple[Name, ...] = (
    "random",
    "entropy",
    "relevance",
    "bald",
    "leverage",
    "batch_bald",
    "determinant",
)
TABLE: tuple[Name, ...] = ("random", "variance", "determinant")
CAPTIONS = {
    "random": "random",
    "entropy": "entropy",
    "relevance": "tr Λ",
    "bald": "BALD",
    "leverage": "leverage",
    "batch_bald": "BatchBALD",
    "determinant": "determinant",
    "variance": "variance",
}


@dataclass(frozen=True, kw_only=True)
class ActiveSettings(Settings):
    """``num_data`` is the digits' pool, of which ``candidates`` are scored in each round.

    Both sets begin with ``start`` labels and ask for ``per_round`` in each of ``rounds``.
    """

    net: str = "784-100-10; 8-50-1, tanh"
    num_data: int = 5000
    epochs: int
    data: str = "mnist"
    table: str = "concrete"
    test_images: int = 2000
    candidates: int = 1000
    start: int = 20
    per_round: int = 20
    rounds: int
    lr: float = 3e-3
    prior_scale: float = 0.5
    table_epochs: int = 100
    table_batch_size: int = 32
    table_lr: float = 1e-2
    noise: float = 0.3
    batch_size: int = 16
    prediction_samples: int = 32


def run_one(settings: ActiveSettings, seed: int, folder: Path) -> Json:
    """Every acquisition on both sets, from the same first labels and weights."""
    result: Json = {}
    for name in DIGITS:
        history = digits(settings, name, seed, folder / f"digits-{name}")
        result |= _curve(f"digits_{name}", history, "accuracy")
    for name in TABLE:
        history = table(settings, name, seed, folder / f"table-{name}")
        result |= _curve(f"table_{name}", history, "rmse")
    return result


def digits(settings: ActiveSettings, acquisition: Name, seed: int, folder: Path) -> History:
    """A classifier of handwritten digits."""
    data = credo.data.load(settings.data)
    x, y = data.train[0][: settings.num_data], data.train[1][: settings.num_data]
    test = data.test[0][: settings.test_images], data.test[1][: settings.test_images]
    net = build("784-100-10", x.shape[1:], seed)
    prior = credo.priors.Normal(settings.prior_scale)
    return learn(
        credo.Model(net, credo.likelihoods.Categorical(), prior),
        credo.Laplace(structure="kron", subset="last_layer", train=credo.MAP(lr=settings.lr)),
        x, y.__getitem__, acquisition, start=settings.start, per_round=settings.per_round,
        rounds=settings.rounds, candidates=settings.candidates, epochs=settings.epochs,
        batch_size=settings.batch_size, test_data=test,
        prediction_samples=settings.prediction_samples, seed=seed, folder=folder, progress=False,
    )  # fmt: skip


def table(settings: ActiveSettings, acquisition: Name, seed: int, folder: Path) -> History:
    """A regression; the seed also chooses the split."""
    raw = uci(settings.table, split=seed % 20)
    x, test_x = credo.data.standardise(raw[0], raw[2])
    y, test_y = credo.data.standardise(raw[1], raw[3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
    return learn(
        credo.Model(net, credo.likelihoods.Gaussian(scale=settings.noise)),
        credo.Laplace(structure="full", train=credo.MAP(lr=settings.table_lr)),
        x, y.__getitem__, acquisition, start=settings.start, per_round=settings.per_round,
        rounds=settings.rounds, epochs=settings.table_epochs,
        batch_size=settings.table_batch_size,
        test_data=(test_x, test_y), seed=seed, folder=folder, progress=False,
    )  # fmt: skip


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    return {
        "relevance_helps": [r["digits_relevance_area"] - r["digits_random_area"] for r in results],
        "bald_helps": [r["digits_bald_area"] - r["digits_random_area"] for r in results],
        "variance_helps": [r["table_random_area"] - r["table_variance_area"] for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The learning curves of both sets, with a standard error on either side."""
    with house_style():
        figure = blank_figure(11.5, 4.2)
        left, right = figure.subplots(1, 2)
        _draw(left, results, "digits", DIGITS)
        left.set(ylabel="test accuracy", title="MNIST: last-layer Laplace")
        _draw(right, results, "table", TABLE)
        right.set(ylabel="test RMSE, in standard deviations", title="Concrete: Laplace")
        return [save(figure, folder / "active-learning.png")]


def _draw(axes: Axes, results: Sequence[Json], kind: str, names: Sequence[str]) -> None:
    colours = dict(coloured(name for name in CAPTIONS if name != "random"))
    for name in names:
        labels = results[0][f"{kind}_{name}_labels"]
        values = np.array([r[f"{kind}_{name}_curve"] for r in results])
        mean = values.mean(0)
        dark = name == "random"
        axes.plot(
            labels, mean, color=BLACK if dark else colours[name], label=CAPTIONS[name],
            linestyle="--" if dark else "-", zorder=3 if dark else 2,
        )  # fmt: skip
        if len(values) > 1:
            error = values.std(0, ddof=1) / len(values) ** 0.5
            colour = BLACK if dark else colours[name]
            axes.fill_between(labels, mean - error, mean + error, color=colour, alpha=0.12)
    axes.set_xlabel("labels")
    axes.legend(fontsize=8.5)
    faint_grid(axes)


def _curve(prefix: str, history: History, metric: str) -> Json:
    labels, values = history.curve(metric)
    return {
        f"{prefix}_labels": labels,
        f"{prefix}_curve": values,
        f"{prefix}_area": history.mean_over_labels(metric),
        f"{prefix}_final": values[-1],
        f"{prefix}_nll": history.rounds[-1]["scores"]["nll"],
    }


EXPERIMENT = Experiment(
    id="004-active-learning",
    paper="004",
    claim="Khan (2019): Bayes 'can perform active learning', and examples are ranked by Λ to find "
    "what a model needs to know. (Pictures without numbers.) Here: with as many labels, a network "
    "is better over the whole curve if tr Λ or BALD chose them than if chance did, on MNIST, and "
    "if predictive variance did, on concrete strength.",
    theorem=False,
    needs=("mnist", "uci"),
    minutes=5,
    presets={
        "quick": ActiveSettings(epochs=50, rounds=9),
        "paper": ActiveSettings(
            num_data=60_000, epochs=200, rounds=49, per_round=20, test_images=10_000,
            candidates=10_000, table_epochs=400, prediction_samples=128,
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
