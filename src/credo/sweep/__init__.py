"""Many independent runs: on the cores of this machine, on Ray or on Dask."""

from credo.sweep.space import Choice, LogUniform, Space, TruncatedNormal, Uniform
from credo.sweep.study import Findings, Study, run_study
from credo.trials import Outcome, run_many

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
