"""One look for all figures: few lines, readable sizes, colours that colour-blind readers can tell.

The colours are those of Okabe and Ito (2008), "Color universal design". Figures are made without
pyplot, so nothing here needs a display or changes matplotlib's global state. It is an extra,
imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from credo.checks import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#222222"
GREY, PALE = "#767676", "#D9D9D9"

COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""The order in which series take their colours."""

DEEP_ORANGE, DEEP_SKY = "#B07700", "#2E8FCB"
LINE_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, DEEP_ORANGE, BLACK, DEEP_SKY)
"""For lines and dots on white: the two pale colours of `COLOURS` darker, so that each has a
contrast of at least 3:1 with the paper."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5))

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
    matplotlib = import_extra("matplotlib", extra="plots", purpose="drawing")
    rules: dict[Any, Any] = {**matplotlib.rcParamsDefault, **RULES, "backend": "agg"}
    context: AbstractContextManager[None] = matplotlib.rc_context(rules)
    return context


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, whose parts arrange themselves without overlap."""
    figures = import_extra("matplotlib.figure", extra="plots", purpose="drawing")
    figure: Figure = figures.Figure(figsize=(width, height), layout="constrained")
    return figure


def coloured(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name with its colour.

    >>> coloured(["MAP", "VI"])
    [('MAP', '#0072B2'), ('VI', '#D55E00')]
    """
    return list(zip(names, cycle(COLOURS), strict=False))


@dataclass(frozen=True)
class Look:
    """How a method's lines and dots look: never by colour alone.

    Args:
        colour: Of lines and dots.
        marker: Matplotlib's name of the dots' shape.
        dash: Lengths of strokes and gaps in line widths; none is a whole line.
        key: What its parts are called in an SVG, where a page shows and hides them; may be empty.
    """

    colour: str
    marker: str
    dash: tuple[float, ...] = ()
    key: str = ""

    @property
    def linestyle(self) -> Any:
        """As matplotlib wants it."""
        return (0, self.dash) if self.dash else "solid"


def looks(names: Iterable[str], keyed: bool = False) -> dict[str, Look]:
    """Each name with its look: no two are alike among the first 56.

    Args:
        names: Of the methods, in their order.
        keyed: Whether the parts are to be told apart in an SVG.

    >>> looks(["MAP", "VI"])["VI"].colour
    '#D55E00'
    """
    return {
        name: Look(
            LINE_COLOURS[index % len(LINE_COLOURS)],
            MARKERS[index % len(MARKERS)],
            DASHES[index // len(LINE_COLOURS) % len(DASHES)],
            f"m{index}" if keyed else "",
        )
        for index, name in enumerate(names)
    }


def faint_grid(axes: Axes) -> None:
    """Thin horizontal lines to read values off."""
    axes.grid(axis="y", color=PALE, linewidth=0.6)


def heat_map(
    axes: Axes,
    values: ArrayLike,
    xs: Sequence[float],
    ys: Sequence[float],
    form: str = ".2f",
    limits: tuple[float, float] | None = None,
) -> None:
    """A coloured cell with its number for each x and y, evenly spaced whatever their values.

    ``values`` is (len(ys), len(xs)), the first row at the bottom; cells that are not numbers stay
    grey. `cells` says where curves through the same axes go.
    """
    grid = np.ma.masked_invalid(np.asarray(values, dtype=float))
    axes.set_facecolor(PALE)
    low, high = limits if limits else (float(grid.min()), float(grid.max()))
    axes.imshow(grid, origin="lower", aspect="auto", cmap="cividis", vmin=low, vmax=high)
    for (row, column), value in np.ndenumerate(grid):
        if not np.ma.is_masked(value):
            bright = value > low + 0.6 * (high - low)
            axes.text(column, row, f"{value:{form}}", ha="center", va="center", fontsize=8,
                      color=BLACK if bright else "white")  # fmt: skip
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.tick_params(length=0)


def cells(marks: Sequence[float], places: ArrayLike, log: bool = False) -> Any:
    """Where on the axis of a `heat_map` with these marks numbers are, NaN outside its cells.

    >>> cells([0.01, 0.1, 1.0], [0.1, 0.3162278, 9.0], log=True).round(3).tolist()
    [1.0, 1.5, nan]
    """
    change = np.log if log else np.asarray
    at, knots = change(np.asarray(places, dtype=float)), change(np.asarray(marks, dtype=float))
    indices = np.arange(len(knots), dtype=float)
    # Half a cell at each end, as wide as the neighbouring step.
    ends = (1.5 * knots[0] - 0.5 * knots[1], 1.5 * knots[-1] - 0.5 * knots[-2])
    knots = np.concatenate([ends[:1], knots, ends[1:]])
    indices = np.concatenate([[-0.5], indices, [len(marks) - 0.5]])
    return np.interp(at, knots, indices, left=np.nan, right=np.nan)


def save(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write the figure, in the format that the file's name says, making folders as needed.

    Args:
        figure: What one of the functions of `credo.report` drew.
        path: Where to; its suffix is the format.
        dpi: Dots per inch.

    Returns:
        The path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure.savefig(path, dpi=dpi)
    return path
