"""Do the optimizers train at their defaults? ``CREDO_DATA=… python -m bench.networks PART FOLDER``.

Every optimizer at all its defaults, ``NAME(net, num_data=n)`` in a plain loop and ``NAME()`` in
`credo.fit`, against Adam at 1e-3, with a cosine to zero. Parts:

protocol  LeNet-5, 20,000 CIFAR-10 images, batch 64, 8 epochs; also SGD, MAP, VI, ivon-opt
short     the same with 6,000 images and 6 epochs (564 steps)
networks  MLP, LeNet-5, ResNet-20 (batch norm, group norm), a transformer, an LSTM
lengths   300 to 30,000 steps of the MLP and LeNet-5
rates     a tenth and three times the default rate
tables    yacht, concrete and red wine (50 hidden units), through `credo.fit`

Runs are kept in FOLDER, so that a stopped one goes on. Scores are on the sets' own test images:
settings were chosen on images 55,000 to 60,000 of the training sets and on other splits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.sweep import run_many
from credo_papers.networks import build
from credo_papers.uci_tables import uci

NATURAL = ("IVON", "VOGN", "Vadam", "EVON")
IMAGES: dict[str, tuple[str, str, int, int, int]] = {
    # name: network, data set, images, epochs, batch
    "protocol": ("LeNet-5", "cifar10", 20_000, 8, 64),
    "short": ("LeNet-5", "cifar10", 6_000, 6, 64),
    "MLP": ("MLP", "fashion-mnist", 10_000, 6, 64),
    "LeNet-5": ("LeNet-5", "mnist", 10_000, 6, 64),
    "ResNet-20": ("ResNet-20", "cifar10", 8_000, 2, 16),
    "ResNet-20 GN": ("ResNet-20 GN", "cifar10", 8_000, 2, 16),
    "transformer": ("transformer", "mnist", 10_000, 6, 64),
    "LSTM": ("LSTM", "mnist", 10_000, 6, 64),
    "MLP 300": ("MLP", "fashion-mnist", 6_400, 3, 64),
    "MLP 3,000": ("MLP", "fashion-mnist", 12_800, 15, 64),
    "MLP 30,000": ("MLP", "fashion-mnist", 19_200, 100, 64),
    "LeNet-5 300": ("LeNet-5", "mnist", 6_400, 3, 64),
    "LeNet-5 3,000": ("LeNet-5", "mnist", 12_800, 15, 64),
    "LeNet-5 30,000": ("LeNet-5", "mnist", 19_200, 100, 64),
}
TABLES = ("yacht", "concrete", "wine_red")
FEWER, SAMPLES, FEWER_SAMPLES = 1_000, 32, 8
"""So many test images and samples for a ResNet: those of the others take longer than training."""


class Rows(nn.Module):
    """An image as a sequence of its rows, for networks that read sequences."""

    def __init__(self, kind: str, width: int = 64) -> None:
        super().__init__()
        self.read = nn.Linear(28, width)
        self.place = nn.Embedding(28, width)
        self.core: nn.Module
        if kind == "LSTM":
            self.core = nn.LSTM(width, width, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.squeeze(1)
        places = torch.arange(28, device=x.device).expand(len(x), 28)
        found = self.core(self.read(rows) + self.place(places))
        return self.head(found[0][:, -1] if isinstance(found, tuple) else found.mean(1))


def network(name: str, image: tuple[int, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "MLP":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(image), 100), nn.ReLU(), nn.Linear(100, 10)
        )
    if name in ("LSTM", "transformer"):
        return Rows(name)
    if name == "LeNet-5":  # torch's own initialisation, as users have it
        padding = (32 - image[1]) // 2
        return nn.Sequential(
            nn.Conv2d(image[0], 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
    return build(name, image, seed)  # type: ignore[arg-type]


def images(name: str, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = credo.data.load(name)
    (x, y), (test_x, test_y) = data.train, data.test
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x[:count] - mean) / std, y[:count], (test_x - mean) / std, test_y


def optimizer(name: str, net: nn.Module, n: int, factor: float) -> Any:
    if name == "Adam":
        return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)
    if name == "SGD":
        return torch.optim.SGD(net.parameters(), lr=0.03 * factor, momentum=0.9)
    if name == "ivon-opt":
        from ivon import IVON

        return IVON(net.parameters(), lr=0.1 * factor, ess=n)
    kind = getattr(credo.optim, name)
    found = kind(net, num_data=n)
    for group in found.param_groups:
        group["lr"] *= factor
    return found


def sampling(opt: Any) -> Callable[[], Any] | None:
    if hasattr(opt, "sampled_params"):
        return lambda: opt.sampled_params(train=True)
    return getattr(opt, "sampled", None)


def samples_of(trial: dict[str, Any]) -> int:
    return FEWER_SAMPLES if trial["task"].startswith("ResNet") else SAMPLES


def by_loop(trial: dict[str, Any], net: nn.Module, data: Any, epochs: int, size: int) -> Tensor:
    """Probabilities of the test images after a plain loop."""
    x, y, test_x, _ = data
    samples = samples_of(trial)
    opt = optimizer(trial["method"], net, len(x), trial.get("factor", 1.0))
    total = epochs * math.ceil(len(x) / size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    order = torch.Generator().manual_seed(trial["seed"])
    draw = sampling(opt)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(size):
            opt.zero_grad()
            if draw is None:
                F.cross_entropy(net(x[rows]), y[rows]).backward()
            else:
                with draw():
                    F.cross_entropy(net(x[rows]), y[rows]).backward()
            opt.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        if hasattr(opt, "posterior"):
            posterior = opt.posterior(net, credo.likelihoods.Categorical())
            return posterior.predict(test_x, samples=samples, batch_size=1000).probs
        if hasattr(opt, "sampled_params"):
            found = []
            for _ in range(samples):
                with opt.sampled_params():
                    found.append(torch.cat([net(c).softmax(1) for c in test_x.split(1000)]))
            return torch.stack(found).mean(0)
        return torch.cat([net(chunk).softmax(1) for chunk in test_x.split(1000)])


def by_fit(trial: dict[str, Any], net: nn.Module, data: Any, epochs: int, size: int) -> Tensor:
    x, y, test_x, _ = data
    method = getattr(credo, trial["method"].removeprefix("fit "))()
    posterior = credo.fit(
        credo.Model(net, credo.likelihoods.Categorical()), method, (x, y), epochs=epochs,
        batch_size=size, seed=trial["seed"], schedule="cosine", progress=False,
    )  # fmt: skip
    return posterior.predict(test_x, samples=samples_of(trial), batch_size=1000).probs


def classify(trial: dict[str, Any]) -> dict[str, float]:
    name, data_set, count, epochs, size = IMAGES[trial["task"]]
    data = images(data_set, count)
    if name.startswith("ResNet"):
        data = (*data[:2], data[2][:FEWER], data[3][:FEWER])
    net = network(name, tuple(data[0].shape[1:]), trial["seed"])
    started = time.process_time()
    runner = by_fit if trial["method"].startswith("fit ") else by_loop
    probs = runner(trial, net, data, epochs, size)
    return {
        "accuracy": 100 * credo.metrics.accuracy(probs, data[3]),
        "nll": credo.metrics.nll(probs, data[3]),
        "ece": float(credo.metrics.ece(probs, data[3])),
        "seconds": time.process_time() - started,
    }


def regress(trial: dict[str, Any]) -> dict[str, float]:
    """A table by `credo.fit`; "Adam" is maximum likelihood in a plain loop."""
    x, y, test_x, test_y = uci(trial["task"], split=trial["seed"])
    x, test_x = credo.data.standardise(x, test_x)
    y, test_y = credo.data.standardise(y, test_y)
    torch.manual_seed(trial["seed"])
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    steps = trial.get("steps", 3000)
    epochs = math.ceil(steps / math.ceil(len(x) / 32))
    likelihood = credo.likelihoods.Gaussian(scale=0.5, learned=True)
    method = credo.MLE(lr=1e-3) if trial["method"] == "Adam" else getattr(credo, trial["method"])()
    posterior = credo.fit(
        credo.Model(net, likelihood), method, (x, y), epochs=epochs, batch_size=32,
        seed=trial["seed"], schedule="cosine", progress=False,
    )  # fmt: skip
    pred = posterior.predict(test_x, samples=64)
    return {
        "rmse": float((pred.mean - test_y).square().mean().sqrt()),
        "nll": -float(pred.log_prob(test_y).mean()),
    }


def run_one(trial: dict[str, Any], folder: Path | None) -> dict[str, float]:
    torch.set_num_threads(1)
    return regress(trial) if trial["task"] in TABLES else classify(trial)


def trials_of(part: str, seeds: int) -> list[dict[str, Any]]:
    def all_of(tasks: Any, methods: Any, **more: Any) -> list[dict[str, Any]]:
        return [
            {"task": task, "method": method, "seed": seed, **more}
            for task in tasks for method in methods for seed in range(seeds)
        ]  # fmt: skip

    natural = [name for name in NATURAL if hasattr(credo.optim, name)]
    in_fit = [f"fit {name}" for name in natural]
    if part == "protocol":
        others = ("Adam", "SGD", "ivon-opt", "fit MAP", "fit VI")
        return all_of(["protocol"], [*others, *natural, *in_fit])
    if part == "short":
        return all_of(["short"], ["Adam", "fit VI", *natural, *in_fit])
    if part == "networks":
        return all_of(["MLP", "LeNet-5", "LSTM", "transformer", "ResNet-20", "ResNet-20 GN"],
                      ["Adam", *natural])  # fmt: skip
    if part == "lengths":
        names = [f"{net} {steps}" for steps in ("300", "3,000", "30,000")
                 for net in ("MLP", "LeNet-5")]  # fmt: skip
        return all_of(names, ["Adam", *natural])
    if part == "rates":
        return [
            trial for factor in (0.1, 3.0)
            for trial in all_of(["short", "MLP", "LSTM", "transformer"], ["Adam", *natural],
                                factor=factor)
        ]  # fmt: skip
    return [trial for steps in (300, 3000)
            for trial in all_of(TABLES, ["Adam", "MAP", "VI", *natural], steps=steps)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="methods, separated by commas")
    given = parser.parse_args()
    trials = trials_of(given.part, given.seeds)
    if given.only:
        trials = [trial for trial in trials if trial["method"] in given.only.split(",")]
    outcomes = run_many(run_one, trials, jobs=given.jobs, folder=given.folder)
    cells: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        key = (trial["task"], trial.get("factor", ""), trial.get("steps", ""), trial["method"])
        if outcome.result:
            cells.setdefault(key, []).append(outcome.result)
        else:
            print(*key, trial["seed"], outcome)
    for key, found in cells.items():
        scores = "  ".join(
            f"{name} " + ", ".join(f"{result[name]:.4g}" for result in found) for name in found[0]
        )
        print("  ".join(str(part) for part in key if part != ""), "|", scores)


if __name__ == "__main__":
    main()
