"""SWAG, SGLD and SGHMC at their defaults: ``CREDO_DATA=… python -m bench.swag PART``.

swag      SWAG and MultiSWAG against MAP (constant rate and cosine) and an ensemble of 5
chains    SGLD and SGHMC, with and without cycles, against MAP, at equal epochs
norm      SWAG on a network with batch norm, with and without statistics of each draw
time      SWAG's time of training over MAP's, in process time, interleaved

Tasks: MLP 784-100-10 on 10,000 Fashion-MNIST images, 20 epochs, and LeNet-5 on 10,000 MNIST images,
8 epochs, both of minibatches of 128 and scored on the sets' 10,000 test images; yacht and concrete,
50 hidden units, 3,000 steps of 32 rows, on standardised targets, splits 0 to 2, with learned noise
(chains take the noise of a first run by MAP).
Settings were chosen on images 50,000 to 60,000 of the training sets and on splits 10 to 12
(``--choose``).
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import credo
from bench.networks import network
from credo.method import Method
from credo_papers.uci_tables import uci

IMAGES = {"MLP": ("MLP", "fashion-mnist", 20), "LeNet-5": ("LeNet-5", "mnist", 8)}
"""Network, data set, epochs."""
TABLES = ("yacht", "concrete")
STEPS = 3000

Make = Callable[[], tuple[Method[Any], str]]
"""A method and the schedule that it is trained with."""

SWAG: dict[str, Make] = {
    "MAP": lambda: (credo.MAP(), "constant"),
    "MAP, cosine": lambda: (credo.MAP(), "cosine"),
    "SWAG": lambda: (credo.SWAG(), "constant"),
    "SWAG, cosine": lambda: (credo.SWAG(), "cosine"),
    "Ensemble of 5": lambda: (credo.Ensemble(credo.MAP()), "cosine"),
    "MultiSWAG of 5": lambda: (credo.Ensemble(credo.SWAG()), "constant"),
}
CHAINS: dict[str, Make] = {
    "MAP": lambda: (credo.MAP(), "constant"),
    "MAP, cosine": lambda: (credo.MAP(), "cosine"),
    "SGLD": lambda: (credo.SGLD(), "constant"),
    "SGHMC": lambda: (credo.SGHMC(), "constant"),
    "SGLD, one chain": lambda: (credo.SGLD(chains=1), "constant"),
    "SGHMC, one chain": lambda: (credo.SGHMC(chains=1), "constant"),
    "SGLD, one chain, 4 cycles": lambda: (credo.SGLD(chains=1, cycles=4), "constant"),
    "SGHMC, one chain, 4 cycles": lambda: (credo.SGHMC(chains=1, cycles=4), "constant"),
}


@cache
def images(name: str, choose: bool, count: int = 10_000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = credo.data.load(name)
    (x, y), (test_x, test_y) = data.train, data.test
    mean, std = x[:count].mean(), x[:count].std()
    if choose:
        test_x, test_y = x[50_000:], y[50_000:]
    return (x[:count] - mean) / std, y[:count], (test_x - mean) / std, test_y


def classify(task: str, make: Make, seed: int, choose: bool) -> dict[str, float]:
    name, data_set, epochs = IMAGES[task]
    x, y, test_x, test_y = images(data_set, choose)
    net = network(name, tuple(x.shape[1:]), seed)
    method, schedule = make()
    started = time.process_time()
    posterior = credo.fit(
        credo.Model(net, credo.likelihoods.Categorical()), method, (x, y), epochs=epochs,
        seed=seed, schedule=schedule, progress=False,
    )  # fmt: skip
    seconds = time.process_time() - started
    pred = posterior.predict(test_x, samples=32, batch_size=1000, keep_samples=False)
    return {
        "accuracy": 100 * credo.metrics.accuracy(pred.probs, test_y),
        "nll": credo.metrics.nll(pred.probs, test_y),
        "ece": float(credo.metrics.ece(pred.probs, test_y)),
        "seconds": seconds,
    }


def regress(task: str, make: Make, seed: int, choose: bool) -> dict[str, float]:
    x, y, test_x, test_y = uci(task, split=seed + (10 if choose else 0))
    x, test_x = credo.data.standardise(x, test_x)
    y, test_y = credo.data.standardise(y, test_y)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    epochs = math.ceil(STEPS / math.ceil(len(x) / 32))
    method, schedule = make()
    likelihood = credo.likelihoods.Gaussian(scale=0.5, learned=True)
    if "SG" in type(method).__name__:  # chains learn no noise: that of a first run by MAP is taken
        first = credo.fit(
            credo.Model(copy.deepcopy(net), likelihood), credo.MAP(), (x, y), epochs=epochs,
            batch_size=32, seed=seed, schedule="cosine", progress=False,
        )  # fmt: skip
        scale = float(first.predict(x[:1]).aleatoric_std)
        likelihood = credo.likelihoods.Gaussian(scale=scale)
    started = time.process_time()
    posterior = credo.fit(
        credo.Model(net, likelihood), method, (x, y), epochs=epochs, batch_size=32, seed=seed,
        schedule=schedule, progress=False,
    )  # fmt: skip
    seconds = time.process_time() - started
    pred = posterior.predict(test_x, samples=64)
    return {
        "rmse": float((pred.mean - test_y).square().mean().sqrt()),
        "nll": -float(pred.log_prob(test_y).mean()),
        "seconds": seconds,
    }


def table(tasks: list[str], makes: dict[str, Make], seeds: int, choose: bool) -> None:
    for task in tasks:
        score = classify if task in IMAGES else regress
        for name, make in makes.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [score(task, make, seed, choose) for seed in range(seeds)]
            parts = []
            for key in found[0]:
                values = [each[key] for each in found]
                spread = statistics.stdev(values) if seeds > 1 else 0.0
                parts.append(f"{key} {statistics.fmean(values):.4g} ± {spread:.2g}")
            print(f"{task:9} {name:28} " + "  ".join(parts), flush=True)


def batch_norm(seeds: int) -> None:
    """LeNet-5 with batch norm on MNIST: each draw's statistics from more and fewer examples."""
    for examples in (0, 256, 2048, 10_000):
        found = []
        for seed in range(seeds):
            x, y, test_x, test_y = images("mnist", choose=False)
            torch.manual_seed(seed)
            net = nn.Sequential(
                nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(400, 84), nn.BatchNorm1d(84), nn.ReLU(), nn.Linear(84, 10),
            )  # fmt: skip
            model = credo.Model(net, credo.likelihoods.Categorical())
            method = credo.SWAG(examples=examples or 1)
            started = time.process_time()
            posterior = credo.fit(model, method, (x, y), epochs=5, seed=seed, progress=False)
            seconds = time.process_time() - started
            if not examples:  # as if the statistics at the mean were those of every draw
                posterior = credo.Posterior(
                    posterior.model, posterior.q, posterior.point, posterior.buffers
                )
            pred = posterior.predict(test_x, samples=20, batch_size=1000, keep_samples=False)
            found.append((credo.metrics.nll(pred.probs, test_y), seconds))
        nll, seconds = (statistics.fmean(values) for values in zip(*found, strict=True))
        print(f"{examples:6} examples: nll {nll:.4f}, training {seconds:.1f} s", flush=True)


def timing(tasks: list[str], rounds: int) -> None:
    """The time of training by SWAG over that by MAP, by `credo.fit`, round by round."""
    for task in tasks:
        name, data_set, epochs = IMAGES[task]
        x, y, _, _ = images(data_set, choose=False)
        ratios = []
        for number in range(rounds):
            seconds = {}
            for method in (credo.MAP(), credo.SWAG())[:: 1 if number % 2 else -1]:
                model = credo.Model(network(name, (1, 28, 28), 0), credo.likelihoods.Categorical())
                started = time.process_time()
                credo.fit(model, method, (x, y), epochs=epochs, progress=False)
                seconds[type(method).__name__] = time.process_time() - started
            ratios.append(seconds["SWAG"] / seconds["MAP"])
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{task}: SWAG over MAP {statistics.median(ratios):.3f} ({each})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["swag", "chains", "norm", "time"])
    parser.add_argument("--tasks", default="yacht,concrete,MLP,LeNet-5")
    parser.add_argument("--only", default="", help="methods, separated by semicolons")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--choose", action="store_true", help="score on held-out training data")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "time":
        timing([task for task in given.tasks.split(",") if task in IMAGES], given.rounds)
    elif given.part == "norm":
        batch_norm(given.seeds)
    else:
        makes = SWAG if given.part == "swag" else CHAINS
        wanted = given.only.split(";") if given.only else list(makes)
        chosen = {name: makes[name] for name in wanted}
        table(given.tasks.split(","), chosen, given.seeds, given.choose)


if __name__ == "__main__":
    main()
