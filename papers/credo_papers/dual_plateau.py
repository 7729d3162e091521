r"""Book (2020), figure 5.11: let the NLL steer the means' rate and the KL the scales'.

Each rate starts at 10⁻³ and is divided by ten when what it watches has not fallen for two epochs.
The thesis compares with constant rates of 10⁻³ and 10⁻⁴ (Adam): on CIFAR-10 the schedule "seems to
improve the training process significantly", on MNIST it "made no significant difference". It also
notes that the KL falls in every run.

The rules, written before any run:

1. ``plateau_better``: on CIFAR-10 its test accuracy is above that of both constant rates.
2. ``plateau_equal``: on MNIST it is within one percentage point of the better of them.
3. ``kl_falls``: the least fall of the KL over the epochs, over all runs, is positive.

Where the schedule never cut a rate there is nothing to compare, and statements 1 and 2 are open:
``cuts`` counts how often it did. The quick preset has few images and many epochs for that reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credo.report.style import blank_figure, coloured, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.study_figures import draw_curves, draw_seeds
from credo_papers.study_setup import (
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

WAYS = {"fast": "10⁻³", "slow": "10⁻⁴", "plateau": "dual plateau from 10⁻³"}
SAME = 0.01


@dataclass(frozen=True, kw_only=True)
class PlateauSettings(StudySettings):
    """``better`` and ``equal``: where the schedule is to help, and where to make no difference."""

    better: str = "cifar10"
    equal: str = "mnist"
    num_data: int = 1000
    epochs: int = 30


def run_one(settings: PlateauSettings, seed: int, folder: Path) -> Json:
    """Two constant rates and the schedule, on both data sets."""
    shared = SharedRuns(settings, seed, folder)
    runs, cuts = {}, 0
    for data in (settings.better, settings.equal):
        runs[f"{data}_fast"] = shared.run(shared.trial(data, lr=1e-3))
        runs[f"{data}_slow"] = shared.run(shared.trial(data, lr=1e-4))
        runs[f"{data}_plateau"] = shared.run(shared.trial(data, lr=1e-3, schedule="dual plateau"))
        cuts += cuts_in(runs[f"{data}_plateau"])
    return with_accuracies(runs) | {
        "better": settings.better, "equal": settings.equal, "cuts": cuts
    }  # fmt: skip


def cuts_in(run: Json) -> int:
    """How often a rate fell from one epoch to the next."""
    pairs = zip(run["rates"], run["rates"][1:], strict=False)
    return sum(later[group] < earlier[group] for earlier, later in pairs for group in earlier)


def gain(result: Json, data: str) -> float:
    """The schedule's accuracy less that of the better constant rate; NaN if it never cut one."""
    if not cuts_in(result["runs"][f"{data}_plateau"]):
        return math.nan
    constant = max(value(result, f"{data}_{way}", "accuracy") for way in ("fast", "slow"))
    return value(result, f"{data}_plateau", "accuracy") - constant


def fall_of_kl(result: Json) -> float:
    """The least, over all runs."""
    curves = [run["kl_curve"] for run in result["runs"].values()]
    falls = [math.nan if not curve or None in curve else curve[0] - curve[-1] for curve in curves]
    return float(np.min(falls))  # NaN if one is


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""
    first = results[0]
    statements = {
        "plateau_better": margins(results, lambda r: gain(r, first["better"])),
        "plateau_equal": margins(results, lambda r: SAME - abs(gain(r, first["equal"]))),
        "kl_falls": margins(results, fall_of_kl),
    }
    cuts = {"cuts": math.fsum(r["cuts"] for r in results) / len(results)}
    return judge(statements, averages(results) | cuts)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Training NLL and KL by epoch, and accuracies, a row for each data set."""
    with house_style():
        figure = blank_figure(10.5, 6.0)
        rows = figure.subplots(2, 3, width_ratios=(3, 3, 1.6))
        names = {"nll_curve": "training NLL", "kl_curve": "KL per image"}
        for data, row in zip((results[0]["better"], results[0]["equal"]), rows, strict=True):
            for place, (way, colour) in enumerate(coloured(WAYS)):
                label = f"{data}_{way}"
                for axes, (name, title) in zip(row, names.items(), strict=False):
                    draw_curves(axes, results, label, name, color=colour, label=WAYS[way])
                    axes.set_ylabel(title)
                draw_seeds(row[2], results, label, "accuracy", place, color=colour)
            row[0].set_title(set_name(data))
            row[2].set_xticks(range(len(WAYS)), ["10⁻³", "10⁻⁴", "plateau"])
            row[2].set(ylabel="test accuracy", xlim=(-0.5, 2.5))
            faint_grid(row[2])
        handles, labels = rows[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(WAYS))
        return [save(figure, folder / "dual-plateau.png")]


EXPERIMENT = Experiment(
    id="003-dual-plateau",
    paper="003",
    claim="Book (2020), fig. 5.11: plateau schedules that watch the NLL for the means' rate and "
    "the KL for the scales' improve training on CIFAR-10 over constant rates of 10⁻³ and 10⁻⁴, and "
    "make no difference on MNIST; the KL falls in every run.",
    theorem=False,
    needs=("mnist", "cifar10"),
    minutes=0.6,
    presets={"quick": PlateauSettings(), "paper": PlateauSettings(**PAPER)},
    run_one=run_one,
    check=check,
    figures=figures,
)
