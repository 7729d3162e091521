"""A distilled network beside the ensemble it was distilled from and beside one member.

    python -m bench.distil digits 3
    CREDO_DATA=… python -m bench.distil fashion-mnist 3

Ensembles of five MLPs; ``credo.tools.distil`` at its defaults but for what the options say, on the
training inputs without their labels. Printed for each seed and on average: test NLL, and the AUROC
of telling foreign images (photographs for the digits, MNIST for Fashion-MNIST) from test images by
the entropy and by the mutual information; time of a prediction relative to the ensemble's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import credo
from credo.metrics import accuracy, auroc, nll


def data(name: str) -> tuple[Any, Any, torch.Tensor, int, int]:
    """Training set, test set, foreign images, hidden units, epochs."""
    if name == "digits":
        digits = credo.data.digits()
        return digits.train, digits.test, digits.ood, 64, 120
    clothes, foreign = credo.data.load("fashion-mnist"), credo.data.load("mnist")
    train, test = (
        [t[:n] for t in part] for part, n in ((clothes.train, 10_000), (clothes.test, 5000))
    )
    return train, test, foreign.test[0][:5000], 100, 15


def scores(pred: Any, foreign: Any, y: torch.Tensor) -> dict[str, float]:
    found = {"nll": nll(pred.probs, y), "accuracy": accuracy(pred.probs, y)}
    for name in ("entropy", "mutual_information"):
        inside, outside = getattr(pred, name), getattr(foreign, name)
        found[f"auroc_{name}"] = auroc(inside, outside)
    return found


def seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def one(name: str, seed: int, **options: Any) -> dict[str, dict[str, float]]:
    train, test, foreign, hidden, epochs = data(name)
    torch.manual_seed(seed)
    size = train[0][0].numel()
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    model = credo.Model(net, credo.likelihoods.Categorical())
    teacher = credo.fit(
        model, credo.Ensemble(credo.MAP(), members=5), tuple(train), epochs=epochs, seed=seed,
        progress=False,
    )  # fmt: skip
    student = credo.tools.distil(teacher, train[0], seed=seed, progress=False, **options)
    x, y = test
    kinds = {"ensemble": teacher, "one member": teacher.members[0], "distilled": student}
    table = {k: scores(p.predict(x), p.predict(foreign), y) for k, p in kinds.items()}
    ratios = [
        seconds(lambda: student.predict(x)) / seconds(lambda: teacher.predict(x)) for _ in range(7)
    ]
    table["distilled"]["time of the ensemble's"] = float(np.median(ratios))
    there, here = teacher.predict(foreign), student.predict(foreign)
    inside = teacher.predict(x).mutual_information, student.predict(x).mutual_information
    table["distilled"]["information, test"] = float(inside[1].mean() / inside[0].mean())
    table["distilled"]["information, foreign"] = float(
        here.mutual_information.mean() / there.mutual_information.mean()
    )
    return table


def main(name: str = "digits", seeds: str = "3", *settings: str) -> None:
    options = {key: float(value) for key, value in (s.split("=") for s in settings)}
    if "epochs" in options:
        options["epochs"] = int(options["epochs"])
    runs = []
    for seed in range(int(seeds)):
        runs.append(one(name, seed, **options))
        print(seed, {k: {m: round(v, 4) for m, v in row.items()} for k, row in runs[-1].items()},
              flush=True)  # fmt: skip
    for kind in runs[0]:
        for metric in runs[0][kind]:
            values = np.array([run[kind][metric] for run in runs])
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            print(f"{name} {kind}: {metric} {values.mean():.4f} ± {error:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
