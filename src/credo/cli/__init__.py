"""The command line."""

from credo.cli.command_line import main

__all__ = ["main"]
