"""Many independent runs on the cores of this machine."""

from credo.sweep.many import Outcome, run_many

__all__ = ["Outcome", "run_many"]
