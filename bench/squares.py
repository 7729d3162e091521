"""Per-example squares: what a VOGN step costs over Adam's, by the route that squares are found.

Every contestant makes the same step on the flat vector and differs in where its squares come from.
``python -m bench.squares`` measures the memory that they take.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bench import rivals
from bench.nets import NETS, batch
from bench.suites import (
    BASELINES,
    OPTIMIZERS,
    ROUNDS,
    _kilobytes,
    adam_step,
    optimizer_step,
)
from bench.timing import Contestants, Row, interleave
from credo import noise
from credo.autodiff import layer_squares
from credo.autodiff.squares import Squares
from credo.network import FlatParams, bind, select

NUM_DATA = 60_000
SECONDS = 120.0


class Vogn:
    """The flat part of VOGN: draw the weights, then update their mean and precision."""

    def __init__(self, net: nn.Module) -> None:
        self.flat: FlatParams = bind(net)
        self.selection = select(self.flat.segments)
        self.mean = self.selection.read(self.flat.vector)
        self.curvature = torch.full_like(self.mean, 1e-2)
        self.momentum = torch.zeros_like(self.mean)
        self.gradient, self.squares, self.draw = (torch.empty_like(self.mean) for _ in range(3))
        self.noise = noise.source("table", seed=0)
        self.steps = 0

    def sample(self) -> None:
        self.steps += 1
        scale = torch.mul(self.curvature, NUM_DATA).add_(1.0).rsqrt_()
        draw = self.noise.draw(self.draw, self.steps)
        with self.flat.writing() as vector:
            self.selection.write(vector, torch.addcmul(self.mean, scale, draw, out=self.squares))

    def update(self) -> None:
        self.momentum.lerp_(self.gradient, 0.1)
        self.curvature.lerp_(self.squares, 0.001)
        torch.add(self.curvature, 1 / NUM_DATA, out=self.squares)
        self.mean.addcdiv_(self.momentum, self.squares, value=-1e-3)


def harvested(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    vogn = Vogn(net)
    squares = Squares(vogn.flat, vogn.selection)

    def step() -> None:
        vogn.sample()
        with squares.armed():
            F.cross_entropy(net(x), y).backward()
        vogn.flat.gradient(vogn.selection, out=vogn.gradient)
        squares.mean(vogn.squares)
        squares.reset()
        vogn.update()

    return step


def batch_squared(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The same step with the square of the batch gradient: what everything but squares costs."""
    vogn = Vogn(net)

    def step() -> None:
        vogn.sample()
        F.cross_entropy(net(x), y).backward()
        vogn.flat.gradient(vogn.selection, out=vogn.gradient)
        torch.square(vogn.gradient, out=vogn.squares)
        vogn.update()

    return step


def vmapped(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    vogn = Vogn(net)
    names = [segment.name for segment in vogn.selection.segments]

    Weights = dict[str, Tensor]

    def loss(weights: Weights, others: Weights, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights | others, (x[None],)), y[None])

    per_example = vmap(grad(loss), (None, None, 0, 0))

    def step() -> None:
        vogn.sample()
        others = {name: p.detach() for name, p in net.named_parameters()}
        found = per_example({name: others.pop(name) for name in names}, others, x, y)
        torch.cat([found[name].mean(0).reshape(-1) for name in names], out=vogn.gradient)
        squares = [found[name].square_().mean(0).reshape(-1) for name in names]
        torch.cat(squares, out=vogn.squares)
        vogn.update()

    return step


def from_rival(
    find: Callable[..., Callable[[], list[Tensor]]], net: nn.Module, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """The same step with the squares that another library finds."""
    vogn = Vogn(net)
    parameters = [vogn.flat.parameter_at[segment.start] for segment in vogn.selection.segments]
    run = find(net, x, y, parameters)

    def step() -> None:
        vogn.sample()
        squares = run()
        vogn.flat.gradient(vogn.selection, out=vogn.gradient)
        torch.cat([found.reshape(-1) for found in squares], out=vogn.squares)
        vogn.update()

    return step


def forced(step: Callable[[], None], route: str) -> Callable[[], None]:
    """The step with one convolution route for all layers."""

    def run() -> None:
        with mock.patch.object(layer_squares, "filter_gradients", getattr(layer_squares, route)):
            step()

    return run


def routes(net: str) -> list[Row]:
    """One VOGN step relative to the same network's Adam step, at most `SECONDS` long."""
    make, (x, y) = NETS[net], batch(net)
    contestants: Contestants = {
        "adam": adam_step(make(), x, y),
        "adam again (control)": adam_step(make(), x, y),
        "adam fused": adam_step(make(), x, y, fused=True),
        "squares of the batch gradient": batch_squared(make(), x, y),
        "credo": harvested(make(), x, y),
        "credo VOGN, pool draws": optimizer_step(
            OPTIMIZERS["credo VOGN, pool draws"], make(), x, y
        ),
    }
    if net != "mlp":
        by_windows, by_groups = harvested(make(), x, y), harvested(make(), x, y)
        contestants["credo, windows only"] = forced(by_windows, "by_windows")
        contestants["credo, groups only"] = forced(by_groups, "by_groups")
    builders = {"vmap": lambda: vmapped(make(), x, y)}
    for name, find in rivals.SQUARES.items():
        builders[name] = partial(from_rival, find, make(), x, y)
    contestants |= rivals.working(builders)
    rounds, steps = ROUNDS[net]
    return interleave("per-example squares", net, contestants, BASELINES, rounds, steps, SECONDS)


MEMORY: dict[str, Callable[[nn.Module, Tensor, Tensor], Callable]] = {
    "adam": adam_step,
    "harvested": harvested,
}


def memory_child(contestant: str) -> None:
    """Print the peak of resident memory above the process's baseline, in MiB; its own process."""
    MEMORY[contestant](NETS["mlp"](16), *batch("mlp"))()  # type: ignore[call-arg]
    Path("/proc/self/clear_refs").write_text("5")
    baseline = _kilobytes("VmRSS")
    step = MEMORY[contestant](NETS["wide mlp"](), *batch("wide mlp"))
    for _ in range(4):
        step()
    print(f"PEAK {(_kilobytes('VmHWM') - baseline) / 1024:.1f}")


def memory() -> list[Row]:
    """Peak memory of training a wide MLP, each contestant in a process of its own."""
    peaks = {}
    for contestant in MEMORY:
        command = [sys.executable, "-m", "bench.squares", "memory-child", contestant]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[contestant] = float(lines.split()[-1])
    return [
        Row("peak memory", "wide mlp", name, round(peak / peaks["adam"], 3), (peak, peak), "adam")
        for name, peak in peaks.items()
    ]


if __name__ == "__main__":
    torch.set_num_threads(2)
    if sys.argv[1:2] == ["memory-child"]:
        memory_child(sys.argv[2])
    else:
        for row in memory():
            print(row)
