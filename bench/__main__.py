"""``make bench``, or ``python -m bench [SUITE ...]`` with the names in `SUITES`.

Prints the ratios and writes bench/results.json. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bench import rule, squares, suites
from bench.timing import Row

RESULTS = Path(__file__).parent / "results.json"
SUITES = {
    "mlp": lambda: suites.training("mlp"),
    "lenet5": lambda: suites.training("lenet5"),
    "resnet20": lambda: suites.training("resnet20"),
    "squares-mlp": lambda: squares.routes("mlp"),
    "squares-lenet5": lambda: squares.routes("lenet5"),
    "squares-resnet20": lambda: squares.routes("resnet20 groupnorm"),
    "prediction": suites.prediction,
    "memory": suites.memory,
    "rule": rule.adam_step,
    "dense": rule.dense_step,
}


def show(rows: list[Row]) -> None:
    """One line per contestant and baseline; for memory the interval is the peak in MiB."""
    for row in rows:
        low, high = row.iqr
        print(
            f"  {row.contestant:28s} {row.ratio:6.2f}  [{low:.2f}, {high:.2f}]  vs {row.baseline}"
        )


def main(names: list[str]) -> None:
    torch.set_num_threads(2)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for name in names or list(SUITES):
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
