"""The errors Credo raises by name: each says what was wrong, what was given and what to do."""

from __future__ import annotations


class CredoError(Exception):
    """Anything Credo refuses on purpose."""


class DataError(CredoError, ValueError):
    """The data cannot be what the user meant: empty, misshapen, out of range, or not finite."""


class FileFormatError(DataError):
    """A file is truncated, oversized, or its header does not tell the truth."""


class BindingError(CredoError, RuntimeError):
    """A network's parameters no longer live in the flat vector that Credo bound them to."""


class NonFiniteError(CredoError, ArithmeticError):
    """Training produced an infinite or undefined number; the message names step and segment."""


class CheckpointError(CredoError, RuntimeError):
    """A run folder or checkpoint cannot be continued: damaged, or from another configuration."""


class UnsupportedError(CredoError, NotImplementedError):
    """Two choices that do not fit together; the message says why and what fits."""


class ConvergenceError(CredoError, RuntimeError):
    """An iteration did not come to rest; the message says how far it got and what may help."""


class MissingExtraError(CredoError, ImportError):
    """A package that only some features need is not installed; the message says which."""


class RankError(CredoError, RuntimeError):
    """The ranks of a run don't do the same thing, or one of them is gone; the message names it."""
