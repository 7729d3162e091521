"""LeNet-5 on MNIST: MAP, VI at η = 1, VI balanced. ``CREDO_DATA=… python -m bench.mnist [FOLDER]``.

τ is chosen on 5,000 held-out training images with one seed; then every method trains on all 60,000,
three seeds. Test scores are of the predictive over 32 samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import credo
from bench.nets import lenet5
from credo.sweep import run_many

TAUS = (0.003, 0.01, 0.03, 0.1, 0.3)
SEEDS = (0, 1, 2)
EPOCHS = 10
HELD_OUT = 5_000
SCORES = ("accuracy", "nll", "ece", "seconds")


def method(trial: dict[str, Any]) -> credo.MAP | credo.VI:
    if trial["method"] == "MAP":
        return credo.MAP()
    if trial["method"] == "VI":
        return credo.VI(temperature=1.0)
    return credo.VI(temperature=credo.Balanced(trial["tau"]))


def run_one(trial: dict[str, Any], folder: Path | None) -> dict[str, float]:
    torch.manual_seed(trial["seed"])
    mnist = credo.data.load("mnist")
    (x, y), test = mnist.train, mnist.test
    if trial["held_out"]:
        x, y, test = x[:-HELD_OUT], y[:-HELD_OUT], (x[-HELD_OUT:], y[-HELD_OUT:])
    model = credo.Model(lenet5(), credo.likelihoods.Categorical())
    posterior = credo.fit(
        model, method(trial), (x, y), EPOCHS, 128, seed=trial["seed"], folder=folder, progress=False
    )
    pred = posterior.predict(test[0], samples=32)
    return {
        "accuracy": credo.metrics.accuracy(pred.probs, test[1]),
        "nll": credo.metrics.nll(pred.probs, test[1]),
        "ece": credo.metrics.ece(pred.probs, test[1]),
        "temperature": posterior.history[-1]["temperature"],
        "seconds": posterior.history[-1]["seconds"],
    }


def main(folder: str = "runs/mnist") -> None:
    search = [{"method": "balanced", "tau": t, "seed": 0, "held_out": True} for t in TAUS]
    found = run_many(run_one, search, jobs=2, folder=Path(folder))
    for outcome in found:
        print(outcome.trial["tau"], outcome.result or outcome.error)
    best = min((o for o in found if o.result), key=lambda o: o.result["nll"]).trial["tau"]  # type: ignore[index]
    print(f"best τ on held-out images: {best}")
    trials = [
        {"method": name, "tau": best, "seed": seed, "held_out": False}
        for seed in SEEDS for name in ("MAP", "VI", "balanced")
    ]  # fmt: skip
    outcomes = run_many(run_one, trials, jobs=2, folder=Path(folder))
    for name in ("MAP", "VI", "balanced"):
        rows = np.array(
            [
                [o.result[k] for k in SCORES]
                for o in outcomes
                if o.result and o.trial["method"] == name
            ]
        )
        error = rows.std(0, ddof=1) / np.sqrt(len(rows))
        cells = " ".join(
            f"{k} {m:.4f}±{e:.4f}" for k, m, e in zip(SCORES, rows.mean(0), error, strict=True)
        )
        print(f"{name:10s} {cells}")


if __name__ == "__main__":
    main(*sys.argv[1:])
