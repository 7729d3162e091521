"""How the commands about the papers reach them: by an entry point, because they may be absent."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from credo.errors import MissingExtraError

GROUP = "credo.commands"
"""The entry points that offer commands; ``credo-papers`` registers one called ``papers``."""


class PapersCommands(Protocol):
    """What ``credo-papers`` offers to the command line."""

    list_experiments: Callable[..., None]
    run: Callable[..., Any]
    claims: Callable[..., None]
    sweep: Callable[..., Any]


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
