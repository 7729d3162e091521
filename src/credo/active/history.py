"""What active learning returns: which labels were asked for, and what they were good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from credo.display import Display, Displayed
from credo.errors import DataError
from credo.posterior.posterior import Posterior
from credo.report.style import blank_figure, coloured, faint_grid, house_style, save
from credo.types import Json


@dataclass(frozen=True, repr=False)
class History(Displayed):
    """What was asked for and what it was good for.

    Args:
        indices: Into the pool, in the order in which they were asked for.
        labels: Their labels.
        rounds: A record for each training: ``labels``, how many there were; ``asked``, the new
            indices; the test ``scores``; ``seconds``.
        posterior: The last one.
        exhausted: Whether the pool was empty before the last round.
    """

    indices: Tensor
    labels: Tensor
    rounds: list[Json]
    posterior: Posterior
    exhausted: bool

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Numbers of labels, and the metric after each training.

        Args:
            metric: Classification has "accuracy", "nll" and "ece", regression "rmse" and "nll".
        """
        return [r["labels"] for r in self.rounds], [_of(r, metric) for r in self.rounds]

    def mean_over_labels(self, metric: str) -> float:
        """The area under the curve, divided by the labels it stretches over.

        One number for a whole curve: a learner that is good early is better than one that is good
        at the end only.

        Args:
            metric: What `curve` is asked for.
        """
        return area(*self.curve(metric))

    def _display(self) -> Display:
        last = self.rounds[-1]["scores"] if self.rounds else {}
        score = "".join(f", {name} {last[name]:.4g}" for name in list(last)[:1])
        curve = "".join(f"history.curve({name!r}), " for name in list(last)[:1])
        return Display(
            f"History: {len(self.indices)} labels asked for in {len(self.rounds)} trainings{score}",
            f"{curve}history.posterior.predict(x)",
            rows=[
                [str(r["labels"]), *(f"{r['scores'][name]:.4g}" for name in last)]
                for r in self.rounds
            ],
            header=["labels", *last],
        )


@dataclass(frozen=True)
class Band:
    """The mean of several curves and its standard error.

    Args:
        labels: Numbers of labels, (T,).
        mean: Of the curves, (T,).
        error: Standard error of the mean, (T,); NaN for a single curve.
    """

    labels: NDArray[np.int64]
    mean: NDArray[np.float64]
    error: NDArray[np.float64]


def band(histories: Sequence[History], metric: str) -> Band:
    """The curve of several seeds, as far as all of them reach.

    Args:
        histories: Of several seeds.
        metric: What `History.curve` is asked for.
    """
    if not histories:
        raise DataError("band needs at least one history")
    curves = [history.curve(metric) for history in histories]
    length = min(len(labels) for labels, _ in curves)
    counts = {tuple(labels[:length]) for labels, _ in curves}
    if len(counts) > 1:
        raise DataError(
            "these runs had different numbers of labels round by round, so their curves have no "
            "common mean: use the same start, per_round and pool size"
        )
    values = np.array([scores[:length] for _, scores in curves])
    error = (
        values.std(0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.full(length, np.nan)
    )
    return Band(np.array(counts.pop()), values.mean(0), error)


def area(labels: Sequence[int], values: Sequence[float]) -> float:
    """The area under a curve by trapezoids, divided by its width; one point is its own mean.

    Args:
        labels: Where the curve has points, rising.
        values: Its height there.

    >>> area([0, 10, 30], [0.0, 1.0, 1.0])
    0.8333333333333334
    """
    if len(labels) == 1:
        return values[0]
    return float(np.trapezoid(values, labels) / (labels[-1] - labels[0]))


def plot(runs: Mapping[str, Sequence[History]], metric: str, path: str | Path) -> Path:
    """Draw the band of each acquisition's seeds; the file's name says the format.

    Args:
        runs: The histories of several seeds, by what the legend calls them.
        metric: What `History.curve` is asked for.
        path: The file to write.

    Returns:
        The path.
    """
    with house_style():
        figure = blank_figure(6, 3.8)
        axes = figure.subplots()
        for name, colour in coloured(runs):
            curve = band(runs[name], metric)
            axes.plot(curve.labels, curve.mean, label=name, color=colour)
            if len(runs[name]) > 1:
                low, high = curve.mean - curve.error, curve.mean + curve.error
                axes.fill_between(curve.labels, low, high, color=colour, alpha=0.2)
        axes.set(xlabel="labels", ylabel=f"test {metric}")
        faint_grid(axes)
        axes.legend()
    return save(figure, path)


def _of(record: Json, metric: str) -> float:
    if metric not in record.get("scores", {}):
        known = ", ".join(record.get("scores", {})) or "none: give test_data"
        raise DataError(f"{metric!r} was not recorded; there are {known}")
    return float(record["scores"][metric])
