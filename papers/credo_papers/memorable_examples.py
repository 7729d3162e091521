r"""Khan (2019), "memorable past": the examples with the largest Λ are the hard and ambiguous ones.

The tutorial ranks training images by Λ(x) = tr(diag(p) − ppᵀ) and shows the most and the least
relevant digits of MNIST and images of CIFAR-10: the first are written badly or could be two things,
the last are plain. Here LeNet-5 is trained on each set; the figures show the same of its training
images.

The tutorial's pictures have no numbers. For numbers the test images, which the network has not
fitted, are ranked by relevance too (no label is needed for it), the top and the bottom tenth taken.
For CIFAR-10 some fifty people labelled every test image (CIFAR-10H, Peterson, Battleday, Griffiths
& Russakovsky, 2019), so how ambiguous it is can be said without the network: by the entropy of
their labels.

Rules of the verdict, written before the first run: with 95 % confidence over seeds

1. ``mnist_errors``, ``cifar10_errors``: the most relevant tenth is misclassified more often than
   the least relevant one;
2. ``cifar10_ambiguous``: its images have the larger entropy of human labels.

Reproduced if all hold, not reproduced if one is refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import credo
from credo.data.npz import read_npz
from credo.data.sets import data_root
from credo.functionspace import most_memorable, relevance
from credo.report.style import blank_figure, house_style, save
from credo.types import Json
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)
from credo_papers.networks import build

SETS = ("mnist", "cifar10")
SOFT_LABELS = "cifar10h_test_soft_labels.npz"


@dataclass(frozen=True, kw_only=True)
class MemorableSettings(Settings):
    """``share`` of ``ranked`` test images is most, and as many least relevant.

    ``shown`` of the training images are in the figure, of each.
    """

    net: str = "LeNet-5"
    num_data: int = 20_000
    epochs: int = 5
    data: tuple[str, ...] = SETS
    ranked: int = 10_000
    share: float = 0.1
    shown: int = 12
    lr: float = 1e-3


def run_one(settings: MemorableSettings, seed: int, folder: Path) -> Json:
    """Train on each set; rank its training images to be seen and its test images to be judged."""
    result: Json = {}
    for name in settings.data:
        images = credo.data.load(name)
        x, y = (part[: settings.num_data] for part in images.train)
        test, labels = (part[: settings.ranked] for part in images.test)
        model = credo.Model(
            build("LeNet-5", x.shape[1:], seed, len(images.classes)),
            credo.likelihoods.Categorical(),
        )
        posterior = credo.fit(
            model, credo.MAP(lr=settings.lr), (x, y), epochs=settings.epochs, batch_size=128,
            seed=seed, folder=folder / name, progress=False,
        )  # fmt: skip
        fitted = relevance(posterior, (x, y), progress=False)
        scores = relevance(posterior, (test, labels), progress=False)
        wrong = posterior.predict(test, at="mean").probs.argmax(-1) != labels
        count = max(1, int(settings.share * len(test)))
        for rank, least in (("most", False), ("least", True)):
            chosen = most_memorable(scores, count, least=least)
            result[f"{name}_{rank}_errors"] = float(wrong[chosen].float().mean())
            result[f"{name}_{rank}_score"] = float(scores[chosen].mean())
            if name == "cifar10":
                result[f"{name}_{rank}_entropy"] = float(_human_entropy(len(test))[chosen].mean())
            seen = most_memorable(fitted, settings.shown, least=least)
            result[f"{name}_{rank}_images"] = _pixels(x[seen])
            result[f"{name}_{rank}_labels"] = [images.classes[int(label)] for label in y[seen]]
        result[f"{name}_error"] = float(wrong.float().mean())
    return result


def _human_entropy(count: int) -> Tensor:
    """Of the labels that people gave to the first test images of CIFAR-10, in nats."""
    counts = read_npz(data_root(None, "cifar10") / SOFT_LABELS, ["counts"])["counts"]
    shares = torch.from_numpy(counts[:count]).double()
    return torch.special.entr(shares / shares.sum(1, keepdim=True)).sum(1)


def _pixels(images: Tensor) -> list[Any]:
    """Bytes, channels last, as lists: a run's result is JSON."""
    pixels: list[Any] = (images.movedim(1, -1) * 255).round().to(torch.uint8).tolist()
    return pixels


def margins(results: list[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed."""
    differences = {
        f"{name}_errors": [r[f"{name}_most_errors"] - r[f"{name}_least_errors"] for r in results]
        for name in SETS
        if f"{name}_error" in results[0]
    }
    if "cifar10_error" in results[0]:
        differences["cifar10_ambiguous"] = [
            r["cifar10_most_entropy"] - r["cifar10_least_entropy"] for r in results
        ]
    return differences


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The first seed's most and least relevant training images of every set, with labels."""
    first, paths = results[0], []
    for name in (s for s in SETS if f"{s}_error" in results[0]):
        with house_style():
            columns = len(first[f"{name}_most_labels"])
            figure = blank_figure(0.85 * columns + 0.4, 2.6)
            grid = figure.subplots(2, columns, squeeze=False)
            for row, (rank, title) in enumerate(
                {"most": "Most relevant", "least": "Least relevant"}.items()
            ):
                for axes, image, label in zip(
                    grid[row], first[f"{name}_{rank}_images"], first[f"{name}_{rank}_labels"],
                    strict=True,
                ):  # fmt: skip
                    pixels = np.array(image, dtype=np.uint8)
                    plain = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
                    axes.imshow(plain, cmap="gray_r" if pixels.shape[-1] == 1 else None)
                    axes.set_axis_off()
                    axes.text(
                        0.5, -0.12, label, transform=axes.transAxes, ha="center", va="top",
                        fontsize=7.5,
                    )  # fmt: skip
                grid[row][0].set_title(title)
            paths.append(save(figure, folder / f"memorable-{name}.png"))
    return paths


EXPERIMENT = Experiment(
    id="004-memorable",
    paper="004",
    claim="Khan (2019), the memorable past: images with a large Λ are ambiguous or badly drawn, "
    "those with a small one plain. Here: the most relevant tenth of test images is misclassified "
    "more often than the least relevant on MNIST and CIFAR-10, and people disagree more on its "
    "labels.",
    theorem=False,
    needs=("mnist", "cifar10", "cifar10h"),
    minutes=1.5,
    presets={
        "quick": MemorableSettings(),
        "paper": MemorableSettings(num_data=60_000, epochs=50),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
