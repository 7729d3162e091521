r"""Huix et al. (2022) on MNIST: one hidden layer of growing width, balanced and not.

Two parametrisations of the same network. "mean_field": f(x) = (1/N) Σ_j a_j φ(⟨b_j, x⟩) with φ =
ReLU and a prior N(0, 1/5) on every weight, for which its limit theorem holds; the verdict rests on
it. "usual": two `nn.Linear` layers with biases and a prior of variance 1/fan-in, for which nothing
is claimed; its numbers begin with ``usual_``. In both N counts parameters, as in the paper's
experiments: in the theory it is hidden units, which for one input size differ by a factor.

The four statements and how they are decided: `credo_papers.temperature_setup`. Besides, ours:
``<width>_from_prior`` of the figures' data is the RMS distance of test from prior predictions.

Adam's steps don't shrink with the gradient, so with the factor 1/N one rate serves all widths, but
a larger one than usual: weights have to grow until an average, and not a sum, tells digits apart.
The rates were chosen by training loss alone, at τ = 1e-4 and widths 50 and 800: of 0.003, 0.01,
0.02 and 0.05 for the means, training accuracy is above 98 % only at the last; ten times as much for
the scales, the default, lets wide networks diverge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import credo
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.temperature_setup import (
    PRIOR_SCALE,
    Per,
    TemperatureSettings,
    draw,
    judged,
    load,
    sweep,
    verdict,
)

PARAMETRISATIONS = ("mean_field", "usual")


@dataclass(frozen=True, kw_only=True)
class WidthSettings(TemperatureSettings):
    """The defaults are those of the quick preset; ``lr`` is for the first parametrisation."""

    net: str = "one hidden ReLU layer"
    data: str = "mnist"
    foreign: str = "fashion-mnist"
    widths: tuple[int, ...] = (50, 200, 800, 3200)
    taus: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
    per: Per = "parameters"
    num_data: int = 5000
    epochs: int = 10
    lr: float = 0.05
    usual_lr: float = 3e-3
    scale_lr: float = 0.03


class MeanFieldNet(nn.Module):
    """f(x) = (1/N) Σ_j a_j relu(⟨b_j, x⟩), x (B, C, H, W) → (B, classes)."""

    def __init__(self, pixels: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(pixels, width, bias=False)
        self.output = nn.Linear(width, classes, bias=False)
        self.width = width
        nn.init.normal_(self.hidden.weight, std=1 / math.sqrt(pixels))
        nn.init.normal_(self.output.weight, std=PRIOR_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        """The average over the hidden units."""
        hidden = torch.relu(self.hidden(x.flatten(1)))
        output: Tensor = self.output(hidden) / self.width
        return output


def model(name: str, pixels: int, width: int, classes: int, seed: int) -> credo.Model:
    """The network in one of the `PARAMETRISATIONS`, its weights drawn from ``seed``."""
    likelihood = credo.likelihoods.Categorical()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "mean_field":
            net = MeanFieldNet(pixels, width, classes)
            return credo.Model(net, likelihood, credo.priors.Normal(scale=PRIOR_SCALE))
        plain = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes)
        )
        return credo.Model(plain, likelihood, credo.priors.Normal.fan_in())


def run_one(settings: WidthSettings, seed: int, folder: Path) -> Json:
    """Every width and temperature in both parametrisations."""
    data = load(settings)
    pixels, classes = data.train[0][0].numel(), 10
    rates = {"mean_field": settings.lr, "usual": settings.usual_lr}
    return {
        name: sweep(
            replace(settings, lr=rates[name]),
            lambda width, name=name: model(name, pixels, width, classes, seed),  # type: ignore[misc]
            data,
            seed,
            folder / name,
        )
        for name in PARAMETRISATIONS
    }


def check(results: list[Json]) -> Verdict:
    """The mean-field parametrisation decides; of the other one the same numbers are given."""
    numbers = judged([result["mean_field"] for result in results])
    usual = judged([result["usual"] for result in results])
    return verdict(numbers | {f"usual_{name}": value for name, value in usual.items()})


def figures(results: list[Json], folder: Path) -> list[Path]:
    """One figure for each parametrisation."""
    return [
        draw(
            [result[name] for result in results], "unit",
            folder / f"width-temperature-{name}.png", "hidden units",
        )
        for name in PARAMETRISATIONS
    ]  # fmt: skip


EXPERIMENT = Experiment(
    id="000-width-temperature",
    paper="000",
    claim="Huix et al. (2022): with η = τ·n/N a one-hidden-layer network on MNIST keeps learning "
    "at every width: confidence falls with τ, an intermediate τ has the best NLL, and at η = 1 a "
    "wide network falls back to its prior. Ours, from its limit theorem: curves of different "
    "widths lie at least twice as close over τ as over η.",
    theorem=False,
    needs=("mnist", "fashion-mnist"),
    minutes=6,
    presets={
        "quick": WidthSettings(),
        "paper": WidthSettings(
            num_data=60_000,
            epochs=100,
            lr=0.01,
            usual_lr=1e-3,
            scale_lr=0.01,
            test_images=10_000,
            prediction_samples=50,
            taus=tuple(float(10.0 ** (k / 2)) for k in range(-8, 5)),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
