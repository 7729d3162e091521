"""A page that shows a table and pictures, written as one string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from credo.display import html_table

STYLE = """
  :root { color-scheme: light; }
  body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2.5rem auto;
         padding: 0 1.25rem; }
  h1 { font-size: 1.7rem; margin-bottom: 0.3rem; }
  h2 { font-size: 1.15rem; margin: 2.6rem 0 0.3rem; }
  p { max-width: 46rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; margin: 1.4rem 0; font-variant-numeric: tabular-nums; }
  th, td { padding: 0.4rem 0.9rem; text-align: right; border-bottom: 1px solid #d9d9d9; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
  th { border-bottom: 2px solid #222; font-weight: 600; }
  img { max-width: 100%; height: auto; }
  footer { margin-top: 3rem; color: #767676; font-size: 0.88rem; }
"""


@dataclass(frozen=True)
class Picture:
    """An image file beside the page, with what it shows and how to read it.

    Args:
        file: Its name, relative to the page.
        title: What it shows; also the text for who can't see it.
        caption: How to read it.
    """

    file: str
    title: str
    caption: str


def page(
    title: str,
    introduction: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: Sequence[Sequence[bool]],
    pictures: Sequence[Picture],
    footer: str,
) -> str:
    """The whole HTML page, all text escaped.

    Args:
        title: Heading, and the name of the browser's tab.
        introduction: The paragraph below it.
        header: Names of the table's columns.
        rows: Its cells, row by row.
        best: Which cells are bold, in the shape of ``rows``.
        pictures: The figures below the table.
        footer: Small print at the end.

    Returns:
        The page as one string.

    >>> text = page("Demo", "Hello.", ["method"], [["a < b"]], [[True]], [], "made today")
    >>> "<td><b>a &lt; b</b></td>" in text
    True
    """
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(introduction)}</p>",
        f'<div class="wide">{html_table(header, rows, best)}</div>',
        *(_figure(picture) for picture in pictures),
        f"<footer>{escape(footer)}</footer>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _figure(picture: Picture) -> str:
    return (
        f"<h2>{escape(picture.title)}</h2>\n<p>{escape(picture.caption)}</p>\n"
        f'<img src="{escape(picture.file)}" alt="{escape(picture.title)}">'
    )
