"""Active learning: which labels to ask for, and which examples to train on."""

from credo.active.acquisitions import (
    Acquisition,
    BatchBALD,
    Determinant,
    Random,
    TopScores,
    joint_outputs,
)
from credo.active.batchbald import batch_bald
from credo.active.determinant import greedy_determinant
from credo.active.history import Band, History, band, plot
from credo.active.important import ImportantBatches, most_relevant
from credo.active.loop import Oracle, learn
from credo.active.scores import bald, entropy, leverage, relevance, variance

__all__ = [
    "Acquisition",
    "Band",
    "BatchBALD",
    "Determinant",
    "History",
    "ImportantBatches",
    "Oracle",
    "Random",
    "TopScores",
    "bald",
    "band",
    "batch_bald",
    "entropy",
    "greedy_determinant",
    "joint_outputs",
    "learn",
    "leverage",
    "most_relevant",
    "plot",
    "relevance",
    "variance",
]
