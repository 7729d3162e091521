"""What is measured: a training step, a prediction, and the memory of training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import credo
from bench import rivals
from bench.nets import NETS, batch
from bench.timing import Contestants, Row, interleave

BASELINES = {"adam": "adam", "adam fused": "adam fused"}
ROUNDS = {"mlp": (31, 4), "lenet5": (21, 3), "resnet20": (9, 1), "resnet20 groupnorm": (9, 1)}


def adam_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor, **settings: bool) -> Callable:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, **settings)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def credo_step(
    net: nn.Module, method: credo.VI | credo.VariationalLaplace, x: torch.Tensor, y: torch.Tensor
) -> Callable:
    model = credo.Model(net, credo.likelihoods.Categorical())
    state = method.init(model, rivals.NUM_DATA, torch.Generator().manual_seed(0))
    return lambda: method.update(state, (x, y))


def optimizer_step(
    make: Callable[..., torch.optim.Optimizer], net: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> Callable:
    """The two changed lines of `credo.optim` in a loop that already exists."""
    optimizer = make(net, num_data=rivals.NUM_DATA)

    def step() -> None:
        with optimizer.sampled():
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


OPTIMIZERS = {
    f"credo {kind.__name__}, {draws} draws": partial(kind, draws=draws)
    for kind in (credo.optim.IVON, credo.optim.Vadam, credo.optim.VOGN)
    for draws in ("normal", "table", "pool")
}


def training(net: str) -> list[Row]:
    """One Bayesian training step, relative to the same network's Adam step."""
    make, (x, y) = NETS[net], batch(net)
    contestants: Contestants = {
        "adam": adam_step(make(), x, y),
        "adam again (control)": adam_step(make(), x, y),
        "adam fused": adam_step(make(), x, y, fused=True),
        "credo VI, normal draws": credo_step(make(), credo.VI(draws="normal"), x, y),
        "credo VI, table draws": credo_step(make(), credo.VI(draws="table"), x, y),
        "credo VI, pool draws": credo_step(make(), credo.VI(draws="pool"), x, y),
    }
    if net == "lenet5":
        for noise in ("local", "flipout"):
            contestants[f"credo VI, {noise}"] = credo_step(make(), credo.VI(noise=noise), x, y)
    for name, optimizer in OPTIMIZERS.items():
        contestants[name] = optimizer_step(optimizer, make(), x, y)
    contestants |= rivals.training_steps(make, x, y)
    rounds, steps = ROUNDS[net]
    return interleave("training step", net, contestants, BASELINES, rounds, steps)


FIT_BATCHES = {"mlp": 96, "lenet5": 32, "resnet20": 6}
"""Minibatches of one call: enough that what happens once is a small part of it."""


def fitting(net: str) -> list[Row]:
    """What a user calls: an epoch of `credo.fit`, relative to a plain loop of the same steps."""
    make, size = NETS[net], len(batch(net)[1])
    x, y = batch(net, size * FIT_BATCHES[net])

    def loop(**settings: bool) -> Callable:
        network = make()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, **settings)

        def epoch() -> None:
            for rows in torch.randperm(len(y)).split(size):
                optimizer.zero_grad()
                F.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()

        return epoch

    def fit(method: credo.method.Method) -> Callable:
        model = credo.Model(make(), credo.likelihoods.Categorical())
        return lambda: credo.fit(model, method, (x, y), epochs=1, batch_size=size, progress=False)

    contestants: Contestants = {
        "adam": loop(),
        "adam again (control)": loop(),
        "adam fused": loop(fused=True),
        "credo.fit MAP": fit(credo.MAP()),
        "credo.fit VI": fit(credo.VI()),
        "credo.fit IVON": fit(credo.IVON()),
        "credo.fit Vadam": fit(credo.Vadam()),
        "credo.fit VOGN": fit(credo.VOGN()),
    }
    return interleave("epoch of fit", net, contestants, BASELINES, rounds=9, steps=1, seconds=90)


def variational_laplace(net: str) -> list[Row]:
    """One step of Variational Laplace, relative to the same (smooth) network's Adam step."""
    make, (x, y) = NETS[net], batch(net)
    routes = {
        "difference": credo.VariationalLaplace(),
        "difference, penalty on half": credo.VariationalLaplace(penalty_share=0.5),
        "exact": credo.VariationalLaplace(route="exact"),
        "exact, penalty on half": credo.VariationalLaplace(route="exact", penalty_share=0.5),
    }
    contestants: Contestants = {
        "adam": adam_step(make(), x, y),
        "adam again (control)": adam_step(make(), x, y),
        "adam fused": adam_step(make(), x, y, fused=True),
        "credo VI, table draws": credo_step(make(), credo.VI(), x, y),
    }
    for name, method in routes.items():
        contestants[f"credo VL, {name}"] = credo_step(make(), method, x, y)
    rounds, steps = ROUNDS[net.removeprefix("softplus ")]
    return interleave("variational laplace step", net, contestants, BASELINES, rounds, steps)


def prediction(net: str = "mlp", samples: int = 32, inputs: int = 1000) -> list[Row]:
    """``samples`` predictions of ``inputs`` inputs, relative to as many deterministic passes."""
    make, (x, _) = NETS[net], batch(net, inputs)
    plain = make().eval()

    @torch.no_grad()
    def deterministic() -> torch.Tensor:
        return torch.stack([plain(x) for _ in range(samples)]).softmax(-1).mean(0)

    def credo_prediction(draws: str) -> Callable:
        method = credo.VI(draws=draws)
        model = credo.Model(make(), credo.likelihoods.Categorical())
        posterior = method.posterior(method.init(model, rivals.NUM_DATA))
        return lambda: posterior.predict(x, samples=samples).probs

    def loop(build: Callable[[], nn.Module]) -> Callable:
        network = build()

        @torch.no_grad()
        def run() -> torch.Tensor:
            return torch.stack([network(x) for _ in range(samples)]).softmax(-1).mean(0)

        return run

    contestants: Contestants = {
        "deterministic": deterministic,
        "deterministic again (control)": deterministic,
        "credo, normal draws": credo_prediction("normal"),
        "credo, table draws": credo_prediction("table"),
        "credo, pool draws": credo_prediction("pool"),
    }
    networks = rivals.forward_networks(make)
    contestants |= rivals.working({k: (lambda b=b: loop(b)) for k, b in networks.items()})
    baselines = {"deterministic": f"{samples} deterministic forwards"}
    return interleave("prediction", net, contestants, baselines, rounds=9, steps=1)


MEMORY_CONTESTANTS = [
    "adam", "adam fused", "credo VI, normal draws", "credo VI, table draws",
    "credo VI, pool draws", *rivals.LAYER_LIBRARIES, "posteriors",
]  # fmt: skip


def memory_child(net: str, contestant: str) -> None:
    """Print the peak of resident memory above the process's baseline, in MiB; its own process."""
    torch.set_num_threads(2)
    rivals.working({contestant: lambda: _memory_step("mlp", contestant)})  # imports and warm-up
    # A child starts with its parent's high-water mark: "5" sets the mark to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    baseline = _kilobytes("VmRSS")
    step = _memory_step(net, contestant)
    for _ in range(4):
        step()
    print(f"PEAK {(_kilobytes('VmHWM') - baseline) / 1024:.1f}")


def _kilobytes(entry: str) -> int:
    """A line of this process's status, as Linux reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry + ":"))


def _memory_step(net: str, contestant: str) -> Callable:
    make = NETS[net] if net != "mlp" else (lambda: NETS["mlp"](16))  # type: ignore[call-arg]
    x, y = batch(net)
    if contestant.startswith("adam"):
        return adam_step(make(), x, y, fused=contestant.endswith("fused"))
    if contestant.startswith("credo"):
        draws = contestant.removeprefix("credo VI, ").removesuffix(" draws")
        return credo_step(make(), credo.VI(draws=draws), x, y)
    if contestant == "posteriors":
        return rivals.posteriors_step(make(), x, y)
    return rivals._adam_step(*rivals.LAYER_LIBRARIES[contestant](make()), x, y)


def memory(net: str = "wide mlp") -> list[Row]:
    """Peak memory of training, relative to deterministic Adam; each in a process of its own."""
    peaks = {}
    for contestant in MEMORY_CONTESTANTS:
        command = [sys.executable, "-W", "ignore", "-m", "bench", "memory-child", net, contestant]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in result.stdout.splitlines() if line.startswith("PEAK")]
        if lines:
            peaks[contestant] = float(lines[0].split()[1])
        else:
            print(f"  {contestant}: left out ({result.stderr.strip().splitlines()[-1:]})")
    return [
        Row("peak memory", net, name, round(peak / peaks[base], 3), (peak, peak), printed)
        for base, printed in BASELINES.items()
        for name, peak in peaks.items()
    ]
