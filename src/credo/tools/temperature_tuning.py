r"""Which temperature? Train once, then follow the posterior along a path of temperatures.

    η* = argmin_η  −(1/m) Σ_j log p(y_j | x_j, D; η)        over a grid, (x_j, y_j) held out

symbols: η the KL's weight in E_q[−log p(D|w)] + η·KL(q‖prior), given as τ of η = τ·n/N
(`credo.Balanced`) or as itself; D the training part, m the number of held-out examples.

The grid is followed from the smallest value up. The first value is trained for all ``epochs``; at
each further one the same state (means, scales, the optimizer's averages) is trained on with the new
temperature for ``epochs // (values − 1)``, at least 1. All values together then cost at most two
trainings, once there are as many epochs as values.

Upwards, because that picks better. Eight values on a 784-100-10 ReLU network with 2,000 images of
Fashion-MNIST, VI, 42 epochs: the value picked, trained by itself, had a test NLL of 0.556 where the
best of eight separate trainings had 0.549. Downwards it was 0.716: a network that starts near its
prior has not overfitted yet when it comes to small values, so they look harmless. On the digits the
order made no difference above 0.006. What a path costs is a lag: on the way up q still remembers
the sharper posteriors, so a shallow minimum may be found a step too high, and the posterior there
be worse than one of its own. Ask for ``refit=True`` where that matters more than the time.

Later values have also been trained for longer. At the optimum a higher temperature can only raise
E_q[−log p(D|w)], so a training NLL that falls along the path shows that the first training had not
converged, and the search says so where that may have decided it.

    >>> import torch, credo
    >>> noise = torch.Generator().manual_seed(0)
    >>> x = torch.randn(100, 40, generator=noise)
    >>> y = x[:, :1] + torch.randn(100, 1, generator=noise)
    >>> model = credo.Model(torch.nn.Linear(40, 1), credo.likelihoods.Gaussian(scale=1.0))
    >>> search = credo.tune_temperature(
    ...     model, credo.VI(lr=0.03), (x, y), values=(0.01, 0.1, 1.0, 10.0, 100.0),
    ...     kind="temperature", epochs=40, progress=False
    ... )
    >>> search.temperature, search.cost
    (10.0, 2.0)
    >>> predicted = search.posterior.predict(x).mean
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from credo.checks import Count, Index, Probability, Range, Remedy, checked, positive
from credo.errors import DataError
from credo.method import TemperedMethod
from credo.model import Model
from credo.noise import key_to_seed
from credo.schedules import ScheduleSpec
from credo.temperature import Balanced, temperature_at
from credo.tools import held_out
from credo.tools.temperature_path import Snapshot, TemperaturePath
from credo.tools.temperature_search import TemperatureRow, TemperatureSearch, average
from credo.train import fit
from credo.train.progress import Bar, Reporter, progress_bar
from credo.types import Json

TAUS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
TEMPERATURES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


def _which_methods(given: object) -> str:
    return (
        f"{type(given).__name__} has no temperature to tune: use VI, VariationalLaplace, VOGN, "
        "IVON, Vadam, Laplace or MAP"
    )


@checked
def tune_temperature(
    model: Model,
    method: Annotated[TemperedMethod[Any], Remedy(_which_methods)],
    data: Any,
    values: Sequence[float] | None = None,
    kind: Literal["balanced", "temperature"] = "balanced",
    epochs: Index | None = None,
    batch_size: Count = 128,
    seed: int = 0,
    *,
    val_data: Any = None,
    val_share: Probability = 0.2,
    folds: Annotated[int, Range(2)] | None = None,
    refit: bool = False,
    samples: Count = 32,
    schedule: ScheduleSpec = "constant",
    progress: bool = True,
) -> TemperatureSearch:
    """Pick the temperature with the lowest NLL on examples that were not trained on.

    If ``method`` has a `Balanced` temperature, its ``per`` and ``max_temperature`` are kept; values
    that the latter makes equal are tried once. The network starts from its current weights and is
    left at the mean of the posterior that is returned.

    Args:
        model: What is trained.
        method: Any that has a ``temperature``: VI, VariationalLaplace, VOGN, IVON, Vadam, MAP; also
            Laplace, which with no epochs takes one pass for each value.
        data: What `credo.fit` takes.
        values: Those of τ in `credo.Balanced`, or with ``kind="temperature"`` of η itself.
        kind: What the values are: "balanced" for τ, "temperature" for η.
        epochs: Of the first value, and of the last training if there is one.
        batch_size: That of `credo.fit`.
        seed: Of the split and the trainings.
        val_data: What the values are scored on.
        val_share: Of ``data`` that is held out where there is no ``val_data``.
        folds: Parts of a cross-validation, instead of one split.
        refit: Whether to train anew at the best value on all of ``data``; after cross-validation
            that is always done. Otherwise the posterior is that of the path, from the training part
            alone.
        samples: Draws of the weights by which is scored.
        schedule: Of the learning rates, which runs its course at every value.
        progress: Whether to show a progress bar.

    Returns:
        The rows of all values and the posterior at the best one.
    """
    epochs = method.default_epochs if epochs is None else epochs
    _refuse_misfits(method, epochs, val_data, folds)
    asked = _temperatures(method, kind, values)
    parts = held_out.splits(model, data, batch_size, val_data, val_share, folds, seed)
    tried = _distinct(asked, model, parts[0].num_data)
    further = min(epochs, max(1, epochs // (len(asked) - 1)))
    refit = refit or folds is not None
    start = Snapshot.of(model)
    tables = []
    total = len(parts) * (epochs + further * (len(tried) - 1)) + refit * epochs
    with progress_bar(progress and total > 0, total) as bar:
        report = _SearchBar(bar)
        how: dict[str, Any] = {"batch_size": batch_size, "schedule": schedule, "progress": report}
        for number, split in enumerate(parts, start=1):
            start.restore(model)
            path = TemperaturePath(model, method, split, samples, how)
            for index, temperature in enumerate(tried):
                fold = f"fold {number} of {folds} · " if folds else ""
                report.trying(f"{fold}{_in_words(temperature)}")
                run_seed = key_to_seed(seed, held_out.SPLIT_STREAM, number, index)
                path.train_on(temperature, further if index else epochs, run_seed)
            tables.append(path.rows)
        rows = average(tables, [split.num_held_out for split in parts])
        best = min(range(len(rows)), key=lambda index: rows[index].nll)
        if refit:
            start.restore(model)
            report.trying(f"{_in_words(tried[best])}, on all data")
            chosen = method.at(tried[best])
            posterior = fit(model, chosen, data, epochs=epochs, seed=seed, **how)
        else:
            posterior = path.leave_at_best()
    trained = sum(row.epochs for row in rows) + refit * epochs
    search = TemperatureSearch(
        rows=tuple(rows),
        best_index=best,
        temperature=tried[best],
        posterior=posterior,
        cost=trained / max(1, epochs),
        folds=folds,
        refitted=refit,
        doubts=tuple(_doubts(rows, best, tried[best])),
    )
    for doubt in search.doubts:
        warnings.warn(doubt, stacklevel=2)
    return search


def _refuse_misfits(
    method: TemperedMethod[Any], epochs: int, val_data: Any, folds: int | None
) -> None:
    name = type(method).__name__
    current = method.temperature
    if callable(current) and not isinstance(current, Balanced):
        raise DataError(
            f"{name}'s temperature is a schedule, which a search over constants would drop: give "
            "it a number or credo.Balanced, or compare schedules by credo.fit(val_data=…)"
        )
    if epochs == 0 and method.default_epochs:
        raise DataError(f"epochs={epochs} must be at least 1: {name} learns by training")
    if val_data is not None and folds is not None:
        raise DataError("val_data and folds are two ways to hold out examples: choose one")
    if epochs == 0 and val_data is None:
        raise DataError(
            f"with epochs=0 {name} takes the network as it is, and a part of the data that it was "
            "trained on is not held out: give val_data"
        )


def _temperatures(
    method: TemperedMethod[Any], kind: str, values: Sequence[float] | None
) -> list[float | Balanced]:
    """What the values mean for this method, from the smallest up."""
    default = TAUS if kind == "balanced" else TEMPERATURES
    chosen = list(default if values is None else values)
    name = "τ" if kind == "balanced" else "the temperature"
    chosen = sorted({positive(name, value) for value in chosen})
    if len(chosen) < 2:
        raise DataError(
            f"values has {len(chosen)} different entries: with fewer than 2 there is no choice"
        )
    if kind == "temperature":
        return list(chosen)
    current = method.temperature
    rule = current if isinstance(current, Balanced) else Balanced(tau=1.0)
    return [replace(rule, tau=tau) for tau in chosen]


def _distinct(
    asked: Sequence[float | Balanced], model: Model, num_data: int
) -> list[float | Balanced]:
    """Without the values that a cap makes equal to an earlier one."""
    segments = model.random.segments
    distinct: dict[float, float | Balanced] = {}
    for temperature in asked:
        distinct.setdefault(temperature_at(temperature, segments, num_data, 0.0), temperature)
    return list(distinct.values())


def _in_words(temperature: float | Balanced) -> str:
    if isinstance(temperature, Balanced):
        return f"τ = {temperature.tau:.3g}"
    return f"η = {temperature:.3g}"


def _doubts(rows: list[TemperatureRow], best: int, temperature: float | Balanced) -> Iterator[str]:
    first, chosen = rows[0], rows[best]
    gain = first.nll - chosen.nll
    if first.train_nll is not None and chosen.train_nll is not None:
        fall = first.train_nll - chosen.train_nll
        if gain > 0 and fall > gain / 2:
            yield (
                f"the training NLL fell from {first.train_nll:.3g} at {first.name} to "
                f"{chosen.train_nll:.3g} at {chosen.name}, though a higher temperature can only "
                "raise it: the former was not trained to the end. Train for more epochs"
            )
    capped = isinstance(temperature, Balanced) and chosen.eta >= temperature.max_temperature
    if best == len(rows) - 1 and capped:
        yield (
            f"the best temperature, η = {chosen.eta:.3g}, is the cap of credo.Balanced. To look "
            "beyond it give the method temperature=credo.Balanced(…, max_temperature=…)"
        )
    elif best == len(rows) - 1:
        yield f"the best value, {chosen.name}, is the largest that was tried: try larger ones"
    elif best == 0:
        yield f"the best value, {chosen.name}, is the smallest that was tried: try smaller ones"


class _SearchBar(Reporter):
    """One bar over the epochs of all values."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._what = bar, ""

    def trying(self, what: str) -> None:
        """A new value begins."""
        self._what = what
        self._bar.show(what)

    def epoch(self, record: Json) -> None:
        """An epoch is done."""
        self._bar.advance(f"{self._what} · nll {record['nll']:.4f}")
