"""What an object says of itself: a line in a terminal, a small table in a notebook.

>>> class Coin(Displayed):
...     def _display(self) -> Display:
...         return Display("Coin: 3 heads of 5", "coin.toss()", [("heads", "3"), ("tails", "2")])
>>> Coin()
<Coin: 3 heads of 5; next: coin.toss()>
>>> print(Coin()._repr_html_())
<div><b>Coin: 3 heads of 5</b>
<table>
<tr><td>heads</td><td>3</td></tr>
<tr><td>tails</td><td>2</td></tr>
</table>
<p>Next: <code>coin.toss()</code></p></div>
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Display:
    """The parts of what an object says.

    Args:
        what: What it is, in one line.
        then: What to call next, in one line.
        rows: A table for a notebook, as text.
        header: Its columns' names, or none.
        notes: Sentences below it.
    """

    what: str
    then: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def line(self) -> str:
        """For a terminal."""
        return f"<{self.what}; next: {self.then}>"

    @property
    def html(self) -> str:
        """For a notebook, escaped, without colours of its own: a dark one stays dark."""
        parts = [f"<b>{escape(self.what)}</b>"]
        if self.rows:
            parts.append(html_table(self.header, self.rows))
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        parts.append(f"<p>Next: <code>{escape(self.then)}</code></p>")
        return "<div>" + "\n".join(parts) + "</div>"


class Displayed:
    """An object that shows itself by its `Display`."""

    @abstractmethod
    def _display(self) -> Display: ...

    def __repr__(self) -> str:
        return self._display().line

    def _repr_html_(self) -> str:
        return self._display().html


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Sequence[Sequence[bool]] | None = None,
) -> str:
    """An HTML table of texts, which are escaped.

    Args:
        header: The columns' names; none makes a table without a head.
        rows: The cells' texts, row by row.
        bold: Where a cell is to stand out; nowhere if it isn't given.

    Returns:
        The element, one line for each row.
    """
    lines = ["".join(f"<th>{escape(name)}</th>" for name in header)] if header else []
    for index, cells in enumerate(rows):
        marks = [False] * len(cells) if bold is None else bold[index]
        texts = (
            f"<b>{escape(cell)}</b>" if mark else escape(cell)
            for cell, mark in zip(cells, marks, strict=True)
        )
        lines.append("".join(f"<td>{text}</td>" for text in texts))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n{body}\n</table>"
