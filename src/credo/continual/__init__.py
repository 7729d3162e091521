"""Learning one task after the other without forgetting."""

from credo.continual.baselines import Joint, Naive, Replay
from credo.continual.ewc import EWC, KroneckerLaplace, OnlineEWC
from credo.continual.fromp import FROMP
from credo.continual.heads import MaskedHead, MultiHead
from credo.continual.learner import Learner, PenalisedLearner, Training
from credo.continual.natural_vcl import NaturalVCL
from credo.continual.penalised import Penalised, Regulariser
from credo.continual.report import Report, run
from credo.continual.si import SI
from credo.continual.streams import permuted, rotated, sequence, split
from credo.continual.tasks import Stream, Task
from credo.continual.vcl import VCL

__all__ = [
    "EWC",
    "FROMP",
    "SI",
    "VCL",
    "Joint",
    "KroneckerLaplace",
    "Learner",
    "MaskedHead",
    "MultiHead",
    "Naive",
    "NaturalVCL",
    "OnlineEWC",
    "Penalised",
    "PenalisedLearner",
    "Regulariser",
    "Replay",
    "Report",
    "Stream",
    "Task",
    "Training",
    "permuted",
    "rotated",
    "run",
    "sequence",
    "split",
]
