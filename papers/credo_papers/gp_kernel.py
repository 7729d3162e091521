r"""Khan (2019), "DNN2GP": the kernel of a network trained on digits has a block for every class.

The paper it presents (Khan, Immer, Abedi & Korzepa, 2019, arXiv:1906.01930) shows the kernel
matrix JΣJᵀ of a LeNet-5 trained on MNIST, inputs sorted by class: blocks along the diagonal. Here
LeNet-5 is trained by MAP, Laplace's diagonal Σ follows, and the kernel of `PER_CLASS` images of
each class among the first 1,000 of the test set, summed over matching outputs, is made a
correlation k_ij/√(k_ii k_jj).

Rules of the verdict, written before the first run: with 95 % confidence over seeds

1. ``blocks``: the mean correlation within classes exceeds that between them, in every class by
   itself (the smallest of the ten margins is tested);
2. ``learned``: the mean margin is larger than that of the same network before training: images of a
   class are alike for any kernel, so blocks alone would show nothing of what was learned.

Reproduced if both hold, not reproduced if one is refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import credo
from credo.families import DiagGaussian
from credo.functionspace import to_gp
from credo.report.style import blank_figure, house_style, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise
from credo_papers.networks import build

PER_CLASS = 30


@dataclass(frozen=True, kw_only=True)
class KernelSettings(Settings):
    """``data`` is any image set; ``candidates`` of its test set are looked at."""

    net: str = "LeNet-5"
    num_data: int = 10_000
    epochs: int = 4
    data: str = "mnist"
    candidates: int = 1000
    per_class: int = PER_CLASS
    lr: float = 1e-3


def run_one(settings: KernelSettings, seed: int, folder: Path) -> Json:
    """Train; the kernel before and after."""
    images = credo.data.load(settings.data)
    x, y = (part[: settings.num_data] for part in images.train)
    chosen, labels = sorted_by_class(
        images.test[1][: settings.candidates], settings.per_class, len(images.classes)
    )
    shown = images.test[0][: settings.candidates][chosen]
    net = build("LeNet-5", x.shape[1:], seed, len(images.classes))
    model = credo.Model(net, credo.likelihoods.Categorical())
    ones = DiagGaussian(model.weights(model.random), torch.tensor(1.0).to(x))
    before = correlation(to_gp(credo.Posterior.at_network(model, ones)).kernel(shown))
    method = credo.Laplace(structure="diag", train=credo.MAP(lr=settings.lr))
    posterior = credo.fit(
        model, method, (x, y), epochs=settings.epochs, batch_size=128, seed=seed,
        folder=folder / "laplace", progress=False,
    )  # fmt: skip
    after = correlation(to_gp(posterior).kernel(shown))
    tested = posterior.predict(images.test[0], at="mean").probs.argmax(-1)
    margins = class_margins(after, labels)
    return {
        "accuracy": float((tested == images.test[1]).float().mean()),
        "smallest_margin": min(margins),
        "margin": sum(margins) / len(margins),
        "margin_before": sum(class_margins(before, labels)) / len(margins),
        "margins": margins,
        "labels": labels.tolist(),
        "before": [[round(v, 4) for v in row] for row in before.tolist()],
        "after": [[round(v, 4) for v in row] for row in after.tolist()],
    }


def sorted_by_class(labels: Tensor, per_class: int, classes: int) -> tuple[Tensor, Tensor]:
    """The first images of every class, class by class, and their labels."""
    by_class = [(labels == c).nonzero().flatten()[:per_class] for c in range(classes)]
    chosen = torch.cat(by_class)
    return chosen, labels[chosen]


def correlation(kernel: Tensor) -> Tensor:
    """k_ij/√(k_ii k_jj)."""
    scale = kernel.diagonal().rsqrt()
    return kernel * scale.unsqueeze(0) * scale.unsqueeze(1)


def class_margins(matrix: Tensor, labels: Tensor) -> list[float]:
    """For each class the mean within, without the diagonal, less the mean to all others."""
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    apart = ~torch.eye(len(labels), dtype=torch.bool)
    return [
        float(matrix[mine][:, mine][apart[mine][:, mine]].mean() - matrix[mine][~same[mine]].mean())
        for mine in (labels == c for c in labels.unique())
    ]


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    blocks = sign_of_mean([r["smallest_margin"] for r in results])
    learned = sign_of_mean([r["margin"] - r["margin_before"] for r in results])
    numbers |= {"blocks_holds": float(blocks), "learned_holds": float(learned)}
    if min(blocks, learned) > 0:
        return Verdict("reproduced", numbers)
    return Verdict("not reproduced" if min(blocks, learned) < 0 else "inconclusive", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """The first seed's kernel before and after training, sorted by class."""
    first = results[0]
    classes = len(set(first["labels"]))
    step = len(first["labels"]) / classes
    with house_style():
        figure = blank_figure(9, 4.6)
        for axes, (key, title) in zip(
            figure.subplots(1, 2),
            {"before": "Before training", "after": "After training"}.items(),
            strict=True,
        ):
            drawn = axes.imshow(first[key], cmap="cividis", vmin=0, vmax=1)
            places = [(c + 0.5) * step for c in range(classes)]
            axes.set_xticks(places, [str(c) for c in range(classes)])
            axes.set_yticks(places, [str(c) for c in range(classes)])
            axes.tick_params(length=0)
            axes.set(title=title, xlabel="class")
        figure.colorbar(drawn, ax=figure.axes, shrink=0.8, label="correlation of the kernel")
        return [save(figure, folder / "gp-kernel.png")]


EXPERIMENT = Experiment(
    id="004-gp-kernel",
    paper="004",
    claim="Khan, Immer, Abedi & Korzepa (2019), DNN2GP: the kernel matrix of a LeNet-5 trained on "
    "MNIST, sorted by class, has blocks on its diagonal. Here: images of a class are more alike to "
    "it than to the others, in every class, and by a larger margin than before training.",
    theorem=False,
    needs=("mnist",),
    minutes=0.4,
    presets={"quick": KernelSettings(), "paper": KernelSettings(num_data=60_000, epochs=20)},
    run_one=run_one,
    check=check,
    figures=figures,
)
