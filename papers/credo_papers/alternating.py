r"""Book (2020), figure 5.8: train means and scales in turns.

Adam at 10⁻³ on CIFAR-10, once as usual and once with some epochs for the means alone, then as many
for the scales, and so on. The thesis sees that training the means lowers the NLL, training the
scales lowers the KL, and that the accuracy is "more or less the same" as usual.

The rules, written before any run. Within a turn of several epochs, the change from one epoch to the
next, averaged over turns:

1. ``means_lower_nll``: is negative for the training NLL in turns of the means;
2. ``scales_lower_kl``: is negative for the KL in turns of the scales;
3. ``nll_is_the_means_work``: it falls faster in turns of the means than of the scales;
4. ``same_accuracy``: test accuracies in the end differ by less than two percentage points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credo.report.style import PALE, blank_figure, coloured, faint_grid, house_style, save
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

WAYS = {"usual": "both at once", "turns": "in turns"}
SAME = 0.02


@dataclass(frozen=True, kw_only=True)
class TurnSettings(StudySettings):
    """``turn``: epochs for the means, and as many for the scales."""

    data: str = "cifar10"
    epochs: int = 12
    turn: int = 2


def run_one(settings: TurnSettings, seed: int, folder: Path) -> Json:
    """As usual, and in turns."""
    shared = SharedRuns(settings, seed, folder)
    runs = {
        "usual": shared.run(shared.trial(settings.data)),
        "turns": shared.run(shared.trial(settings.data, schedule="alternate", turn=settings.turn)),
    }
    return with_accuracies(runs) | {"data": settings.data, "turn": settings.turn}


def change(curve: Sequence[float | None], turn: int, of: int) -> float:
    """Mean change per epoch within the turns of the means (``of`` = 0) or of the scales (1).

    >>> change([5.0, 3.0, 3.0, 3.5, 2.0, 1.0], turn=2, of=0)
    -1.5
    """
    values = np.array(curve, dtype=float)
    steps = [
        values[epoch] - values[epoch - 1]
        for epoch in range(1, len(values))
        if epoch % turn and (epoch // turn) % 2 == of
    ]
    return float(np.mean(steps)) if steps else float("nan")


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""

    def changed(result: Json, name: str, of: int) -> float:
        return change(result["runs"]["turns"][name], result["turn"], of)

    statements = {
        "means_lower_nll": margins(results, lambda r: -changed(r, "nll_curve", 0)),
        "scales_lower_kl": margins(results, lambda r: -changed(r, "kl_curve", 1)),
        "nll_is_the_means_work": margins(
            results, lambda r: changed(r, "nll_curve", 1) - changed(r, "nll_curve", 0)
        ),
        "same_accuracy": margins(
            results,
            lambda r: SAME - abs(value(r, "turns", "accuracy") - value(r, "usual", "accuracy")),
        ),
    }
    extra = {
        "kl_change_by_means": float(np.mean([changed(r, "kl_curve", 0) for r in results])),
        "kl_change_by_scales": float(np.mean([changed(r, "kl_curve", 1) for r in results])),
    }
    return judge(statements, averages(results) | extra)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Training NLL and KL by epoch, the turns of the scales shaded, and accuracies."""
    turn = results[0]["turn"]
    with house_style():
        figure = blank_figure(10.5, 3.3)
        panels = figure.subplots(1, 3, width_ratios=(3, 3, 1.3))
        names = {"nll_curve": "training NLL", "kl_curve": "KL per image"}
        for axes, (name, title) in zip(panels, names.items(), strict=False):
            epochs = len(results[0]["runs"]["turns"][name])
            for start in range(turn, epochs, 2 * turn):
                label = "only scales are trained" if start == turn else None
                axes.axvspan(start + 0.5, start + turn + 0.5, color=PALE, alpha=0.5, label=label)
            for way, colour in coloured(WAYS):
                draw_curves(axes, results, way, name, color=colour, label=WAYS[way])
            axes.set_ylabel(title)
        panels[0].set_title(set_name(results[0]["data"]))
        for place, (way, colour) in enumerate(coloured(WAYS)):
            draw_seeds(panels[2], results, way, "accuracy", place, color=colour)
        panels[2].set_xticks(range(len(WAYS)), WAYS.values())
        panels[2].set(ylabel="test accuracy", xlim=(-0.6, 1.6))
        faint_grid(panels[2])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return [save(figure, folder / "alternating.png")]


EXPERIMENT = Experiment(
    id="003-alternating",
    paper="003",
    claim="Book (2020), fig. 5.8: when means and scales are trained in turns, the means' turns "
    "lower the NLL and the scales' turns the KL, and the accuracy is about that of training both "
    "at once.",
    theorem=False,
    needs=("cifar10",),
    minutes=0.5,
    presets={
        "quick": TurnSettings(),
        # The thesis doesn't say how long its turns are.
        "paper": TurnSettings(**PAPER, turn=5),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
