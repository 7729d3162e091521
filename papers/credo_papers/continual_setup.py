"""What the experiments on continual learning share: streams, networks, and every learner by name.

A learner is a line of `LEARNERS`. Its own arguments come from the settings' ``options``, by name,
those of its training from ``options[name]["training"]``; all learners of one seed see the same
stream and start from the same weights.

The quick presets keep the paper's tasks, heads and network, and have fewer images (and a learning
rate that suits fewer steps). How strongly EWC, online EWC, Kronecker factors and SI hold on to the
past, and FROMP on split CIFAR, was searched over powers of ten by average accuracy at seed 100,
which no verdict uses, until the best was inside of the grid (`continual_strengths`). For VCL
numbers of epochs and first scales were tried on both sets of digits, for its natural gradient step
sizes. Elsewhere FROMP has the published settings, its variants have FROMP's, and replay was not
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import credo
from credo.continual import (
    EWC,
    FROMP,
    SI,
    VCL,
    Joint,
    KroneckerLaplace,
    Learner,
    MultiHead,
    Naive,
    NaturalVCL,
    OnlineEWC,
    Replay,
    Report,
    Stream,
    Training,
    permuted,
    run,
    split,
)
from credo.data import ImageSet, standardise
from credo.errors import DataError
from credo.types import Json
from credo_papers.experiment import Settings


class Entry(NamedTuple):
    """A learner: its name in tables, and how it is made of model, training and memory size."""

    title: str
    make: Callable[..., Learner]
    remembers: str | None = None
    """The argument that takes the number of examples remembered of each task."""
    given: Mapping[str, Any] = {}
    """Arguments that make it this learner and no other."""


LEARNERS: dict[str, Entry] = {
    "naive": Entry("fine-tuning", Naive),
    "joint": Entry("joint (ceiling)", Joint),
    "replay": Entry("replay", Replay, "size"),
    "ewc": Entry("EWC", EWC),
    "online_ewc": Entry("online EWC", OnlineEWC),
    "kronecker": Entry("Kronecker Laplace", KroneckerLaplace),
    "si": Entry("SI", SI),
    "vcl": Entry("VCL", VCL),
    "vcl_coreset": Entry("VCL + coreset", VCL, "coreset_size"),
    "vcl_natural": Entry("VCL, natural gradient", NaturalVCL),
    "fromp": Entry("FROMP", FROMP, "size"),
    "fromp_l2": Entry("FROMP, K = I", FROMP, "size", {"kernel": "identity"}),
    "fromp_random": Entry("FROMP, random memory", FROMP, "size", {"choice": "balanced"}),
}
"""Every learner by the name that settings and results know it by."""


def same_for_variants(*, vcl: Json, fromp: Json) -> dict[str, Json]:
    """Options of VCL with and without a coreset, and of FROMP with each kernel and memory.

    >>> sorted(same_for_variants(vcl={}, fromp={}))
    ['fromp', 'fromp_l2', 'fromp_random', 'vcl', 'vcl_coreset']
    """
    both = dict.fromkeys(("vcl", "vcl_coreset"), vcl)
    return both | dict.fromkeys(("fromp", "fromp_l2", "fromp_random"), fromp)


@dataclass(frozen=True, kw_only=True)
class ContinualSettings(Settings):
    """``num_data`` and ``test_images`` are counts of one task; ``memory`` too.

    ``options`` has each learner's arguments by its name, "training" among them for its training.
    """

    stream: str
    data: str
    tasks: int
    test_images: int = 1000
    batch_size: int = 128
    lr: float = 1e-3
    memory: int = 40
    pool: int = 1
    learners: tuple[str, ...] = tuple(LEARNERS)
    options: Mapping[str, Json] = field(default_factory=dict)


def make_stream(settings: ContinualSettings, seed: int) -> Stream:
    """The stream of these settings; subsets and permutations come from the seed."""
    few: dict[str, Any] = {
        "seed": seed,
        "num_data": settings.num_data,
        "num_test": settings.test_images,
    }
    if settings.stream == "permuted":
        return permuted(settings.data, tasks=settings.tasks, **few)
    if settings.stream == "split":
        source = _smaller(credo.data.load(settings.data), settings.pool)
        classes = len(source.classes)
        return split(source, per_task=classes // settings.tasks, **few)
    if settings.stream == "cifar10 then cifar100":
        return _cifar_stream(settings, few)
    raise DataError(f"no stream is called {settings.stream!r}")


def make_model(settings: ContinualSettings, stream: Stream, seed: int) -> credo.Model:
    """The network of these settings, with PyTorch's own start, which the published codes use.

    Its prior, N(0, 1), is that of variational continual learning; the others do not see it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if settings.net.startswith("conv"):
            body, features = _convolutional(settings.net, stream.input_shape)
        else:
            body, features = _dense(settings.net, stream.input_shape)
        net: nn.Module
        if stream.multi_head:
            net = MultiHead(body, features, stream.head_sizes)
        else:
            net = nn.Sequential(body, nn.Linear(features, stream.head_sizes[0]))
    return credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0))


def make_learner(settings: ContinualSettings, name: str, stream: Stream, seed: int) -> Learner:
    """The learner of this name, before its first task."""
    if name not in LEARNERS:
        raise DataError(f"no learner is called {name!r}; there are {', '.join(LEARNERS)}")
    entry = LEARNERS[name]
    options = dict(settings.options.get(name, {}))
    training = Training(
        epochs=settings.epochs, batch_size=settings.batch_size, lr=settings.lr, seed=seed
    )
    training = replace(training, **options.pop("training", {}))
    if entry.remembers is not None:
        options.setdefault(entry.remembers, settings.memory)
    return entry.make(make_model(settings, stream, seed), training, **entry.given, **options)


def learn_stream(settings: ContinualSettings, name: str, seed: int, folder: Path) -> Report:
    """One learner on one stream, resumed if it was begun in this folder."""
    stream = make_stream(settings, seed)
    return run(make_learner(settings, name, stream, seed), stream, folder, progress=False)


def _dense(net: str, shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """ "256-256" and the like: hidden layers with ReLU."""
    layers: list[nn.Module] = [nn.Flatten()]
    features = 1
    for side in shape:
        features *= side
    for width in (int(part) for part in net.split("-")):
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers), features


def _convolutional(net: str, shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """ "conv 32-32-64-64, 512": pairs of 3×3 convolutions, each pair pooled, and dropout.

    The first of a pair pads, the second does not.
    """
    convolutions, dense = net.removeprefix("conv").split(",")
    widths = [int(part) for part in convolutions.split("-")]
    channels, height, _ = shape
    layers: list[nn.Module] = []
    for first, second in zip(widths[::2], widths[1::2], strict=True):
        layers += [
            nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3),
            nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        ]  # fmt: skip
        channels, height = second, (height - 2) // 2
    features = int(dense)
    layers += [nn.Flatten(), nn.Linear(channels * height * height, features), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.5)), features


def _smaller(source: ImageSet, pool: int) -> ImageSet:
    """Standardised if in colour, as the convolutional network's inputs are; pooled if asked."""
    if source.train[0].shape[1] == 1 and pool == 1:
        return source
    (x, y), (x_test, y_test) = source.train, source.test
    if pool > 1:
        x, x_test = (nn.functional.avg_pool2d(images, pool) for images in (x, x_test))
    x, x_test = standardise(x, x_test)
    return replace(source, train=(x, y), test=(x_test, y_test))


def _cifar_stream(settings: ContinualSettings, few: Mapping[str, Any]) -> Stream:
    """CIFAR-10 as a whole, then the first classes of CIFAR-100, ten in each task."""
    first = _smaller(credo.data.load("cifar10"), settings.pool)
    second = _smaller(credo.data.load("cifar100"), settings.pool)
    whole = split(first, per_task=10, **few)
    groups = [list(range(10 * t, 10 * t + 10)) for t in range(settings.tasks - 1)]
    parts = split(second, per_task=groups, **few)
    moved = tuple(replace(task, head=index + 1) for index, task in enumerate(parts))
    return Stream("CIFAR-10, then CIFAR-100", (*whole, *moved))
