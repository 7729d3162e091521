"""How `credo.VI()`'s defaults were chosen: ``CREDO_DATA=… python -m bench.defaults [FOLDER]``.

One setting is changed at a time, on the embedded digits, 10,000 MNIST images (LeNet-5) and the
three UCI tables; what is printed is the test NLL (mean over seeds, lower is better) and its mean
rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import credo
from bench.nets import lenet5
from credo.sweep import run_many
from credo_papers.uci_tables import uci

TASKS = ("digits", "mnist", "yacht", "concrete", "wine_red")
SEEDS = (0, 1)
CENTRE: dict[str, Any] = {
    "prior": "kaiming", "init_scale": 0.05, "ratio": 10.0, "lr": 1e-3, "temperature": 1.0,
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {},
    {"map": True},
    {"map": True, "lr": 3e-3},
    {"prior": 1.0},
    {"prior": "fan_in"},
    {"prior": 0.3},
    {"init_scale": 0.01},
    {"init_scale": 0.2},
    {"ratio": 1.0},
    {"ratio": 30.0},
    {"lr": 3e-3},
    {"lr": 3e-3, "ratio": 3.0},
    {"temperature": 0.3},
    {"temperature": 0.1},
    {"temperature": 0.03},
    {"temperature": 0.1, "lr": 3e-3},
    {"temperature": 0.1, "prior": 1.0},
    {"temperature": 0.1, "ratio": 1.0},
    {"temperature": 0.1, "prior": "fan_in"},
    {"temperature": 0.03, "lr": 3e-3},
    {"temperature": 0.03, "lr": 3e-3, "ratio": 3.0},
    {"temperature": 0.03, "lr": 3e-3, "ratio": 1.0},
    {"temperature": 0.01, "lr": 3e-3},
    {"temperature": 0.003, "lr": 3e-3},
    {"tau": 0.1, "lr": 3e-3},
    {"tau": 0.03, "lr": 3e-3},
]
"""``tau`` stands for the temperature `credo.Balanced` (tau)."""


def table_task(name: str, seed: int) -> tuple[nn.Module, Any, Any, Any]:
    x, y, x_test, y_test = uci(name, split=seed)
    x, x_test = credo.data.standardise(x, x_test)
    y, y_test = credo.data.standardise(y, y_test)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    return net, credo.likelihoods.Gaussian(scale=0.5, learned=True), (x, y), (x_test, y_test)


def image_task(name: str) -> tuple[nn.Module, Any, Any, Any]:
    likelihood = credo.likelihoods.Categorical()
    if name == "digits":
        data = credo.data.digits()
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(),
            nn.Linear(100, 10),
        )  # fmt: skip
        return net, likelihood, data.train, data.test
    mnist = credo.data.load("mnist")
    train, test = mnist.train, mnist.test
    return lenet5(), likelihood, (train[0][:10_000], train[1][:10_000]), test


BUDGET = {"digits": (60, 32), "mnist": (6, 128), "yacht": (200, 32), "concrete": (100, 32),
          "wine_red": (50, 32)}  # fmt: skip


def run_one(trial: dict[str, Any], folder: Path | None) -> dict[str, float]:
    settings = {**CENTRE, **trial["change"]}
    torch.manual_seed(trial["seed"])
    task = trial["task"]
    net, likelihood, train, test = (
        image_task(task) if task in ("digits", "mnist") else table_task(task, trial["seed"])
    )
    prior: Any = settings["prior"]
    if isinstance(prior, str):
        prior = getattr(credo.priors.Normal, prior)()
    else:
        prior = credo.priors.Normal(prior)
    model = credo.Model(net, likelihood, prior)
    method: Any = credo.MAP(lr=settings["lr"])
    if not settings.get("map"):
        method = credo.VI(
            lr=settings["lr"], scale_lr=settings["ratio"] * settings["lr"],
            init_scale=settings["init_scale"],
            temperature=credo.Balanced(settings["tau"]) if "tau" in settings
            else settings["temperature"],
        )  # fmt: skip
    epochs, batch_size = BUDGET[task]
    posterior = credo.fit(
        model, method, train, epochs, batch_size, seed=trial["seed"], progress=False
    )
    pred = posterior.predict(test[0], samples=32)
    scores = {"nll": -float(pred.log_prob(test[1]).mean())}
    if task in ("digits", "mnist"):
        scores |= {
            "accuracy": credo.metrics.accuracy(pred.probs, test[1]),
            "ece": credo.metrics.ece(pred.probs, test[1]),
        }
    return scores


def main(folder: str = "runs/defaults") -> None:
    trials = [
        {"change": change, "task": task, "seed": seed}
        for change in CHANGES for task in TASKS for seed in SEEDS
    ]  # fmt: skip
    outcomes = run_many(run_one, trials, jobs=2, folder=Path(folder))
    table = np.full((len(CHANGES), len(TASKS)), np.nan)
    extra: dict[str, str] = {}
    for row, change in enumerate(CHANGES):
        for column, task in enumerate(TASKS):
            found = [
                o.result for o in outcomes
                if o.result and o.trial["change"] == change and o.trial["task"] == task
            ]  # fmt: skip
            if found:
                table[row, column] = np.mean([r["nll"] for r in found])
            if found and task == "mnist":
                extra[str(change)] = " ".join(
                    f"{k} {np.mean([r[k] for r in found]):.4f}" for k in ("accuracy", "ece")
                )
    ranks = table.argsort(0).argsort(0).mean(1)
    print(f"{'change':44s}" + "".join(f"{task:>10s}" for task in TASKS) + "      rank  MNIST")
    for row in np.argsort(ranks):
        numbers = "".join(f"{value:10.4f}" for value in table[row])
        print(f"{CHANGES[row]!s:44s}{numbers}{ranks[row]:10.1f}  {extra.get(str(CHANGES[row]))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
