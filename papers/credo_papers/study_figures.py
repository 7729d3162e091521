"""What the figures of the experiments of Book (2020) on training share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from credo.report.style import faint_grid
from credo.types import Json


def curves(results: Sequence[Json], run: str, name: str) -> NDArray[np.float64]:
    """A run's numbers by epoch, (seeds, epochs); masked for a seed that diverged."""
    curves: list[Sequence[Any]] = [r["runs"][run][name] for r in results]
    epochs = max(map(len, curves))
    padded = [[*curve, *[np.nan] * (epochs - len(curve))] for curve in curves]
    return np.ma.masked_invalid(np.array(padded, dtype=float))


def draw_curves(
    axes: Axes, results: Sequence[Json], run: str, name: str, **look: Any
) -> None:  # fmt: skip
    """The mean over seeds by epoch, and each seed as a thin line; ``look`` goes to matplotlib."""
    by_seed = curves(results, run, name)
    epochs = np.arange(1, by_seed.shape[1] + 1)
    thin = {k: v for k, v in look.items() if k in ("color", "linestyle")}
    axes.plot(epochs, by_seed.T, linewidth=0.7, alpha=0.4, **thin)
    axes.plot(epochs, by_seed.mean(0), **look)
    axes.set_xlabel("epoch")
    faint_grid(axes)


def draw_seeds(
    axes: Axes, results: Sequence[Json], run: str, measure: str, place: float, **look: Any
) -> None:
    """A dot a seed at ``place``, and a line through their mean."""
    values = [v for r in results if (v := r["runs"][run][measure]) is not None]
    if not values:
        return
    axes.scatter(np.full(len(values), place), values, s=22, **look)
    mean = float(np.mean(values))
    axes.plot([place - 0.08, place + 0.08], [mean, mean], linewidth=1.2,
              **{k: v for k, v in look.items() if k == "color"})  # fmt: skip
