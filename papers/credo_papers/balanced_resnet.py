r"""Huix et al. (2022) on CIFAR-10: does balancing carry over to a residual network?

The paper plots ResNet-20 against η with a line at η = 1, N being the number of parameters. Here
networks of its structure with several widths (channels of the first stage) run over τ and at η = 1;
the four statements and how they are decided: `credo_papers.temperature_setup`. They are
sharper than the paper, which has one width.

The prior is N(0, 1/5) on every weight; norm layers, here group norm so that examples don't mix, are
point estimates without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import credo
from credo.types import Json
from credo_papers.experiment import Experiment, Verdict
from credo_papers.networks import ResidualBlock
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


@dataclass(frozen=True, kw_only=True)
class ResNetSettings(TemperatureSettings):
    """``blocks`` of each of the three stages; 3 and a width of 16 make ResNet-20."""

    net: str = "ResNet-8 GN"
    data: str = "cifar10"
    foreign: str = "svhn"
    widths: tuple[int, ...] = (4, 8, 16)
    taus: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
    per: Per = "parameters"
    pool: int = 2
    num_data: int = 5000
    epochs: int = 12
    lr: float = 3e-3
    scale_lr: float = 0.03
    blocks: int = 1


def residual_net(width: int, blocks: int, classes: int, channels: int = 3) -> nn.Sequential:
    """Three stages of ``width``, 2·``width`` and 4·``width`` channels, with group norm.

    >>> sum(p.numel() for p in residual_net(16, 3, 10).parameters())
    272474
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.GroupNorm(width // 4, width), nn.ReLU()
    ]  # fmt: skip
    before = width
    for stage, after in enumerate((width, 2 * width, 4 * width)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(ResidualBlock(before, after, stride, "group"))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def run_one(settings: ResNetSettings, seed: int, folder: Path) -> Json:
    """Every width and temperature."""
    data = load(settings)
    channels = data.train[0].shape[1]

    def model(width: int) -> credo.Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = residual_net(width, settings.blocks, 10, channels)
        prior = credo.priors.Normal(scale=PRIOR_SCALE)
        return credo.Model(net, credo.likelihoods.Categorical(), prior)

    return sweep(settings, model, data, seed, folder)


def check(results: list[Json]) -> Verdict:
    """The rule of `temperature_setup`."""
    return verdict(judged(results))


def figures(results: list[Json], folder: Path) -> list[Path]:
    """All metrics over τ and over η."""
    path = folder / "balanced-resnet.png"
    return [draw(results, "parameter", path, "channels of the first stage")]


EXPERIMENT = Experiment(
    id="000-balanced-resnet",
    paper="000",
    claim="Huix et al. (2022): balancing carries over to a residual network on CIFAR-10: "
    "confidence falls with τ, an intermediate τ has the best NLL, and at η = 1 the network falls "
    "back to its prior. Ours: curves of different widths lie at least twice as close over τ as "
    "over η.",
    theorem=False,
    needs=("cifar10", "svhn"),
    minutes=10,
    presets={
        "quick": ResNetSettings(),
        "paper": ResNetSettings(
            net="ResNet-20 GN",
            pool=1,
            blocks=3,
            widths=(8, 16, 32),
            num_data=50_000,
            epochs=200,
            lr=1e-3,
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
