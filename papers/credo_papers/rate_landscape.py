r"""Book (2020), figure 5.9: separate rates for means and scales, with AdaBound and Adam.

The thesis searches (α_μ, α_σ) on CIFAR-10, 50 epochs each, AdaBound's final rate being 0.1. It
reads off: AdaBound does not care about α_σ and becomes unstable at α_μ ≳ 0.1; Adam has optimal
values of both; and the larger Adam's α_σ, the lower the KL.

The rules, written before any run, on a grid; "stable" are the α_μ ≤ 0.01:

1. ``adabound_indifferent``: the range of test accuracy over α_σ, each averaged over stable α_μ, is
   for AdaBound less than half of Adam's.
2. ``adabound_unstable``: its accuracy averaged over α_σ is lower at α_μ = 0.1 than over stable α_μ.
3. ``adam_best_inside``: Adam's best α_μ (averaged over α_σ) is neither the least nor the largest.
4. ``adam_kl_falls``: Adam's KL falls with log α_σ: slope by least squares, mean over stable α_μ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.report.style import blank_figure, heat_map, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.study_setup import PAPER, SharedRuns, StudySettings, judge, set_name

OPTIMIZERS = {"adabound": "AdaBound", "adam": "Adam"}
STABLE, UNSTABLE = 0.01, 0.1
SHOWN = {"accuracy": ("test accuracy", ".2f"), "kl": ("KL per image", ".0f")}


@dataclass(frozen=True, kw_only=True)
class RateGridSettings(StudySettings):
    """The grid: ``mean_rates`` α_μ and ``scale_rates`` α_σ."""

    data: str = "cifar10"
    mean_rates: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 1e-2, UNSTABLE)
    scale_rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)


def run_one(settings: RateGridSettings, seed: int, folder: Path) -> Json:
    """Accuracies and KLs of both optimizers on the grid, a row for each α_σ."""
    shared = SharedRuns(settings, seed, folder)
    result: Json = {
        "data": settings.data,
        "mean_rates": list(settings.mean_rates),
        "scale_rates": list(settings.scale_rates),
    }
    for optimizer in OPTIMIZERS:
        records = [
            [
                shared.run(
                    shared.trial(
                        settings.data, optimizer=optimizer, lr=lr,
                        # Rounded, so that equal ratios of other experiments are the same trial.
                        scale_ratio=float(f"{scale_lr / lr:.6g}"),
                    )
                )
                for lr in settings.mean_rates
            ]
            for scale_lr in settings.scale_rates
        ]  # fmt: skip
        for measure in ("accuracy", "nll", "kl", "elbo"):
            result[f"{optimizer}_{measure}"] = [[r[measure] for r in row] for row in records]
        result[f"{optimizer}_best"] = max(r["accuracy"] for row in records for r in row)
    return result


def statements(result: Json) -> dict[str, float]:
    """By how much each statement holds in one seed."""
    mean_rates = np.array(result["mean_rates"])
    stable = mean_rates <= STABLE
    accuracy = {name: np.array(result[f"{name}_accuracy"]) for name in OPTIMIZERS}
    by_scale = {name: np.ptp(grid[:, stable].mean(1)) for name, grid in accuracy.items()}
    by_mean = {name: grid.mean(0) for name, grid in accuracy.items()}
    slopes = [
        _slope(result["scale_rates"], column)
        for column in np.array(result["adam_kl"], dtype=float)[:, stable].T
    ]
    return {
        "adabound_indifferent": float(0.5 * by_scale["adam"] - by_scale["adabound"]),
        "adabound_unstable": float(
            by_mean["adabound"][stable].mean() - by_mean["adabound"][mean_rates >= UNSTABLE].mean()
        ),
        "adam_best_inside": float(
            by_mean["adam"][1:-1].max() - max(by_mean["adam"][0], by_mean["adam"][-1])
        ),
        "adam_kl_falls": -float(np.mean(slopes)),
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring, and where on average the best points are."""
    rows = [statements(result) for result in results]
    numbers: dict[str, float] = {}
    for name in OPTIMIZERS:
        mean = seed_mean(results, f"{name}_accuracy")
        row, column = np.unravel_index(int(mean.argmax()), mean.shape)
        numbers |= {
            f"{name}_best_accuracy": float(mean.max()),
            f"{name}_best_mean_rate": results[0]["mean_rates"][column],
            f"{name}_best_scale_rate": results[0]["scale_rates"][row],
        }
    return judge({name: [row[name] for row in rows] for name in rows[0]}, numbers)


def seed_mean(results: Sequence[Json], name: str) -> Any:
    """A grid's mean over seeds, masked where a run diverged in all of them."""
    grids: NDArray[np.float64] = np.array([r[name] for r in results], dtype=float)
    return np.ma.masked_invalid(grids).mean(0)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Accuracy and KL on the grid, AdaBound on top; grey where all runs diverged."""
    with house_style():
        figure = blank_figure(9.5, 6.4)
        for (name, title), row in zip(OPTIMIZERS.items(), figure.subplots(2, 2), strict=True):
            for axes, (measure, (label, form)) in zip(row, SHOWN.items(), strict=True):
                values = np.ma.filled(seed_mean(results, f"{name}_{measure}"), np.nan)
                heat_map(axes, values, results[0]["mean_rates"], results[0]["scale_rates"], form)
                axes.set(xlabel="rate of the means α_μ", ylabel="rate of the scales α_σ")
                axes.set_title(f"{title}: {label}")
        data = results[0]["data"]
        figure.suptitle(set_name(data))
        return [save(figure, folder / "rate-landscape.png")]


def _slope(rates: Sequence[float], values: NDArray[np.float64]) -> float:
    known = np.isfinite(values)
    if known.sum() < 2:
        return float("nan")
    return float(np.polyfit(np.log10(rates)[known], values[known], 1)[0])


EXPERIMENT = Experiment(
    id="003-rate-landscape",
    paper="003",
    claim="Book (2020), fig. 5.9: with separate rates for means and scales AdaBound is indifferent "
    "to α_σ and unstable for α_μ of 0.1 or more; Adam has an optimal α_μ, and the larger its α_σ "
    "the lower the KL.",
    theorem=False,
    needs=("cifar10",),
    minutes=3.5,
    presets={
        "quick": RateGridSettings(),
        "paper": RateGridSettings(
            **PAPER,
            mean_rates=(1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, UNSTABLE, 0.3),
            scale_rates=(1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
