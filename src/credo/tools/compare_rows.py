"""Rows of a table as a list of dictionaries, and the ways out of it: text, CSV, LaTeX, HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from credo.display import html_table
from credo.storage import write_atomically
from credo.types import Json

WIDTH = 80


class Rows(list[Json]):
    """A list of dictionaries that prints as a table, as many columns as fit 80 characters.

    Args:
        iterable: The dictionaries.

    >>> print(Rows([{"method": "MAP", "nll": 0.25}, {"method": "VI", "nll": 0.125}]))
    method    nll
    MAP      0.25
    VI      0.125
    """

    @property
    def columns(self) -> list[str]:
        """Every name that any row has; errors last."""
        names = list(dict.fromkeys(name for row in self for name in row if name != "error"))
        return [*names, "error"] if any(row.get("error") for row in self) else names

    def to_csv(self, path: str | Path | None = None) -> str:
        """As comma-separated values, unrounded; what a row has not is empty.

        Args:
            path: A file to write, too.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({k: _plain(v) for k, v in row.items()} for row in self)
        return _written(text.getvalue(), path)

    def __str__(self) -> str:
        return text_table(
            self.columns, [[_short(row.get(c)) for c in self.columns] for row in self]
        )

    def _repr_html_(self) -> str:
        return html_table(
            self.columns, [[_short(row.get(c)) for c in self.columns] for row in self]
        )


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Columns side by side, the first to the left and the others to the right.

    Columns for which there is no room are left out, from the end.

    Args:
        header: The columns' names.
        rows: The cells' texts.
        width: Characters of a line.
    """
    sizes = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    used = 1
    while used < len(sizes) and sum(sizes[: used + 1]) + 2 * used <= width:
        used += 1
    lines = [
        "  ".join(
            cell.ljust(size) if place == 0 else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(cells[:used], sizes, strict=False))
        ).rstrip()
        for cells in (header, *rows)
    ]
    return "\n".join(line[:width] for line in lines)


def latex_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], path: str | Path | None = None
) -> str:
    """A tabular environment with booktabs' lines; cells are LaTeX already.

    Args:
        header: The columns' names, as plain text.
        rows: The cells.
        path: A file to write, too.
    """
    lines = [
        r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}",
        r"\toprule",
        " & ".join(latex(name) for name in header) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return _written("\n".join(lines) + "\n", path)


def latex(text: str) -> str:
    r"""Plain text with what LaTeX would take for commands made harmless.

    >>> latex("50 % of a_b")
    '50 \\% of a\\_b'

    Args:
        text: As it is to be read.
    """
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    found = {**special, **{c: f"\\{c}" for c in "&%$#_{}"}, "±": r"$\pm$", "η": r"$\eta$"}
    return "".join(found.get(c, c) for c in text)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_atomically(Path(path), text.encode())
    return text


def _plain(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def _short(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
