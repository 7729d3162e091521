"""Docstrings as Markdown for the API pages: examples become code, ruled tables become tables.

Docstrings are written to be read in an editor, where an example is a line that begins with ``>>>``
and a table is ruled by ``====``. Markdown knows neither, so both are rewritten while the pages are
built.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

RULE = re.compile(r"^( *)(=+)(?: +=+)+ *$")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(fence_examples(as_markdown_tables(lines)))


def fence_examples(lines: list[str]) -> list[str]:
    """Doctest blocks, which end at an empty line, inside of code fences."""
    out: list[str] = []
    inside = fenced = False
    margin = ""
    for line in lines:
        fenced ^= line.lstrip().startswith("```")
        if not inside and not fenced and line.lstrip().startswith(">>>"):
            margin = line[: len(line) - len(line.lstrip())]
            out += [margin[:-4] if len(margin) >= 4 else margin, f"{margin}```pycon"]
            inside = True
        elif inside and not line.strip():
            out.append(f"{margin}```")
            inside = False
        out.append(line)
    if inside:
        out.append(f"{margin}```")
    return out


def as_markdown_tables(lines: list[str]) -> list[str]:
    """Tables ruled by lines of ``=``: a rule, a header, a rule, rows, a rule."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        rules = [i for i in range(at, len(lines)) if RULE.match(lines[i])][:3]
        if len(rules) < 3 or rules[0] != at:
            out.append(lines[at])
            at += 1
            continue
        starts = [m.start() for m in re.finditer("=+", lines[at])]
        header = cells(lines[rules[0] + 1], starts)
        rows: list[list[str]] = []
        for line in lines[rules[1] + 1 : rules[2]]:
            row = cells(line, starts)
            if row[0] or not rows:
                rows.append(row)
            else:  # a row whose first cell is empty goes on with the one above
                rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], row, strict=True)]
        out += ["", table_row(header), table_row(["---"] * len(header)), *map(table_row, rows), ""]
        at = rules[2] + 1
    return out


def cells(line: str, starts: list[int]) -> list[str]:
    """The texts of a line, cut where the columns start."""
    return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]


def table_row(texts: list[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
