"""Independent calls of one function, several at a time: what sweeps and comparisons run on."""

from credo.trials.attempt import Outcome
from credo.trials.many import run_many

__all__ = ["Outcome", "run_many"]
