"""What the numbers of a comparison are called, how they are printed, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from credo.report.evidence import Run

LEVEL = 0.95
"""Of the intervals around differences."""


@dataclass(frozen=True)
class Score:
    """One kind of number.

    Args:
        heading: Its name in a table.
        form: How it is printed.
        better: 1 if more is better, −1 if less is, 0 if it is neither.
        meaning: What it says, and what it does not.
        price: Whether it is a cost of computing rather than a quality of predictions.
    """

    heading: str
    form: str
    better: int
    meaning: str
    price: bool = False


SCORES: Mapping[str, Score] = {
    "accuracy": Score(
        "Accuracy", "{:.1%}", +1,
        "Share of test examples whose most probable class is the true one. It says nothing about "
        "whether the probabilities can be believed.",
    ),
    "mean_iou": Score(
        "Mean IoU", "{:.3f}", +1,
        "Intersection over union of predicted and true places of a class, averaged over classes.",
    ),
    "rmse": Score(
        "RMSE", "{:.3g}", -1,
        "Root mean squared error of the predicted means, in the units of the target. It ignores "
        "the predicted uncertainty.",
    ),
    "nll": Score(
        "NLL", "{:.3f}", -1,
        "Negative log-likelihood of what came true, in nats per example. A proper score: it is "
        "lowest, on average, for the true probabilities, and one confident mistake costs a lot.",
    ),
    "brier": Score(
        "Brier", "{:.3f}", -1,
        "Squared distance between the probabilities and what came true, summed over the classes. "
        "A proper score like NLL, but a single mistake can cost no more than 2.",
    ),
    "crps": Score(
        "CRPS", "{:.3g}", -1,
        "Continuous ranked probability score: the absolute error of a whole predicted "
        "distribution, in the units of the target. A proper score.",
    ),
    "ece": Score(
        "ECE", "{:.3f}", -1,
        "Expected calibration error: how far confidence and accuracy are apart, on average over "
        "15 bins of confidence. It can't be negative, so even perfect probabilities do not score "
        "0 on finitely many examples: the floor beside it is what they would score. An ECE near "
        "its floor can't be told from calibrated. It is not a proper score: always answering "
        "with the classes' frequencies has a low ECE and is useless.",
    ),
    "coverage": Score(
        "Coverage", "{:.1%}", 0,
        "Share of targets inside their predicted interval. It should be the level of the "
        "interval; more is not better.",
    ),
    "width": Score(
        "Width", "{:.3g}", 0,
        "Mean width of the predicted intervals, in the units of the target. Narrower is better "
        "only where the coverage is right.",
    ),
    "r_hat": Score(
        "R̂", "{:.2f}", 0,
        "Whether chains of samples agree with each other: above 1.01 they have not converged.",
    ),
    "ood_auroc": Score(
        "Foreign AUROC", "{:.3f}", +1,
        "How well the predictions’ uncertainty tells test examples from foreign ones: the "
        "probability that a foreign example is the more uncertain of the two. 0.5 is guessing. It "
        "holds for these foreign data only; other ones may be harder.",
    ),
    "retention_area": Score(
        "Retention area", "{:.3f}", +1,
        "Mean accuracy over all shares of examples kept, the most certain first. It rewards both "
        "being right and knowing when one is not.",
    ),
    "ood_auroc_epistemic": Score(
        "Foreign AUROC, epistemic", "{:.3f}", +1,
        "The same by the epistemic part of the uncertainty alone.",
    ),
    "retention_mse": Score(
        "Retained MSE", "{:.3g}", -1,
        "Mean squared error over all shares of examples kept, the narrowest predictions first.",
    ),
    "epistemic": Score(
        "Epistemic", "{:.3f}", 0,
        "The part of the uncertainty that more data would remove (for classes the mutual "
        "information between label and weights, in nats).",
    ),
    "aleatoric": Score(
        "Aleatoric", "{:.3f}", 0,
        "The part of the uncertainty that more data would not remove, as the method sees it.",
    ),
    "agreement": Score(
        "Agreement", "{:.1%}", +1,
        "Share of test examples on which the most probable class is the reference’s.",
    ),
    "total_variation": Score(
        "Total variation", "{:.3f}", -1,
        "Mean distance to the reference’s probabilities, from 0 to 1.",
    ),
    "w2": Score("W₂", "{:.3g}", -1, "Mean Wasserstein distance to the reference’s predictions."),
    "train_seconds": Score(
        "Training", "{:.1f} s", -1,
        "Wall-clock seconds of training. They depend on the machine and on what else ran on it; "
        "compare them within one page only.", price=True,
    ),
    "predict_seconds": Score(
        "Prediction", "{:.2f} s", -1, "Wall-clock seconds to predict the test examples once.",
        price=True,
    ),
    "train_mib": Score(
        "Training memory", "{:.0f} MiB", -1,
        "Memory at the peak of training, beyond what there was before.", price=True,
    ),
    "predict_mib": Score(
        "Prediction memory", "{:.0f} MiB", -1, "The same for prediction.", price=True
    ),
}  # fmt: skip
"""In the order of a table's columns; what is not here follows under its own name."""

BESIDE = {"ece_floor": "ece", "ece_floor_std": "ece"}
"""Scores that are printed in another's cell."""

TERMS = {"nll": "nll", "accuracy": "correct", "brier": "brier", "crps": "crps"}
"""Scores that are means over test examples, and the arrays that hold these examples' terms."""


def score_of(name: str) -> Score:
    """The entry of `SCORES`, or a plain one for a name that is not there.

    >>> score_of("ece").heading, score_of("my_score").heading
    ('ECE', 'My score')
    """
    known, _, of = name.partition(": ")
    if known in SCORES and of:
        return replace(SCORES[known], heading=f"{SCORES[known].heading}, {of}", meaning="")
    return SCORES.get(name) or Score(name.replace("_", " ").capitalize(), "{:.4g}", 0, "")


def columns_of(runs: Iterable[Run]) -> list[str]:
    """Names of the scores that any run has, known ones first, in the order of `SCORES`."""
    present = dict.fromkeys(
        name
        for run in runs
        for name, value in run.scores.items()
        if name not in BESIDE and is_number(value)
    )
    order = {name: place for place, name in enumerate(SCORES)}
    return sorted(present, key=lambda name: order.get(name.partition(": ")[0], len(order)))


def is_number(value: object) -> bool:
    """Whether a record's entry can be drawn: a real number, not a flag, a text or a table."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


@dataclass(frozen=True)
class Summary:
    """A score over the seeds.

    Args:
        mean: Over the runs that have it.
        error: Standard error of the mean, NaN for a single run.
        count: Number of runs.
    """

    mean: float
    error: float
    count: int

    def text(self, form: str) -> str:
        """As it stands in a table, without its standard error.

        >>> Summary(0.9123, 0.004, 3).text("{:.1%}")
        '91.2%'
        """
        return form.format(self.mean) if math.isfinite(self.mean) else "—"

    def error_text(self, form: str) -> str:
        """The standard error, in the digits of the mean; nothing for a single run.

        >>> Summary(0.347, 0.00902, 3).error_text("{:.3g}")
        '± 0.009'
        """
        # significant digits of the mean would be more of the error than it has
        form = "{:.1g}" if form.endswith("g}") else form
        return f"± {form.format(self.error)}" if math.isfinite(self.error) else ""


def summary(values: Sequence[float]) -> Summary:
    """Mean and standard error; runs whose value is not finite make a mean that is not.

    >>> summary([1.0, 3.0])
    Summary(mean=2.0, error=1.0, count=2)
    """
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        return Summary(math.nan, math.nan, 0)
    error = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else math.nan
    return Summary(float(array.mean()), error, array.size)


@dataclass(frozen=True)
class Difference:
    """One method's score minus another's, pair by pair.

    Args:
        mean: Over the pairs.
        low: Lower end of the 95 % interval of Student's t; NaN for a single pair.
        high: Its upper end.
        count: Number of pairs.
        p: How probable one as large is by chance, corrected for the number of comparisons.
    """

    mean: float
    low: float
    high: float
    count: int
    p: float

    @property
    def told_apart(self) -> bool:
        """Whether it is significant; never with one pair."""
        return self.p < 1 - LEVEL

    @property
    def may_be_none(self) -> bool:
        """Whether the interval holds 0, without regard to other comparisons."""
        return self.low <= 0 <= self.high


def differences(
    values: Sequence[Sequence[float] | NDArray[np.float64]],
    base: Sequence[Sequence[float] | NDArray[np.float64]],
) -> list[Difference]:
    """Paired differences of several methods to one, with Holm's correction for their number.

    What a pair has in common (the starting weights and the order of the data of a seed, or the test
    example) cancels, so a difference is known better than either score.

    Args:
        values: Of each method, pair by pair.
        base: What each is compared with, in the same order.

    >>> differences([[1.0, 2.0, 3.1]], [[0.5, 1.5, 2.5]])[0].told_apart
    True
    """
    from scipy.stats import t

    from credo.metrics.paired import holm, paired

    gaps = [paired(own, other) for own, other in zip(values, base, strict=True)]
    found = []
    for gap, p in zip(gaps, holm([gap.p for gap in gaps]), strict=True):
        half = float(t.ppf(0.5 + LEVEL / 2, gap.count - 1)) if gap.count > 1 else math.nan
        half *= gap.standard_error
        mean = gap.difference
        found.append(Difference(mean, mean - half, mean + half, gap.count, p))
    return found
