r"""Khan (2019), "Optimization vs Bayes": a Gaussian learner leaves a sharp minimum for a flat one.

The tutorial compares what the two kinds of learning rest at,

    optimisation  ∇ℓ(θ*) = 0,  ∇²ℓ(θ*) ≻ 0          Bayes  E_q*[∇ℓ] = 0,  S* = E_q*[∇²ℓ] ≻ 0

and says, over a picture without axes, that the "Bayesian solution seeks 'flatter' minima". Here

    ℓ(θ) = ½(θ − c)² − d·exp(−(θ − s)²/2w²)

is a bowl with a narrow hole at s whose bottom lies a little deeper than the bowl's. Descent,
Newton and Laplace see ℓ at one point. Variational online Newton (`gallery.von`) sees averages over
q, by Gauss–Hermite quadrature; both conditions are then checked with the closed forms of E_q, which
the learner never sees. Nothing prefers flatness as such: E_q[ℓ] − τH weighs depth against width, so
at a low temperature τ the deeper minimum wins, and near it q can also be caught in a local optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import ConvergenceError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian
from credo.report.style import BLACK, BLUE, GREY, PALE, VERMILLION, blank_figure, save
from credo.rule.expectations import GaussHermite
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.gallery.laplace import laplace
from credo.rule.gallery.newton import newton
from credo.rule.gallery.von import von
from credo.types import Json, Vector
from credo_papers.experiment import Experiment, Settings, Verdict, summarise

TOLERANCE = 1e-8
"""On both conditions: what order-160 quadrature of the hole leaves, times a margin."""

AT_REST = 1e-10
MAX_STEPS = 500

FINE = (1.0, 0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)


@dataclass(frozen=True, kw_only=True)
class FlatSettings(Settings):
    """``starts`` points spread over [−3, 3]; ``temperatures`` from 1, Bayes, to nearly 0."""

    net: str = "one weight"
    num_data: int = 0
    epochs: int = 0
    starts: int = 6
    order: int = 160
    rate: float = 0.4
    temperatures: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)


@dataclass(frozen=True)
class BowlWithHole:
    """ℓ, its derivatives, and their expectations under N(m, v), elementwise for tensors θ, m, v."""

    gap: float
    flat: float = 0.0
    sharp: float = -2.1
    width: float = 0.35

    @cached_property
    def depth(self) -> float:
        """d, such that the hole's centre is ``gap`` below the bottom of the bowl alone."""
        return 0.5 * (self.sharp - self.flat) ** 2 + self.gap

    def value(self, theta: Tensor) -> Tensor:
        """ℓ(θ)."""
        return self.smoothed(theta, torch.zeros_like(theta))

    def smoothed(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E ℓ(θ) for θ ~ N(mean, variance)."""
        bowl = 0.5 * ((mean - self.flat).square() + variance)
        return bowl - self._hole(mean, variance)

    def gradient(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E ℓ'(θ) = ∂ E ℓ/∂m."""
        spread = self.width**2 + variance
        return mean - self.flat + self._hole(mean, variance) * (mean - self.sharp) / spread

    def curvature(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E ℓ''(θ) = ∂² E ℓ/∂m²."""
        spread = self.width**2 + variance
        bend = 1 / spread - ((mean - self.sharp) / spread).square()
        return 1 + self._hole(mean, variance) * bend

    def objective(self, mean: Tensor, variance: Tensor, temperature: float) -> Tensor:
        """E_q[ℓ] − τH(q) of q = N(mean, variance)."""
        entropy = 0.5 * torch.log(2 * math.pi * math.e * variance)
        return self.smoothed(mean, variance) - temperature * entropy

    def barrier(self) -> float:
        """Where ℓ is highest between the minima."""
        between = torch.linspace(self.sharp, self.flat, 2001, dtype=torch.float64)
        return float(between[self.value(between).argmax()])

    def _hole(self, mean: Tensor, variance: Tensor) -> Tensor:
        # A normal density of variance w², convolved with one of variance v.
        spread = self.width**2 + variance
        height = self.depth * self.width / spread.sqrt()
        return height * torch.exp(-0.5 * (mean - self.sharp).square() / spread)


def bayes(
    shape: BowlWithHole, q: DiagGaussian, settings: FlatSettings, temperature: float
) -> list[tuple[float, float]]:
    """VON's (m, σ) from q on, until both conditions hold at the quadrature's own nodes."""
    # The rule forgets S at the pace ρτ, so a rate over τ takes as many steps at every temperature.
    rate = settings.rate / temperature
    method = von(rate, GaussHermite(settings.order), temperature=temperature)
    loss = Loss.of(lambda theta: shape.value(theta).sum())
    state = method.init(q)
    path = [(float(state.q.mean), float(state.q.scale))]
    for _ in range(MAX_STEPS):
        gradient, curvature = method.estimate(state, loss)
        assert curvature is not None
        surplus = curvature - temperature / state.q.variance
        if max(float(gradient.abs()), float(surplus.abs())) < AT_REST:
            return path
        method.move(state, gradient, curvature)
        path.append((float(state.q.mean), float(state.q.scale)))
    raise ConvergenceError(f"variational online Newton still moves after {MAX_STEPS} steps")


def optimise(shape: BowlWithHole, start: float) -> tuple[list[float], float]:
    """Descent's path from a start, and where Newton's method takes its end."""
    loss = Loss.of(lambda theta: shape.value(theta).sum())
    descent, polish = gradient_descent(rate=0.04), newton()
    state = descent.init(FixedGaussian(_vector(start), torch.tensor(1.0, dtype=torch.float64)))
    path = [start]
    for _ in range(120):
        path.append(float(descent.update(state, loss).q.mean))
    end = polish.init(FullGaussian(_vector(path[-1]), torch.ones(1, 1, dtype=torch.float64)))
    for _ in range(8):
        polish.update(end, loss)
    return path, float(end.q.mean)


def run_one(settings: FlatSettings, seed: int, folder: Path) -> Json:
    """Optimise from every start, go on by VON from the Laplace Gaussian there, and cool it."""
    generator = torch.Generator().manual_seed(seed)
    gap, *uniforms = torch.rand(1 + settings.starts, generator=generator).double().tolist()
    shape = BowlWithHole(gap=0.05 + 0.25 * gap)
    barrier = shape.barrier()
    starts_at = [6.0 * (i + u) / settings.starts - 3.0 for i, u in enumerate(uniforms)]
    paths, ends = zip(*(optimise(shape, start) for start in starts_at), strict=True)
    minima = {"sharp": optimise(shape, shape.sharp)[1], "flat": optimise(shape, shape.flat)[1]}
    stays = all(
        abs(end - minima["sharp" if path[0] < barrier else "flat"]) < TOLERANCE
        for path, end in zip(paths, ends, strict=True)
    )
    loss = Loss.of(lambda theta: shape.value(theta).sum())
    one = torch.ones(1, 1, dtype=torch.float64)
    gaussians = {name: laplace(loss, FullGaussian(_vector(m), one)) for name, m in minima.items()}
    starts = {name: DiagGaussian(q.mean, q.scale) for name, q in gaussians.items()}
    sweep: dict[str, list[tuple[float, float]]] = {}
    for name, q in starts.items():
        sweep[name] = []
        for temperature in settings.temperatures:
            cooled = DiagGaussian(q.mean, q.scale * math.sqrt(temperature))
            path = bayes(shape, cooled, settings, temperature)
            sweep[name].append(path[-1])
            if name == "sharp" and temperature == 1.0:
                escape = path
    best = torch.tensor(sweep["sharp"][0], dtype=torch.float64)
    mean, variance = best[0], best[1].square()
    heights = {
        name: [_objective(shape, *q, t) for q, t in zip(ends, settings.temperatures, strict=True)]
        for name, ends in sweep.items()
    }
    cold = settings.temperatures[-1]
    coldest = min(sweep, key=lambda name: heights[name][-1])
    return {
        "gap": shape.gap,
        "sharp_is_deeper_by": float(
            shape.value(_vector(minima["flat"])) - shape.value(_vector(minima["sharp"]))
        ),
        "sharp_curvature": 1 / float(gaussians["sharp"].variance),
        "flat_curvature": 1 / float(gaussians["flat"].variance),
        "starts_in_the_sharp_basin": sum(p[0] < barrier for p in paths),
        "optimisers_stay": float(stays),
        "ends_in_the_flat_minimum": float(
            sum(q[0] > barrier for q in (sweep["sharp"][0], sweep["flat"][0])) / 2
        ),
        "mean": float(mean),
        "scale": float(best[1]),
        "first_condition": float(shape.gradient(mean, variance).abs()),
        "second_condition": float((shape.curvature(mean, variance) - 1 / variance).abs()),
        "objective": heights["sharp"][0],
        "objective_of_sharp_laplace": _objective(
            shape, minima["sharp"], float(gaussians["sharp"].scale), 1.0
        ),
        "objective_of_flat_laplace": _objective(
            shape, minima["flat"], float(gaussians["flat"].scale), 1.0
        ),
        "best_of_grid_minus_objective": _best_of_grid(shape) - heights["sharp"][0],
        "cold_temperature": cold,
        "cold_mean": sweep[coldest][-1][0],
        "cold_distance_to_sharp": abs(sweep[coldest][-1][0] - minima["sharp"]),
        "switching_temperature": _switch(settings.temperatures, heights),
        "temperatures": list(settings.temperatures),
        "barrier": barrier,
        "minima": minima,
        "laplace_scales": {name: float(q.scale) for name, q in gaussians.items()},
        "paths": [list(path) for path in paths],
        "escape": [list(point) for point in escape],
        "sweep": {name: [list(point) for point in ends] for name, ends in sweep.items()},
        "heights": heights,
    }


def check(results: list[Json]) -> Verdict:
    """Whether in every seed VON rests in the flat minimum, its conditions hold, and cold is sharp.

    Reproduced: at τ = 1, even from the Gaussian of the sharp minimum, it ends beyond the barrier,
    both conditions hold to 1e-8, its objective is below that Gaussian's and below every other's on
    a grid, optimisers stay where they started, and the coldest q is in the sharp minimum.
    """
    holds = [
        r["ends_in_the_flat_minimum"] == 1.0
        and max(r["first_condition"], r["second_condition"]) < TOLERANCE
        and r["objective"] < r["objective_of_sharp_laplace"]
        and r["best_of_grid_minus_objective"] > -TOLERANCE
        and r["optimisers_stay"] == 1.0
        and r["cold_mean"] < r["barrier"]
        for r in results
    ]
    numbers = summarise(results)
    for name in ("first_condition", "second_condition"):
        numbers[f"largest_{name}"] = max(r[name] for r in results)
    if all(holds):
        return Verdict("reproduced", numbers)
    return Verdict("inconclusive" if any(holds) else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The loss with its Gaussians, VON's way out of the sharp minimum, and the role of τ."""
    first = results[0]
    shape = BowlWithHole(gap=first["gap"])
    figure = blank_figure(12.5, 4)
    land, way, cold = figure.subplots(1, 3, width_ratios=(1.35, 1, 1))
    theta = torch.linspace(-3.1, 3.1, 800, dtype=torch.float64)
    smooth = shape.smoothed(theta, torch.full_like(theta, first["scale"] ** 2))
    land.plot(theta, shape.value(theta), color=BLACK, label="loss ℓ(θ)")
    land.plot(
        theta, smooth, color=BLUE, linestyle="--", label="smoothed loss E_q[ℓ], q* moved to θ"
    )
    for mean, scale, colour, label in (
        (first["minima"]["sharp"], first["laplace_scales"]["sharp"], VERMILLION,
         "Laplace at the sharp minimum"),
        (first["mean"], first["scale"], BLUE, "q*, where VON rests"),
    ):  # fmt: skip
        density = torch.exp(-0.5 * ((theta - mean) / scale).square()) / scale
        land.fill_between(theta, -2.3, -2.3 + 0.33 * density, color=colour, alpha=0.35, label=label)
    for path in first["paths"]:
        points = torch.tensor([path[0], path[-1]], dtype=torch.float64)
        heights = shape.value(points)
        land.plot(points[0], heights[0], "o", color="white", markeredgecolor=GREY, zorder=4)
        land.plot(points[1], heights[1], "o", color=GREY, markersize=5, zorder=5)
    land.plot([], [], "o", color="white", markeredgecolor=GREY, label="descent: start")
    land.plot([], [], "o", color=GREY, markersize=5, label="descent: end")
    land.set(xlabel="θ", ylabel="loss", ylim=(-2.3, 7.4), title="One hole, one bowl")
    land.legend(loc="upper center", ncols=2, fontsize=8, columnspacing=1.0)

    steps = torch.arange(len(first["escape"]))
    means, scales = torch.tensor(first["escape"], dtype=torch.float64).T
    way.axhspan(-3.1, first["barrier"], color=PALE, alpha=0.5, linewidth=0)
    way.text(len(steps) * 0.98, -3.0, "basin of the sharp minimum", ha="right", fontsize=8.5,
             color=GREY)  # fmt: skip
    way.fill_between(steps, means - scales, means + scales, color=BLUE, alpha=0.25, linewidth=0)
    way.plot(steps, means, color=BLUE)
    way.set(xlabel="step of VON", ylabel="m ± σ", title="Bayes leaves the hole",
            xlim=(0, len(steps)), ylim=(-3.1, 2.2))  # fmt: skip

    apart = [
        abs(s[0] - f[0]) > 0.1
        for s, f in zip(first["sweep"]["sharp"], first["sweep"]["flat"], strict=True)
    ]
    for name, colour in (("flat", BLUE), ("sharp", VERMILLION)):
        kept = [name == "flat" or a for a in apart]
        chosen = [
            (t, h - g)
            for t, h, g, keep in zip(
                first["temperatures"], first["heights"][name], first["heights"]["flat"], kept,
                strict=True,
            )
            if keep
        ]  # fmt: skip
        label = f"q resting in the {name} minimum"
        cold.plot(*zip(*chosen, strict=True), "o-", color=colour, label=label)
    cold.set(xlabel="temperature τ", ylabel="E_q[ℓ] − τH, relative to the flat minimum",
             xscale="log", title="Cold learning prefers depth")  # fmt: skip
    cold.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    cold.minorticks_off()
    cold.legend(loc="upper left", fontsize=8)
    return [save(figure, folder / "flat-minimum.png")]


def _vector(value: float) -> Vector:
    return torch.tensor([value], dtype=torch.float64)


def _objective(shape: BowlWithHole, mean: float, scale: float, temperature: float) -> float:
    return float(shape.objective(_vector(mean), _vector(scale).square(), temperature))


def _best_of_grid(shape: BowlWithHole) -> float:
    """The smallest E_q[ℓ] − H over a fine grid of Gaussians."""
    mean = torch.linspace(-4, 4, 801, dtype=torch.float64)[:, None]
    scale = torch.logspace(-2, 1, 601, dtype=torch.float64)
    return float(shape.objective(mean, scale.square(), 1.0).min())


def _switch(temperatures: Sequence[float], heights: dict[str, list[float]]) -> float:
    """The τ below which the sharp minimum is worth more, on a line between neighbours; 0 if none.

    Where q has left the sharp minimum both heights are the same but for rounding.
    """
    excess = [s - f for s, f in zip(heights["sharp"], heights["flat"], strict=True)]
    colder = next((i for i, value in enumerate(excess) if value < -TOLERANCE), None)
    if colder is None:
        return 0.0
    if colder == 0:
        return temperatures[0]
    before = max(excess[colder - 1], 0.0)
    share = before / (before - excess[colder])
    return temperatures[colder - 1] + share * (temperatures[colder] - temperatures[colder - 1])


EXPERIMENT = Experiment(
    id="004-flat-minimum",
    paper="004",
    claim="Khan (2019), 'Optimization vs Bayes' and 'Robustness of Bayes: Example II': the "
    "Bayesian solution rests where E_q[∇ℓ] = 0 and S = E_q[∇²ℓ], not where ∇ℓ = 0; it seeks "
    "flatter minima. (The tutorial's loss is a picture; here a bowl with a narrow, slightly deeper "
    "hole. Ours: it is depth against width, so at low temperature the sharp minimum wins.)",
    theorem=False,
    minutes=0.2,
    presets={"quick": FlatSettings(), "paper": FlatSettings(starts=20, temperatures=FINE)},
    run_one=run_one,
    check=check,
    figures=figures,
)
