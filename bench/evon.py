"""EVON against IVON, AdamW and SOAP. ``python -m bench.evon NAME FOLDER [TEXT]``, one thread.

``logistic``  correlated logistic regression, against the KL-optimal full Gaussian
``mnist``, ``fashion-mnist``  784-100-10, 20,000 images, ``CREDO_DATA`` says where they are
``text``      a character transformer (2 layers, width 64, context 64) on the file TEXT
``cost``      CPU time of a step over IVON's, interleaved

Every contestant's rate is chosen among `TRIALS` values on held-out data with one seed; then three
seeds are trained and tested. Times are CPU times of this process. TEXT was the King James Bible of
the Debian packages bible-kjv and bible-kjv-text: ``echo ge1:1-re22:21 | bible -f > TEXT``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from bench.nets import batch, mlp
from bench.soap import SOAP
from credo.families import DiagGaussian, FullGaussian
from credo.kl import kl
from credo.optim import EVON, IVON, NaturalOptimizer

TRIALS = 3
SEEDS = (0, 1, 2)

# --- contestants ----------------------------------------------------------------------------------

POINTS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SOAP": SOAP,
}
NATURAL: dict[str, type[IVON]] = {"IVON": IVON, "EVON": EVON}


def optimizer_for(name: str, net: nn.Module, lr: float, num_data: int) -> torch.optim.Optimizer:
    if name in POINTS:
        return POINTS[name](net.parameters(), lr=lr)
    return NATURAL[name](net, lr=lr, num_data=num_data)


def descend(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    batches: Iterator[Any],
    steps: int,
) -> float:
    """Train under a cosine; the CPU time it took."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = time.process_time()
    for _ in range(steps):
        some = next(batches)
        if isinstance(optimizer, NaturalOptimizer):
            with optimizer.sampled():
                loss_of(some).backward()
        else:
            loss_of(some).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return time.process_time() - start


def chosen(
    rates: dict[str, tuple[float, ...]], trial: Callable[[str, float, int, bool], dict[str, float]]
) -> dict[str, Any]:
    """Choose each contestant's rate on held-out data, then train all seeds."""
    results: dict[str, Any] = {}
    for name, values in rates.items():
        assert len(values) == TRIALS
        tried = {lr: trial(name, lr, 0, True)["nll"] for lr in values}
        best = min(tried, key=lambda lr: tried[lr] if math.isfinite(tried[lr]) else math.inf)
        runs = [trial(name, best, seed, False) for seed in SEEDS]
        means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        results[name] = {"held out": tried, "lr": best, "seeds": runs, "mean": means}
        print(name, best, {k: round(v, 4) for k, v in means.items()}, tried, flush=True)
    return results


# --- logistic regression --------------------------------------------------------------------------

NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(60))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


class Logistic:
    """Correlated inputs, few rows, a standard normal prior; expectations by quadrature."""

    def __init__(self, rows: int = 200, features: int = 10) -> None:
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
        self.x = torch.randn(rows, features, generator=generator, dtype=torch.float64) @ mix / 2
        truth = torch.randn(features, generator=generator, dtype=torch.float64)
        chance = torch.rand(rows, generator=generator, dtype=torch.float64)
        self.y = (chance < (self.x @ truth).sigmoid()).double()
        self.prior = DiagGaussian(torch.zeros(features).double(), torch.ones(features).double())

    def logits(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Nodes of the logits' marginals, (rows, nodes)."""
        sd = (self.x @ covariance * self.x).sum(1).sqrt()
        return (self.x @ mean)[:, None] + sd[:, None] * NODES

    def elbo(self, q: Any, covariance: Tensor) -> float:
        z = self.logits(q.mean, covariance)
        losses = F.softplus(z) - self.y[:, None] * z
        return -float((losses @ WEIGHTS).sum() + kl(q, self.prior))

    def best(self) -> tuple[Tensor, Tensor]:
        """Mean and precision of the KL-optimal full Gaussian, by damped Newton steps."""
        d = self.x.shape[1]
        mean, precision = torch.zeros(d).double(), torch.eye(d).double()
        for _ in range(400):
            p = self.logits(mean, torch.linalg.inv(precision)).sigmoid()
            curvature = (self.x.mT * ((p * (1 - p)) @ WEIGHTS)) @ self.x + torch.eye(d)
            gradient = self.x.mT @ (p @ WEIGHTS - self.y) + mean
            precision = 0.7 * precision + 0.3 * curvature
            mean = mean - 0.3 * torch.linalg.solve(precision, gradient)
        return mean, precision


def logistic(steps: int = 6000) -> dict[str, Any]:
    """Errors of q against the KL-optimal full Gaussian, and nats of ELBO below it."""
    task = Logistic()
    mean, precision = task.best()
    covariance = torch.linalg.inv(precision)
    top = task.elbo(FullGaussian(mean, precision), covariance)
    diagonal = DiagGaussian(mean, precision.diagonal().rsqrt())
    found: dict[str, Any] = {
        "best full": {"elbo": top},
        "full mean, best diagonal": {"elbo": task.elbo(diagonal, diagonal.variance.diag())},
    }
    for name, kind in NATURAL.items():
        runs = []
        for seed in SEEDS:
            net = nn.Linear(len(mean), 1, bias=False).double()
            nn.init.zeros_(net.weight)
            # A gradient is one row here: a basis needs more of them than the axis is long.
            own_options = {"basis_beta": 0.99} if kind is EVON else {}
            opt = kind(net, lr=0.1, num_data=len(task.y), prior_precision=1.0, hess_init=0.2,
                       betas=(0.9, 0.999), seed=seed, **own_options)  # type: ignore[call-arg]  # fmt: skip

            def loss(_: None, net: nn.Module = net) -> Tensor:
                return F.binary_cross_entropy_with_logits(net(task.x)[:, 0], task.y)

            seconds = descend(opt, loss, iter(lambda: None, 1), steps)
            q = opt.posterior(net, credo.likelihoods.Bernoulli()).q
            own = q.dense_covariance() if isinstance(opt, EVON) else q.variance.diag()
            runs.append(
                {
                    "covariance error": float((own - covariance).norm() / covariance.norm()),
                    "mean error": float((q.mean - mean) @ precision @ (q.mean - mean)) ** 0.5,
                    "elbo gap": top - task.elbo(q, own),
                    "seconds": seconds,
                }
            )
        found[name] = {
            "seeds": runs,
            "mean": {k: statistics.mean(run[k] for run in runs) for k in runs[0]},
        }
        print(name, found[name]["mean"], flush=True)
    print(found["best full"], found["full mean, best diagonal"])
    return found


# --- images ---------------------------------------------------------------------------------------

IMAGES, HELD_OUT, BATCH, EPOCHS = 20_000, 5_000, 128, 10
IMAGE_RATES: dict[str, tuple[float, ...]] = {
    "AdamW": (1e-3, 3e-3, 1e-2),
    "SOAP": (1e-3, 3e-3, 1e-2),
    "IVON": (0.1, 0.3, 1.0),
    "EVON": (0.1, 0.3, 1.0),
}
"""IVON's and EVON's largest steps, a hundredth of their rates, are Adam's rates."""


def images(name: str) -> dict[str, Any]:
    """784-100-10 on 20,000 images; scores are of 32 samples where there are samples."""
    data = credo.data.load(name)
    x, y = data.train[0].float(), data.train[1]
    held_out = x[-HELD_OUT:], y[-HELD_OUT:]
    steps = EPOCHS * IMAGES // BATCH

    def trial(name: str, lr: float, seed: int, choosing: bool) -> dict[str, float]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        opt = optimizer_for(name, net, lr, IMAGES)
        order = torch.Generator().manual_seed(seed)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                for part in torch.randperm(IMAGES, generator=order).split(BATCH):
                    yield x[part], y[part]

        seconds = descend(opt, lambda b: F.cross_entropy(net(b[0]), b[1]), batches(), steps)
        inputs, targets = held_out if choosing else (data.test[0].float(), data.test[1])
        if isinstance(opt, NaturalOptimizer):
            posterior = opt.posterior(net, credo.likelihoods.Categorical())
            probs = posterior.predict(inputs, samples=32).probs
        else:
            with torch.no_grad():
                probs = net(inputs).softmax(-1)
        return {
            "accuracy": credo.metrics.accuracy(probs, targets),
            "nll": credo.metrics.nll(probs, targets),
            "ece": credo.metrics.ece(probs, targets),
            "seconds": seconds,
        }

    return chosen(IMAGE_RATES, trial)


# --- text -----------------------------------------------------------------------------------------

CONTEXT, WIDTH, HEADS, LAYERS, SEQUENCES, STEPS = 64, 64, 4, 2, 32, 250
TEXT_RATES: dict[str, tuple[float, ...]] = {
    "AdamW": (1e-3, 3e-3, 1e-2),
    "SOAP": (1e-3, 3e-3, 1e-2),
    "IVON": (0.1, 0.3, 1.0),
    "EVON": (0.1, 0.3, 1.0),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class Transformer(nn.Module):
    """Characters in, logits of the next ones out."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.characters(x) + places)))


def read_text(path: str) -> Tensor:
    """The file's verses as codes of their characters."""
    lines = Path(path).read_text(encoding="latin-1").splitlines()
    verses = [line.split(" ", 1)[1] for line in lines if re.match(r"\d?[A-Za-z]+\d+:\d+ ", line)]
    text = "\n".join(verses)
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    return torch.tensor([codes[character] for character in text])


def text(path: str) -> dict[str, Any]:
    """Perplexity of a character at equal steps, and at AdamW's time for `STEPS` of them."""
    data = read_text(path)
    characters, tenth = int(data.max()) + 1, len(data) // 20
    train = data[: -2 * tenth]
    parts = {True: data[-2 * tenth : -tenth], False: data[-tenth:]}

    def windows(of: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = of[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    def loss(net: nn.Module, some: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(some[0]).flatten(0, 1), some[1].flatten())

    def prepared(name: str, lr: float, seed: int) -> tuple[nn.Module, Any, Iterator[Any]]:
        torch.manual_seed(seed)
        net = Transformer(characters)
        opt = optimizer_for(name, net, lr, len(train))
        generator = torch.Generator().manual_seed(seed)

        def batches() -> Iterator[Any]:
            while True:
                most = len(train) - CONTEXT - 1
                yield windows(train, torch.randint(most, (SEQUENCES,), generator=generator))

        return net, opt, batches()

    def scores(net: nn.Module, opt: Any, choosing: bool) -> dict[str, float]:
        """At the mean, and of the mean probability of 8 samples."""
        part = parts[choosing]
        starts = torch.arange(0, len(part) - CONTEXT - 1, CONTEXT)[:: 8 if choosing else 4]
        some = windows(part, starts)
        with torch.no_grad():
            at_mean = float(loss(net, some))
            sampled = at_mean
            if isinstance(opt, NaturalOptimizer):
                flat = opt.posterior(net, credo.likelihoods.Categorical())
                total = torch.zeros(some[1].numel(), dtype=torch.float64)
                weights = list(flat.q.sample(8, torch.Generator().manual_seed(0)))
                home = flat.model.bind()
                before = home.vector.clone()
                for one in weights:
                    with home.writing() as vector:
                        flat.model.random.write(vector, one)
                    own = flat.model.net(some[0]).flatten(0, 1).log_softmax(-1)
                    total += own.gather(1, some[1].flatten()[:, None])[:, 0].double().exp() / 8
                with home.writing() as vector:
                    vector.copy_(before)
                sampled = -float(total.log().mean())
        return {"nll": min(at_mean, sampled), "perplexity at the mean": math.exp(at_mean),
                "perplexity": math.exp(sampled)}  # fmt: skip

    def run(name: str, lr: float, seed: int, choosing: bool, steps: int) -> dict[str, float]:
        net, opt, batches = prepared(name, lr, seed)
        seconds = descend(opt, lambda some: loss(net, some), batches, steps)
        return {**scores(net, opt, choosing), "seconds": seconds, "steps": steps}

    results = chosen(TEXT_RATES, lambda n, lr, s, c: run(n, lr, s, c, STEPS))
    pace = {
        name: statistics.median(r["seconds"] for r in results[name]["seeds"]) for name in results
    }
    for name in results:
        steps = round(STEPS * min(pace.values()) / pace[name])
        runs = [run(name, results[name]["lr"], seed, False, steps) for seed in SEEDS]
        means = {key: statistics.mean(r[key] for r in runs) for key in runs[0]}
        results[name]["equal time"] = {"seeds": runs, "mean": means}
        print(name, "equal time", {k: round(v, 4) for k, v in means.items()}, flush=True)
    return {"characters": characters, "training characters": len(train), **results}


# --- cost -----------------------------------------------------------------------------------------


def cost(rounds: int = 9, steps: int = 10) -> dict[str, Any]:
    """Medians of ratios to IVON's CPU time, each over a whole refresh."""
    contestants = {
        "IVON": (IVON, {}),
        "EVON": (EVON, {}),
        "EVON max_size=1024": (EVON, {"max_size": 1024}),
        "EVON max_size=1024 one-sided": (EVON, {"max_size": 1024, "one_sided": True}),
    }
    nets = {
        "784-100-10": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)
        ),
        "784-400-400-10": mlp,
    }
    found: dict[str, Any] = {}
    for net_name, make in nets.items():
        for size in (128, 1024):
            x, y = batch("mlp", size)
            stepping = {}
            for name, (kind, options) in contestants.items():
                torch.manual_seed(0)
                net = make()
                opt = kind(net, num_data=50_000, **options)

                def step(
                    net: nn.Module = net, opt: Any = opt, x: Tensor = x, y: Tensor = y
                ) -> None:
                    for _ in range(steps):
                        with opt.sampled():
                            F.cross_entropy(net(x), y).backward()
                        opt.step()
                        opt.zero_grad()

                step()
                stepping[name] = step
            took: dict[str, list[float]] = {name: [] for name in stepping}
            for _ in range(rounds):
                for name, step in stepping.items():
                    start = time.process_time()
                    step()
                    took[name].append(time.process_time() - start)
            for name, times in took.items():
                ratio = statistics.median(t / b for t, b in zip(times, took["IVON"], strict=True))
                found[f"{net_name}, batch {size}, {name}"] = round(ratio, 2)
                print(net_name, size, name, round(ratio, 2), flush=True)
    return found


def main(name: str, folder: str, *rest: str) -> None:
    torch.set_num_threads(1)
    if name in ("mnist", "fashion-mnist"):
        found = images(name)
    else:
        found = {"logistic": logistic, "text": text, "cost": cost}[name](*rest)  # type: ignore[operator]
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
