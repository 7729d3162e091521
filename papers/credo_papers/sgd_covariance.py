r"""Khan (2019), "Can we obtain covariances from SGD?": its iterates do not determine one.

The tutorial: SGD estimates only the mean, so the covariance can be arbitrary; with q = N(m, Σ) and
Σ fixed the rule reads m ← m − ρΣ∇ℓ(m), and a covariance takes additional computation, "essentially
the pre-conditioner". As exact statements, on Bayesian logistic regression with two weights:

1. The rule in the family of any fixed Σ is that step, and at rate ρ/t in the family of tI it makes
   SGD's own iterates, bit for bit where t is a power of two, minibatches included.
2. Whatever Σ is, the iterates come to rest at the same m, with ∇ℓ(m) = 0.
3. These q have different E_q[ℓ] − H(q), and none has the smallest. The variational optimum has one
   Σ, the inverse of E_q[∇²ℓ], which VON finds from any start.

Erratum: the step with an arbitrary Σ is preconditioned descent, not inference. Its
q is not the best even of its own family: without the delta method, E_q[∇ℓ] = 0 puts the mean
elsewhere for every Σ. How far SGD's own noise spreads its iterates is reported too, as a share of
the posterior's variance: it grows with the learning rate, of which the posterior knows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from credo.autodiff.loss import Loss
from credo.errors import ConvergenceError
from credo.families import FixedGaussian, FullGaussian, Gaussian
from credo.report.style import BLACK, GREY, PALE, blank_figure, coloured, save
from credo.rule.expectations import GaussHermite
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.gallery.laplace import laplace
from credo.rule.gallery.preconditioned_descent import preconditioned_descent
from credo.rule.gallery.von import von
from credo.rule.learner import Learner, Step
from credo.types import Json, Vector
from credo_papers.experiment import Experiment, Settings, Verdict, summarise

STEP_TOLERANCE = 1e-12
"""Rounding of one solve with a 2×2 matrix of condition below a few hundred."""

REST_TOLERANCE = 1e-8
"""Iterations stop at a gradient of 1e-11, and ∇²ℓ is at least 1, the prior's."""

DIFFERENT = 1e-6
"""Nats: objectives that differ by more are different, being computed to about 1e-9."""

RESCALINGS = (2.0**-6, 2.0**-2, 2.0**2, 2.0**6)
MAX_STEPS = 20_000


@dataclass(frozen=True, kw_only=True)
class CovarianceSettings(Settings):
    """``sgd_steps`` of minibatch descent at each of ``rates``, the first quarter thrown away."""

    net: str = "logistic regression, 2 weights"
    num_data: int = 60
    epochs: int = 0
    order: int = 16
    batch_size: int = 6
    sgd_steps: int = 1500
    rates: tuple[float, ...] = (0.01, 0.04)


@dataclass(frozen=True)
class _Problem:
    """Logistic regression with a N(0, I) prior: x (N, 2), y (N,) of zeros and ones."""

    x: Tensor
    y: Tensor

    @classmethod
    def draw(cls, num_data: int, generator: Generator) -> _Problem:
        x = torch.randn(num_data, 2, generator=generator, dtype=torch.float64)
        x[:, 1] += 0.8 * x[:, 0]
        probs = torch.sigmoid(x @ torch.tensor([2.0, -1.0], dtype=torch.float64))
        return cls(x, torch.bernoulli(probs, generator=generator))

    def loss(self, rows: Tensor | None = None) -> Loss:
        """−log joint; a minibatch of ``rows`` stands for all data."""
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        share = len(self.x) / len(x)

        def function(w: Vector) -> Tensor:
            f = x @ w
            return share * (softplus(f) - y * f).sum() + 0.5 * w.square().sum()

        return Loss.of(function)

    def curvature_bound(self) -> Tensor:
        """A matrix that ∇²ℓ never exceeds: ¼XᵀX + I."""
        return 0.25 * self.x.mT @ self.x + torch.eye(2, dtype=torch.float64)

    def minibatches(self, settings: CovarianceSettings, steps: int, seed: int) -> list[Tensor]:
        """Rows of each step, drawn with replacement."""
        generator = torch.Generator().manual_seed(seed)
        shape = (steps, settings.batch_size)
        return list(torch.randint(len(self.x), shape, generator=generator))


def run_one(settings: CovarianceSettings, seed: int, folder: Path) -> Json:
    """Every fixed Σ to its rest, the variational optimum from three starts, and SGD's spread."""
    generator = torch.Generator().manual_seed(seed)
    problem = _Problem.draw(settings.num_data, generator)
    loss, bound = problem.loss(), problem.curvature_bound()
    start = torch.tensor([-1.5, 1.5], dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)
    mode = laplace(loss, FullGaussian(torch.zeros_like(start), one))
    covariances = _covariances(mode.solve(one), generator)
    grid = GaussHermite(settings.order)
    best, *others = (_best_gaussian(loss, q, grid) for q in _starts(mode, generator))
    size = best.precision.abs().max()
    _, curvature = _derivatives(best, loss, GaussHermite(settings.order + 8))
    lowest = _objective(best, loss, grid)
    steps, rests, excess, averaged, paths = [], [], [], [], []
    for sigma in covariances.values():
        q = FixedGaussian(start, torch.linalg.inv(sigma))
        rate = 1.0 / float(torch.linalg.eigvals(sigma @ bound).real.max())
        method = preconditioned_descent(rate)
        once = method.update(method.init(q), loss).q.mean
        steps.append(_distance(once, start - rate * sigma @ loss.gradient(start)))
        rest, path = _rest(method, q, loss)
        rests.append(_distance(rest.mean, mode.mean))
        excess.append(_objective(rest, loss, grid) - lowest)
        paths.append(path)
        averaged.append(_rest(Learner(grid, None, Step(rate=rate)), rest, loss)[0].mean)
    result: Json = {
        "step_error": max(steps),
        "rescaled_iterates_error": _rescaled_error(problem, settings, seed),
        "rest_error": max(rests),
        "best_precisions_differ": max(_distance(q.precision, best.precision) for q in others)
        / float(size),
        "best_curvature_residual": _distance(best.precision, curvature) / float(size),
        "smallest_excess": min(excess),
        "largest_excess": max(excess),
        "means_without_delta_differ": max(_distance(m, mode.mean) for m in averaged),
        "names": list(covariances),
        "covariances": [sigma.tolist() for sigma in covariances.values()],
        "excess": excess,
        "paths": paths,
        "mode": mode.mean.tolist(),
        "best_mean": best.mean.tolist(),
        "best_covariance": best.covariance.tolist(),
    }
    for rate in settings.rates:
        spread = _spread_of_sgd(problem, mode.mean, settings, rate, seed)
        result[f"sgd_variance_share_rate{rate:g}"] = spread / float(best.variance.sum())
    return result


def check(results: list[Json]) -> Verdict:
    """The three statements, in every seed, to the tolerances at the top."""
    numbers = summarise(results)
    for name in ("step_error", "rest_error", "rescaled_iterates_error", "best_precisions_differ",
                 "best_curvature_residual"):  # fmt: skip
        numbers[f"largest_{name}"] = max(r[name] for r in results)
    right = all(
        r["step_error"] < STEP_TOLERANCE
        and r["rescaled_iterates_error"] == 0.0
        and r["rest_error"] < REST_TOLERANCE
        and r["best_precisions_differ"] < REST_TOLERANCE
        and r["best_curvature_residual"] < REST_TOLERANCE
        and r["smallest_excess"] > DIFFERENT
        and r["largest_excess"] - r["smallest_excess"] > DIFFERENT
        for r in results
    )
    return Verdict("reproduced" if right else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Paths to one mean with the ellipses they might claim, and what each q costs."""
    first = results[0]
    mode = torch.tensor(first["mode"], dtype=torch.float64)
    figure = blank_figure(11, 4.4)
    plane, costs = figure.subplots(1, 2, width_ratios=(1.2, 1))
    angle = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], 1)

    def ellipse(mean: Tensor, covariance: list[list[float]]) -> Tensor:
        factor = torch.linalg.cholesky(torch.tensor(covariance, dtype=torch.float64))
        return (mean + 2 * circle @ factor.mT).T

    for i, (name, colour) in enumerate(coloured(first["names"])):
        path = torch.tensor(first["paths"][i], dtype=torch.float64).T
        plane.plot(*path, color=colour, linewidth=1, alpha=0.8)
        plane.plot(*ellipse(mode, first["covariances"][i]), color=colour, label=name)
        seeds = [r["excess"][i] for r in results]
        costs.axhline(i, color=PALE, linewidth=0.8, zorder=0)
        costs.plot(seeds, [i] * len(seeds), "o", color=colour)
    best = torch.tensor(first["best_mean"], dtype=torch.float64)
    plane.plot(*ellipse(best, first["best_covariance"]), color=BLACK, linestyle="--",
               label="variational optimum")  # fmt: skip
    plane.plot(*mode, "o", color=BLACK, markersize=5, zorder=5)
    plane.plot(*first["paths"][0][0], "o", color="white", markeredgecolor=GREY, zorder=5)
    plane.annotate("start", first["paths"][0][0], xytext=(6, 4), textcoords="offset points")
    plane.set(xlabel="weight 1", ylabel="weight 2", aspect="equal",
              title="Every Σ comes to rest at the same mean")  # fmt: skip
    plane.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5,
                 title="Σ of q = N(m, Σ), 2σ", title_fontsize=8.5, alignment="left")  # fmt: skip
    costs.set(xscale="log", yticks=range(len(first["names"])), yticklabels=first["names"],
              xlabel="E_q[ℓ] − H(q) above the variational optimum (nats)",
              title="What each q costs, a dot per seed")  # fmt: skip
    costs.invert_yaxis()
    return [save(figure, folder / "sgd-covariance.png")]


def _covariances(inverse_hessian: Tensor, generator: Generator) -> dict[str, Tensor]:
    root = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)
    return {
        "identity: SGD": one,
        "identity / 100": one / 100,
        "axes unequal": torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)),
        "random": 0.3 * root @ root.mT + 0.03 * one,
        "inverse Hessian": inverse_hessian,
    }


def _starts(mode: Gaussian, generator: Generator) -> list[FullGaussian]:
    one = torch.eye(2, dtype=torch.float64)
    root = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    return [
        FullGaussian(mode.mean, 10 * one),
        FullGaussian(torch.zeros(2, dtype=torch.float64), 100 * one),
        FullGaussian(mode.mean + 0.5, root @ root.mT + one),
    ]


def _rest(method: Learner, q: Gaussian, loss: Loss) -> tuple[Gaussian, list[list[float]]]:
    """Where the mean's gradient vanishes, and the means on the way."""
    state, path = method.init(q), []
    for _ in range(MAX_STEPS):
        path.append(state.q.mean.tolist())
        gradient, _ = method.estimate(state, loss)
        if float(gradient.abs().max()) < 1e-11:
            return state.q, path
        method.move(state, gradient, None)
    raise ConvergenceError(f"descent still moves after {MAX_STEPS} steps")


def _best_gaussian(loss: Loss, q: FullGaussian, grid: GaussHermite) -> FullGaussian:
    """The variational optimum, by VON."""
    method = von(0.5, grid)
    state = method.init(q)
    for _ in range(500):
        gradient, curvature = method.estimate(state, loss)
        now = state.q
        assert isinstance(now, FullGaussian)
        assert curvature is not None
        if max(float(gradient.abs().max()), _distance(curvature, now.precision)) < 1e-10:
            return now
        method.move(state, gradient, curvature)
    raise ConvergenceError("variational online Newton still moves after 500 steps")


def _derivatives(q: Gaussian, loss: Loss, grid: GaussHermite) -> tuple[Vector, Tensor]:
    method = von(0.5, grid)
    gradient, curvature = method.estimate(method.init(q), loss)
    assert curvature is not None
    return gradient, curvature


def _objective(q: Gaussian, loss: Loss, grid: GaussHermite) -> float:
    """E_q[ℓ] − H(q)."""
    points = grid.points(q, torch.Generator())
    average = math.fsum(share * float(loss.value(theta)) for share, theta in points)
    return average - float(q.entropy())


def _rescaled_error(problem: _Problem, settings: CovarianceSettings, seed: int) -> float:
    """How far SGD's iterates in the families N(m, tI) at rate ρ/t are from those at t = 1."""
    rate = settings.rates[0]
    losses = [problem.loss(rows) for rows in problem.minibatches(settings, 50, seed)]

    def iterates(t: float) -> Tensor:
        method = gradient_descent(rate / t)
        precision = torch.tensor(1.0 / t, dtype=torch.float64)
        state = method.init(FixedGaussian(torch.ones(2, dtype=torch.float64), precision))
        return torch.stack([method.update(state, loss).q.mean for loss in losses])

    plain = iterates(1.0)
    return max(_distance(iterates(t), plain) for t in RESCALINGS)


def _spread_of_sgd(
    problem: _Problem, start: Vector, settings: CovarianceSettings, rate: float, seed: int
) -> float:
    """The variance of SGD's iterates around their mean, summed over the weights."""
    method = gradient_descent(rate)
    state = method.init(FixedGaussian(start, torch.tensor(1.0, dtype=torch.float64)))
    batches = problem.minibatches(settings, settings.sgd_steps, seed)
    means = [method.update(state, problem.loss(rows)).q.mean for rows in batches]
    return float(torch.stack(means[len(means) // 4 :]).var(0).sum())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


EXPERIMENT = Experiment(
    id="004-sgd-covariance",
    paper="004",
    claim="Khan (2019), 'Can we obtain covariances from SGD?': SGD estimates only the mean, so the "
    "covariance can be arbitrary; with q = N(m, Σ) and Σ fixed, the rule is m ← m − ρΣ∇ℓ(m), and a "
    "covariance takes additional computation. (Erratum: with an arbitrary Σ the step is "
    "preconditioned descent, and its q is not the variational optimum.)",
    theorem=True,
    minutes=0.2,
    presets={
        "quick": CovarianceSettings(),
        "paper": CovarianceSettings(sgd_steps=20_000, rates=(0.0025, 0.01, 0.04)),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
