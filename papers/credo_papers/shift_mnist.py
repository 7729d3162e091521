r"""Khan (2019) and Ovadia et al. (2019): what is left of calibration on turned and moved digits.

Y. Ovadia et al., "Can you trust your model's uncertainty? Evaluating predictive uncertainty under
dataset shift", 2019 (arXiv:1906.02530), train on MNIST and test on digits turned by up to 180° and
rolled by up to 26 pixels, with labels as they are; letters (notMNIST) and clothes (Fashion-MNIST)
are foreign. Statements and rules are in `credo_papers.shift_rules`, methods in
`credo_papers.shift_setup`. The quick preset has every other angle and distance.
"""

from __future__ import annotations

from pathlib import Path

from credo.data import shifts
from credo.types import Json
from credo_papers import shift_rules
from credo_papers.experiment import Experiment
from credo_papers.shift_rules import check, margins
from credo_papers.shift_setup import ShiftSettings, run_methods

__all__ = ["EXPERIMENT", "check", "figures", "margins", "run_one"]


def run_one(settings: ShiftSettings, seed: int, folder: Path) -> Json:
    """All methods, from the same weights."""
    return run_methods(settings, seed, folder)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """NLL and calibration error against angle and distance."""
    path = folder / "shift-mnist.png"
    return [shift_rules.figure(results, path, ("rotation", "roll"))]


EXPERIMENT = Experiment(
    id="004-shift-mnist",
    paper="004",
    claim="Khan (2019) on uncertainty under shift, tested by the protocol of Ovadia et al. (2019) "
    "on MNIST: calibration on clean data does not carry over to turned and moved digits; ensembles "
    "are best there; and uncertainty does not grow as the error does.",
    theorem=False,
    needs=("mnist", "notmnist", "fashion-mnist"),
    minutes=8,
    presets={
        "quick": ShiftSettings(
            data="mnist", foreign=("notmnist", "fashion-mnist"), num_data=10_000, held_out=2000,
            epochs=6, prediction_samples=16, test_images=1000, foreign_images=1000,
            rotations=(30, 60, 90, 120, 150, 180), rolls=(4, 8, 12, 16, 20, 24),
        ),
        "paper": ShiftSettings(
            data="mnist", foreign=("notmnist", "fashion-mnist"), num_data=50_000, held_out=10_000,
            epochs=20, members=10, prediction_samples=128, test_images=10_000,
            foreign_images=10_000, rotations=shifts.ROTATIONS, rolls=shifts.ROLLS,
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
