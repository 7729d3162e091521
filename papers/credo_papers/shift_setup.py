r"""What the experiments on shifted images share: data, methods, temperature scaling, scores.

Every method trains LeNet-5 from the same weights, on the same images, along half a cosine (SWAG's
rates have a course of their own), at the library's own defaults: nothing was searched here.
Variational Laplace needs a smooth network: its ReLUs are softplus (`credo.smooth`). MC dropout has
p = 0.1 after every activation. Laplace's method and temperature scaling go on from the trained
network of MAP; the temperature is fitted to images that no method trains on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

import credo
from credo.data import shifts
from credo.method import Method
from credo.types import Json
from credo_papers.experiment import Settings
from credo_papers.networks import lenet5
from credo_papers.saved_scores import saved

CAPTIONS = {
    "map": "MAP",
    "scaled": "temperature scaling",
    "dropout": "MC dropout",
    "ensemble": "ensemble",
    "swag": "SWAG",
    "multiswag": "MultiSWAG",
    "vi": "VI",
    "ivon": "IVON",
    "last_layer": "Laplace, last layer",
    "kron": "Laplace, Kronecker",
    "vl": "Variational Laplace",
    "vi_ensemble": "ensemble of VI",
}
AFTER_MAP = ("scaled", "last_layer", "kron")
"""Those that go on from MAP's network."""

OWN_RATES = ("swag", "multiswag")
"""Those whose rates follow a course of their own; the others go along half a cosine."""

MEASURES = ("accuracy", "nll", "brier", "ece", "confidence", "entropy")


@dataclass(frozen=True, kw_only=True)
class ShiftSettings(Settings):
    """``num_data`` images to train on, ``held_out`` others for the temperature.

    ``rotations`` in degrees and ``rolls`` in pixels are those of Ovadia et al. (2019);
    ``corruptions`` are names of `credo.data.shifts.IMAGES`, at ``severities``. ``test_images`` and
    ``foreign_images`` are the most that are taken of a set.
    """

    net: str = "LeNet-5"
    data: str
    foreign: tuple[str, ...]
    num_data: int
    held_out: int
    epochs: int
    batch_size: int = 128
    members: int = 5
    dropout: float = 0.1
    prediction_samples: int
    test_images: int
    foreign_images: int
    rotations: tuple[int, ...] = ()
    rolls: tuple[int, ...] = ()
    corruptions: tuple[str, ...] = ()
    severities: tuple[int, ...] = ()


def small_network(image: torch.Size, seed: int) -> nn.Sequential:
    """LeNet-5 with torch's initialisation, which members of an ensemble draw anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lenet5(image)


def swag() -> Method[Any] | None:
    """`credo.SWAG`, or None where this version of the library has none."""
    made = getattr(credo, "SWAG", None)
    return None if made is None else made()


def schedule_of(name: str) -> Literal["constant", "cosine"]:
    """How the rates of a method change on the way."""
    return "constant" if name in OWN_RATES else "cosine"


def methods(settings: ShiftSettings) -> dict[str, Method[Any] | None]:
    """All that are trained; None is one that the library does not have."""
    averaged = swag()
    return {
        "map": credo.MAP(),
        "dropout": credo.MCDropout(p=settings.dropout),
        "ensemble": credo.Ensemble(credo.MAP(), members=settings.members),
        "swag": averaged,
        "multiswag": averaged and credo.Ensemble(averaged, members=settings.members),
        "vi": credo.VI(),
        "ivon": credo.IVON(),
        "vl": credo.VariationalLaplace(),
        "vi_ensemble": credo.Ensemble(credo.VI(), members=settings.members),
    }


@dataclass(frozen=True)
class Images:
    """Pixels in [0, 1], and how they are standardised for the network."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    foreign: dict[str, Tensor]
    mean: Tensor
    std: Tensor

    def scaled(self, x: Tensor) -> Tensor:
        """By the training images' mean and standard deviation in each channel."""
        return (x - self.mean) / self.std


def load_images(settings: ShiftSettings, seed: int) -> Images:
    """The seed chooses which images are trained on and which are held out."""
    data = credo.data.load(settings.data)
    x, y = data.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train = order[: settings.num_data]
    held = order[settings.num_data : settings.num_data + settings.held_out]
    return Images(
        (x[train], y[train]),
        (x[held], y[held]),
        (data.test[0][: settings.test_images], data.test[1][: settings.test_images]),
        {
            name: credo.data.load(name).test[0][: settings.foreign_images]
            for name in settings.foreign
        },
        x[train].mean((0, 2, 3), keepdim=True),
        x[train].std((0, 2, 3), correction=0, keepdim=True),
    )


def shifted_sets(settings: ShiftSettings, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The kind of each shift and the images, from the mildest to the hardest of a kind."""
    for degrees in settings.rotations:
        yield "rotation", shifts.rotated(x, degrees).clamp(0, 1)
    for pixels in settings.rolls:
        yield "roll", shifts.rolled(x, pixels)
    for name in settings.corruptions:
        for severity in settings.severities:
            yield name, shifts.IMAGES[name](x, severity)


Predict = Callable[[Tensor], Tensor]
"""From standardised images to probabilities."""


def run_methods(settings: ShiftSettings, seed: int, folder: Path) -> Json:
    """Every method's scores, each in a file of its own; those after MAP follow its training."""
    images = load_images(settings, seed)
    result: Json = {"skipped": []}
    for name, method in methods(settings).items():
        if method is None:
            result["skipped"].append(f"{name}: this version of the library has no credo.SWAG")
            continue
        scores = saved(
            folder / name / "scores.json",
            settings,
            lambda name=name, method=method: _trained_scores(  # type: ignore[misc]
                settings, images, name, method, seed, folder
            ),
        )
        result |= scores
    return result


def _trained_scores(
    settings: ShiftSettings, images: Images, name: str, method: Method[Any], seed: int, folder: Path
) -> Json:
    net: nn.Module = small_network(images.train[0].shape[1:], seed)
    if name == "vl":
        net = credo.smooth(net)
    model = credo.Model(net, credo.likelihoods.Categorical())
    train = images.scaled(images.train[0]), images.train[1]
    posterior = credo.fit(
        model, method, train, epochs=settings.epochs, batch_size=settings.batch_size, seed=seed,
        folder=folder / name / "run", progress=False, schedule=schedule_of(name),
    )  # fmt: skip
    samples = settings.prediction_samples
    scores = score(settings, images, name, _predictor(posterior, samples))
    scores[f"{name}_seconds"] = posterior.history[-1]["seconds"]
    if name != "map":
        return scores
    scaled, temperature = scaled_by_temperature(posterior, images)
    scores |= score(settings, images, "scaled", scaled) | {"scaled_temperature": temperature}
    subsets = {
        "last_layer": credo.Laplace(structure="full", subset="last_layer"),
        "kron": credo.Laplace(structure="kron"),
    }
    for kind, laplace in subsets.items():
        expanded = credo.fit(model, laplace, train, seed=seed, progress=False)
        scores |= score(settings, images, kind, _predictor(expanded, samples))
    return scores


def _predictor(posterior: credo.Posterior, samples: int) -> Predict:
    return lambda x: posterior.predict(x, samples=samples, keep_samples=False).probs


def scaled_by_temperature(posterior: credo.Posterior, images: Images) -> tuple[Predict, float]:
    """Predictions softmax(logits/T), T of least NLL on the held-out images (Guo et al., 2017).

    Returns:
        How to predict, and T.
    """

    def logits(x: Tensor) -> Tensor:
        return posterior.predict(x, samples=1).outputs[0]

    held, labels = logits(images.scaled(images.held_out[0])).double(), images.held_out[1]

    def nll(log_temperature: float) -> float:
        return float(nn.functional.cross_entropy(held / math.exp(log_temperature), labels))

    temperature = math.exp(optimize.minimize_scalar(nll, bounds=(-3, 3), method="bounded").x)
    return (lambda x: torch.softmax(logits(x) / temperature, 1)), temperature


def score(settings: ShiftSettings, images: Images, name: str, predict: Predict) -> Json:
    """Clean, shifted and foreign images: means over all shifted sets, and lists by kind."""
    x, y = images.test
    probs = predict(images.scaled(x))
    clean = _measures(probs, y)
    by_kind: dict[str, list[dict[str, float]]] = {}
    for kind, moved in shifted_sets(settings, x):
        by_kind.setdefault(kind, []).append(_measures(predict(images.scaled(moved)), y))
    every = [scores for levels in by_kind.values() for scores in levels]
    result: Json = {f"{name}_clean_{key}": value for key, value in clean.items()}
    for key in MEASURES:
        result[f"{name}_shift_{key}"] = float(np.mean([scores[key] for scores in every]))
        for kind, levels in by_kind.items():
            result[f"{name}_{kind}_{key}"] = [clean[key], *(scores[key] for scores in levels)]
    for foreign, others in images.foreign.items():
        doubts = _entropy(predict(images.scaled(others)))
        result[f"{name}_{foreign}_auroc"] = credo.metrics.auroc(_entropy(probs), doubts)
    return result


def _measures(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": credo.metrics.accuracy(probs, y),
        "nll": credo.metrics.nll(probs, y),
        "brier": credo.metrics.brier(probs, y),
        "ece": credo.metrics.ece(probs, y),
        "confidence": float(probs.amax(1).mean()),
        "entropy": float(_entropy(probs).mean()),
    }


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp_min(1e-12).log()).sum(1)
