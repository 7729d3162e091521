"""``make bench``, or ``python -m bench [SUITE ...]`` with the names in `SUITES`.

"squares" is short for all that begin with "squares-", and so on. Prints the ratios and writes
bench/results.json. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bench import (
    continual,
    ensembles,
    function_space,
    laplace,
    optimizers,
    penalties,
    processes,
    rule,
    squares,
    suites,
    sweep,
    tiny,
)
from bench.timing import Row

RESULTS = Path(__file__).parent / "results.json"
SUITES = {
    "mlp": lambda: suites.training("mlp"),
    "lenet5": lambda: suites.training("lenet5"),
    "resnet20": lambda: suites.training("resnet20"),
    "fit-mlp": lambda: suites.fitting("mlp"),
    "fit-lenet5": lambda: suites.fitting("lenet5"),
    "fit-resnet20": lambda: suites.fitting("resnet20"),
    "squares-mlp": lambda: squares.routes("mlp"),
    "squares-lenet5": lambda: squares.routes("lenet5"),
    "squares-resnet20": lambda: squares.routes("resnet20 groupnorm"),
    "variational-laplace-mlp": lambda: suites.variational_laplace("softplus mlp"),
    "variational-laplace-lenet5": lambda: suites.variational_laplace("softplus lenet5"),
    "variational-laplace-resnet20": lambda: suites.variational_laplace("softplus resnet20"),
    "laplace-fit": laplace.fitting,
    "laplace-prediction": laplace.prediction,
    "prediction": suites.prediction,
    "memory": suites.memory,
    "rule": rule.adam_step,
    "optimizers": optimizers.flat_step,
    "dense": rule.dense_step,
    "penalties-loop": penalties.in_a_loop,
    "penalties-priors": penalties.to_priors,
    "function-space-kernel": function_space.kernel,
    "function-space-ranking": function_space.ranking,
    "continual": continual.learning,
    "continual-full": continual.full_length,
    "sweep": sweep.many_runs,
    "ranks": processes.throughput,
    "tiny": tiny.fitting,
    "ensembles-tiny": lambda: ensembles.training((10, 50, 1), 3200, 3),
    "ensembles-mlp": lambda: ensembles.training((784, 100, 10), 3200, 1, 9),
    "ensembles-prediction-tiny": lambda: ensembles.prediction((10, 50, 1), 10_000),
    "ensembles-prediction-mlp": lambda: ensembles.prediction((784, 100, 10), 10_000, 9),
}


def show(rows: list[Row]) -> None:
    """One line per contestant and baseline; for memory the interval is the peak in MiB."""
    for row in rows:
        low, high = row.iqr
        print(
            f"  {row.contestant:42s} {row.ratio:6.2f}  [{low:.2f}, {high:.2f}]  vs {row.baseline}"
        )


def chosen(names: list[str]) -> list[str]:
    """The suites that are named, or whose group is; all if none is."""
    found = []
    for name in names:
        group = [suite for suite in SUITES if suite == name or suite.startswith(name + "-")]
        if not group:
            sys.exit(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
        found += group
    return found or list(SUITES)


def main(names: list[str]) -> None:
    torch.set_num_threads(2)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for name in chosen(names):
        print(f"{name}:", flush=True)
        rows = SUITES[name]()
        show(rows)
        key = (rows[0].bench, rows[0].net)
        stored = [row for row in stored if (row["bench"], row["net"]) != key]
        stored += [row.as_dict() for row in rows]
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory-child"]:
        suites.memory_child(*sys.argv[2:4])
    else:
        main(sys.argv[1:])
