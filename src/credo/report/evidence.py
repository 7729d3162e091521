"""What a comparison of methods leaves behind for tables, figures and pages: numbers and arrays.

One `Run` for each method and seed, all on the same test examples; `Evidence` is all of them with
what they were tried on. Nothing here knows how a method works, so a page can be made from files
long after the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class ShiftScores:
    """How one run fares on shifted test examples.

    Args:
        shift: The name of the shift, such as "rotation".
        severity: From 1, the mildest, upwards; 0 are the examples as they are.
        scores: By the names of `Run.scores`.
    """

    shift: str
    severity: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Args:
        method: Its name in the comparison.
        seed: Of initialisation, data order and noise.
        scores: Numbers by name: "accuracy", "nll", "brier", "ece", "ece_floor", "ood_auroc",
            "retention_area", … for classes; "rmse", "nll", "crps", "coverage", … for numbers; and
            "train_seconds", "predict_seconds", "train_mib", "predict_mib".
        arrays: By name, one entry for each test example: "confidence", "correct", "entropy",
            "mutual_information", "predicted" for classes, "mean", "std", "error" (target − mean)
            for numbers; and "ood_entropy" or "ood_std", one for each foreign example. Scores that
            are means over examples have these examples' terms here: "nll", "brier", "crps". Of
            dense predictions these are means over pixels; "pixel_confidence" and "pixel_correct"
            are of single pixels, "entropy_map" and "correct_map" (len(inputs), H, W) of the inputs.
        shifts: Scores on shifted examples.
        history: The records of training, epoch by epoch.
        settings: What made it: the method's configuration, epochs, rates.
        error: Why it failed; then it has no scores.
    """

    method: str
    seed: int
    scores: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    shifts: Sequence[ShiftScores] = ()
    history: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Evidence:
    """All runs of a comparison, and what they were tried on.

    Args:
        kind: "classification", "regression" or "dense" (a class for each pixel).
        runs: One for each method and seed.
        inputs: Some of the test inputs, to be shown as pictures or rows; empty if unknown.
        targets: The test targets, one for each example.
        classes: Names of the classes; empty if unknown.
        about: What a reader needs to repeat it: sizes of the sets, versions, the command.
        input_index: Which of the test examples ``inputs`` are; the first ones if it isn't given.
        features: Names of the inputs' features, if these are rows of a table.
    """

    kind: str
    runs: Sequence[Run]
    inputs: NDArray[Any] | None = None
    targets: NDArray[Any] | None = None
    classes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    input_index: NDArray[Any] | None = None
    features: Sequence[str] = ()
