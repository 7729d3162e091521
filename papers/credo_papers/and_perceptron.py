r"""Book (2020) §2.4, fig. 2.2: a single Bayesian node learns AND.

Bayes-by-backprop as in the thesis: Gaussian q, N(0, 1) priors, one sample of the weights per step,
one batch per epoch, Adam at 10⁻², q's initial spread from Kaiming's rule with two inputs. The
result is held against the exact posterior and the best mean-field q, both by quadrature.

The thesis does not say how many observations its single batch has. It matters: with the four rows
once each, the exact posterior gives P(y = 1 | 1, 1) = 0.44, so *no* correct inference learns AND
from them under this prior. We take the thesis's batch size of 100 (§4.2), each row 25 times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import credo
from credo.report.style import blank_figure, save
from credo.types import Json
from credo_papers.and_model import (
    elbo,
    exact_posterior,
    mean_field_optimum,
    predictive,
    truth_table,
)
from credo_papers.experiment import Experiment, Settings, Verdict, summarise

ROWS = ("00", "01", "10", "11")


@dataclass(frozen=True, kw_only=True)
class AndSettings(Settings):
    """``copies`` of the truth table make the one batch; a step is an epoch."""

    net: str = "one node, 2-1"
    num_data: int = 100
    epochs: int
    lr: float = 1e-2
    samples: int = 1

    @property
    def copies(self) -> int:
        """How often each row is observed."""
        return self.num_data // 4


def run_one(settings: AndSettings, seed: int, folder: Path) -> Json:
    """Train the node, and compare it with quadrature."""
    posterior, initial_mean = train(settings, seed, folder)
    weights = posterior.mean, posterior.q.scale  # (w₁, w₂, b), the order in which Linear keeps them
    exact = exact_posterior(settings.copies)
    best = mean_field_optimum(settings.copies)
    x, _ = truth_table()
    probs = predictive(*weights, x)
    result: Json = {f"p_{row}": float(p) for row, p in zip(ROWS, probs, strict=True)}
    result |= {f"exact_p_{row}": float(p) for row, p in zip(ROWS, exact.probs, strict=True)}
    return result | {
        "distance_to_exact": float((probs - exact.probs).abs().max()),
        "distance_of_best_mean_field": float(
            (predictive(best.mean, best.scale, x) - exact.probs).abs().max()
        ),
        "elbo": float(elbo(*weights, settings.copies)),
        "best_elbo": float(elbo(best.mean, best.scale, settings.copies)),
        "log_evidence": exact.log_evidence,
        "exact_p_11_from_four_observations": float(exact_posterior(1).probs[3]),
        "initial_mean": initial_mean.tolist(),
        "mean": weights[0].tolist(),
        "scale": weights[1].tolist(),
        "exact_mean": exact.mean.tolist(),
        "exact_scale": exact.scale.tolist(),
        "loss": [-record["elbo"] / settings.num_data for record in posterior.history],
    }


def train(settings: AndSettings, seed: int, folder: Path) -> tuple[credo.Posterior, Tensor]:
    """Bayes-by-backprop on one batch per epoch: the posterior, and the mean it started from."""
    node = nn.Linear(2, 1).double()
    generator = torch.Generator().manual_seed(seed)
    spread = math.sqrt(2 / 2)  # Kaiming's with fan-in 2 and a = 0 for ReLU, not the printed 1
    with torch.no_grad():
        for parameter in node.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(spread * noise)
    initial_mean = torch.cat([p.detach().flatten() for p in (node.weight, node.bias)])
    x, y = credo.data.and_gate()
    data = x.double().repeat(settings.copies, 1), y.double().repeat(settings.copies, 1)
    method = credo.VI(
        samples=settings.samples, temperature=1.0, lr=settings.lr, scale_lr=settings.lr,
        link="softplus", init_scale=spread,
    )  # fmt: skip
    model = credo.Model(node, credo.likelihoods.Bernoulli(), credo.priors.Normal(scale=1.0))
    posterior = credo.fit(
        model, method, data, epochs=settings.epochs, batch_size=settings.num_data, seed=seed,
        folder=folder / "vi", progress=False,
    )  # fmt: skip
    return posterior, initial_mean


def check(results: list[Json]) -> Verdict:
    """Whether every seed decides AND rightly; how near quadrature it comes is in the numbers."""
    learned = [r["p_11"] > 0.5 and max(r["p_00"], r["p_01"], r["p_10"]) < 0.5 for r in results]
    numbers = summarise(results) | {"seeds_that_learned": float(sum(learned))}
    if all(learned):
        return Verdict("reproduced", numbers)
    return Verdict("inconclusive" if any(learned) else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """As fig. 2.2: training loss, and P(y = 1 | x) before and after training, for one seed."""
    first = results[0]
    axis = torch.linspace(-0.5, 1.5, 81, dtype=torch.float64)
    plane = torch.cartesian_prod(axis, axis)
    inputs = torch.cat([plane, torch.ones(len(plane), 1, dtype=torch.float64)], 1)
    before = torch.tensor(first["initial_mean"]).double(), torch.ones(3, dtype=torch.float64)
    after = torch.tensor(first["mean"]).double(), torch.tensor(first["scale"]).double()
    figure = blank_figure(11, 3.2)
    loss, *maps = figure.subplots(1, 3)
    loss.plot(first["loss"], linewidth=0.8)
    loss.axhline(
        -first["best_elbo"] / AndSettings.num_data,
        color="black",
        linestyle=":",
        label="best mean-field q",
    )
    loss.set(xlabel="step", ylabel="loss per observation")
    loss.legend()
    for axes, title, q in zip(maps, ("before", "after"), (before, after), strict=True):
        probs = predictive(*q, inputs).reshape(81, 81)
        image = axes.imshow(
            probs.T.numpy(),
            origin="lower",
            extent=(-0.5, 1.5, -0.5, 1.5),
            vmin=0,
            vmax=1,
            cmap="coolwarm",
        )
        axes.plot([0, 0, 1], [0, 1, 0], "o", color="black")
        axes.plot([1], [1], "*", color="black", markersize=12)
        axes.set(title=f"P(y = 1 | x) {title} training", xlabel="x₁", ylabel="x₂")
    figure.colorbar(image, ax=maps)
    return [save(figure, folder / "and-perceptron.png")]


EXPERIMENT = Experiment(
    id="003-and-perceptron",
    paper="003",
    claim="Book (2020), §2.4, fig. 2.2: a single Bayesian node with N(0, 1) priors, trained by "
    "variational inference with Adam at 1e-2 and one sample per step, learns AND. (The number of "
    "observations is not given; with 100 it does, with 4 even the exact posterior does not.)",
    theorem=False,
    minutes=0.1,
    presets={"quick": AndSettings(epochs=1000), "paper": AndSettings(epochs=2000)},
    run_one=run_one,
    check=check,
    figures=figures,
)
