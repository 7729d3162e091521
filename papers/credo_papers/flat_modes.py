r"""Unlu & Aitchison (2021) §1: Variational Laplace finds a flat mode, Laplace takes any.

"As the mode is discovered by standard gradient descent, it may be a narrow mode that generalises
poorly", the paper says of Laplace's method, and of its own that it "finds broad, flat modes even
in the absence of the stochastic sampling". It shows no figure of this. Here both are trained from
the same weights at the same β, and flatness is asked of the modes alone: by how much does

    E NLL(μ + c·s∘ε) − NLL(μ),   ε ~ N(0, I)

rise on training images, s the prior's scales? To leading order that is ½c²·Σ s²h, h the curvature:
weights are compared in the prior's units, with the same noise for both modes. The rules, written
before any run, ask with 95 % confidence over seeds whether

1. ``flatter``: at c = `NOISE` the rise is smaller at VL's mean than at MAP's mode;
2. ``beats_map``: VL's mean has the lower test NLL;
3. ``beats_laplace``: also lower than that of Laplace's approximation at MAP's mode, with the same
   diagonal and temperature, predicting by the linearised network.

Reproduced if all hold, not reproduced if one is refuted. 1 alone would be cheap: a mode that fits
nothing is flat. (One seed was run at another size, 5,000 images and 10,218 weights, before the
quick preset got its size; the rules stayed as they were.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import credo
from credo.families import DiagGaussian
from credo.metrics import gibbs_nll
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
from credo_papers.experiment import Experiment, Verdict, judgement, sign_of_mean, summarise
from credo_papers.vl_setup import ImageSettings, images, method, scores, trained

NOISE = 0.05
"""The fraction of the prior's scale at which the modes are compared: about where σ starts, e⁻³."""

MODES = {"map": "MAP, Laplace's mode", "vl": "VL's mean"}
PREDICTIONS = {"map": "MAP", "laplace": "Laplace", "vl": "VL"}
COLOURS = {"map": GREEN, "laplace": BLUE, "vl": VERMILLION}


@dataclass(frozen=True, kw_only=True)
class ModeSettings(ImageSettings):
    """``noises``: fractions of the prior's scale, `NOISE` among them; ``draws`` of each.

    ``noise_images`` of training and of test set see the noise.
    """

    data: str = "fashion-mnist"
    beta: float = 0.1
    noises: tuple[float, ...] = (0.0125, 0.025, NOISE, 0.1, 0.2)
    draws: int = 16
    noise_images: int = 1000


def run_one(settings: ModeSettings, seed: int, folder: Path) -> Json:
    """MAP with Laplace's approximation, and VL; their modes under noise, and their predictions."""
    data = images(settings, settings.data)
    point = credo.MAP(lr=settings.lr, temperature=settings.beta)
    laplace = credo.Laplace(structure="diag", temperature=settings.beta, train=point)
    variational = method("vl", settings.lr, settings.beta)
    # Training that ends in Laplace's approximation is MAP's until then, and its mean MAP's mode.
    at_mode = trained(settings, data, laplace, seed, folder / "laplace")
    at_mean = trained(settings, data, variational, seed, folder / "vl")
    result: Json = {"noises": list(settings.noises)}
    results = {
        "map": scores(at_mode, data.test, "mean", 1),
        "laplace": scores(at_mode, data.test, "linearised", settings.prediction_samples),
        "vl": scores(at_mean, data.test, "mean", 1),
    }
    for name, values in results.items():
        result |= {f"{name}_{key}": value for key, value in values.items()}
    place = settings.noises.index(NOISE)
    for name, posterior in (("map", at_mode), ("vl", at_mean)):
        for part, (x, y) in (("train", data.train), ("test", data.test)):
            few = x[: settings.noise_images], y[: settings.noise_images]
            quiet = scores(posterior, few, "mean", 1)["nll"]
            rises = [
                noisy_nll(posterior, few, noise, settings.draws) - quiet
                for noise in settings.noises
            ]
            result[f"{name}_{part}_quiet"] = quiet
            result[f"{name}_{part}_rises"] = rises
            result[f"{name}_{part}_rise"] = rises[place]
    return result


def noisy_nll(
    posterior: credo.Posterior, data: tuple[Tensor, Tensor], noise: float, draws: int
) -> float:
    """The NLL expected when every weight is moved from the mean by ``noise`` prior scales."""
    mean = posterior.mean
    scale = torch.as_tensor(posterior.model.prior_over_weights().scale).to(mean)
    q = DiagGaussian(mean, (noise * scale).expand_as(mean).contiguous())
    around = credo.Posterior(posterior.model, q, posterior.point, posterior.buffers)
    return gibbs_nll(around.predict(data[0], samples=draws).sample_probs, data[1])


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    return {
        "flatter": [r["map_train_rise"] - r["vl_train_rise"] for r in results],
        "beats_map": [r["map_nll"] - r["vl_nll"] for r in results],
        "beats_laplace": [r["laplace_nll"] - r["vl_nll"] for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """NLL under growing noise around both modes, on training and test images; test scores."""
    noises = results[0]["noises"]
    with house_style():
        figure = blank_figure(11.5, 3.8)
        *noisy, final = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
        for axes, (part, label) in zip(
            noisy, {"train": "training NLL", "test": "test NLL"}.items(), strict=True
        ):
            for mode, caption in MODES.items():
                levels = np.array(
                    [[0.0, *r[f"{mode}_{part}_rises"]] for r in results]
                ) + np.array([[r[f"{mode}_{part}_quiet"]] for r in results])  # fmt: skip
                axes.plot([0, *noises], levels.T, color=COLOURS[mode], linewidth=0.7, alpha=0.4)
                axes.plot(
                    [0, *noises], levels.mean(0), "o-", color=COLOURS[mode], markersize=4,
                    label=caption,
                )  # fmt: skip
            axes.axvline(NOISE, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
            axes.set(xlabel="noise on the weights, in prior scales", ylabel=label)
            faint_grid(axes)
        noisy[0].set_title("Noise around the modes")
        noisy[0].legend(fontsize=8.5)
        for place, (name, caption) in enumerate(PREDICTIONS.items()):
            values = [r[f"{name}_nll"] for r in results]
            final.scatter([place] * len(values), values, color=COLOURS[name], label=caption)
            final.hlines(np.mean(values), place - 0.25, place + 0.25, color=COLOURS[name])
        final.set(ylabel="test NLL", title="Predictions", xlim=(-0.6, len(PREDICTIONS) - 0.4))
        final.set_xticks(range(len(PREDICTIONS)), list(PREDICTIONS.values()))
        faint_grid(final)
        return [save(figure, folder / "flat-modes.png")]


EXPERIMENT = Experiment(
    id="002-flat-modes",
    paper="002",
    claim="Unlu & Aitchison (2021), §1: the mode that gradient descent finds for Laplace's method "
    "may be narrow and generalise poorly; Variational Laplace finds a broad, flat one without "
    "sampling weights. Here: noise on the weights raises the training loss less at VL's mean than "
    "at MAP's mode, and VL has a lower test NLL than MAP and than Laplace.",
    theorem=False,
    needs=("fashion-mnist",),
    minutes=0.6,
    presets={
        "quick": ModeSettings(epochs=40),
        "paper": ModeSettings(
            net="PreactResNet-18", pool=1, num_data=100_000, test_images=100_000, epochs=200,
            lr=1e-4, data="cifar10", prediction_samples=64,
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
