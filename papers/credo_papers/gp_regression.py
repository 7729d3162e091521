r"""Khan (2019), "DNN2GP": the Gaussian process of a trained network is unsure away from the data.

The tutorial turns a trained network into a Gaussian process; the paper it presents (Khan, Immer,
Abedi & Korzepa, 2019, arXiv:1906.01930) draws its mean on one-dimensional regressions with two
bands, f(x) ± √(JΣJᵀ + σ²), without numbers. Here a tanh network is trained on a sine with a gap and
on data in the manner of Snelson's (200 points, dense on the left, a gap, and nothing beyond the
ends), its Laplace approximation becomes a GP, and the model's part of the variance, JΣJᵀ, is read
near the training inputs, in the gap and beyond the ends.

Rules of the verdict, written before the first run: with 95 % confidence over seeds, on both data
sets, the mean log of the model's standard deviation

1. ``gap``: is larger in the gap than at the training inputs;
2. ``beyond``: is larger beyond the ends than at the training inputs;

and (3, ``fits``) the mean's root mean square error at held-out inputs near the data is below
`FITTED` times the noise, in every run, else inconclusive. Reproduced if all hold, not reproduced if
1 or 2 is refuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor, nn

import credo
from credo.functionspace import to_gp
from credo.report.style import BLACK, BLUE, SKY, blank_figure, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise

FITTED = 1.5
"""How far above the noise the error near the data may be: what fits nothing is no test."""

PROBLEMS = {"sinus": "a sine with a gap", "snelson": "in the manner of Snelson's data"}
GAPS = {"sinus": (-1.2, 1.2), "snelson": (2.2, 2.9)}
ENDS = {"sinus": (-4.0, 4.0), "snelson": (0.0, 6.0)}
BEYOND = 1.5


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(Settings):
    """``prior_scale`` of every weight; ``noise`` of both problems."""

    net: str = "1-20-20-1, tanh"
    num_data: int = 200
    epochs: int = 1500
    lr: float = 1e-2
    prior_scale: float = 1.0
    noise: float = 0.1
    grid: int = 240


def snelson_like(n: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """A wiggly curve on [0, 2] and [3, 6], two thirds of its points on the left."""
    generator = Generator().manual_seed(seed)
    left = torch.rand(n, 1, generator=generator) < 2 / 3
    u = torch.rand(n, 1, generator=generator)
    x = torch.where(left, 2 * u, 3 + 3 * u)
    return x, snelson_curve(x) + noise * torch.randn(n, 1, generator=generator)


def snelson_curve(x: Tensor) -> Tensor:
    """What the noise is added to."""
    return torch.sin(2.5 * x) * torch.exp(-0.2 * x)


def problem(name: str, settings: RegressionSettings, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    if name == "sinus":
        return credo.data.sinus_with_gap(settings.num_data, seed, settings.noise)
    return snelson_like(settings.num_data, settings.noise, seed)


def run_one(settings: RegressionSettings, seed: int, folder: Path) -> Json:
    """Train on both problems; the process's mean and bands on a grid."""
    result: Json = {}
    for name in PROBLEMS:
        x, y = problem(name, settings, seed)
        test, truth = problem(name, settings, seed + 1_000_000)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = nn.Sequential(
                nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
            )
        model = credo.Model(
            net,
            credo.likelihoods.Gaussian(settings.noise),
            credo.priors.Normal(settings.prior_scale),
        )
        method = credo.Laplace(structure="full", train=credo.MAP(lr=settings.lr))
        posterior = credo.fit(
            model, method, (x, y), epochs=settings.epochs, batch_size=50, seed=seed,
            folder=folder / name, progress=False,
        )  # fmt: skip
        gp = to_gp(posterior)
        low, high = ENDS[name]
        grid = torch.linspace(low - BEYOND, high + BEYOND, settings.grid)[:, None]
        predicted = gp.predict(grid)
        spread = predicted.model_variance.sqrt().flatten()
        place = grid.flatten()
        gap = (place > GAPS[name][0]) & (place < GAPS[name][1])
        out = (place < low - 0.5) | (place > high + 0.5)
        near = float(gp.predict(x).model_variance.sqrt().log().mean())
        result |= {
            f"{name}_gap_rise": float(spread[gap].log().mean()) - near,
            f"{name}_beyond_rise": float(spread[out].log().mean()) - near,
            f"{name}_error": float((gp.mean(test) - truth).square().mean().sqrt()) / settings.noise,
            f"{name}_grid": place.tolist(),
            f"{name}_mean": predicted.mean.flatten().tolist(),
            f"{name}_model_std": spread.tolist(),
            f"{name}_std": predicted.std.flatten().tolist(),
            f"{name}_x": x.flatten().tolist(),
            f"{name}_y": y.flatten().tolist(),
        }
    return result


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = [
        _noted(numbers, f"{name}_{where}", [r[f"{name}_{where}_rise"] for r in results])
        for name in PROBLEMS
        for where in ("gap", "beyond")
    ]
    fits = all(r[f"{name}_error"] < FITTED for r in results for name in PROBLEMS)
    numbers["fits_holds"] = float(fits)
    if min(signs) < 0:
        return Verdict("not reproduced", numbers)
    return Verdict("reproduced" if fits and min(signs) > 0 else "inconclusive", numbers)


def _noted(numbers: dict[str, float], name: str, margins: Sequence[float]) -> int:
    sign = sign_of_mean(margins)
    numbers[f"{name}_holds"] = float(sign)
    return sign


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The first seed's data, mean, and bands of the model and of the model with noise."""
    first = results[0]
    with house_style():
        figure = blank_figure(10, 3.4)
        for axes, (name, title) in zip(
            figure.subplots(1, len(PROBLEMS)), PROBLEMS.items(), strict=True
        ):
            grid, mean = np.array(first[f"{name}_grid"]), np.array(first[f"{name}_mean"])
            for key, colour, label in (
                ("std", SKY, "model and noise"), ("model_std", BLUE, "model"),
            ):  # fmt: skip
                band = 2 * np.array(first[f"{name}_{key}"])
                axes.fill_between(
                    grid, mean - band, mean + band, color=colour, alpha=0.35, linewidth=0,
                    label=f"±2 std, {label}",
                )  # fmt: skip
            axes.plot(grid, mean, color=BLUE, label="mean")
            axes.scatter(first[f"{name}_x"], first[f"{name}_y"], s=5, color=BLACK, zorder=3)
            axes.set(xlabel="x", ylabel="y", title=title[0].upper() + title[1:], ylim=(-3, 3))
        axes.legend(fontsize=8.5)
        return [save(figure, folder / "gp-regression.png")]


EXPERIMENT = Experiment(
    id="004-gp-uncertainty",
    paper="004",
    claim="Khan (2019), DNN2GP: the Gaussian process of a trained network is more uncertain away "
    "from the data. Here: on a sine with a gap and on data like Snelson's its model standard "
    "deviation is larger in the gap and beyond the ends than at the training inputs.",
    theorem=False,
    minutes=0.3,
    presets={
        "quick": RegressionSettings(),
        "paper": RegressionSettings(epochs=10_000, grid=1000),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
