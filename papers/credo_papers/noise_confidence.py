r"""Book (2020), fig. 1.1: a network that never saw noise is sure of what it sees in it.

The thesis shows one hand-picked image of Gaussian noise, which a frequentist network classifies
with confidence and a Bayesian one does not, both above 98 % on handwritten digits. Here both are
LeNet-5 on MNIST, and the comparison is over many images of noise: pixels N(0, 1) on the scale of
the standardised inputs, so noise has the mean and variance of the digits. Confidence is the mean
over images of the largest class probability, for the Bayesian network of the predictive
distribution (1/S) Σ_s softmax(f_s).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import credo
from credo.report.style import blank_figure, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise
from credo_papers.networks import NetName, build

PREDICTION_SAMPLES = 32
REQUIRED_ACCURACY = 0.98


@dataclass(frozen=True, kw_only=True)
class NoiseSettings(Settings):
    """``temperature`` weighs the KL of the Bayesian network; the frequentist one has no prior.

    A second Bayesian network at ``cold_temperature`` shows how much hangs on that; it has no part
    in the verdict.
    """

    net: NetName = "LeNet-5"
    num_data: int = 60_000
    epochs: int
    batch_size: int = 100
    lr: float = 1e-3
    scale_lr: float | None = None
    init_scale: float = 0.05
    temperature: float = 1.0
    cold_temperature: float = 0.1
    noise_images: int = 2000


def run_one(settings: NoiseSettings, seed: int, folder: Path) -> Json:
    """Train both networks from the same weights; score them on digits and on noise."""
    digits = credo.data.load("mnist")
    x, x_test = credo.data.standardise(digits.train[0][: settings.num_data], digits.test[0])
    y, y_test = digits.train[1][: settings.num_data], digits.test[1]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(settings.noise_images, *x.shape[1:], generator=generator)
    bayesian = credo.VI(
        lr=settings.lr, scale_lr=settings.scale_lr, init_scale=settings.init_scale,
        temperature=settings.temperature,
    )  # fmt: skip
    methods: dict[str, credo.MAP | credo.VI] = {
        "frequentist": credo.MLE(lr=settings.lr),
        "bayesian": bayesian,
        "cold": replace(bayesian, temperature=settings.cold_temperature),
    }
    result: Json = {}
    for name, method in methods.items():
        net = build(settings.net, x.shape[1:], seed)
        model = credo.Model(net, credo.likelihoods.Categorical())
        posterior = credo.fit(
            model, method, (x, y), epochs=settings.epochs, batch_size=settings.batch_size,
            seed=seed, folder=folder / name, progress=False,
        )  # fmt: skip
        samples = 1 if name == "frequentist" else PREDICTION_SAMPLES
        on_test = posterior.predict(x_test, samples=samples, keep_samples=False).probs
        on_noise = posterior.predict(noise, samples=samples, keep_samples=False).probs
        confidence = on_noise.max(1).values
        result |= {
            f"{name}_accuracy": credo.metrics.accuracy(on_test, y_test),
            f"{name}_nll": credo.metrics.nll(on_test, y_test),
            f"{name}_digit_confidence": float(on_test.max(1).values.mean()),
            f"{name}_noise_confidence": float(confidence.mean()),
            f"{name}_noise_above_90": float((confidence > 0.9).float().mean()),
            f"{name}_noise_histogram": torch.histc(confidence, 20, 0, 1).tolist(),
        }
    return result


def check(results: list[Json]) -> Verdict:
    """Whether the frequentist network is surer of noise, if both are as accurate as claimed."""
    numbers = summarise(results)
    accurate = all(
        numbers[f"{name}_accuracy"] > REQUIRED_ACCURACY for name in ("frequentist", "bayesian")
    )
    sign = sign_of_mean(
        [r["frequentist_noise_confidence"] - r["bayesian_noise_confidence"] for r in results]
    )
    if not accurate or sign == 0:
        return Verdict("inconclusive", numbers)
    return Verdict("reproduced" if sign > 0 else "not reproduced", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Histograms of the confidence on noise, over all seeds."""
    figure = blank_figure(5, 3)
    axes = figure.subplots()
    edges = np.linspace(0, 1, 21)
    for name in ("frequentist", "bayesian", "cold"):
        counts = np.sum([r[f"{name}_noise_histogram"] for r in results], axis=0)
        label = "bayesian, low temperature" if name == "cold" else name
        axes.stairs(counts / counts.sum(), edges, linewidth=2, label=label)
    axes.set(xlabel="largest class probability on Gaussian noise", ylabel="share of images")
    axes.legend()
    return [save(figure, folder / "noise-confidence.png")]


EXPERIMENT = Experiment(
    id="003-noise-confidence",
    paper="003",
    claim="Book (2020), fig. 1.1: of two networks with more than 98 % accuracy on handwritten "
    "digits, the frequentist one is more confident about images of Gaussian noise than the "
    "Bayesian one. (The figure is one hand-picked image; here the mean over many.)",
    theorem=False,
    needs=("mnist",),
    minutes=4,
    presets={
        "quick": NoiseSettings(epochs=5),
        # Adam at one rate for means and scales, as in the thesis's chapter 5; its initial σ of
        # 4.5e-5 everywhere is here about that fraction of each layer's prior scale.
        "paper": NoiseSettings(epochs=50, scale_lr=1e-3, init_scale=5e-4),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
