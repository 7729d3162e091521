"""Many independent runs: on the cores of this machine, on Ray or on Dask."""

from credo.sweep.attempt import Outcome
from credo.sweep.many import run_many
from credo.sweep.space import Choice, LogUniform, Space, TruncatedNormal, Uniform
from credo.sweep.study import Findings, Study, run_study

__all__ = [
    "Choice",
    "Findings",
    "LogUniform",
    "Outcome",
    "Space",
    "Study",
    "TruncatedNormal",
    "Uniform",
    "run_many",
    "run_study",
]
