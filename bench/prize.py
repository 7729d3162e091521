"""A posterior against a tuned Adam and a tuned SGD at equal time: ``python -m bench.prize FOLDER``.

LeNet-5 on MNIST, Fashion-MNIST and CIFAR-10, the first 20,000 training images, and ResNet-20 with
group norm on 10,000 of CIFAR-10's; batches of 64, a cosine to zero. Every contestant gets the
processor time of `TASKS`' epochs of Adam (its steps are counted off by what a step was measured to
cost, interleaved on one thread) and as many settings as the others (`GRIDS`: 12; ResNet-20: 4), of
which the one with the lowest NLL on the last 5,000 training images is trained with three seeds
and judged on the test images. Adam and SGD are also stopped at their best epoch on those images.

EVON's weight decay is a prior at full strength: its precision is decay·n/T, so that the
temperature T cools only the entropy (Wenzel et al., 2020).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from bench.networks import network
from credo.sweep import run_many

TASKS: dict[str, tuple[str, str, int, int]] = {
    # name: network, data set, training images, epochs of Adam
    "mnist": ("LeNet-5", "mnist", 20_000, 10),
    "fashion-mnist": ("LeNet-5", "fashion-mnist", 20_000, 10),
    "cifar10": ("LeNet-5", "cifar10", 20_000, 10),
    "resnet": ("ResNet-20 GN", "cifar10", 10_000, 6),
}
HELD_OUT, BATCH = 5_000, 64
DECAYS = (3e-4, 1e-3, 3e-3, 1e-2)
GRIDS: dict[str, list[dict[str, float]]] = {
    "Adam": [{"lr": lr, "decay": d} for lr, d in itertools.product((1e-3, 2e-3, 4e-3), DECAYS)],
    "SGD": [{"lr": lr, "decay": d} for lr, d in itertools.product((0.01, 0.03, 0.1), DECAYS)],
    "EVON": [{"temperature": t, "decay": d} for t, d in itertools.product((0.1, 0.3, 1.0), DECAYS)],
}


def grid_of(task: str, kind: str) -> list[dict[str, float]]:
    """All settings; of a network that takes minutes, the middle rates and the middle decays."""
    if task != "resnet":
        return GRIDS[kind]
    first = "temperature" if kind == "EVON" else "lr"
    rates = sorted({setting[first] for setting in GRIDS[kind]})[-2:]
    return [s for s in GRIDS[kind] if s[first] in rates and s["decay"] in DECAYS[1:3]]


def data(task: str) -> dict[str, tuple[Tensor, Tensor]]:
    _, name, count, _ = TASKS[task]
    found = credo.data.load(name)
    (x, y), (test_x, test_y) = found.train, found.test
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    x, test_x = (x - mean) / std, (test_x - mean) / std
    return {
        "train": (x[:count], y[:count]),
        "held out": (x[-HELD_OUT:], y[-HELD_OUT:]),
        "test": (test_x, test_y),
    }


def optimizer(name: str, net: nn.Module, setting: dict[str, float], count: int) -> Any:
    decay = setting["decay"]
    if name == "Adam":
        return torch.optim.Adam(net.parameters(), setting["lr"], weight_decay=decay)
    if name == "SGD":
        return torch.optim.SGD(net.parameters(), setting["lr"], 0.9, weight_decay=decay)
    temperature = setting["temperature"]
    prior = decay * count / temperature
    options = {"temperature": temperature, "prior_precision": prior, "refresh": 30, "lr": 0.1}
    return credo.optim.EVON(net, num_data=count, **options)


def step(opt: Any, net: nn.Module, x: Tensor, y: Tensor) -> None:
    if isinstance(opt, credo.optim.EVON):
        with opt.sampled():
            F.cross_entropy(net(x), y).backward()
    else:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
    opt.step()


def costs(name: str, rounds: int = 15, steps: int = 12) -> dict[str, float]:
    """What a step costs each contestant, over Adam's: medians, interleaved."""
    x, y = data(name)["train"]
    nets = {kind: network(TASKS[name][0], tuple(x.shape[1:]), 0) for kind in GRIDS}
    opts = {kind: optimizer(kind, net, GRIDS[kind][0], len(x)) for kind, net in nets.items()}
    times: dict[str, list[float]] = {kind: [] for kind in GRIDS}
    for number in range(rounds):
        for kind, net in nets.items():
            started = time.process_time()
            for place in range(steps):
                rows = slice((number * steps + place) * BATCH, (number * steps + place + 1) * BATCH)
                step(opts[kind], net, x[rows], y[rows])
            times[kind].append(time.process_time() - started)
    ratios = {k: [t / a for t, a in zip(times[k], times["Adam"], strict=True)] for k in GRIDS}
    return {kind: statistics.median(found[2:]) for kind, found in ratios.items()}


def probabilities(opt: Any, net: nn.Module, x: Tensor) -> Tensor:
    if isinstance(opt, credo.optim.EVON):
        posterior = opt.posterior(net, credo.likelihoods.Categorical())
        return posterior.predict(x, samples=32, batch_size=1000).probs
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(chunk).softmax(1) for chunk in x.split(1000)])
    net.train()
    return found


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    floor, spread = credo.metrics.ece_floor(probs)
    return {
        "accuracy": 100 * credo.metrics.accuracy(probs, y),
        "nll": credo.metrics.nll(probs, y),
        "ece": float(credo.metrics.ece(probs, y)),
        "ece floor": floor + 2 * spread,  # below it nothing can be told from calibrated
    }


def run_one(trial: dict[str, Any], folder: Path | None) -> dict[str, float]:
    torch.set_num_threads(1)
    parts, kind, seed = data(trial["set"]), trial["method"], trial["seed"]
    x, y = parts["train"]
    name, _, count, epochs = TASKS[trial["set"]]
    net = network(name, tuple(x.shape[1:]), seed)
    opt = optimizer(kind, net, trial["setting"], count)
    total = round(epochs * math.ceil(count / BATCH) / trial["cost"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    order = torch.Generator().manual_seed(seed)
    done, spent, best = 0, 0.0, (math.inf, net)
    while done < total:
        started = time.process_time()
        for rows in torch.randperm(count, generator=order).split(BATCH)[: total - done]:
            step(opt, net, x[rows], y[rows])
            schedule.step()
            done += 1
        spent += time.process_time() - started
        if kind != "EVON":  # early stopping, which costs the others no time here
            held_x, held_y = parts["held out"]
            nll = credo.metrics.nll(probabilities(opt, net, held_x), held_y)
            best = min(best, (nll, copy.deepcopy(net)), key=lambda pair: pair[0])
    chosen = net if kind == "EVON" else best[1]
    held_out = scores(probabilities(opt, chosen, parts["held out"][0]), parts["held out"][1])
    found = {f"held out {name}": value for name, value in held_out.items()}
    if trial["judge"]:
        found |= scores(probabilities(opt, chosen, parts["test"][0]), parts["test"][1])
    return {**found, "seconds": spent, "steps": float(total)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join(TASKS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.sets.split(","):
        cost_file = given.folder / f"cost-{name}.json"
        given.folder.mkdir(parents=True, exist_ok=True)
        if not cost_file.exists():
            cost_file.write_text(json.dumps(costs(name)))
        cost = json.loads(cost_file.read_text())
        print(name, {kind: round(value, 3) for kind, value in cost.items()}, flush=True)
        for kind in GRIDS:
            grid = grid_of(name, kind)
            common = {"set": name, "method": kind, "cost": round(cost[kind], 3)}
            tuning = [{**common, "setting": s, "seed": 0, "judge": False} for s in grid]
            outcomes = run_many(run_one, tuning, jobs=1, folder=given.folder, progress=False)
            nlls = [(o.result or {}).get("held out nll", math.inf) for o in outcomes]
            setting = grid[nlls.index(min(nlls))]
            finals = [{**common, "setting": setting, "seed": s, "judge": True} for s in (1, 2, 3)]
            results = [
                o.result or {}
                for o in run_many(run_one, finals, jobs=1, folder=given.folder, progress=False)
            ]
            print(
                f"{name} {kind} {setting} | "
                + "  ".join(
                    f"{key} " + ", ".join(f"{r[key]:.4g}" for r in results)
                    for key in ("accuracy", "nll", "ece", "ece floor", "seconds", "steps")
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
