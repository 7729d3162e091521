r"""Khan (2019), "Sequential Bayesian inference": the last posterior as prior loses nothing.

    p(θ | D₁, D₂) = p(D₂ | θ) p(θ | D₁) / ∫ p(D₂ | θ) p(θ | D₁) dθ

The tutorial: set the prior to the previous posterior and recompute; "the global property enables
sequential update", which they say deep learning's local updates cannot do. Two conjugate models, in
which the learning rule at rate one is exact, make both halves checkable:

- a line y = w₀ + w₁x + noise with a Gaussian prior (`gallery.linear_regression`), and coin tosses
  with a Beta prior (`rule.step`): one observation at a time, in two orders, equals all at once;
- the point estimate that gradient descent refits to the newest block alone, starting from the last
  estimate, does not. Blocks arrive from left to right in x, so what it forgets is the left.

Tosses and noise are drawn anew for each seed, the truth is w = (−0.3, 0.5) (Bishop 2006, fig. 3.7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import ConvergenceError
from credo.families import FixedGaussian, FullGaussian
from credo.report.style import BLACK, BLUE, GREY, PALE, VERMILLION, blank_figure, save
from credo.rule.families import Beta
from credo.rule.gallery import linear_regression
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.rule import step
from credo.types import Json, Vector
from credo_papers.experiment import Experiment, Settings, Verdict, summarise

TOLERANCE = 1e-10
"""Rounding of a few thousand updates of numbers of size one to 10⁵, relative to their size."""

TRUTH = (-0.3, 0.5)
NOISE = 0.2
PRIOR_PRECISION = 2.0
SHOWN = (0, 1, 2, 5, 20)
BLOCKS = 5
MAX_STEPS = 20_000


@dataclass(frozen=True, kw_only=True)
class SequentialSettings(Settings):
    """``num_data`` observations of the line, and as many tosses of a coin."""

    net: str = "a line with 2 weights; a coin"
    num_data: int = 20
    epochs: int = 0


def run_one(settings: SequentialSettings, seed: int, folder: Path) -> Json:
    """Both models one observation at a time and all at once; then blocks against refitting."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(settings.num_data, generator=generator, dtype=torch.float64) - 1
    noise = torch.randn(settings.num_data, generator=generator, dtype=torch.float64)
    y = _features(x) @ torch.tensor(TRUTH, dtype=torch.float64) + NOISE * noise
    tosses = (torch.rand(settings.num_data, generator=generator) < 0.7).double()
    order = torch.randperm(settings.num_data, generator=generator)

    batch = linear_regression.fit(_prior(), _features(x), y, NOISE)
    forward, kept = _one_by_one(x, y)
    shuffled, _ = _one_by_one(x[order], y[order])
    coin = _toss(_coin(), tosses)
    coins = _coin(), _coin()
    for one, other in zip(tosses, tosses[order], strict=True):
        coins = _toss(coins[0], one[None]), _toss(coins[1], other[None])
    blocks = _by_blocks(x, y)
    last = blocks[-1]
    return {
        "line_error": max(_difference(q, batch) for q in (forward, shuffled)),
        "coin_error": max(_coin_difference(q, coin) for q in coins),
        "blocks_error": _difference(last["posterior"], batch),
        "refit_distance": float((last["refit"] - batch.mean).abs().max()),
        "refit_distance_in_sd": float(((last["refit"] - batch.mean) / batch.scale).abs().max()),
        "old_rmse_sequential": _old_rmse(x, last["posterior"].mean),
        "old_rmse_refit": _old_rmse(x, last["refit"]),
        "old_rmse_batch": _old_rmse(x, batch.mean),
        "x": x.tolist(),
        "y": y.tolist(),
        "means": [q.mean.tolist() for q in kept],
        "covariances": [q.covariance.tolist() for q in kept],
        "blocks": [
            {
                "x": block["x"].tolist(),
                "y": block["y"].tolist(),
                "mean": block["posterior"].mean.tolist(),
                "covariance": block["posterior"].covariance.tolist(),
                "refit": block["refit"].tolist(),
            }
            for block in blocks
        ],
    }


def check(results: list[Json]) -> Verdict:
    """Sequential equals batch to rounding in every seed, and refitting does not (by over 1e-3)."""
    numbers = summarise(results)
    for name in ("line_error", "coin_error", "blocks_error"):
        numbers[f"largest_{name}"] = max(r[name] for r in results)
    numbers["smallest_refit_distance"] = min(r["refit_distance"] for r in results)
    equal = max(numbers[f"largest_{n}_error"] for n in ("line", "coin", "blocks")) < TOLERANCE
    forgets = numbers["smallest_refit_distance"] > 1e-3
    return Verdict("reproduced" if equal and forgets else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Posterior after 0, 1, 2, 5 and 20 observations; blocks against refitting."""
    return [_draw_strip(results[0], folder), _draw_blocks(results[0], folder)]


def _features(x: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(x), x], -1)


def _prior() -> FullGaussian:
    one = torch.eye(2, dtype=torch.float64)
    return FullGaussian(torch.zeros(2, dtype=torch.float64), PRIOR_PRECISION * one)


def _coin() -> Beta:
    one = torch.ones(1, dtype=torch.float64)
    return Beta(2 * one, 2 * one)


def _one_by_one(x: Tensor, y: Tensor) -> tuple[FullGaussian, list[FullGaussian]]:
    """The last posterior, and those after the numbers of observations in `SHOWN`."""
    q, kept = _prior(), []
    for count in range(len(x) + 1):
        if count in SHOWN:
            kept.append(q)
        if count < len(x):
            now = slice(count, count + 1)
            q = linear_regression.fit(q, _features(x[now]), y[now], NOISE)
    return q, kept


def _toss(prior: Beta, tosses: Tensor) -> Beta:
    """One step of the rule: ∇_μE_q[−log p(tosses, θ)] is minus (heads, tails) and the prior's λ."""
    counts = tosses.sum()[None], (1 - tosses).sum()[None]
    gradient = tuple(-n - natural for n, natural in zip(counts, prior.natural, strict=True))
    return step(prior, gradient, rate=1.0)


def _by_blocks(x: Tensor, y: Tensor) -> list[Json]:
    """After each block from left to right: the sequential posterior, and the refitted estimate."""
    stages: list[Json] = []
    q, refit = _prior(), _prior().mean
    for rows in x.argsort().tensor_split(BLOCKS):
        q = linear_regression.fit(q, _features(x[rows]), y[rows], NOISE)
        refit = _refit(refit, x[rows], y[rows])
        stages.append({"x": x[rows], "y": y[rows], "posterior": q, "refit": refit})
    return stages


def _refit(start: Vector, x: Tensor, y: Tensor) -> Vector:
    """Gradient descent on this block's squared error, from ``start`` until it rests."""
    inputs = _features(x)
    loss = Loss.of(lambda w: 0.5 * (y - inputs @ w).square().mean())
    largest = torch.linalg.eigvalsh(inputs.mT @ inputs / len(x))[-1]
    method = gradient_descent(rate=1.0 / float(largest))
    state = method.init(FixedGaussian(start, torch.tensor(1.0, dtype=torch.float64)))
    for _ in range(MAX_STEPS):
        gradient, _ = method.estimate(state, loss)
        if float(gradient.abs().max()) < 1e-5:
            return state.q.mean
        method.move(state, gradient, None)
    raise ConvergenceError(f"descent on one block still moves after {MAX_STEPS} steps")


def _difference(q: FullGaussian, other: FullGaussian) -> float:
    """The largest relative difference of precision and mean, the latter in standard deviations."""
    size = other.precision.abs().max()
    precision = (q.precision - other.precision).abs().max() / size
    mean = ((q.mean - other.mean) / other.scale).abs().max()
    return max(float(precision), float(mean))


def _coin_difference(q: Beta, other: Beta) -> float:
    return max(float((q.a / other.a - 1).abs()), float((q.b / other.b - 1).abs()))


def _old_rmse(x: Tensor, weights: Vector) -> float:
    """Distance from the true line where the earlier blocks were."""
    old = x.sort().values[: len(x) - len(x) // BLOCKS]
    error = _features(old) @ (weights - torch.tensor(TRUTH, dtype=torch.float64))
    return math.sqrt(float(error.square().mean()))


def _draw_strip(first: Json, folder: Path) -> Path:
    x, y = (torch.tensor(first[name], dtype=torch.float64) for name in ("x", "y"))
    figure = blank_figure(12.5, 5)
    rows = figure.subplots(2, len(SHOWN), sharex="row", sharey="row")
    axis = torch.linspace(-1.6, 1.6, 161, dtype=torch.float64)
    plane = torch.cartesian_prod(axis, axis)
    line = torch.linspace(-1, 1, 61, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    shades = torch.linspace(0.02, 1, 13).tolist()
    for column, count in enumerate(SHOWN):
        covariance = torch.tensor(first["covariances"][column], dtype=torch.float64)
        mean = torch.tensor(first["means"][column], dtype=torch.float64)
        q = FullGaussian(mean, torch.linalg.inv(covariance))
        weights, functions = rows[0, column], rows[1, column]
        density = q.log_prob(plane).exp().reshape(161, 161)
        weights.contourf(axis, axis, (density / density.max()).T, levels=shades, cmap="Blues")
        weights.plot(*TRUTH, "+", color=VERMILLION, markersize=11, markeredgewidth=2)
        title = f"{count or 'no'} observation{'' if count == 1 else 's'}"
        weights.set(title=title, xlabel="w₀", aspect="equal")
        centre = _features(line) @ mean
        spread = 2 * ((_features(line) @ covariance) * _features(line)).sum(1).sqrt()
        functions.fill_between(line, centre - spread, centre + spread, color=BLUE, alpha=0.15,
                               linewidth=0)  # fmt: skip
        for sample in q.sample(6, draws):
            functions.plot(line, _features(line) @ sample, color=BLUE, linewidth=0.9, alpha=0.8)
        functions.plot(line, _features(line) @ torch.tensor(TRUTH, dtype=torch.float64),
                       color=VERMILLION, linestyle="--", linewidth=1.4)  # fmt: skip
        functions.plot(x[:count], y[:count], "o", color=BLACK, markersize=4, zorder=5)
        functions.set(xlabel="x", xlim=(-1, 1), ylim=(-2, 2), xticks=(-1, 0, 1))
    rows[0, 0].set_ylabel("w₁\n(weights)")
    rows[1, 0].set_ylabel("y\n(functions)")
    return save(figure, folder / "sequential-inference.png")


def _draw_blocks(first: Json, folder: Path) -> Path:
    figure = blank_figure(12.5, 3.2)
    line = torch.linspace(-1, 1, 61, dtype=torch.float64)
    truth = _features(line) @ torch.tensor(TRUTH, dtype=torch.float64)
    panels = figure.subplots(1, BLOCKS, sharey=True)
    for number, axes in enumerate(panels):
        block = first["blocks"][number]
        covariance = torch.tensor(block["covariance"], dtype=torch.float64)
        centre = _features(line) @ torch.tensor(block["mean"], dtype=torch.float64)
        spread = 2 * ((_features(line) @ covariance) * _features(line)).sum(1).sqrt()
        refit = _features(line) @ torch.tensor(block["refit"], dtype=torch.float64)
        axes.fill_between(line, centre - spread, centre + spread, color=BLUE, alpha=0.15,
                          linewidth=0)  # fmt: skip
        axes.plot(line, centre, color=BLUE, label="sequential Bayes, ±2σ")
        axes.plot(line, refit, color=VERMILLION, label="refitted to the newest block")
        axes.plot(line, truth, color=BLACK, linestyle=":", label="truth")
        for old in first["blocks"][:number]:
            axes.plot(old["x"], old["y"], "o", color=PALE, markeredgecolor=GREY, markersize=4)
        axes.plot(block["x"], block["y"], "o", color=BLACK, markersize=4.5, label="newest block")
        axes.set(title=f"After block {number + 1}", xlabel="x", xlim=(-1, 1), ylim=(-2, 1.6),
                 xticks=(-1, 0, 1))  # fmt: skip
    panels[0].set_ylabel("y")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return save(figure, folder / "forgetting.png")


EXPERIMENT = Experiment(
    id="004-sequential-inference",
    paper="004",
    claim="Khan (2019), 'Sequential Bayesian inference': with the previous posterior as the prior, "
    "inference one batch at a time gives the posterior of all data at once. (Exact in conjugate "
    "models. Held against it: a point estimate refitted by gradient descent to the newest data "
    "does not end where all data would put it.)",
    theorem=True,
    minutes=0.1,
    presets={"quick": SequentialSettings(), "paper": SequentialSettings(num_data=2000)},
    run_one=run_one,
    check=check,
    figures=figures,
)
