"""A page of evidence: one HTML file that needs nothing else, on a screen, a phone or on paper.

It carries its style, its script, its figures and its pictures, and forbids itself every other
source. Without the script it says the same; with it, figures answer to pointer and arrow keys, the
table sorts, and methods can be shown and hidden.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from credo.checks import import_extra
from credo.report import figures_of_classes, figures_of_numbers, figures_of_scores
from credo.report.contest import Contest, Section
from credo.report.evidence import Evidence, Run
from credo.report.examples import examples
from credo.report.style import Look
from credo.report.svg import page_style
from credo.report.table import last_records, table
from credo.report.words import in_short, meanings, settings
from credo.version import __version__

TITLE = "Methods compared"

SECTIONS: Sequence[Callable[[Contest], Section | None]] = (
    table,
    figures_of_scores.differences,
    figures_of_classes.calibration,
    figures_of_numbers.intervals,
    figures_of_numbers.predicted_against_true,
    figures_of_classes.selective,
    figures_of_numbers.selective,
    figures_of_scores.shifts,
    figures_of_classes.foreign,
    figures_of_numbers.foreign,
    examples,
    figures_of_scores.price,
    figures_of_scores.training,
    meanings,
    settings,
)
"""In the order of the page; those without evidence are left out."""

RUN_SECTIONS = (last_records, figures_of_scores.training, settings)

NOUNS = {
    "classification": "predictions of classes",
    "regression": "predictions of numbers",
    "dense": "predictions of a class for each pixel",
}

SHAPES = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.6-3.6h7.2v7.2h-7.2z",
    "^": "M0-4.6 4.4 3.4h-8.8z",
    "D": "M0-5 5 0 0 5-5 0z",
    "v": "M0 4.6 4.4-3.4h-8.8z",
    "P": "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "X": "M-4-2-2-4 0-2 2-4 4-2 2 0 4 2 2 4 0 2-2 4-4 2-2 0z",
    "p": "M0-4.8 4.6-1.5 2.8 3.9h-5.6L-4.6-1.5z",
}
"""Outlines of matplotlib's markers, for the legend."""


def comparison_page(evidence: Evidence, title: str = TITLE) -> str:
    """One self-contained HTML page about a comparison of methods.

    The table (sortable), paired differences, calibration, selective prediction, shift, foreign
    data, single examples, price, training, what the numbers mean, and what made them; sections for
    which the evidence holds nothing are left out.

    Args:
        evidence: What a comparison left behind.
        title: Heading, and the name of the browser's tab.

    Returns:
        The page, to be written to a file in UTF-8.

    Raises:
        DataError: The evidence has no runs, or its kind is unknown.
        MissingExtraError: matplotlib or jinja2 is not installed.

    >>> run = Run("MAP", 0, {"accuracy": 0.9, "nll": 0.3})
    >>> html = comparison_page(Evidence("classification", [run]), "Digits")
    >>> "<h1>Digits</h1>" in html, "://" in html
    (True, False)
    """
    contest = Contest(evidence)
    count, seeds = len(contest.names), len(contest.seeds)
    targets = evidence.targets
    facts = [
        f"{count} {'method' if count == 1 else 'methods'}",
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}",
        NOUNS[evidence.kind],
    ]
    if targets is not None:
        facts.append(f"{len(targets):,} test {'images' if contest.dense else 'examples'}")
    notes = [str(note) for note in evidence.about.get("notes", ())]
    return _render(contest, title, facts, in_short(contest), SECTIONS, notes)


def run_page(runs: Sequence[Run], title: str = "Training runs") -> str:
    """One self-contained HTML page about runs of `credo.fit`: last records, curves and settings.

    Args:
        runs: What `read_runs` found, each with a name of its own.
        title: Heading, and the name of the browser's tab.

    Returns:
        The page, to be written to a file in UTF-8.

    >>> history = [{"epoch": 0, "nll": 1.2}, {"epoch": 1, "nll": 0.8}]
    >>> html = run_page([Run("VI", 0, {"nll": 0.8}, history=history)])
    >>> "How did training go?" in html
    True
    """
    contest = Contest(Evidence("classification", runs))
    count = len(contest.names)
    facts = [f"{count} {'run' if count == 1 else 'runs'} of credo.fit"]
    said = [
        "These are records of training, on the training examples unless they say “validation”: "
        "they do not tell how good the predictions are on new data."
    ]
    return _render(contest, title, facts, said, RUN_SECTIONS)


def _render(
    contest: Contest,
    title: str,
    facts: Sequence[str],
    said: Sequence[str],
    sections: Sequence[Callable[[Contest], Section | None]],
    notes: Sequence[str] = (),
) -> str:
    jinja2 = import_extra("jinja2", extra="report", purpose="a page")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["trusted"] = environment.filters["safe"]
    script = _template("page.js")
    with page_style():
        made = [found for make in sections if (found := make(contest)) is not None]
    html: str = environment.get_template("page.html.j2").render(
        title=title,
        facts=facts,
        said=said,
        methods=[_method(name, look) for name, look in contest.looks.items()],
        shown={contest.looks[name].key for name in contest.finished},
        sections=made,
        notes=notes,
        style=_template("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        kind=contest.evidence.kind,
        features=[str(name) for name in contest.evidence.features],
        version=__version__,
        today=time.strftime("%Y-%m-%d"),
    )
    return html


def _template(name: str) -> str:
    return resources.files("credo.report").joinpath("templates", name).read_text(encoding="utf-8")


def _method(name: str, look: Look) -> dict[str, Any]:
    return {
        "name": name,
        "key": look.key,
        "colour": look.colour,
        "shape": SHAPES[look.marker],
        "dash": " ".join(f"{2 * length:g}" for length in look.dash) or "none",
    }
