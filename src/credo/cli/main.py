"""The command line. Each command is one call into a module, imported only when it is called."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from credo.cli.papers import papers
from credo.errors import CredoError
from credo.version import __version__

app = typer.Typer(
    help="Bayesian neural networks: predictions that know what they do not know.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer carries its own click or imports the installed one, by version; this is the exception from
# which either derives all complaints about what was typed.
WrongCommandLine: type[Exception] = typer.BadParameter.__mro__[2]

INTERRUPTED = 130


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


def _writable(folder: Path) -> Path:
    """Refuse a folder that can't be written to before anything is computed, and make none yet."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return folder
    except OSError as error:
        raise typer.BadParameter(f"can't write to {folder}: {error.strerror or error}") from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"credo {__version__}")
        raise typer.Exit


OutputFolder = Annotated[
    Path, typer.Option(help="Where the results are written.", callback=_writable)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: OutputFolder = Path("credo-demo"),
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.", min=1)] = 60,
) -> None:
    """Compare several methods on handwritten digits; writes figures and a page to look at."""
    from credo.cli.demo import run as run_demo

    run_demo(folder, seed, epochs)


@app.command("list")
def list_experiments(json: AsJson = False) -> None:
    """List the experiments and the claims they test."""
    commands = papers()

    commands.list_experiments(json=json)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment; `credo list` names them.")],
    preset: Annotated[
        Preset, typer.Option(help="quick: a minute or so; paper: the paper's scale.")
    ] = Preset.quick,
    seeds: Annotated[int, typer.Option(help="How many seeds to repeat it with.", min=1)] = 3,
    folder: OutputFolder = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Processes to use at once.", min=1)] = 2,
) -> None:
    """Run one experiment and judge its claims."""
    commands = papers()

    commands.run(name=name, preset=preset.value, seeds=seeds, folder=folder, jobs=jobs)


@app.command()
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
    """Try many settings and rank them; finished trials are kept, failed ones are tried again."""
    papers().sweep(
        name, trials, engine.value, jobs, sampler.value, folder=folder, seed=seed, space=space
    )


@app.command()
def claims(
    json: AsJson = False,
    folder: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("runs"),
) -> None:
    """Show every claim of the papers with its verdict."""
    commands = papers()

    commands.claims(json=json, folder=folder)


@app.command()
def rule(json: AsJson = False) -> None:
    """Show the learning rule: which choices make which algorithm, and the test that holds it."""
    from credo.rule.gallery import table

    table.show(json=json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code: 0 well, 1 refused or failed, 2 mistyped."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with _tidy_warnings():
            code = app(arguments, prog_name="credo", standalone_mode=False)
    except WrongCommandLine as error:
        return _complain(_without_full_stop(error), _help_hint(error), code=2)
    except CredoError as error:
        return _complain(str(error), *getattr(error, "__notes__", ()), code=1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader left, as `credo list | head` does; what Python flushes on exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    # newer versions of typer turn Ctrl-C into this code themselves, and say nothing
    if code == INTERRUPTED:
        return _complain("interrupted", code=INTERRUPTED)
    return code if isinstance(code, int) else 0


def _complain(*parts: str, code: int) -> int:
    message = Text.assemble(("credo: ", "bold red"), " ".join(part for part in parts if part))
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)
    return code


def _without_full_stop(error: Any) -> str:
    text: str = error.format_message()
    return text.removesuffix(".")


def _help_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"(see {context.command_path} --help)" if context is not None else ""


@contextmanager
def _tidy_warnings() -> Iterator[None]:
    """Warnings as one line each, without the source code around them."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = Text.assemble(("warning: ", "bold yellow"), str(message))
        Console(stderr=True, highlight=False).print(text, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
