r"""Book (2020), figures 5.6 and 5.7: is a low β₂ better for Adam?

The thesis draws (β₁, β₂), trains one epoch on MNIST and ten on CIFAR-10 and sees that "low values
for β₂ give better performance", against the default of 0.999; it takes that for a vote for SGD.
(Adam with β₂ = 0 is not SGD, though: its step is m/|g|, the sign of the gradient without momentum.)

The rule, written before any run: on each data set the mean test accuracy over the grid's β₂ ≤ ½ is
above that at β₂ = 0.999, over the same β₁. A bowl, which figures with clipped colours can hide,
would show in the numbers: the best β₂ on average, and the accuracy at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from credo.report.style import blank_figure, heat_map, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.sgd_landscape import mean_grid
from credo_papers.study_setup import (
    PAPER,
    SETS,
    SUCCESS,
    SharedRuns,
    StudySettings,
    judge,
    margins,
    set_name,
)

LOW, DEFAULT = 0.5, 0.999


@dataclass(frozen=True, kw_only=True)
class BetaSettings(StudySettings):
    """``epochs`` is for CIFAR-10, ``mnist_epochs`` for MNIST; ``beta2`` has the default in it."""

    epochs: int = 4
    mnist_epochs: int = 2
    beta1: tuple[float, ...] = (0.0, 0.5, 0.9, 0.99)
    beta2: tuple[float, ...] = (0.1, 0.5, 0.9, 0.99, DEFAULT)


def run_one(settings: BetaSettings, seed: int, folder: Path) -> Json:
    """The grid on both data sets: accuracies, a row for each β₂."""
    shared = SharedRuns(settings, seed, folder)
    result: Json = {"beta1": list(settings.beta1), "beta2": list(settings.beta2)}
    for data in SETS:
        epochs = settings.mnist_epochs if data == "mnist" else settings.epochs
        grid = [
            [
                shared.run(shared.trial(data, epochs=epochs, options={"betas": [first, second]}))[
                    "accuracy"
                ]
                for first in settings.beta1
            ]
            for second in settings.beta2
        ]
        result[data] = grid
        result[f"{data}_best"] = float(np.max(grid))
        result[f"{data}_success"] = float(np.mean(np.array(grid) > SUCCESS))
    return result


def low_gain(result: Json, data: str) -> float:
    """Mean accuracy at low β₂ less that at the default."""
    by_beta2 = np.mean(result[data], axis=1)
    beta2 = np.array(result["beta2"])
    return float(by_beta2[beta2 <= LOW].mean() - by_beta2[beta2 == DEFAULT].mean())


def check(results: list[Json]) -> Verdict:
    """The rule of the module's docstring, as ``<data>_low_beta2_better``."""
    numbers = {}
    for data in SETS:
        by_beta2 = mean_grid(results, data).mean(1)
        numbers[f"{data}_best_beta2"] = results[0]["beta2"][int(by_beta2.argmax())]
        for second, accuracy in zip(results[0]["beta2"], by_beta2, strict=True):
            numbers[f"{data}_beta2_{second:g}_accuracy"] = float(accuracy)
    statements = {
        f"{data}_low_beta2_better": margins(results, partial(low_gain, data=data)) for data in SETS
    }
    return judge(statements, numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Mean accuracy on the grid."""
    with house_style():
        figure = blank_figure(9.5, 3.8)
        for data, axes in zip(SETS, figure.subplots(1, len(SETS)), strict=True):
            heat_map(axes, mean_grid(results, data), results[0]["beta1"], results[0]["beta2"])
            axes.set(xlabel="β₁", ylabel="β₂")
            axes.set_title(f"{set_name(data)}: test accuracy")
        return [save(figure, folder / "adam-landscape.png")]


EXPERIMENT = Experiment(
    id="003-adam-landscape",
    paper="003",
    claim="Book (2020), figs. 5.6 and 5.7: low values of Adam's β₂ train a Bayesian LeNet-5 better "
    "than the default 0.999, on MNIST and CIFAR-10.",
    theorem=False,
    needs=("mnist", "cifar10"),
    minutes=2,
    presets={
        "quick": BetaSettings(),
        "paper": BetaSettings(
            **(PAPER | {"epochs": 10}),
            mnist_epochs=1,
            beta1=(0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99),
            beta2=(0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 0.99, DEFAULT),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
