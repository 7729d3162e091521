"""`credo list`, `run`, `claims` and `sweep`: what the package ``credo-papers`` offers.

It is a distribution of its own, reached by an entry point because it may be absent.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import typer

from credo.cli.options import AsJson, OutputFolder
from credo.errors import MissingExtraError

GROUP = "credo.commands"
"""The entry points that offer commands; ``credo-papers`` registers one called ``papers``."""


class PapersCommands(Protocol):
    """What ``credo-papers`` offers to the command line."""

    list_experiments: Callable[..., None]
    run: Callable[..., Any]
    claims: Callable[..., None]
    sweep: Callable[..., Any]


class Engine(StrEnum):
    """Where the trials of a sweep run."""

    local = "local"
    ray = "ray"
    dask = "dask"


class Sampler(StrEnum):
    """How a sweep chooses what to try."""

    random = "random"
    grid = "grid"
    optuna = "optuna"


class Preset(StrEnum):
    """How much an experiment computes."""

    quick = "quick"
    paper = "paper"


def papers() -> PapersCommands:
    """The commands of the package ``credo-papers``.

    Raises:
        MissingExtraError: It is not installed.
    """
    for entry in entry_points(group=GROUP, name="papers"):
        return cast(PapersCommands, entry.load())
    raise MissingExtraError(
        "the experiments and their verdicts are a package of their own: "
        "pip install credo-papers (in a checkout: pip install ./papers)"
    )


def list_experiments(
    short: Annotated[
        bool, typer.Option("--short", help="A line each: verdict, needs, duration; no claims.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List the experiments and the claims they test.

    Args:
        short: A line each (verdict, needs, duration) instead of the claims.
        json: Print the rows as JSON instead of a table.
    """
    papers().list_experiments(short=short, json=json)


def run(
    name: Annotated[str, typer.Argument(help="An experiment; `credo list` names them.")],
    preset: Annotated[
        Preset, typer.Option(help="quick: minutes, mostly; paper: the paper's scale.")
    ] = Preset.quick,
    seeds: Annotated[int, typer.Option(help="How many seeds to repeat it with.", min=1)] = 3,
    folder: OutputFolder = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Processes to use at once.", min=1)] = 2,
) -> None:
    """Run one experiment and judge its claims.

    Args:
        name: The experiment's id.
        preset: "quick", or "paper" for the paper's scale.
        seeds: How many seeds to repeat it with.
        folder: Where the runs are kept.
        jobs: Processes to use at once.
    """
    papers().run(name=name, preset=preset.value, seeds=seeds, folder=folder, jobs=jobs)


def claims(
    json: AsJson = False,
    folder: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("runs"),
) -> None:
    """Show every claim of the papers with its verdict.

    Args:
        json: Print the rows as JSON instead of a table.
        folder: Where local runs are; their verdicts win over the committed ones.
    """
    papers().claims(json=json, folder=folder)


def sweep(
    name: Annotated[str, typer.Argument(help="A study, such as vi-digits.")],
    trials: Annotated[int, typer.Option(help="How many settings to try.", min=1)] = 20,
    engine: Annotated[
        Engine, typer.Option(help="Processes of this machine, or a Ray or Dask cluster.")
    ] = Engine.local,
    jobs: Annotated[int, typer.Option(help="Trials to run at once.", min=1)] = 2,
    sampler: Annotated[
        Sampler, typer.Option(help="At random, on a grid, or where optuna expects the best.")
    ] = Sampler.random,
    folder: OutputFolder = Path("runs"),
    seed: Annotated[int, typer.Option(help="Same seed, same trials.", min=0)] = 0,
    space: Annotated[
        Path | None, typer.Option(help='JSON such as {"lr": {"loguniform": [1e-4, 1e-2]}}.')
    ] = None,
) -> None:
    """Try many settings and rank them; finished trials are kept, failed ones are tried again.

    Args:
        name: The study's name.
        trials: How many settings to try.
        engine: Processes of this machine, or a Ray or Dask cluster.
        jobs: Trials to run at once.
        sampler: At random, on a grid, or where optuna expects the best.
        folder: Where the trials are kept.
        seed: Same seed, same trials.
        space: A JSON file whose parameters take the place of the study's own.
    """
    papers().sweep(
        name, trials, engine.value, jobs, sampler.value, folder=folder, seed=seed, space=space
    )
