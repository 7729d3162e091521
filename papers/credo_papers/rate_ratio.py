r"""Book (2020), figure 5.10: the ratio r = α_σ/α_μ of the rates of scales and means.

Adam on CIFAR-10 with α_μ = 10⁻³ (the figure's caption; the text has 10⁻²), each curve a mean over
four runs. The thesis concludes that α_μ "should be at least a factor 10 larger than α_σ".

The rule, written before any run: mean test accuracy over r ≤ 0.1 is above that over r ≥ 1. The
figure shows KL and ELBO as well, by which Unlu & Aitchison (2021) conclude the opposite;
`rate_disagreement` is about that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credo.report.style import BLUE, blank_figure, faint_grid, house_style, save
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

SMALL, LARGE = 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class RatioSettings(StudySettings):
    """``ratios`` of the scales' rate to the means', which is ``lr``."""

    data: str = "cifar10"
    lr: float = 1e-3
    ratios: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)


def run_one(settings: RatioSettings, seed: int, folder: Path) -> Json:
    """Every ratio from the same weights."""
    shared = SharedRuns(settings, seed, folder)
    runs = {
        f"{ratio:g}": shared.run(shared.trial(settings.data, lr=settings.lr, scale_ratio=ratio))
        for ratio in settings.ratios
    }
    return with_accuracies(runs) | {"data": settings.data, "ratios": list(settings.ratios)}


def gain(result: Json) -> float:
    """Mean accuracy of the small ratios less that of the large ones."""
    ratios = result["ratios"]
    small = [value(result, f"{ratio:g}", "accuracy") for ratio in ratios if ratio <= SMALL]
    large = [value(result, f"{ratio:g}", "accuracy") for ratio in ratios if ratio >= LARGE]
    return float(np.mean(small) - np.mean(large))


def check(results: list[Json]) -> Verdict:
    """The rule of the module's docstring."""
    return judge({"small_ratio_better": margins(results, gain)}, averages(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The four measures against the ratio; thin lines are seeds."""
    ratios = results[0]["ratios"]
    with house_style():
        figure = blank_figure(11.5, 3.0)
        for axes, (measure, title) in zip(figure.subplots(1, 4), MEASURES.items(), strict=True):
            values = np.array([[value(r, f"{x:g}", measure) for x in ratios] for r in results])
            axes.plot(ratios, values.T, color=BLUE, linewidth=0.7, alpha=0.4)
            axes.plot(ratios, values.mean(0), "o-", color=BLUE)
            axes.set(xscale="log", xlabel="r = α_σ / α_μ", ylabel=title)
            faint_grid(axes)
            if measure == "accuracy":
                axes.set_title(set_name(results[0]["data"]))
        return [save(figure, folder / "rate-ratio.png")]


EXPERIMENT = Experiment(
    id="003-rate-ratio",
    paper="003",
    claim="Book (2020), fig. 5.10: with Adam the rate of the means should be at least ten times "
    "that of the scales, for the sake of accuracy on CIFAR-10.",
    theorem=False,
    needs=("cifar10",),
    minutes=0.5,
    presets={"quick": RatioSettings(), "paper": RatioSettings(**PAPER)},
    run_one=run_one,
    check=check,
    figures=figures,
)
