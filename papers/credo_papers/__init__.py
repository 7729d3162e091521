"""The papers' claims as experiments, one file each, and the ledger of what became of them.

`credo run NAME` tests a claim and writes ``verdict.json`` into the run's folder. The files in
``ledger/`` are such verdicts, copied there unchanged as ``<id>.json`` from runs of our own.

The names are imported when first used: the workers of a sweep need none of the other experiments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credo_papers.commands import claims as claims
    from credo_papers.commands import list_experiments as list_experiments
    from credo_papers.commands import run as run
    from credo_papers.experiment import Experiment as Experiment
    from credo_papers.experiment import Settings as Settings
    from credo_papers.experiment import Verdict as Verdict
    from credo_papers.registry import EXPERIMENTS as EXPERIMENTS
    from credo_papers.registry import find as find
    from credo_papers.sweep_command import sweep as sweep

_HOMES = {
    "EXPERIMENTS": "registry",
    "Experiment": "experiment",
    "Settings": "experiment",
    "Verdict": "experiment",
    "claims": "commands",
    "find": "registry",
    "list_experiments": "commands",
    "run": "commands",
    "sweep": "sweep_command",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'credo_papers' has no attribute {name!r}")
    return getattr(import_module(f"credo_papers.{_HOMES[name]}"), name)
