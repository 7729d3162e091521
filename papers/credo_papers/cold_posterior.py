r"""Huix et al. (2022): ELBO_η is for the posterior L^{1/η}·P₀ what the ELBO is for L·P₀.

The paper states the equivalence and shows the cold-posterior effect of Wenzel et al., found by
Markov chains. (There the prior is cooled as well, e^{−U/T}; here, as in the statement, it is not.)
On a network small enough for Hamiltonian Monte Carlo the statement can be looked at: HMC draws from
L^{1/T}·P₀ at a grid of temperatures, mean-field VI maximises ELBO_T, SGLD goes along. A Gaussian
with independent weights is no network's posterior, so VI can't predict as HMC does; but if both aim
at the same distribution, VI's predictions must change with T as HMC's do.

Predictions are compared at test inputs and at a grid of inputs around them, by

    d(A, B) = mean |p_A − p_B| + mean |s_A − s_B|

p being the predicted probability of the first class and s its standard deviation over draws. The
rules were written before any run:

1. ``gap``: over all T, d(VI at T, HMC at T) is smaller than the mean d(VI at T, HMC at T' ≠ T).
2. ``rank_correlation``: over the temperatures, of VI's and HMC's mean s and of their mean
   confidence: positive.
3. ``steps_off``: of the HMC temperatures the nearest to VI at T is at most one step of the grid
   away from T, on average.

Each is tested over seeds with 95 % confidence: reproduced if all hold, not reproduced if one is
refuted, else inconclusive. Inconclusive also if HMC can't tell its own temperatures apart: if d of
one half of its chains from the other, ``hmc_error``, is more than half of d between neighbouring
temperatures, ``hmc_step``, both averaged over T. (Cold chains may stay in one of several modes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import credo
from credo.families import Empirical
from credo.method import Method
from credo.metrics import accuracy, nll
from credo.report.style import (
    BLUE,
    GREEN,
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

METHODS = {"hmc": "HMC", "sgld": "SGLD", "vi": "mean-field VI"}
COLOURS = {"hmc": BLUE, "sgld": GREEN, "vi": VERMILLION}
SCORES = {
    "nll": "test NLL",
    "accuracy": "test accuracy",
    "std": "deviation of p over draws",
    "confidence": "mean confidence",
}
TELLS_APART = 0.5
"""The largest error of HMC, as a share of what one step of temperature changes."""


@dataclass(frozen=True, kw_only=True)
class ColdSettings(Settings):
    """``epochs`` are HMC's transitions, the first ``warmup`` thrown away.

    SGLD takes ``sgld_epochs`` of minibatches, the first quarter thrown away, VI ``vi_epochs`` of
    all data. ``data_noise`` is the deviation of the points from their moons.
    """

    net: str = "2-8-2, tanh"
    num_data: int = 80
    epochs: int = 400
    hidden: int = 8
    data_noise: float = 0.3
    test_data: int = 500
    temperatures: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    prior_scale: float = 1.0
    chains: int = 6
    leapfrog: int = 16
    warmup: int = 160
    sgld_lr: float = 3e-3
    sgld_epochs: int = 500
    batch_size: int = 20
    vi_lr: float = 0.02
    vi_epochs: int = 800
    prediction_samples: int = 400


def run_one(settings: ColdSettings, seed: int, folder: Path) -> Json:
    """All methods at all temperatures, from the same weights, and the distances between them."""
    x, y = credo.data.two_moons(settings.num_data, settings.data_noise, seed)
    test, labels = credo.data.two_moons(settings.test_data, settings.data_noise, seed + 10_000)
    x, test = x.double(), test.double()
    grid = torch.cartesian_prod(torch.linspace(-2, 3, 20), torch.linspace(-1.5, 2, 20))
    points = torch.cat([test, grid.double()])
    result: Json = {"temperatures": list(settings.temperatures)}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    errors = []
    for name in METHODS:
        scores: dict[str, list[float]] = {key: [] for key in SCORES}
        seen[name] = []
        for temperature in settings.temperatures:
            method, epochs, batch_size = _method(name, settings, temperature)
            posterior = credo.fit(
                _model(settings, seed), method, (x, y), epochs=epochs, batch_size=batch_size,
                seed=seed, folder=folder / f"{name}-{temperature:g}", progress=False,
                schedule="cosine" if name == "vi" else "constant",
            )  # fmt: skip
            samples = settings.prediction_samples if name == "vi" else len(_bag(posterior))
            drawn = posterior.predict(points, samples=samples).outputs
            first = drawn.softmax(-1)[..., 0]
            p, s = first.mean(0), first.std(0)
            seen[name].append((p, s))
            probs = torch.stack([p, 1 - p], 1)[: len(test)]
            scores["nll"].append(nll(probs, labels))
            scores["accuracy"].append(accuracy(probs, labels))
            scores["std"].append(float(s[: len(test)].mean()))
            scores["confidence"].append(float(probs.max(1).values.mean()))
            if name == "hmc":
                halves = first.chunk(2)
                errors.append(_distance(*((half.mean(0), half.std(0)) for half in halves)))
        best = settings.temperatures[int(np.argmin(scores["nll"]))]
        result |= {f"{name}_{key}": values for key, values in scores.items()}
        result[f"{name}_best_log10_temperature"] = float(np.log10(best))
    neighbours = [_distance(a, b) for a, b in pairwise(seen["hmc"])]
    result |= {
        "hmc_errors": errors,
        "hmc_error": float(np.mean(errors)),
        "hmc_step": float(np.mean(neighbours)),
    }
    for name in ("vi", "sgld"):
        distances = np.array([[_distance(a, b) for b in seen["hmc"]] for a in seen[name]])
        result |= {f"{name}_{key}": value for key, value in _compare(distances).items()}
        correlations = [
            float(spearmanr(result[f"{name}_{key}"], result[f"hmc_{key}"]).statistic)
            for key in ("std", "confidence")
        ]
        result[f"{name}_rank_correlation"] = float(np.nan_to_num(correlations).mean())
    return result


def check(results: list[Json]) -> Verdict:
    """The three rules at the top of the file."""
    numbers = summarise(results)
    signs = [
        sign_of_mean([r["vi_gap"] for r in results]),
        sign_of_mean([r["vi_rank_correlation"] for r in results]),
        sign_of_mean([1.0 - r["vi_steps_off"] for r in results]),
    ]
    if numbers["hmc_error"] > TELLS_APART * numbers["hmc_step"]:
        return Verdict("inconclusive", numbers)
    return Verdict(judgement(signs), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Every score over the temperature, and how far VI at each one is from HMC at each one."""
    temperatures = results[0]["temperatures"]
    with house_style():
        figure = blank_figure(11, 6)
        axes = figure.subplots(2, 3).flatten()
        for place, (key, label) in zip(axes, SCORES.items(), strict=False):
            for name, title in METHODS.items():
                seeds = np.array([r[f"{name}_{key}"] for r in results])
                place.plot(temperatures, seeds.mean(0), "o-", color=COLOURS[name], label=title,
                           markersize=4)  # fmt: skip
                if len(seeds) > 1:
                    error = seeds.std(0, ddof=1) / len(seeds) ** 0.5
                    place.fill_between(temperatures, seeds.mean(0) - error, seeds.mean(0) + error,
                                       color=COLOURS[name], alpha=0.15, linewidth=0)  # fmt: skip
            place.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
            place.set(xscale="log", xlabel="temperature T", title=label)
            faint_grid(place)
        axes[0].legend()
        ticks = [f"{t:g}" for t in temperatures]
        for place, name in zip(axes[4:], ("vi", "sgld"), strict=True):
            distances = np.mean([r[f"{name}_distances"] for r in results], axis=0)
            image = place.imshow(distances, origin="lower", cmap="Blues_r", aspect="auto")
            place.plot(distances.argmin(1), range(len(temperatures)), "o", color="white",
                       markeredgecolor=GREY, label="nearest")  # fmt: skip
            place.plot([0, len(ticks) - 1], [0, len(ticks) - 1], color=GREY, linewidth=0.8)
            place.set(xticks=range(len(ticks)), xticklabels=ticks, yticks=range(len(ticks)),
                      yticklabels=ticks, xlabel="T of HMC", ylabel=f"T of {METHODS[name]}",
                      title=f"distance of {METHODS[name]} from HMC")  # fmt: skip
            figure.colorbar(image, ax=place)
            place.legend(loc="upper left", fontsize=8)
    return [save(figure, folder / "cold-posterior.png")]


def _method(name: str, settings: ColdSettings, temperature: float) -> tuple[Method[Any], int, int]:
    """The method with its epochs and batch size."""
    if name == "hmc":
        hmc = credo.HMC(
            temperature=temperature, chains=settings.chains, leapfrog=settings.leapfrog,
            warmup=settings.warmup,
        )  # fmt: skip
        return hmc, settings.epochs, settings.num_data
    if name == "sgld":
        sgld = credo.SGLD(
            temperature=temperature, lr=settings.sgld_lr, chains=settings.chains,
            warmup=settings.sgld_epochs / 4,
        )  # fmt: skip
        return sgld, settings.sgld_epochs, settings.batch_size
    vi = credo.VI(temperature=temperature, lr=settings.vi_lr, samples=2, draws="normal")
    return vi, settings.vi_epochs, settings.num_data


def _model(settings: ColdSettings, seed: int) -> credo.Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, settings.hidden), nn.Tanh(), nn.Linear(settings.hidden, 2))
    prior = credo.priors.Normal(scale=settings.prior_scale)
    return credo.Model(net.double(), credo.likelihoods.Categorical(), prior)


def _bag(posterior: credo.Posterior) -> Empirical:
    assert isinstance(posterior.q, Empirical)
    return posterior.q


def _distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    return float(sum((one - other).abs().mean() for one, other in zip(a, b, strict=True)))


def _compare(distances: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Json:
    """What the distances (T of the method, T of HMC) say of the temperatures."""
    count = len(distances)
    own = distances.diagonal()
    others = (distances.sum(1) - own) / max(1, count - 1)
    return {
        "distances": distances.tolist(),
        "own_distance": float(own.mean()),
        "gap": float((others - own).mean()),
        "steps_off": float(np.abs(distances.argmin(1) - np.arange(count)).mean()),
    }


EXPERIMENT = Experiment(
    id="000-cold-posterior",
    paper="000",
    claim="Huix et al. (2022), the tempered ELBO: maximising −η·KL(q‖P₀) + E_q[log L] is "
    "variational inference for the tempered posterior proportional to L^(1/η)·P₀. Read as: over a "
    "grid of temperatures VI's predictions change as those of Hamiltonian Monte Carlo on that "
    "posterior do, and are nearest to HMC's of the same temperature. (The equivalence itself is a "
    "theorem; how well a mean-field Gaussian follows is not.)",
    theorem=False,
    minutes=3,
    presets={
        "quick": ColdSettings(),
        # The paper has no such experiment: the same with chains four times as long.
        "paper": ColdSettings(
            epochs=2000, warmup=500, sgld_lr=1e-3, sgld_epochs=8000, vi_lr=0.01, vi_epochs=5000,
            temperatures=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
