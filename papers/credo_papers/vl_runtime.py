r"""Unlu & Aitchison (2021), table 2: what a step of Variational Laplace costs.

Seconds per epoch on CIFAR-10 are 114.9 for VL, 43.2 for VI and 41.8 for MAP: "VL is around a factor
of 3 slower than either" (the text has "VI or VL" for "VI or MAP"; the ratios are 2.66 and 2.75),
and VI costs 1.03 times what MAP does. Only ratios travel from their cards to this machine.

Methods take steps in turn, each with a network of its own, and each round gives one ratio; a seed's
ratio is the median of its rounds. Time is the processor's, so that other programs on the machine
don't count. VL is the paper's: backward through the gradient (``route="exact"``). The default
``route="difference"`` is timed beside it and has no part in the verdict.

The rules, written before any run: with 95 % confidence over seeds, VL costs between `AROUND_THREE`
times what MAP and what VI cost, and VI at most `ABOUT_EQUAL` times what MAP does. Reproduced if all
hold, not reproduced if one is refuted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import credo
from credo.report.style import (
    BLUE,
    GREY,
    VERMILLION,
    blank_figure,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)
from credo_papers.networks import NetName, build

AROUND_THREE = (2.0, 4.0)
ABOUT_EQUAL = 1.15

METHODS = {"map": "MAP", "vi": "VI", "vl_difference": "VL, difference", "vl": "VL, exact"}
DOCUMENT = {"map": 1.0, "vi": 43.2 / 41.8, "vl": 114.9 / 41.8}


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings(Settings):
    """``rounds`` in which each method takes one step, after one that is not timed.

    Nothing depends on what the images show, so they are noise.
    """

    net: NetName = "PreactResNet-18"
    image: tuple[int, int, int] = (3, 32, 32)
    num_data: int = 50_000
    epochs: int = 0
    batch_size: int
    rounds: int


def contestants() -> dict[str, Any]:
    """The methods in the order of `METHODS`, untempered."""
    return {
        "map": credo.MAP(temperature=1.0),
        "vi": credo.VI(temperature=1.0),
        "vl_difference": credo.VariationalLaplace(temperature=1.0, route="difference"),
        "vl": credo.VariationalLaplace(temperature=1.0, route="exact"),
    }


def run_one(settings: RuntimeSettings, seed: int, folder: Path) -> Json:
    """Seconds of each step, and the median over rounds of the ratios to MAP's and to VI's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(settings.batch_size, *settings.image, generator=generator)
    y = torch.randint(10, (settings.batch_size,), generator=generator)
    methods = contestants()
    states = {}
    for name, method in methods.items():
        net = build(settings.net, settings.image, seed)
        model = credo.Model(net, credo.likelihoods.Categorical())
        states[name] = method.init(model, settings.num_data, generator)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(1 + settings.rounds):
        for name, method in methods.items():
            start = time.process_time()
            states[name], _ = method.update(states[name], (x, y))
            seconds[name].append(time.process_time() - start)
    timed = {name: np.array(values[1:]) for name, values in seconds.items()}
    result: Json = {f"{name}_seconds": values.tolist() for name, values in timed.items()}
    for name in METHODS:
        result[f"{name}_over_map"] = float(np.median(timed[name] / timed["map"]))
    result["vl_over_vi"] = float(np.median(timed["vl"] / timed["vi"]))
    return result


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    low, high = AROUND_THREE
    return {
        "vl_dearer_than_map": [r["vl_over_map"] - low for r in results],
        "vl_dearer_than_vi": [r["vl_over_vi"] - low for r in results],
        "vl_affordable": [high - max(r["vl_over_map"], r["vl_over_vi"]) for r in results],
        "vi_like_map": [ABOUT_EQUAL - r["vi_over_map"] for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The ratios to MAP: a dot a seed, a bar for their mean, a ring for the paper's."""
    with house_style():
        figure = blank_figure(6.0, 3.4)
        axes = figure.subplots()
        for place, name in enumerate(METHODS):
            values = [r[f"{name}_over_map"] for r in results]
            axes.bar(place, float(np.mean(values)), 0.55, color=BLUE, alpha=0.3)
            axes.scatter([place] * len(values), values, color=BLUE, s=16, zorder=3)
            if name in DOCUMENT:
                axes.plot(place, DOCUMENT[name], "o", markersize=11, markerfacecolor="none",
                          markeredgecolor=VERMILLION, zorder=4)  # fmt: skip
        axes.plot([], [], "o", color=BLUE, markersize=4, label="here, each seed")
        axes.plot([], [], "o", markersize=9, markerfacecolor="none", markeredgecolor=VERMILLION,
                  label="Unlu & Aitchison (2021), table 2")  # fmt: skip
        axes.axhline(1.0, color=GREY, linewidth=1)
        axes.set_xticks(range(len(METHODS)), list(METHODS.values()))
        axes.set(ylabel="time of a step, over MAP's")
        axes.legend(loc="upper left")
        faint_grid(axes)
        return [save(figure, folder / "vl-runtime.png")]


EXPERIMENT = Experiment(
    id="002-runtime",
    paper="002",
    claim="Unlu & Aitchison (2021), table 2: a Variational Laplace epoch takes around 3 times as "
    "long as one of VI or MAP (114.9, 43.2 and 41.8 s), and VI costs what MAP does. Here the "
    "processor time of one step of a PreactResNet-18 on CIFAR-sized images.",
    theorem=False,
    minutes=0.5,
    presets={
        "quick": RuntimeSettings(batch_size=16, rounds=4),
        "paper": RuntimeSettings(batch_size=128, rounds=20),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
