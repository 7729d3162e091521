"""Learning one task after the other without forgetting."""

from credo.continual.baselines import Joint, Naive, Replay
from credo.continual.ewc import EWC, KroneckerLaplace, OnlineEWC
from credo.continual.fromp import FROMP
from credo.continual.heads import MultiHead
from credo.continual.learner import Learner, RegularisedLearner, Training
from credo.continual.natural_vcl import NaturalVCL
from credo.continual.regularised import RegularisedMAP, Regulariser
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
    "MultiHead",
    "Naive",
    "NaturalVCL",
    "OnlineEWC",
    "RegularisedLearner",
    "RegularisedMAP",
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
