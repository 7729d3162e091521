"""The command line: its commands, each in a file of its own, and how they end.

A command imports what it calls when it is called, so that ``credo --help`` does not wait for torch.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from credo.cli.demo import demo
from credo.cli.options import Command, Group
from credo.cli.papers import claims, list_experiments, run, sweep
from credo.cli.report import report
from credo.cli.rule import rule
from credo.errors import CredoError
from credo.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "report": report,
    "rule": rule,
    "list": list_experiments,
    "run": run,
    "claims": claims,
    "sweep": sweep,
}
"""In the order of the help."""

RESUMABLE = ("run", "sweep")
"""Commands that keep what they have finished, and go on from there when they are called again."""

INTERRUPTED = 130

# Typer carries its own click or imports the installed one, by version; this is the exception from
# which either derives all complaints about what was typed.
WrongCommandLine: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    cls=Group,
    help="Bayesian neural networks: predictions that know what they do not know.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in COMMANDS.items():
    # The first paragraph of a docstring is the command's help; what follows is for developers.
    _help = inspect.cleandoc(_command.__doc__ or "").split("\n\n")[0]
    app.command(_name, cls=Command, help=_help)(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"credo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: What was typed after ``credo``; by default what this process was started with.

    Returns:
        The exit code: 0 well, 1 refused or failed, 2 mistyped, 130 interrupted.
    """
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
        advice = ": run again to resume" if arguments[0] in RESUMABLE else ""
        return _complain(f"interrupted{advice}", code=INTERRUPTED)
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
