r"""Ours: is the disagreement of two works about rates, or about the temperature?

`rate_disagreement` finds that scales which learn fast buy ELBO and cost accuracy, at η = 1, where
both Unlu & Aitchison (2021) and Book (2020) train. By Huix et al. (2022) that is what has to be
expected: for a network with many more weights than images the optimum of the ELBO is close to the
prior, so converging it *is* unlearning, and slow scales help because they don't arrive. Then at η =
τ·n/N, where the optimum is worth arriving at, the ratio of rates should not matter.

Adam, σ = e^ρ from a twentieth of the prior's scale (as `credo.VI` does), CIFAR-10, each at η = 1
and balanced with τ = 0.1. The rules, written before any run:

1. ``costs_at_one``: at η = 1 the ratio 10 has a worse test NLL than 0.1.
2. ``free_if_balanced_nll``: balanced, the ratio 10 has a test NLL at most `NLL_MARGIN` above 0.1's.
3. ``free_if_balanced_accuracy``: balanced, its accuracy is at most `ACCURACY_MARGIN` below.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credo.report.style import BLUE, VERMILLION, blank_figure, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.study_setup import (
    MEASURES,
    PAPER,
    SharedRuns,
    StudySettings,
    averages,
    judge,
    margins,
    set_name,
    value,
    with_accuracies,
)

NLL_MARGIN = 0.02
ACCURACY_MARGIN = 0.01
SLOW, FAST = "0.1", "10"
TEMPERATURES = {"one": "η = 1", "balanced": "η = 0.1·n/N"}
COLOURS = {"one": VERMILLION, "balanced": BLUE}


@dataclass(frozen=True, kw_only=True)
class BalancedRateSettings(StudySettings):
    """``ratios`` of the scales' rate to ``lr``, that of the means; ``tau`` balances."""

    data: str = "cifar10"
    lr: float = 3e-3
    ratios: tuple[float, ...] = (0.1, 1.0, 10.0)
    tau: float = 0.1
    prediction_samples: int = 8


def run_one(settings: BalancedRateSettings, seed: int, folder: Path) -> Json:
    """Every ratio at both temperatures, from the same weights."""
    shared = SharedRuns(settings, seed, folder)
    runs = {}
    for name in TEMPERATURES:
        for ratio in settings.ratios:
            trial = shared.trial(
                settings.data, lr=settings.lr, scale_ratio=ratio, link="exp", init_scale=0.05,
                tau=settings.tau if name == "balanced" else None,
            )  # fmt: skip
            runs[f"{name}_{ratio:g}"] = shared.run(trial)
    return with_accuracies(runs) | {"data": settings.data, "ratios": list(settings.ratios)}


def cost(result: Json, temperature: str, measure: str) -> float:
    """The measure with fast scales less that with slow ones."""
    return value(result, f"{temperature}_{FAST}", measure) - value(
        result, f"{temperature}_{SLOW}", measure
    )


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""
    statements = {
        "costs_at_one": margins(results, lambda r: cost(r, "one", "nll")),
        "free_if_balanced_nll": margins(results, lambda r: NLL_MARGIN - cost(r, "balanced", "nll")),
        "free_if_balanced_accuracy": margins(
            results, lambda r: ACCURACY_MARGIN + cost(r, "balanced", "accuracy")
        ),
    }
    return judge(statements, averages(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The four measures against the ratio, a colour for each temperature; thin lines are seeds."""
    ratios = results[0]["ratios"]
    with house_style():
        figure = blank_figure(11.5, 3.2)
        for axes, (measure, title) in zip(figure.subplots(1, 4), MEASURES.items(), strict=True):
            for name, label in TEMPERATURES.items():
                values = np.array(
                    [[value(r, f"{name}_{x:g}", measure) for x in ratios] for r in results]
                )
                axes.plot(ratios, values.T, color=COLOURS[name], linewidth=0.7, alpha=0.4)
                axes.plot(ratios, values.mean(0), "o-", color=COLOURS[name], label=label)
            axes.set(xscale="log", xlabel="r = α_σ / α_μ", ylabel=title)
            faint_grid(axes)
            if measure == "accuracy":
                axes.set_title(set_name(results[0]["data"]))
                axes.legend()
        return [save(figure, folder / "balanced-rates.png")]


EXPERIMENT = Experiment(
    id="003-balanced-rates",
    paper="003",
    claim="Ours, on Huix et al. (2022), Unlu & Aitchison (2021) and Book (2020): that fast scales "
    "cost test performance is a matter of the temperature. At η = 1 they do; at the balanced "
    "temperature scales that learn ten times faster than the means are no worse, in test NLL (to "
    "0.02) and accuracy (to 1 %), than scales that learn ten times slower.",
    theorem=False,
    ours=True,
    needs=("cifar10",),
    minutes=0.6,
    presets={
        "quick": BalancedRateSettings(),
        "paper": BalancedRateSettings(
            **(PAPER | {"estimator": "reparam", "prediction_samples": 10}), lr=1e-3
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
