"""The numbers of one predictive beside its targets, and what each of them means.

A score that is a mean over test examples has its terms among the arrays, one for each example, so
that two methods can be compared example by example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo import metrics
from credo.errors import NonFiniteError
from credo.likelihoods.base import match_shape
from credo.metrics.scoring import SMALLEST_PROBABILITY
from credo.posterior.predictive import Predictive
from credo.tools.compare_sets import Kind

Array: TypeAlias = NDArray[Any]

LEVEL = 0.9
"""Of the intervals whose coverage and width are scored."""
FLOOR_DRAWS = 400
FLOOR_NUMBERS = 4_000_000
"""Drawn labels in all, beyond which the floor of the ECE is taken from fewer sets of them."""
MOST_PROBS = 20_000_000
"""Probabilities that are kept of a run; of more, only what follows from them."""
MOST_IN_MAPS = 10_000_000
"""Pixels of all test images up to which their maps are kept."""
MOST_PIXELS = 100_000
"""Pixels whose confidence is kept, evenly spaced among all."""


@dataclass(frozen=True)
class Score:
    """What a column is called, how it is printed, and which end is good.

    Args:
        heading: Over the column.
        digits: Behind the point.
        better: +1 if more is better, −1 if less is, 0 if neither.
        terms: The array whose mean it is, if it is one.
    """

    heading: str
    digits: int
    better: int = 0
    terms: str = ""


SCORES: dict[str, Score] = {
    "accuracy": Score("accuracy", 3, +1, "correct"),
    "rmse": Score("RMSE", 4, -1),
    "nll": Score("NLL", 3, -1, "nll"),
    "ece": Score("ECE", 3, -1),
    "ood_auroc": Score("OOD", 3, +1),
    "crps": Score("CRPS", 4, -1, "crps"),
    "mse": Score("MSE", 4, -1, "squared_error"),
    "coverage": Score("in 90 %", 3, 0, "covered"),
    "mean_iou": Score("IoU", 3, +1),
    "agreement": Score("agree", 3, +1),
    "total_variation": Score("TV", 3, -1),
    "w2": Score("W2", 3, -1),
    "brier": Score("Brier", 3, -1, "brier"),
    "retention_area": Score("retained", 4, +1),
    "retention_mse": Score("retained", 4, -1),
    "ece_floor": Score("floor", 3),
    "ece_floor_std": Score("± floor", 3),
    "width": Score("width", 3),
    "epistemic": Score("epistemic", 4),
    "aleatoric": Score("aleatoric", 4),
    "ood_auroc_epistemic": Score("OOD, epist.", 3, +1),
    "r_hat": Score("R̂", 2, -1),
    "train_seconds": Score("train s", 1, -1),
    "train_mib": Score("train MiB", 0, -1),
    "predict_seconds": Score("predict s", 2, -1),
    "predict_mib": Score("predict MiB", 0, -1),
}
"""The columns, those first that matter most where there is no room for all."""


def about(name: str) -> Score:
    """What is known of a score; those of one foreign set are like those of all.

    Args:
        name: Of the score, such as "nll" or "ood_auroc: photos".

    >>> about("ood_auroc: photos").better
    1
    """
    return SCORES.get(name.split(":")[0], Score(name, 4))


@dataclass(frozen=True)
class Scored:
    """Numbers, and arrays with one entry for each example.

    Args:
        scores: By name.
        arrays: By name.
    """

    scores: dict[str, float]
    arrays: dict[str, Array] = field(default_factory=dict)


def score(
    predictive: Predictive, targets: Tensor, kind: Kind, ignored: int | None = None,
    in_full: bool = True,
) -> Scored:  # fmt: skip
    """How good predictions are.

    Args:
        predictive: Of the test inputs.
        targets: What came true.
        kind: What is predicted.
        ignored: The label that marks missing truth.
        in_full: Whether the floor of the ECE is wanted too, which takes longest.
    """
    if kind == "regression":
        return _numbers(predictive, targets)
    return _classes(predictive, targets, kind, ignored, in_full)


def doubts(predictive: Predictive, kind: Kind) -> tuple[Array, Array]:
    """All uncertainty about each example, and its epistemic part; of pixels, their mean.

    Args:
        predictive: Of any inputs.
        kind: What is predicted.
    """
    if kind == "regression":
        return _per_example(predictive.std.square()) ** 0.5, (
            _per_example(predictive.epistemic_std.square()) ** 0.5
        )
    return _per_example(predictive.entropy), _per_example(predictive.mutual_information)


def foreign_scores(own: tuple[Array, Array], foreign: Mapping[str, tuple[Array, Array]]) -> Scored:
    """How well uncertainty tells foreign inputs from the test set's: by AUROC.

    Args:
        own: The `doubts` about the test set.
        foreign: Those about each set of foreign inputs, by name.
    """
    names = ("ood_auroc", "ood_auroc_epistemic")
    found: dict[str, list[float]] = {name: [] for name in names}
    scores: dict[str, float] = {}
    for of, values in foreign.items():
        for name, familiar, strange in zip(names, own, values, strict=True):
            found[name].append(metrics.auroc(familiar, strange))
            if len(foreign) > 1:
                scores[f"{name}: {of}"] = found[name][-1]
    means = {name: float(np.mean(values)) for name, values in found.items() if values}
    return Scored({**means, **scores})


def _classes(
    predictive: Predictive, targets: Tensor, kind: Kind, ignored: int | None, in_full: bool
) -> Scored:
    probs, y = _as_classes(predictive, targets, kind)
    entropy, epistemic = predictive.entropy.reshape(y.shape), predictive.mutual_information
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    safe = y.clamp(0, probs.shape[1] - 1)
    of_label = probs.gather(1, safe.unsqueeze(1)).squeeze(1)
    terms = {
        "confidence": probs.amax(1),
        "correct": (probs.argmax(1) == y).to(probs.dtype),
        "entropy": entropy,
        "mutual_information": epistemic.reshape(y.shape),
        "nll": -of_label.double().clamp(SMALLEST_PROBABILITY).log(),
        "brier": probs.square().sum(1) - 2 * of_label + 1,
    }
    arrays = {name: _mean_of_counted(values, counted) for name, values in terms.items()}
    scores = {
        "accuracy": metrics.accuracy(probs, y, ignored),
        "nll": metrics.nll(probs, y, ignored),
        "brier": metrics.brier(probs, y, ignored),
        "ece": metrics.ece(probs, y, ignore_index=ignored),
        "epistemic": float(terms["mutual_information"][counted].mean()),
        "aleatoric": float(predictive.expected_entropy.reshape(y.shape)[counted].mean()),
        "retention_area": metrics.retention(arrays["correct"], arrays["entropy"]).area,
    }
    if kind == "dense":
        scores["mean_iou"] = metrics.mean_iou(probs, y, ignored)
        step = max(1, int(counted.sum()) // MOST_PIXELS)
        for name in ("confidence", "correct"):
            arrays[f"pixel_{name}"] = _array(terms[name][counted][::step])
        if y.dim() == 3 and y.numel() <= MOST_IN_MAPS:
            for name in ("entropy", "correct"):
                arrays[f"{name}_map"] = _array((terms[name] * counted).half())
    else:
        arrays["predicted"] = _array(probs.argmax(1))
        if probs.numel() <= MOST_PROBS:
            arrays["probs"] = _array(probs.float())
    if in_full:
        rows = probs.movedim(1, -1)[counted]
        draws = min(FLOOR_DRAWS, max(20, FLOOR_NUMBERS // len(rows)))
        floor, spread = metrics.ece_floor(rows, draws=draws)
        scores |= {"ece_floor": floor, "ece_floor_std": spread}
    return Scored(scores, arrays)


def _as_classes(predictive: Predictive, targets: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Probabilities (B, C, …) and labels (B, …), of yes-or-no targets too."""
    probs = predictive.probs
    if predictive.entropy.shape != probs.shape:
        return probs, targets.to(probs.device)
    yes = probs if kind == "dense" else probs.reshape(len(probs))
    return torch.stack([1 - yes, yes], 1), targets.to(probs.device).reshape(yes.shape).long()


def _numbers(predictive: Predictive, targets: Tensor) -> Scored:
    mean, std = predictive.mean, predictive.std
    if not bool(torch.isfinite(mean).all() and torch.isfinite(std).all()):
        raise NonFiniteError("means or standard deviations of the predictions are not finite")
    y = match_shape(mean, targets.to(mean.device)).to(mean.dtype)
    lower, upper = predictive.interval(LEVEL)
    error = y - mean
    deviation, _ = doubts(predictive, "regression")
    arrays = {
        "mean": _per_example(mean),
        "std": deviation,
        "error": _per_example(error) if error.numel() == len(error)
        else _per_example(error.square()) ** 0.5,
        "nll": -_array(predictive.log_prob(targets).double()),
        "crps": _per_example(predictive.crps(targets)),
        "covered": _per_example(((lower <= y) & (y <= upper)).double()),
        "squared_error": _per_example(error.double().square()),
        "epistemic_std": _per_example(predictive.epistemic_std),
    }  # fmt: skip
    scores = {
        "rmse": metrics.rmse(mean, y),
        "nll": float(arrays["nll"].mean()),
        "crps": float(arrays["crps"].mean()),
        "coverage": metrics.coverage(lower, upper, y),
        "width": float((upper - lower).mean()),
        "epistemic": float(predictive.epistemic_std.mean()),
        "aleatoric": float(predictive.aleatoric_std.mean()),
        "retention_mse": -metrics.retention(-arrays["squared_error"], deviation).area,
    }
    return Scored(scores, arrays)


def _mean_of_counted(values: Tensor, counted: Tensor) -> Array:
    """Of each example, over its pixels that count; 0 where none does."""
    weights = counted.to(values.dtype)
    total = (values * weights).reshape(len(values), -1).sum(1)
    return _array(total / weights.reshape(len(values), -1).sum(1).clamp_min(1))


def _per_example(values: Tensor) -> Array:
    return _array(values.reshape(len(values), -1).mean(1))


def _entries(values: Tensor) -> Array:
    """One number for each example, (B,), or several, (B, D)."""
    return _array(values.reshape(len(values), -1).squeeze(1))


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
