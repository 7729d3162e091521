r"""Khan (2019) and Ovadia et al. (2019): what is left of calibration on corrupted photographs.

The protocol of Ovadia et al. (2019, arXiv:1906.02530) on CIFAR-10, with the corruptions of
`credo.data.shifts` (those of Hendrycks & Dietterich, 2019, that it has) and LeNet-5 in place of a
ResNet-20; house numbers (SVHN) are foreign. Statements and rules are in `credo_papers.shift_rules`,
methods in `credo_papers.shift_setup`.
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

DRAWN = ("gaussian_noise", "defocus_blur", "contrast", "haze")
"""Of the corruptions, those in the figure."""


def run_one(settings: ShiftSettings, seed: int, folder: Path) -> Json:
    """All methods, from the same weights."""
    return run_methods(settings, seed, folder)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """NLL and calibration error against severity, of some corruptions."""
    kinds = [kind for kind in DRAWN if f"map_{kind}_nll" in results[0]]
    return [shift_rules.figure(results, folder / "shift-cifar10.png", kinds)]


EXPERIMENT = Experiment(
    id="004-shift-cifar10",
    paper="004",
    claim="Khan (2019) on uncertainty under shift, tested by the protocol of Ovadia et al. (2019) "
    "on CIFAR-10: calibration on clean data does not carry over to corrupted photographs; "
    "ensembles are best there; and uncertainty does not grow as the error does.",
    theorem=False,
    needs=("cifar10", "svhn"),
    minutes=15,
    presets={
        "quick": ShiftSettings(
            data="cifar10", foreign=("svhn",), num_data=10_000, held_out=2000, epochs=10,
            prediction_samples=16, test_images=1000, foreign_images=1000, severities=(3, 5),
            corruptions=("gaussian_noise", "shot_noise", "impulse_noise", "gaussian_blur",
                         "defocus_blur", "contrast", "brightness", "haze", "pixelate", "jpeg"),
        ),
        "paper": ShiftSettings(
            data="cifar10", foreign=("svhn",), num_data=40_000, held_out=10_000, epochs=60,
            members=10, prediction_samples=128, test_images=10_000, foreign_images=10_000,
            severities=shifts.SEVERITIES, corruptions=tuple(shifts.IMAGES),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
