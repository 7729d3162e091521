r"""Book (2020), figure 5.2: how to share the KL out over the minibatches of an epoch.

Batch i of M gets the share π_i = λ^i/Σλ^k of the KL. λ = 1 is 1/M for all, λ = ½ puts nearly all of
it on the first few batches (Blundell et al.), λ = 2 on the last few, λ = 0 stands for no KL at all.
The thesis finds, with Adam at 10⁻³ on MNIST and CIFAR-10:

1. ``uneven_more_accurate``: λ = ½ and λ = 2 beat λ = 1 in accuracy,
2. ``uneven_worse_kl``, ``uneven_worse_total``: but lose in divergence and in total loss (here the
   negative ELBO with the whole KL, whatever its shares in training),
3. ``order_irrelevant``: ½ and 2 are alike; read as: within one percentage point of accuracy,
4. ``none_most_accurate``: λ = 0 is the most accurate,
5. ``mild_less_accurate``, ``mild_worse_kl``: λ = 0.97 and 1.03 lose to λ = 1 in both.

The rules, written before any run: each holds on each data set; where several λ are named, for the
one for which it holds least. The quick preset has M = 30 instead of 500: with λ = ½ or 2 five
batches (17 % instead of 2 %) then have more than 1/M, and λ = 1 ± 0.03 is nearly uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credo.report.style import BLUE, blank_figure, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.study_figures import draw_seeds
from credo_papers.study_setup import (
    MEASURES,
    PAPER,
    SETS,
    SharedRuns,
    StudySettings,
    averages,
    judge,
    set_name,
    value,
    with_accuracies,
)

RATIOS = (0.0, 0.5, 0.97, 1.0, 1.03, 2.0)
UNEVEN, MILD = (0.5, 2.0), (0.97, 1.03)
SAME = 0.01


@dataclass(frozen=True, kw_only=True)
class WeightSettings(StudySettings):
    """``data``: the sets, by name."""

    data: tuple[str, ...] = SETS


def run_one(settings: WeightSettings, seed: int, folder: Path) -> Json:
    """Every λ on every data set, from the same weights."""
    shared = SharedRuns(settings, seed, folder)
    runs = {
        f"{data}_{ratio:g}": shared.run(
            shared.trial(data, kl_weights="uniform" if ratio == 1 else ratio)
        )
        for data in settings.data
        for ratio in RATIOS
    }
    return with_accuracies(runs) | {"data": list(settings.data)}


def holds(result: Json, data: str) -> dict[str, float]:
    """For each statement, by how much it holds on this data set; negative where it does not."""

    def of(measure: str, *ratios: float) -> list[float]:
        return [value(result, f"{data}_{ratio:g}", measure) for ratio in ratios]

    (accuracy,), (kl,), (elbo,) = of("accuracy", 1.0), of("kl", 1.0), of("elbo", 1.0)
    first, last = of("accuracy", *UNEVEN)
    (none,) = of("accuracy", 0.0)
    return {
        "uneven_more_accurate": min(first, last) - accuracy,
        "uneven_worse_kl": _least(of("kl", *UNEVEN)) - kl,
        "uneven_worse_total": elbo - _most(of("elbo", *UNEVEN)),
        "order_irrelevant": SAME - abs(first - last),
        "none_most_accurate": none - max(of("accuracy", *RATIOS[1:])),
        "mild_less_accurate": accuracy - max(of("accuracy", *MILD)),
        "mild_worse_kl": _least(of("kl", *MILD)) - kl,
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring, as ``<data>_<statement>``."""
    statements: dict[str, list[float]] = {}
    for data in results[0]["data"]:
        rows = [holds(result, data) for result in results]
        statements |= {f"{data}_{name}": [row[name] for row in rows] for name in rows[0]}
    return judge(statements, averages(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Accuracy, NLL, KL and ELBO for every λ; a dot a seed, a row for each data set."""
    names = results[0]["data"]
    with house_style():
        figure = blank_figure(11.5, 0.4 + 2.6 * len(names))
        for data, row in zip(names, figure.subplots(len(names), 4, squeeze=False), strict=True):
            for axes, (measure, title) in zip(row, MEASURES.items(), strict=True):
                for place, ratio in enumerate(RATIOS):
                    draw_seeds(axes, results, f"{data}_{ratio:g}", measure, place, color=BLUE)
                axes.set_xticks(np.arange(len(RATIOS)), [f"{ratio:g}" for ratio in RATIOS])
                axes.set(xlabel="λ", ylabel=title)
                faint_grid(axes)
            row[0].set_title(set_name(data))
        return [save(figure, folder / "kl-weights.png")]


def _least(values: Sequence[float]) -> float:
    return float(np.min(values))  # NaN if one is


def _most(values: Sequence[float]) -> float:
    return float(np.max(values))


EXPERIMENT = Experiment(
    id="003-kl-weights",
    paper="003",
    claim="Book (2020), fig. 5.2: shares λ^i of the KL with λ = ½ or 2 give better accuracy than "
    "equal ones but a worse KL and total loss; their order does not matter; no KL at all is the "
    "most accurate; and λ = 1 ± 0.03 is worse than 1 in accuracy and KL.",
    theorem=False,
    needs=("mnist", "cifar10"),
    minutes=1,
    presets={"quick": WeightSettings(), "paper": WeightSettings(**PAPER)},
    run_one=run_one,
    check=check,
    figures=figures,
)
