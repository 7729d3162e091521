r"""Statements about shift after Ovadia et al. (2019), their rules and their figure.

Voting are the methods that Ovadia et al. compare and the library has: MAP, temperature scaling, MC
dropout, VI and the ensemble. The others are reported. Means are over all shifted sets, and each
statement is asked with 95 % confidence over seeds:

1. ``calibration_is_lost``: temperature scaling's calibration error under shift exceeds that on
   clean images by more than `SLIP`. (Calibration on clean data does not carry over.)
2. ``ensemble_better_calibrated``: it also exceeds the ensemble's under shift.
3. ``ensemble_best``: the ensemble has the lowest NLL under shift, compared with the best of the
   other voting methods in each seed.
4. ``uncertainty_lags``: for every voting method accuracy falls by `SLIP` more than mean confidence
   does. (Uncertainty does not track error under shift.)

Reproduced if all hold, not reproduced if one is refuted. The rules were written before any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from credo.report.style import COLOURS, blank_figure, coloured, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import Verdict, judgement, sign_of_mean, summarise
from credo_papers.shift_setup import CAPTIONS

SLIP = 0.05
"""By how much calibration must be lost, or confidence lag behind, to count."""

SINGLE = ("map", "scaled", "dropout", "vi")
"""The voting methods beside the ensemble."""


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""

    def lag(result: Json, name: str) -> float:
        accuracy = result[f"{name}_clean_accuracy"] - result[f"{name}_shift_accuracy"]
        confidence = result[f"{name}_clean_confidence"] - result[f"{name}_shift_confidence"]
        return float(accuracy - confidence)

    return {
        "calibration_is_lost": [
            r["scaled_shift_ece"] - r["scaled_clean_ece"] - SLIP for r in results
        ],
        "ensemble_better_calibrated": [
            r["scaled_shift_ece"] - r["ensemble_shift_ece"] for r in results
        ],
        "ensemble_best": [
            min(r[f"{name}_shift_nll"] for name in SINGLE) - r["ensemble_shift_nll"]
            for r in results
        ],
        "uncertainty_lags": [
            min(lag(r, name) for name in (*SINGLE, "ensemble")) - SLIP for r in results
        ],
    }


def present(results: Sequence[Json]) -> list[str]:
    """The methods that every seed has."""
    return [name for name in CAPTIONS if all(f"{name}_clean_nll" in r for r in results)]


def check(results: list[Json]) -> Verdict:
    """The rules above; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    names = present(results)
    keys = [
        key
        for key, value in results[0].items()
        if isinstance(value, int | float) and all(key in r for r in results)
    ]
    numbers = summarise(results, keys)
    numbers["ensemble_place"] = 1.0 + sum(
        numbers[f"{name}_shift_nll"] < numbers["ensemble_shift_nll"] for name in names
    )
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figure(results: list[Json], path: Path, kinds: Sequence[str]) -> Path:
    """NLL and calibration error against the level of each kind of shift, means over seeds."""
    with house_style():
        drawing = blank_figure(3.2 * len(kinds) + 1.5, 6.4)
        panels = drawing.subplots(2, len(kinds), squeeze=False)
        for column, kind in enumerate(kinds):
            for row, (key, label) in enumerate((("nll", "NLL"), ("ece", "calibration error"))):
                axes = panels[row][column]
                _draw(axes, results, kind, key)
                axes.set(ylabel=label if column == 0 else "", xlabel="level" if row else "")
                if row == 0:
                    axes.set_title(kind.replace("_", " "))
        handles, labels = panels[0][0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=4)
        return save(drawing, path)


def _draw(axes: Axes, results: Sequence[Json], kind: str, key: str) -> None:
    for place, (name, colour) in enumerate(coloured(present(results))):
        values = np.array([r[f"{name}_{kind}_{key}"] for r in results]).mean(0)
        axes.plot(
            range(len(values)), values, color=colour, label=CAPTIONS[name], linewidth=1.3,
            linestyle="-" if place < len(COLOURS) else "--",
        )  # fmt: skip
    faint_grid(axes)
