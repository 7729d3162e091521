"""One look for all figures: few lines, readable sizes, colours that colour-blind readers can tell.

The colours are those of Okabe and Ito (2008), "Color universal design". Figures are made without
pyplot, so nothing here needs a display or changes matplotlib's global state.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#222222"
GREY, PALE = "#767676", "#D9D9D9"

COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""The order in which series take their colours."""

RULES: dict[str, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": BLACK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def house_style() -> AbstractContextManager[None]:
    """Matplotlib's defaults with `RULES` on top, whatever the user's own settings are."""
    rules: dict[Any, Any] = {**matplotlib.rcParamsDefault, **RULES, "backend": "agg"}
    return matplotlib.rc_context(rules)


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, whose parts arrange themselves without overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def coloured(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name with its colour.

    >>> coloured(["MAP", "VI"])
    [('MAP', '#0072B2'), ('VI', '#D55E00')]
    """
    return list(zip(names, cycle(COLOURS), strict=False))


def faint_grid(axes: Axes) -> None:
    """Thin horizontal lines to read values off."""
    axes.grid(axis="y", color=PALE, linewidth=0.6)


def save(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write the figure, in the format that the file's name says, making folders as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure.savefig(path, dpi=dpi)
    return path
