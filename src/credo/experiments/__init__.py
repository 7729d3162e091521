"""The papers' claims as experiments, one file each, and the ledger of what became of them.

`credo run NAME` tests a claim and writes ``verdict.json`` into the run's folder. The files in
``ledger/`` are such verdicts, copied there unchanged as ``<id>.json`` from runs of our own.

The names are imported when first used: the workers of a sweep need none of the other experiments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credo.experiments.commands import claims as claims
    from credo.experiments.commands import list_experiments as list_experiments
    from credo.experiments.commands import run as run
    from credo.experiments.experiment import Experiment as Experiment
    from credo.experiments.experiment import Settings as Settings
    from credo.experiments.experiment import Verdict as Verdict
    from credo.experiments.registry import EXPERIMENTS as EXPERIMENTS
    from credo.experiments.registry import find as find

_HOMES = {
    "EXPERIMENTS": "registry",
    "Experiment": "experiment",
    "Settings": "experiment",
    "Verdict": "experiment",
    "claims": "commands",
    "find": "registry",
    "list_experiments": "commands",
    "run": "commands",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'credo.experiments' has no attribute {name!r}")
    return getattr(import_module(f"credo.experiments.{_HOMES[name]}"), name)
