"""Options that several commands share, and how their help looks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


def writable(folder: Path) -> Path:
    """Refuse a folder that can't be written to before anything is computed, and make none yet.

    Args:
        folder: Where a command is going to write; it need not exist.

    Returns:
        The folder.

    Raises:
        BadParameter: Neither it nor its nearest parent that exists can be written to.
    """
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return folder
    except OSError as error:
        raise typer.BadParameter(f"can't write to {folder}: {error.strerror or error}") from error


OutputFolder = Annotated[
    Path, typer.Option(help="Where the results are written.", callback=writable)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Command(TyperCommand):
    """A command in whose help a flag stands by itself, without ``<bool>`` beside it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments; flags take no value, so none is named.

        Args:
            ctx: The call's context, which is click's.
        """
        return _without_values_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the help of ``credo`` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options; flags take no value, so none is named.

        Args:
            ctx: The call's context, which is click's.
        """
        return _without_values_of_flags(super().get_params(ctx))


def _without_values_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters
