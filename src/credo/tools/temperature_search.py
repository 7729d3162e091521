"""What `credo.tune_temperature` found: every value it tried, the best, and its posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credo.display import Display, Displayed
from credo.posterior.posterior import Posterior
from credo.report.style import (
    BLUE,
    VERMILLION,
    blank_figure,
    faint_grid,
    house_style,
    save,
)
from credo.temperature import Balanced


@dataclass(frozen=True)
class TemperatureRow:
    """One temperature: how it was asked for, what it was, and its scores on held-out examples.

    After cross-validation times and epochs are sums over the folds, scores are means.

    Args:
        tau: τ of `credo.Balanced`; None if η was asked for.
        eta: The weight of the KL.
        nll: Per example.
        ece: None unless it is a classifier.
        accuracy: None unless it is a classifier.
        seconds: Of training.
        epochs: Of training.
        train_nll: Expected under q in the last epoch, None without any.
    """

    tau: float | None
    eta: float
    nll: float
    ece: float | None
    accuracy: float | None
    seconds: float
    epochs: int
    train_nll: float | None

    @property
    def name(self) -> str:
        """τ or η with its value."""
        return f"η = {self.eta:.3g}" if self.tau is None else f"τ = {self.tau:.3g}"


@dataclass(frozen=True, repr=False)
class TemperatureSearch(Displayed):
    """All temperatures that were tried, and the posterior at the best one.

    Args:
        rows: From the smallest temperature up.
        best_index: The row with the lowest NLL.
        temperature: The best one, as a method takes it.
        posterior: At the best one.
        cost: The training of the whole search, ``refit`` included, in units of one training of
            ``epochs`` epochs on the same examples.
        folds: Parts of a cross-validation, None without one.
        refitted: Whether the posterior was trained anew on all data.
        doubts: Reasons not to trust the choice: a best value at an end of the grid, training that
            had not converged.
    """

    rows: tuple[TemperatureRow, ...]
    best_index: int
    temperature: float | Balanced
    posterior: Posterior
    cost: float
    folds: int | None
    refitted: bool
    doubts: tuple[str, ...]

    @property
    def best(self) -> TemperatureRow:
        """The row with the lowest NLL."""
        return self.rows[self.best_index]

    def _table(self) -> list[list[str]]:
        """A line of names, and one for each temperature."""
        classifies = self.best.accuracy is not None
        heads = ["τ", "η", "NLL", *(["ECE", "accuracy"] if classifies else []), "seconds", ""]
        table = [heads]
        for index, row in enumerate(self.rows):
            scores = [row.nll, *((row.ece, row.accuracy) if classifies else ())]
            tau = "" if row.tau is None else f"{row.tau:.3g}"
            best = "← best" if index == self.best_index else ""
            numbers = [f"{math.nan if score is None else score:.4f}" for score in scores]
            table.append([tau, f"{row.eta:.3g}", *numbers, f"{row.seconds:.1f}", best])
        return table

    def _remarks(self) -> list[str]:
        where = f"{self.folds} folds" if self.folds else "a held-out part"
        after = ", the posterior trained anew on all data" if self.refitted else ""
        scored = f"Scored on {where}; cost {self.cost:.2g} trainings{after}."
        return [scored, *(f"Warning: {doubt}." for doubt in self.doubts)]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if cell.startswith("←") else cell.rjust(width)
                for cell, width in zip(line, widths, strict=True)
            ).rstrip()
            for line in table
        ]
        return "\n".join([*lines, *self._remarks()])

    def _display(self) -> Display:
        header, *rows = self._table()
        return Display(
            f"TemperatureSearch: {self.best.name} is best of {len(self.rows)}, "
            f"held-out NLL {self.best.nll:.4g}",
            "search.posterior.predict(x); print(search) for every value",
            rows=rows,
            header=header,
            notes=self._remarks(),
        )

    def plot(self, path: str | Path) -> Path:
        """A picture of NLL, and for a classifier ECE and accuracy, against the temperature.

        Args:
            path: The file to write; its name says the format.
        """
        panels = {"nll": "held-out NLL", "ece": "ECE", "accuracy": "accuracy"}
        shown = [key for key in panels if getattr(self.best, key) is not None]
        balanced = self.best.tau is not None
        x = [row.eta if row.tau is None else row.tau for row in self.rows]
        with house_style():
            figure = blank_figure(3.3 * len(shown), 2.9)
            grid = figure.subplots(1, len(shown), squeeze=False)[0]
            for key, axes in zip(shown, grid, strict=True):
                y = [getattr(row, key) for row in self.rows]
                axes.plot(x, y, "o-", color=BLUE, markersize=4)
                axes.plot(
                    x[self.best_index], y[self.best_index], "o", color=VERMILLION, markersize=8,
                    label=f"best NLL, {self.best.name}",
                )  # fmt: skip
                axes.set(xscale="log", xlabel="τ" if balanced else "η", ylabel=panels[key])
                axes.xaxis.set_minor_formatter(lambda value, place: "")
                faint_grid(axes)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center")
        return save(figure, path)


def average(
    tables: Sequence[Sequence[TemperatureRow]], sizes: Sequence[int]
) -> list[TemperatureRow]:
    """One table of several folds': scores weighted by the folds' sizes, times and epochs added.

    Args:
        tables: The rows of each fold.
        sizes: Held-out examples of each fold.

    >>> fold = [TemperatureRow(0.1, 0.02, 1.0, None, None, 2.0, 5, 0.9)]
    >>> other = [TemperatureRow(0.1, 0.02, 4.0, None, None, 2.0, 5, 0.9)]
    >>> average([fold, other], [200, 100])[0].nll
    2.0
    """
    total = sum(sizes)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        if len(known) < len(sizes):
            return None
        return math.fsum(v * size for v, size in zip(known, sizes, strict=True)) / total

    return [
        TemperatureRow(
            tau=rows[0].tau,
            eta=math.fsum(row.eta for row in rows) / len(rows),
            nll=mean([row.nll for row in rows]) or 0.0,
            ece=mean([row.ece for row in rows]),
            accuracy=mean([row.accuracy for row in rows]),
            seconds=math.fsum(row.seconds for row in rows),
            epochs=sum(row.epochs for row in rows),
            train_nll=mean([row.train_nll for row in rows]),
        )
        for rows in zip(*tables, strict=True)
    ]
