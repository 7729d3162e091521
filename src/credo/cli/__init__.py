"""The command line."""

from credo.cli.main import main

__all__ = ["main"]
