"""A matplotlib figure as SVG that can stand inside a page: small, with ids of its own.

What matplotlib writes is a file: it declares namespaces and sizes, styles every element of the page
it is put into, and calls its parts the same in every file. Here it becomes an element among others.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from credo.checks import import_extra
from credo.report.style import house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

WIDTH, HEIGHT = 340, 236
"""Of a panel, in pixels of the page where it is as wide as a phone leaves it."""

DOTS_PER_INCH = 72
"""Then one of matplotlib's points is one pixel of the page."""

RULES: dict[str, Any] = {
    "font.size": 11,
    "axes.labelsize": 11.5,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "credo",
}

NUMBER = re.compile(r"-?\d+\.\d{3,}")
FAMILY = re.compile(r"font-family:[^;]*;?\s*")
REFERENCE = re.compile(r"#([^)]+)")
METHOD = re.compile(r"^m\d{1,4}$")
"""A `Look`'s key; what matplotlib calls its markers has ten digits behind the letter."""


@dataclass(frozen=True)
class Mark:
    """A point of a figure that says something when it is pointed at.

    Args:
        x: From the left, in the SVG's units.
        y: From the top.
        method: The key of the method it belongs to, or nothing.
        head: What it is, such as "60 % kept".
        text: Its value.
    """

    x: float
    y: float
    method: str
    head: str
    text: str


_styled: ContextVar[bool] = ContextVar("styled", default=False)


@contextmanager
def page_style() -> Iterator[None]:
    """The look of figures on a page: text stays text, in sizes that are pixels of a phone.

    Setting matplotlib's rules takes as long as drawing a small figure, so it is done once.
    """
    if _styled.get():
        yield
        return
    matplotlib = import_extra("matplotlib", extra="report", purpose="a page with figures")
    token = _styled.set(True)
    try:
        with house_style(), matplotlib.rc_context(RULES):
            yield
    finally:
        _styled.reset(token)


def panel(
    width: float = WIDTH,
    height: float = HEIGHT,
    left: float = 50,
    right: float = 10,
    top: float = 10,
    bottom: float = 42,
) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; all in pixels, as nothing has to be arranged."""
    figures = import_extra("matplotlib.figure", extra="report", purpose="a page with figures")
    size = (width / DOTS_PER_INCH, height / DOTS_PER_INCH)
    figure: Figure = figures.Figure(figsize=size, dpi=DOTS_PER_INCH)
    box = (left / width, bottom / height, (width - left - right) / width)
    axes = figure.add_axes((*box, (height - top - bottom) / height))
    return figure, axes


def marks_at(
    axes: Axes,
    xs: ArrayLike,
    ys: ArrayLike,
    heads: Sequence[str],
    texts: Sequence[str],
    method: str = "",
) -> list[Mark]:
    """Marks at points of the axes, whose limits must be final."""
    import numpy as np

    points = np.column_stack([np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)])
    places = axes.transData.transform(points)
    height = axes.get_figure(root=True).bbox.height  # type: ignore[union-attr]
    return [
        Mark(round(float(x), 1), round(float(height - y), 1), method, head, text)
        for (x, y), head, text in zip(places, heads, texts, strict=True)
        if np.isfinite(x) and np.isfinite(y)
    ]


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element for the inside of a page.

    Parts whose ``gid`` is a method's key, "m0", "m1", …, get it as ``data-method``.

    Args:
        figure: Drawn under `page_style`.
        name: Unlike any other figure's on the page: ids begin with it.

    Returns:
        The element; it is hidden from screen readers: what surrounds it has to say what it shows.
    """
    stream = io.BytesIO()
    with page_style():
        figure.savefig(
            stream, format="svg", transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )  # fmt: skip
    root = ElementTree.fromstring(stream.getvalue())
    _strip(root, name)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _strip(root: ElementTree.Element, name: str) -> None:
    used = set()
    for element in root.iter():
        element.tag = _local(element.tag)
        element.text = element.text.strip() if element.text and element.tag != "text" else (
            element.text
        )  # fmt: skip
        element.tail = None
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            if "#" in value and (_local(key) == "href" or value.startswith("url(")):
                used |= set(REFERENCE.findall(value))
                value = REFERENCE.sub(lambda found: f"#{name}-{found.group(1)}", value)
            element.set(_local(key), _shorter(_local(key), value))
    _drop_what_a_page_has(root)
    for element in root.iter():
        own = element.attrib.pop("id", "")
        if METHOD.match(own):
            element.set("data-method", own)
        elif own in used:
            element.set("id", f"{name}-{own}")


def _drop_what_a_page_has(root: ElementTree.Element) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            empty = child.tag in ("g", "defs") and len(child) == 0
            if child.tag in ("metadata", "style") or empty:
                parent.remove(child)


def _shorter(key: str, value: str) -> str:
    if key == "style":
        return FAMILY.sub("", value).strip()
    if key in ("d", "x", "y", "points", "transform"):
        value = NUMBER.sub(lambda found: f"{float(found.group()):.1f}", value)
        return " ".join(value.split())
    return value


def _local(name: str) -> str:
    return name.rpartition("}")[2]
