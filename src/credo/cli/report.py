"""`credo report`: a page from what `credo.compare` or `credo.fit` left in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from credo.checks import import_extra
from credo.cli.options import writable
from credo.errors import DataError

COMPARISON = "comparison.json"
"""What a comparison's folder has and no other."""

PAGE = "report.html"


def report(
    folder: Annotated[
        Path, typer.Argument(help="What credo.compare or credo.fit was given as folder.")
    ],
    out: Annotated[
        Path | None, typer.Option(help=f"The page to write; by default FOLDER/{PAGE}.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
) -> None:
    """Make a page from the folder of a comparison or of training runs.

    Args:
        folder: A comparison's folder, a run's, or one that holds such runs at any depth.
        out: The file to write; by default ``report.html`` in the folder.
        title: The page's heading.
    """
    for module in ("matplotlib", "jinja2"):
        import_extra(module, extra="report", purpose="credo report")
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: name one that credo.compare or credo.fit wrote to")
    page = folder / PAGE if out is None else out
    if page.is_dir():
        raise DataError(f"{page} is a folder: name a file to write, such as {page / PAGE}")
    writable(page.parent)
    text = html_of(folder, title)
    from credo.storage import write_atomically

    write_atomically(page, text.encode())
    typer.echo(f"Open {page}")


def html_of(folder: Path, title: str | None = None) -> str:
    """The page of a folder.

    Args:
        folder: A comparison's, or one with runs of `credo.fit`.
        title: The page's heading, if not the usual one.
    """
    from credo.report import comparison_page, read_runs, run_page
    from credo.tools import load_comparison

    given = {} if title is None else {"title": title}
    if (folder / COMPARISON).is_file():
        return comparison_page(load_comparison(folder).evidence, **given)
    return run_page(read_runs(folder), **given)
