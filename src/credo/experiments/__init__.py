"""The papers' claims as experiments, one file each, and the ledger of what became of them.

`credo run NAME` tests a claim and writes ``verdict.json`` into the run's folder. The files in
``ledger/`` are such verdicts, copied there unchanged as ``<id>.json`` from runs of our own.
"""

from credo.experiments.commands import claims, list_experiments, run
from credo.experiments.experiment import Experiment, Settings, Verdict
from credo.experiments.registry import EXPERIMENTS, find

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Settings",
    "Verdict",
    "claims",
    "find",
    "list_experiments",
    "run",
]
