r"""Book (2020), figures 5.4 and 5.5: rate and momentum of SGD can't be tuned apart.

The thesis draws (α, μ) uniformly and sees a stable band, after one epoch on MNIST and ten on
CIFAR-10. Below it learning is slow; its lower edge looks like that of the robust region for
curvature h (see `credo.tools.robust_region`), its upper one like a line, beyond which is a "region
of death":

    (1 − √μ)²/h  ≤  α  ≤  a(1 − μ),      h = 1.5, a = 1.9 (MNIST),   h = 2, a = 0.45 (CIFAR-10)

The rules, written before any run, on a grid of α and μ, for each data set:

1. ``band_beats_beyond``: mean test accuracy in the band is above that beyond its upper edge.
2. ``band_beats_below``: and above that below its lower edge (points that are also beyond the upper
   one left out).
3. ``momentum_for_rate``: the most accurate rate at the largest momentum is below that at none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from credo.report.style import VERMILLION, blank_figure, cells, heat_map, house_style, save
from credo.tools import robust_region
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
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

CURVATURE = {"mnist": 1.5, "cifar10": 2.0}
LIMIT = {"mnist": 1.9, "cifar10": 0.45}
"""h and a of the thesis."""
Place = Literal["below", "band", "beyond"]


@dataclass(frozen=True, kw_only=True)
class LandscapeSettings(StudySettings):
    """``epochs`` is for CIFAR-10, ``mnist_epochs`` for MNIST."""

    epochs: int = 4
    mnist_epochs: int = 2
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    momenta: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9, 0.97)


def run_one(settings: LandscapeSettings, seed: int, folder: Path) -> Json:
    """The grid of rates and momenta on both data sets: accuracies, a row for each momentum."""
    shared = SharedRuns(settings, seed, folder)
    result: Json = {"rates": list(settings.rates), "momenta": list(settings.momenta)}
    for data in SETS:
        epochs = settings.mnist_epochs if data == "mnist" else settings.epochs
        grid = [
            [
                shared.run(
                    shared.trial(
                        data, epochs=epochs, optimizer="sgd-plain", lr=rate,
                        options={"momentum": momentum},
                    )
                )["accuracy"]
                for rate in settings.rates
            ]
            for momentum in settings.momenta
        ]  # fmt: skip
        result[data] = grid
        result[f"{data}_best"] = float(np.max(grid))
        result[f"{data}_success"] = float(np.mean(np.array(grid) > SUCCESS))
    return result


def place(data: str, rate: float, momentum: float) -> Place:
    """Where a point lies by the thesis's edges.

    >>> [place("cifar10", rate, 0.5) for rate in (0.01, 0.1, 1.0)]
    ['below', 'band', 'beyond']
    """
    if rate > LIMIT[data] * (1 - momentum):
        return "beyond"
    return "band" if rate >= lower_edge(data, momentum) else "below"


def lower_edge(data: str, momentum: float) -> float:
    """The least robust rate."""
    return robust_region(CURVATURE[data], CURVATURE[data]).rates(momentum)[0]


def advantage(result: Json, data: str, over: Place) -> float:
    """Mean accuracy in the band less that elsewhere; NaN where the grid has no such point."""
    accuracies: dict[str, list[float]] = {"below": [], "band": [], "beyond": []}
    for momentum, row in zip(result["momenta"], result[data], strict=True):
        for rate, accuracy in zip(result["rates"], row, strict=True):
            accuracies[place(data, rate, momentum)].append(accuracy)
    if not accuracies["band"] or not accuracies[over]:
        return math.nan
    return float(np.mean(accuracies["band"]) - np.mean(accuracies[over]))


def exchange(result: Json, data: str) -> float:
    """By how many powers of ten the best rate falls from the least momentum to the largest."""
    rates, grid = np.log10(result["rates"]), np.array(result[data])
    return float(rates[grid[0].argmax()] - rates[grid[-1].argmax()])


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring, as ``<data>_<statement>``."""
    statements: dict[str, list[float]] = {}
    numbers: dict[str, float] = {}
    for data in SETS:
        statements |= {
            f"{data}_band_beats_beyond": margins(
                results, partial(advantage, data=data, over="beyond")
            ),
            f"{data}_band_beats_below": margins(
                results, partial(advantage, data=data, over="below")
            ),
            f"{data}_momentum_for_rate": margins(results, partial(exchange, data=data)),
        }
        mean = mean_grid(results, data)
        best = np.unravel_index(int(mean.argmax()), mean.shape)
        numbers |= {
            f"{data}_best_momentum": results[0]["momenta"][best[0]],
            f"{data}_best_rate": results[0]["rates"][best[1]],
            f"{data}_best_accuracy": float(mean.max()),
        }
    return judge(statements, numbers)


def mean_grid(results: Sequence[Json], name: str) -> NDArray[np.float64]:
    """A grid of accuracies, averaged over seeds."""
    return np.array([r[name] for r in results], dtype=float).mean(0)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Mean accuracy on the grid, with the thesis's edges."""
    rates, momenta = results[0]["rates"], results[0]["momenta"]
    fine = np.linspace(0.0, max(momenta), 400)
    with house_style():
        figure = blank_figure(10.5, 4.2)
        for data, axes in zip(SETS, figure.subplots(1, len(SETS)), strict=True):
            heat_map(axes, mean_grid(results, data), rates, momenta)
            edges = {
                "-": (f"robust, h = {CURVATURE[data]:g}", [lower_edge(data, m) for m in fine]),
                "--": (f"α = {LIMIT[data]:g}(1 − μ)", [LIMIT[data] * (1 - m) for m in fine]),
            }
            for style, (label, edge) in edges.items():
                axes.plot(
                    cells(rates, edge, log=True), cells(momenta, fine), color=VERMILLION,
                    linestyle=style, label=label,
                )  # fmt: skip
            axes.set(xlabel="rate α", ylabel="momentum μ")
            axes.set_title(f"{set_name(data)}: test accuracy")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        return [save(figure, folder / "sgd-landscape.png")]


EXPERIMENT = Experiment(
    id="003-sgd-landscape",
    paper="003",
    claim="Book (2020), figs. 5.4 and 5.5: SGD trains a Bayesian LeNet-5 well in a band of rates "
    "and momenta from the lower edge of the robust region (h = 1.5 on MNIST, 2 on CIFAR-10) to α = "
    "a(1 − μ) (a = 1.9 and 0.45); beyond is a region of death; the two cannot be tuned "
    "independently.",
    theorem=False,
    needs=("mnist", "cifar10"),
    minutes=2.5,
    presets={
        "quick": LandscapeSettings(),
        "paper": LandscapeSettings(
            **(PAPER | {"epochs": 10}),
            mnist_epochs=1,
            rates=tuple(float(rate) for rate in np.geomspace(0.01, 2.0, 24)),
            momenta=tuple(float(momentum) for momentum in np.linspace(0.0, 0.99, 20)),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
