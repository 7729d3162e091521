r"""What the experiments of Huix et al. (2022) share: runs over widths × temperatures.

The paper trains a one-hidden-layer network and a ResNet-20 by Bayes by backprop (centred
Gaussian prior of variance 1/5) at several η = τ·n/N, n the number of examples and N that of hidden
units or of parameters, and plots accuracy, NLL, ECE and confidence (the mean of the largest
probability) with a line at η = 1. Widths, grid, optimizer and samples are not in the paper, and
nothing out of distribution is. That curves of different widths lie on each other over τ, and not
over η, is our sharpening of its limit theorem.

Four statements, written before any run. Each is a number for every seed, positive where the
statement holds, and decided by its mean over seeds (`sign_of_mean`):

aligned       over τ the curves of the widths are at least twice as close as over η: the logarithm
              of half the ratio of `spread` over η to that over τ, the smaller of NLL's and
              confidence's
collapsed     at η = 1 the widest network's NLL is nearer to ln C, that of knowing nothing, than to
              its best
intermediate  the best NLL is inside the grid: the mean over widths of the ends' smaller NLL over
              the smallest one inside, minus 1
monotone      confidence never rises with τ: 0.02 minus its largest rise from one τ to the next
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

import credo
from credo import storage
from credo.families import DiagGaussian
from credo.metrics import accuracy, auroc, confidence, ece, nll
from credo.posterior.posterior import Posterior
from credo.report.style import GREY, blank_figure, faint_grid, house_style, save
from credo.temperature import hidden_units
from credo.types import Json
from credo_papers.experiment import Settings, Verdict, judgement, mean_and_error, sign_of_mean

PRIOR_SCALE = math.sqrt(1 / 5)
"""The paper's prior has variance 1/5."""
METRICS = {
    "accuracy": "test accuracy",
    "nll": "test NLL",
    "ece": "ECE",
    "confidence": "confidence",
    "auroc": "OOD AUROC",
    "kl": "KL per {per}",
}
TOLERATED_RISE = 0.02
CLOSER = 2.0
"""How many times closer over τ than over η counts as aligned."""


Per: TypeAlias = Literal["units", "parameters"]


@dataclass(frozen=True, kw_only=True)
class TemperatureSettings(Settings):
    """``widths`` of the network, ``taus`` of the sweep; η = 1 is run beside them.

    ``num_data`` training images, the first of the set; ``test_images`` and as many of the set
    ``foreign``, whose images belong to no class. Images are averaged over ``pool`` × ``pool``
    pixels. ``per`` is what N counts.
    """

    data: str
    foreign: str
    widths: tuple[int, ...]
    taus: tuple[float, ...]
    per: Per
    pool: int = 1
    test_images: int = 2000
    batch_size: int = 128
    lr: float
    scale_lr: float
    prediction_samples: int = 16


@dataclass(frozen=True)
class SweepData:
    """Standardised images: to train on, to test on, and of another world."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: Tensor


def load(settings: TemperatureSettings) -> SweepData:
    """The images, at the scale of the settings."""
    own, other = credo.data.load(settings.data), credo.data.load(settings.foreign)
    count, shown = settings.num_data, settings.test_images
    images = (own.train[0][:count], own.test[0][:shown], other.test[0][:shown])
    pooled = (avg_pool2d(x, settings.pool) if settings.pool > 1 else x for x in images)
    train, test, foreign = credo.data.standardise(*pooled)
    return SweepData((train, own.train[1][:count]), (test, own.test[1][:shown]), foreign)


def sweep(
    settings: TemperatureSettings,
    build: Callable[[int], credo.Model],
    data: SweepData,
    seed: int,
    folder: Path,
) -> Json:
    """Every width at every temperature: for each metric a list over the temperatures.

    The last entry of each list is at η = 1. A run that is finished is kept in ``folder`` and not
    repeated.
    """
    result: Json = {"widths": list(settings.widths), "taus": list(settings.taus)}
    for width in settings.widths:
        runs = [
            _kept(folder / f"{width}-tau-{tau:g}.json", settings, build, width, data, tau, seed)
            for tau in settings.taus
        ]
        runs.append(_kept(folder / f"{width}-eta-1.json", settings, build, width, data, None, seed))
        result |= {f"{width}_{name}": [run[name] for run in runs] for name in runs[0]}
    return result


def _kept(
    path: Path,
    settings: TemperatureSettings,
    build: Callable[[int], credo.Model],
    width: int,
    data: SweepData,
    tau: float | None,
    seed: int,
) -> Json:
    if path.exists():
        stored: Json = json.loads(path.read_text(encoding="utf-8"))
        return stored
    result = run_at(settings, build(width), data, tau, seed)
    storage.write_atomically(path, json.dumps(result).encode())
    return result


def run_at(
    settings: TemperatureSettings,
    model: credo.Model,
    data: SweepData,
    tau: float | None,
    seed: int,
) -> Json:
    """Train at this τ, or at η = 1, and score."""
    segments, count = model.random.segments, len(data.train[1])
    size = hidden_units(segments) if settings.per == "units" else model.random.size
    eta = 1.0 if tau is None else tau * count / size
    method = credo.VI(lr=settings.lr, scale_lr=settings.scale_lr, temperature=eta, draws="pool")
    posterior = credo.fit(
        model, method, data.train,
        epochs=settings.epochs, batch_size=settings.batch_size, seed=seed, progress=False,
        schedule="cosine",
    )  # fmt: skip
    last = posterior.history[-1]
    return {
        "tau": eta * size / count,
        "eta": eta,
        "kl": last["kl"] / size,
        "kl_total": last["kl"],
        "train_nll": last["nll"],
        **_scores(posterior, data, settings.prediction_samples),
    }


def _scores(posterior: Posterior, data: SweepData, samples: int) -> Json:
    def predicted(x: Tensor, of: Posterior = posterior) -> Tensor:
        return of.predict(x, samples=samples, keep_samples=False).probs

    probs, foreign = predicted(data.test[0]), predicted(data.foreign)
    train = predicted(data.train[0][: len(probs)])
    prior = predicted(data.test[0], _prior_predictive(posterior))
    labels = data.test[1]
    return {
        "accuracy": accuracy(probs, labels),
        "nll": nll(probs, labels),
        "ece": ece(probs, labels),
        "confidence": confidence(probs),
        "auroc": auroc(_entropy(probs), _entropy(foreign)),
        "from_prior": float((probs - prior).square().mean().sqrt()),
        "train_accuracy": accuracy(train, data.train[1][: len(probs)]),
    }


def _prior_predictive(posterior: Posterior) -> Posterior:
    """The same network with its weights drawn from the prior."""
    prior, like = posterior.model.prior_over_weights(), posterior.mean
    scale = torch.as_tensor(prior.scale).to(like).expand_as(like).contiguous()
    q = DiagGaussian(torch.zeros_like(like), scale)
    return Posterior(posterior.model, q, posterior.point, posterior.buffers, posterior.draws)


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp_min(1e-12).log()).sum(1)


# --- what the curves say --------------------------------------------------------------------------


def spread(result: Json, metric: str, over: str) -> float:
    r"""∫ std over widths of the metric d log₁₀ x, x from where all curves have begun to the first
    end; 0 if they lie on each other.

    >>> level = {"1_tau": [0.1, 1, 10, 5], "1_nll": [1, 1, 2, 2], "2_tau": [0.1, 1, 10, 5]}
    >>> spread({"widths": [1, 2], **level, "2_nll": [2, 2, 3, 3]}, "nll", "tau")
    1.0
    """
    curves = [_curve(result, width, metric, over) for width in result["widths"]]
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(low, high, 200)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return float(np.trapezoid(values.std(0), grid))


def _curve(
    result: Json, width: int, metric: str, over: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """log₁₀ of τ or η, and the metric, without the run at η = 1."""
    x = np.log10(np.array(result[f"{width}_{over}"][:-1], dtype=float))
    return x, np.array(result[f"{width}_{metric}"][:-1], dtype=float)


def aligned(result: Json) -> float:
    """ln of how many times closer than `CLOSER` the curves are over τ."""
    ratios = [
        spread(result, metric, "eta") / max(spread(result, metric, "tau"), 1e-12)
        for metric in ("nll", "confidence")
    ]
    return math.log(max(min(ratios), 1e-12) / CLOSER)


def collapsed(result: Json, classes: int = 10) -> float:
    """How far beyond the middle, between its best and ln C, the widest NLL at η = 1 lies."""
    values = result[f"{max(result['widths'])}_nll"]
    return float(values[-1] - (min(values) + math.log(classes)) / 2)


def intermediate(result: Json) -> float:
    """By what share the best NLL inside of the grid beats both ends; mean over widths."""
    gains = []
    for width in result["widths"]:
        values = result[f"{width}_nll"][:-1]
        gains.append(min(values[0], values[-1]) / min(values[1:-1]) - 1)
    return math.fsum(gains) / len(gains)


def monotone(result: Json) -> float:
    """`TOLERATED_RISE` minus the largest rise of confidence between neighbouring τ."""
    rises = [np.diff(result[f"{width}_confidence"][:-1]).max() for width in result["widths"]]
    return float(TOLERATED_RISE - max(rises))


def judged(results: Sequence[Json]) -> dict[str, float]:
    """For each statement the mean of its number, and 1, −1 or 0 for holds, fails or open."""
    numbers: dict[str, float] = {}
    for name, measure in STATEMENTS.items():
        values = [measure(result) for result in results]
        numbers[name] = mean_and_error(values)[0]
        numbers[f"{name}_holds"] = sign_of_mean(values)
    for over in ("tau", "eta"):
        for metric in ("nll", "confidence"):
            values = [spread(r, metric, over) for r in results]
            numbers[f"{metric}_spread_over_{over}"] = mean_and_error(values)[0]
    return numbers


STATEMENTS: Mapping[str, Callable[[Json], float]] = {
    "aligned": aligned,
    "collapsed": collapsed,
    "intermediate": intermediate,
    "monotone": monotone,
}


def verdict(numbers: dict[str, float]) -> Verdict:
    """Reproduced if every statement holds, not if one fails, open otherwise."""
    signs = [numbers[f"{name}_holds"] for name in STATEMENTS]
    return Verdict(judgement(signs), numbers)


# --- pictures -------------------------------------------------------------------------------------


def draw(results: Sequence[Json], per: str, path: Path, width_name: str) -> Path:
    """All metrics over τ in the upper row and over η in the lower, a colour for each width."""
    widths = results[0]["widths"]
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, len(widths)))
    with house_style():
        figure = blank_figure(2.4 * len(METRICS), 5.0)
        panels = figure.subplots(2, len(METRICS), sharey="col")
        for row, over, symbol in zip(panels, ("tau", "eta"), ("τ", "η"), strict=True):
            for axes, (metric, label) in zip(row, METRICS.items(), strict=True):
                for width, colour in zip(widths, shades, strict=True):
                    _line(axes, results, f"{width}_", metric, over, colour, f"{width}")
                if over == "eta":
                    axes.axvline(1.0, color=GREY, linewidth=1, linestyle=(0, (3, 2)))
                axes.set(xscale="log", xlabel=symbol)
                axes.set_title(label.format(per=per), fontsize=9.5, fontweight="normal")
                faint_grid(axes)
        for axes in panels[:, list(METRICS).index("kl")]:
            axes.set_yscale("log")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(widths),
            title=f"{width_name} (diamonds and dashed line: η = 1)",
        )  # fmt: skip
        return save(figure, path)


def _line(
    axes: Axes, results: Sequence[Json], prefix: str, metric: str, over: str, colour: Any,
    label: str,
) -> None:  # fmt: skip
    x = np.array(results[0][f"{prefix}{over}"], dtype=float)
    runs = np.array([result[f"{prefix}{metric}"] for result in results], dtype=float)
    if metric == "kl":
        runs = np.maximum(runs, 1e-6)  # a log axis, and float32 can't tell less from nothing
    mean = runs.mean(0)
    axes.plot(x[:-1], mean[:-1], "o-", color=colour, label=label, markersize=3)
    axes.plot(x[-1], mean[-1], "D", color=colour, markersize=5, markeredgecolor="white")
    if len(runs) > 1:
        std = runs.std(0, ddof=1)[:-1]
        axes.fill_between(
            x[:-1], mean[:-1] - std, mean[:-1] + std, color=colour, alpha=0.2, linewidth=0
        )
