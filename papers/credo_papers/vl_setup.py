r"""What the experiments of Unlu & Aitchison (2021) share: data, network, rates, methods and scores.

Unlu & Aitchison (2021), §5: Adam with its defaults, the rate divided by ten after half and after
three quarters of the epochs, batches of 128, log σ from log s − 3 on at ten times the rate. The
prior's scale s is not given; here it is Kaiming's. No augmentation is mentioned, and there is none.

β of the paper is ``temperature`` here. All methods share it: MAP minimises
mean NLL − (β/n)·log p(w).

The paper trains to convergence networks that can fit every image. The quick presets' network,
images, epochs and rate were chosen for MAP to come near that in seconds: by its training NLL alone,
in 8 runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import avg_pool2d

import credo
from credo.errors import DataError
from credo.method import Method
from credo.metrics import accuracy, ece, nll
from credo.types import Json
from credo_papers.experiment import Settings
from credo_papers.networks import NetName, build

TITLES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "digits": "digits",
}
MULTIPLIER = 10.0
"""The paper's choice for the rate of log σ, over that of the means."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    """The defaults are those of the quick presets, with far more weights than images.

    There a thousand images take MAP 0.07 s, VI 0.09 s and VL 0.13 s on one core.

    ``num_data`` is the most that is taken for training, after ``held_out`` images are set aside.
    Images are averaged over squares of ``pool`` × ``pool`` pixels. ``test_images`` are the first of
    the test set. ``prediction_samples`` is the paper's "10 samples".
    """

    net: NetName = "small softplus"
    pool: int = 2
    num_data: int = 2000
    held_out: int = 0
    test_images: int = 2000
    batch_size: int = 128
    lr: float = 3e-3
    prediction_samples: int = 10


@dataclass(frozen=True)
class Images:
    """Standardised images with labels; ``held_out`` is of the training set, but not trained on."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int

    def model(self, settings: ImageSettings, seed: int) -> credo.Model:
        """The network for these images, its weights drawn from ``seed``."""
        net = build(settings.net, self.train[0].shape[1:], seed, self.classes)
        return credo.Model(net, credo.likelihoods.Categorical())


def images(settings: ImageSettings, data: str) -> Images:
    """The data set of this name, at the scale of the settings."""
    images = credo.data.load(data)
    available = len(images.train[1]) - settings.held_out
    if available < 1:
        raise DataError(
            f"{data} has {len(images.train[1])} training images, of which {settings.held_out} are "
            f"to be held out: nothing is left to train on. ({images.source}.) Put the whole set "
            "into the folder that CREDO_DATA names, or hold out fewer."
        )
    count, end = min(settings.num_data, available), len(images.train[1])
    inputs = [
        avg_pool2d(x, settings.pool) if settings.pool > 1 else x
        for x in (
            images.train[0][:count],
            images.train[0][end - settings.held_out :],
            images.test[0][: settings.test_images],
        )
    ]
    train, held_out, test = credo.data.standardise(*inputs)
    return Images(
        (train, images.train[1][:count]),
        (held_out, images.train[1][end - settings.held_out :]),
        (test, images.test[1][: settings.test_images]),
        len(images.classes),
    )


def method(
    name: Literal["vl", "vi", "map"], lr: float, beta: float, multiplier: float = MULTIPLIER
) -> Method[Any]:
    """Variational Laplace, mean-field VI or MAP at temperature β, with the paper's rates."""
    if name == "map":
        return credo.MAP(lr=lr, temperature=beta)
    kind = credo.VariationalLaplace if name == "vl" else credo.VI
    return kind(lr=lr, scale_lr=multiplier * lr, temperature=beta, init_scale=math.exp(-3))


def step_down(fraction: float) -> float:
    """The rate's factor: 1, a tenth after half of training, a hundredth after three quarters.

    >>> [round(step_down(epoch / 200), 3) for epoch in (0, 99, 100, 149, 150)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    return float(0.1 ** ((fraction >= 0.5) + (fraction >= 0.75)))


def trained(
    settings: ImageSettings, data: Images, how: Method[Any], seed: int, folder: Path
) -> credo.Posterior:
    """The posterior that this method learns from the weights of ``seed``."""
    return credo.fit(
        data.model(settings, seed), how, data.train, epochs=settings.epochs,
        batch_size=settings.batch_size, seed=seed, folder=folder, progress=False,
        schedule=step_down,
    )  # fmt: skip


def scores(
    posterior: credo.Posterior,
    data: tuple[Tensor, Tensor],
    at: Literal["mean", "samples", "linearised"],
    samples: int,
) -> Json:
    """Test NLL, accuracy and ECE of predictions at the mean or by draws."""
    predicted = posterior.predict(data[0], samples=samples, at=at, keep_samples=False).probs
    return {
        "nll": nll(predicted, data[1]),
        "accuracy": accuracy(predicted, data[1]),
        "ece": ece(predicted, data[1]),
    }
