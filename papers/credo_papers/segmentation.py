r"""Khan (2019), "Uncertainty estimation for image segmentation": doubt, pixel by pixel.

The tutorial shows street scenes of Kendall, Gal and Cipolla (2018) with the true segments, a
prediction and a map of its uncertainty, and no numbers; what the eye takes from such maps is that
uncertainty is high along the borders of objects and where the prediction is wrong. Here that is
measured: a small U-Net on CamVid, learned with IVON, and beside it one network by Adam with the
same prior, weights to start from, temperature and epochs. A network without a posterior has an
entropy at every pixel too, so both are scored; only the posterior has mutual information.

A pixel's entropy is that of (1/S) Σ_s softmax(f_s), its mutual information that entropy minus
(1/S) Σ_s H[softmax(f_s)]. Pixels labelled void are left out of everything. A *border* pixel has a
neighbour (above, below, left, right) of another class in the truth. Calibration per class is that
of the pixels a network assigns to the class, of which its confidence says how many are right.

The likelihood multiplies over pixels as if they were independent, but neighbours say nearly the
same: taken at its word an image would count for thousands of labels, and the posterior would be far
too narrow. The temperature pixels/``labels_per_image`` makes it count for fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from torch import Tensor
from torch.nn.functional import avg_pool2d

import credo
from credo.method import Method
from credo.posterior.posterior import Posterior
from credo.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    blank_figure,
    faint_grid,
    save,
)
from credo.types import Json
from credo_papers.camvid import SegmentationSet, camvid
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)
from credo_papers.unet import build_unet

REQUIRED_ACCURACY = 0.7
TITLES = {"map": "one network (MAP)", "ivon": "average over q (IVON)"}
COMPARED = ("accuracy", "mean_iou", "nll", "ece", "entropy_auroc")
IMAGES_AT_ONCE = 16
SCENES = 3
THOUSANDTHS = 1000
WIDTHS = (16, 32, 64, 96)
COLOURS = (SKY, BLUE, BLACK, GREY, PALE, GREEN, ORANGE, "#8C510A", VERMILLION, PURPLE, "#F0E442",
           "#FFFFFF")  # fmt: skip
"""One for each class of CamVid, and white for void."""
_PALETTE = np.array([to_rgb(colour) for colour in COLOURS])


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(Settings):
    """``reduction`` divides height and width. IVON's ``lr`` and ``hess_init`` are per pixel.

    Per pixel means as if the loss were the mean over an image's pixels and not their sum; so the
    same values serve every resolution. ``map_lr`` is Adam's, which knows no such scale.
    IVON's values were chosen among a few by validation images, after short runs on a quarter of the
    training set; ``map_lr`` is `credo.MAP`'s default and was not tuned.
    """

    net: str = "U-Net 16-32-64-96"
    num_data: int = 367
    epochs: int
    reduction: int = 1
    batch_size: int = 4
    lr: float = 0.3
    hess_init: float = 0.3
    curvature_share: float = 0.999
    labels_per_image: int = 75
    map_lr: float = 3e-3
    prediction_samples: int = 16


@dataclass(frozen=True)
class Maps:
    """What was predicted for every pixel: probs (N, C, H, W), the uncertainties (N, H, W)."""

    probs: Tensor
    entropy: Tensor
    mutual_information: Tensor


def run_one(settings: SegmentationSettings, seed: int, folder: Path) -> Json:
    """Train both networks from the same weights; score their pixels and keep a few scenes."""
    scenes = camvid()
    x, y = _reduced(scenes.train, settings.reduction, settings.num_data)
    x_test, y_test = _reduced(scenes.test, settings.reduction)
    inputs, test_inputs = credo.data.standardise(x, x_test)
    result: Json = {"classes": list(scenes.classes), "class_share": _shares(y_test, scenes)}
    for name, method in _methods(settings, pixels=y[0].numel()).items():
        net = build_unet(WIDTHS, x.shape[1], len(scenes.classes), seed)
        model = credo.Model(net, credo.likelihoods.Categorical(ignore_index=scenes.void))
        posterior = credo.fit(
            model, method, (inputs, y), epochs=settings.epochs, batch_size=settings.batch_size,
            seed=seed, folder=folder / name, progress=False,
        )  # fmt: skip
        samples = 1 if name == "map" else settings.prediction_samples
        maps = _predict(posterior, test_inputs, samples)
        numbers = scores(maps, y_test, scenes.void)
        if name == "ivon":
            numbers |= information_scores(maps, y_test, scenes.void)
            result["scenes"] = _scenes(x_test, y_test, maps)
        result |= {f"{name}_{quantity}": value for quantity, value in numbers.items()}
    return result


def scores(maps: Maps, masks: Tensor, void: int) -> Json:
    """How good the classes of the pixels are, how calibrated, and what their entropy tells."""
    known = masks != void
    y, probs, entropy = masks[known], maps.probs.movedim(1, -1)[known], maps.entropy[known]
    predicted, border = probs.argmax(1), borders(masks, void)[known]
    iou = class_iou(predicted, y, probs.shape[1])
    per_class = class_ece(probs, y)
    return {
        "accuracy": credo.metrics.accuracy(probs, y),
        "mean_iou": _mean_of_known(iou),
        "nll": credo.metrics.nll(probs, y),
        "ece": credo.metrics.ece(probs, y),
        "class_ece_mean": _mean_of_known(per_class),
        "entropy_auroc": _auroc_of_errors(entropy, predicted != y),
        "entropy_border": float(entropy[border].mean()),
        "entropy_inside": float(entropy[~border].mean()),
        "class_iou": iou,
        "class_ece": per_class,
    }


def information_scores(maps: Maps, masks: Tensor, void: int) -> Json:
    """What the mutual information of the pixels tells."""
    known = masks != void
    information, border = maps.mutual_information[known], borders(masks, void)[known]
    wrong = maps.probs.argmax(1)[known] != masks[known]
    return {
        "information_auroc": _auroc_of_errors(information, wrong),
        "information_border": float(information[border].mean()),
        "information_inside": float(information[~border].mean()),
    }


def borders(masks: Tensor, void: int) -> Tensor:
    """Which pixels have a direct neighbour of another class, (N, H, W); void is no class.

    >>> borders(torch.tensor([[[0, 0, 1, 1, 2]]]), void=2).int()
    tensor([[[0, 1, 1, 0, 0]]], dtype=torch.int32)
    """
    edges = torch.zeros_like(masks, dtype=torch.bool)
    for dim in (1, 2):
        length = masks.shape[dim] - 1
        first, second = masks.narrow(dim, 0, length), masks.narrow(dim, 1, length)
        differ = (first != second) & (first != void) & (second != void)
        edges.narrow(dim, 0, length).logical_or_(differ)
        edges.narrow(dim, 1, length).logical_or_(differ)
    return edges


def class_iou(predicted: Tensor, y: Tensor, classes: int) -> list[float | None]:
    """Intersection over union of each class, |predicted ∩ true| / |predicted ∪ true|.

    None for a class that is neither there nor predicted.

    >>> class_iou(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), classes=3)
    [0.5, 0.6666666666666666, None]
    """
    counts = torch.bincount(y * classes + predicted, minlength=classes**2)
    table = counts.reshape(classes, classes).double()
    both = table.diagonal()
    union = table.sum(0) + table.sum(1) - both
    return [float(b / u) if u else None for b, u in zip(both, union, strict=True)]


def class_ece(probs: Tensor, y: Tensor) -> list[float | None]:
    """Expected calibration error of the pixels (n, C) assigned to each class, or None if none is.

    Chosen by the prediction and not by the truth: of the pixels called "car" with confidence 0.8,
    80 % should be cars, while of those that are cars nothing of the kind holds even for perfect
    probabilities. Reference: C. Gupta, A. Ramdas, "Top-label calibration and multiclass-to-binary
    reductions", 2022.
    """
    predicted = probs.argmax(1)
    chosen = [predicted == label for label in range(probs.shape[1])]
    return [credo.metrics.ece(probs[c], y[c]) if bool(c.any()) else None for c in chosen]


def check(results: list[Json]) -> Verdict:
    """Whether IVON's uncertainty is higher on errors and at borders, if it segments at all.

    Four differences must be above zero: the AUROC for errors above ½ and the mean at borders above
    the mean inside, each for entropy and for mutual information. One below zero refutes. How the
    single network compares has no part in the verdict: ``*_gain`` is IVON's score minus its.
    """
    numbers = summarise(results) | summarise([_gains(result) for result in results])
    if numbers["ivon_accuracy"] < REQUIRED_ACCURACY:
        return Verdict("inconclusive", numbers)
    signs = [
        sign_of_mean([value(result, quantity) for result in results])
        for quantity in ("entropy", "information")
        for value in (_above_chance, _rise_at_borders)
    ]
    return Verdict(judgement(signs), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Scenes with their uncertainty, of the first seed; calibration of each class, of all seeds."""
    return [_draw_scenes(results[0], folder), _draw_calibration(results, folder)]


def _methods(settings: SegmentationSettings, pixels: int) -> dict[str, Method[Any]]:
    """Both minimise the sum over an image's pixels, so IVON's rates are scaled by their number."""
    temperature = pixels / settings.labels_per_image
    return {
        "map": credo.MAP(lr=settings.map_lr, temperature=temperature),
        "ivon": credo.IVON(
            lr=settings.lr / pixels,
            hess_init=settings.hess_init * pixels,
            betas=(0.9, settings.curvature_share),
            temperature=temperature,
        ),
    }


def _reduced(
    part: tuple[Tensor, Tensor], reduction: int, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """The first images as means over squares of pixels; masks keep one pixel of each square."""
    images, masks = part[0][:count], part[1][:count]
    if reduction == 1:
        return images, masks
    small = avg_pool2d(images, reduction)
    height, width = small.shape[-2:]
    return small, masks[:, ::reduction, ::reduction][:, :height, :width].contiguous()


def _predict(posterior: Posterior, x: Tensor, samples: int) -> Maps:
    """In pieces, all with the same draws of the weights, so that memory does not grow with x."""
    pieces = []
    for images in x.split(IMAGES_AT_ONCE):
        pred = posterior.predict(images, samples=samples, keep_samples=False)
        pieces.append((pred.probs, pred.entropy, pred.mutual_information))
    probs, entropy, information = (torch.cat(values) for values in zip(*pieces, strict=True))
    return Maps(probs, entropy, information)


def _auroc_of_errors(uncertainty: Tensor, wrong: Tensor) -> float:
    return credo.metrics.auroc(uncertainty[~wrong], uncertainty[wrong])


def _mean_of_known(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _shares(masks: Tensor, scenes: SegmentationSet) -> list[float]:
    """How many of the known pixels each class has."""
    counts = torch.bincount(masks[masks != scenes.void], minlength=len(scenes.classes)).double()
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares


def _scenes(images: Tensor, masks: Tensor, maps: Maps) -> list[Json]:
    """Evenly spaced test images, so nobody picked them; whole numbers keep the file small."""
    chosen = torch.linspace(0, len(images) - 1, SCENES + 2)[1:-1].round().long().tolist()
    return [
        {
            "index": i,
            "image": images[i].movedim(0, -1).mul(255).round().int().tolist(),
            "truth": masks[i].tolist(),
            "prediction": maps.probs[i].argmax(0).tolist(),
            "entropy": maps.entropy[i].mul(THOUSANDTHS).round().int().tolist(),
            "mutual_information": maps.mutual_information[i]
            .mul(THOUSANDTHS)
            .round()
            .int()
            .tolist(),
        }
        for i in chosen
    ]


def _above_chance(result: Json, quantity: str) -> float:
    return float(result[f"ivon_{quantity}_auroc"]) - 0.5


def _rise_at_borders(result: Json, quantity: str) -> float:
    return float(result[f"ivon_{quantity}_border"] - result[f"ivon_{quantity}_inside"])


def _gains(result: Json) -> Json:
    return {f"{name}_gain": result[f"ivon_{name}"] - result[f"map_{name}"] for name in COMPARED}


def _draw_scenes(result: Json, folder: Path) -> Path:
    scenes = result["scenes"]
    height, width = np.shape(scenes[0]["truth"])
    figure = blank_figure(12.5, 1.2 + len(scenes) * (2.5 * height / width + 0.05))
    grid = figure.subplots(len(scenes), 5, squeeze=False)
    for scene, row in zip(scenes, grid, strict=True):
        row[0].imshow(np.array(scene["image"], np.uint8))
        for axes, name in zip(row[1:3], ("truth", "prediction"), strict=True):
            axes.imshow(_PALETTE[np.array(scene[name])])
    for column, name in ((3, "entropy"), (4, "mutual_information")):
        _draw_uncertainty([scene[name] for scene in scenes], list(grid[:, column]))
    titles = ("image", "truth", "prediction", "entropy", "mutual information")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    patches = [
        Patch(facecolor=colour, edgecolor=GREY, linewidth=0.5, label=name)
        for name, colour in zip([*result["classes"], "void"], COLOURS, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(COLOURS), fontsize=8.5,
                  columnspacing=1.2, handlelength=1.2)  # fmt: skip
    return save(figure, folder / "segmentation.png")


def _draw_uncertainty(maps: list[list[list[int]]], column: list[Axes]) -> None:
    """One below the other on a common scale, which is drawn below the last."""
    values = np.array(maps) / THOUSANDTHS
    for axes, one in zip(column, values, strict=True):
        # a scale from 0 to 0 would have no colours
        image = axes.imshow(one, cmap="magma", vmin=0, vmax=max(values.max(), 1 / THOUSANDTHS))
    # inside the axes' own frame, or the column would shrink against its neighbours
    below = column[-1].inset_axes((0, -0.12, 1, 0.06))
    bar = column[-1].figure.colorbar(image, cax=below, orientation="horizontal")
    bar.set_label("nats")


def _draw_calibration(results: list[Json], folder: Path) -> Path:
    first = results[0]
    places = np.arange(len(first["classes"]))
    figure = blank_figure(9, 3.4)
    axes = figure.subplots()
    for name, shift, colour in (("map", -0.2, VERMILLION), ("ivon", 0.2, BLUE)):
        seeds = [result[f"{name}_class_ece"] for result in results]
        means = [_mean_of_known(values) for values in zip(*seeds, strict=True)]
        overall = _mean_of_known([result[f"{name}_ece"] for result in results])
        axes.bar(places + shift, means, 0.4, color=colour, label=TITLES[name])
        axes.axhline(overall, color=colour, linewidth=1, linestyle=":")
        for values in seeds:
            points = [(p, v) for p, v in zip(places + shift, values, strict=True) if v is not None]
            axes.plot(*zip(*points, strict=True), "o", color=BLACK, markersize=2)
    shares = zip(first["classes"], first["class_share"], strict=True)
    axes.set_xticks(places, [f"{name}\n{100 * share:.1f} %" for name, share in shares], fontsize=8)
    axes.set(
        ylabel="calibration error",
        xlabel="predicted class (no bar: never predicted) and its share of the true pixels",
    )
    axes.set_title("Calibration of the pixels assigned to each class (dotted: of all pixels)")
    axes.legend()
    faint_grid(axes)
    return save(figure, folder / "class-calibration.png")


EXPERIMENT = Experiment(
    id="004-segmentation",
    paper="004",
    claim="Khan (2019), “Uncertainty estimation for image segmentation”: the uncertainty of a "
    "segmented street scene is high along the borders of objects and where the prediction is "
    "wrong. (The tutorial shows pictures of Kendall, Gal and Cipolla, 2018, without numbers and "
    "from another network and method; here entropy and mutual information over all test pixels of "
    "CamVid, for a small U-Net learned with IVON.)",
    theorem=False,
    needs=("camvid",),
    minutes=5,
    presets={
        "quick": SegmentationSettings(epochs=12, reduction=2),
        "paper": SegmentationSettings(epochs=300, prediction_samples=32),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
