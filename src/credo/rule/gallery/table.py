"""The table of `credo rule`: every algorithm of the gallery with the choices that make it."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from json import dumps
from pathlib import PurePosixPath

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from credo.rule.gallery.entry import Entry

MODULES = (
    "gradient_descent",
    "preconditioned_descent",
    "newton",
    "laplace",
    "online_gauss_newton",
    "rmsprop",
    "adam",
    "von",
    "newton_ensemble",
    "dropout",
    "binary_network",
    "evolution_strategies",
    "policy_search",
    "gaussian_homotopy",
    "exponential_weights",
    "linear_regression",
    "elastic_weight_consolidation",
    "kalman_filter",
    "rts_smoother",
    "hidden_markov",
    "baum_welch",
    "expectation_maximisation",
    "message_passing",
    "gaussian_mixture_model",
    "stochastic_variational_inference",
)
"""The files of the gallery, from optimisation to graphical models."""


def entries() -> list[Entry]:
    """Every row, in the order of `MODULES`.

    >>> entries()[2].algorithm
    "Newton's method"
    """
    return [import_module(f"credo.rule.gallery.{name}").ENTRY for name in MODULES]


def show(json: bool = False) -> None:
    """Print the table, or its rows as JSON."""
    rows = entries()
    if json:
        print(dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    console = Console()
    console.print("λ ← λ − ρ ∇_μ( E_q\\[ℓ(θ)] − τ H(q) )      one rule, and what it becomes\n")
    table = Table(
        Column("algorithm", ratio=4),
        Column("family × expectation × curvature × step", ratio=6),
        Column("gives up", ratio=4),
        show_lines=True,
        expand=console.width < 110,
        caption="Under each algorithm the test that holds it, in words; --json has its name.",
    )
    for row in rows:
        test = PurePosixPath(row.test).name.split("::")[-1].removeprefix("test_")
        choices = " × ".join((row.family, row.expectation, row.curvature, row.step))
        name = f"[bold]{escape(row.algorithm)}[/]\n[dim]{escape(test.replace('_', ' '))}[/]"
        table.add_row(name, escape(choices), escape(row.approximates))
    console.print(table)
