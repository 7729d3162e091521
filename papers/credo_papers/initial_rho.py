r"""Book (2020), appendix A, fig. A.1: the initial spread of q is a trade-off.

With σ = ln(1 + e^ρ), all weights start at the same ρ₀. The thesis finds that a σ₀ chosen too small
loses the benefits of being Bayesian and one too large costs performance, and settles on ρ₀ = −10.
Losing the benefits is measured here by the mutual information between label and weights on test
images, which is zero for a point estimate; performance by accuracy and negative log-likelihood.

`credo.VI` sets the initial scale as a fraction of the prior's, so an isotropic prior of scale s
and the fraction softplus(ρ₀)/s give every weight the same σ₀. The thesis's prior is Kaiming's.

The estimator has a say in it. The thesis keeps only the path derivative, whose term −ε/σ from log q
adds noise of size 1/(n·σ) to the gradient of every mean: 2 per weight at ρ₀ = −10 and n = 10,000,
which drowns the data. The closed-form KL ("reparam") has no such term, so quick uses it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import credo
from credo.families.links import SOFTPLUS
from credo.report.style import blank_figure, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise
from credo_papers.networks import NetName, build

PREDICTION_SAMPLES = 16
MEASURES = ("accuracy", "nll", "kl", "mutual_information")


@dataclass(frozen=True, kw_only=True)
class RhoSettings(Settings):
    """``rhos`` from small to large; means and scales share Adam's rate ``lr``.

    ``estimator`` is `credo.VI`'s: "path" is the thesis's.
    """

    net: NetName
    data: str
    num_data: int
    epochs: int
    rhos: tuple[float, ...] = (-10.0, -7.0, -5.0, -3.0, -1.0)
    batch_size: int = 100
    lr: float = 1e-3
    prior_scale: float = 0.1
    estimator: Literal["reparam", "path"] = "reparam"


def run_one(settings: RhoSettings, seed: int, folder: Path) -> Json:
    """One training per ρ₀, all from the same means."""
    images = credo.data.load(settings.data)
    x, x_test = credo.data.standardise(images.train[0][: settings.num_data], images.test[0])
    y, y_test = images.train[1][: settings.num_data], images.test[1]
    result: Json = {"rhos": list(settings.rhos)}
    for rho in settings.rhos:
        net = build(settings.net, x.shape[1:], seed)
        prior = credo.priors.Normal(scale=settings.prior_scale)
        model = credo.Model(net, credo.likelihoods.Categorical(), prior)
        initial_scale = float(SOFTPLUS.forward(torch.tensor(rho, dtype=torch.float64)))
        method = credo.VI(
            estimator=settings.estimator, temperature=1.0, link="softplus", lr=settings.lr,
            scale_lr=settings.lr, init_scale=initial_scale / settings.prior_scale,
        )  # fmt: skip
        with warnings.catch_warnings():
            # That small initial scales stay small is what the experiment is to show.
            warnings.filterwarnings("ignore", message="the posterior's scales collapsed")
            posterior = credo.fit(
                model, method, (x, y), epochs=settings.epochs, batch_size=settings.batch_size,
                seed=seed, folder=folder / f"rho{rho:g}", progress=False,
            )  # fmt: skip
        pred = posterior.predict(x_test, samples=PREDICTION_SAMPLES, keep_samples=False)
        values = (
            credo.metrics.accuracy(pred.probs, y_test),
            credo.metrics.nll(pred.probs, y_test),
            posterior.history[-1]["kl"],
            float(pred.mutual_information.mean()),
        )
        result |= {_key(name, rho): value for name, value in zip(MEASURES, values, strict=True)}
    return result


def check(results: list[Json]) -> Verdict:
    """Whether the largest σ₀ costs accuracy and the smallest leaves the least uncertainty."""
    rhos = results[0]["rhos"]
    numbers = summarise(results)
    best = max(rhos, key=lambda rho: numbers[_key("accuracy", rho)])
    lost_accuracy = sign_of_mean(
        [r[_key("accuracy", best)] - r[_key("accuracy", rhos[-1])] for r in results]
    )
    lost_uncertainty = sign_of_mean(
        [
            r[_key("mutual_information", rhos[-1])] - r[_key("mutual_information", rhos[0])]
            for r in results
        ]
    )
    numbers["rho_of_best_accuracy"] = best
    if lost_accuracy > 0 and lost_uncertainty > 0:
        return Verdict("reproduced", numbers)
    if lost_uncertainty < 0 or best == rhos[-1]:
        return Verdict("not reproduced", numbers)
    return Verdict("inconclusive", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The four measures against ρ₀, with standard errors over seeds."""
    rhos = results[0]["rhos"]
    numbers = summarise(results)
    figure = blank_figure(9, 6)
    for axes, name in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
        mean = [numbers[_key(name, rho)] for rho in rhos]
        error = [numbers.get(f"{_key(name, rho)}_se", 0.0) for rho in rhos]
        axes.errorbar(rhos, mean, error, marker="o", capsize=3)
        axes.set(xlabel="initial ρ", ylabel=name.replace("_", " "))
    return [save(figure, folder / "initial-rho.png")]


def _key(measure: str, rho: float) -> str:
    return f"{measure}_rho{rho:g}"


EXPERIMENT = Experiment(
    id="003-initial-rho",
    paper="003",
    claim="Book (2020), appendix A, fig. A.1: the initial standard deviation of q trades off. Too "
    "small, and the network is as good as frequentist; too large, and it performs poorly.",
    theorem=False,
    needs=("mnist",),
    minutes=0.5,
    presets={
        "quick": RhoSettings(net="784-100-10", data="mnist", num_data=10_000, epochs=4),
        "paper": RhoSettings(
            net="LeNet-5", data="cifar10", num_data=50_000, epochs=50, estimator="path"
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
