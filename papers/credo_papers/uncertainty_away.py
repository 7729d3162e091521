r"""Khan (2019), "Which is a good classifier?": away from the data, one that averages is less sure.

The tutorial shows two classifiers of points in the plane, one sure everywhere but at a line, the
other only near the data: "what the model does not know". The pictures have no numbers, so here both
are the same network on two moons, with the same prior at the same temperature: `credo.MAP` finds
the best weights, `credo.VI` a Gaussian over them. The temperature is 0.1, because at 1 mean-field
inference underfits these 200 points (accuracy below 0.9).

Near is a test set of moons; far are the points of a square grid that are at least 2 away from every
training point (a moon has radius 1). Uncertainty is the entropy of the predictive distribution, at
most ln 2 = 0.69; mutual information is its part that stems from the weights.

Rules of the verdict, written before the first run: both classifiers reach 0.95 test accuracy, else
inconclusive. Reproduced if the Bayesian one has the larger entropy far away, *and* its entropy
rises more from near to far (to be unsure everywhere is no merit), each with 95 % confidence over
seeds; not reproduced if either difference is negative with that confidence.

Less sure is not unsure. The network's logits grow with distance, and a Gaussian over weights turns
the line between the classes into a wedge, no more: outside of it both remain certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import credo
from credo.report.style import BLACK, BLUE, GREY, VERMILLION, blank_figure, faint_grid, save
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise

REQUIRED_ACCURACY = 0.95
FAR = 2.0
HALF_WIDTH = 6.0
CENTRE = (0.5, 0.25)
CELLS = 101
DISTANCES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
METHODS = ("map", "vi")


@dataclass(frozen=True, kw_only=True)
class AwaySettings(Settings):
    """``temperature`` weighs the prior of both methods; ``samples`` are VI's draws a step."""

    net: str = "2-32-32-2, ReLU"
    num_data: int = 200
    epochs: int
    noise: float = 0.1
    batch_size: int = 50
    lr: float = 1e-2
    samples: int = 4
    temperature: float = 0.1
    prediction_samples: int = 256


def run_one(settings: AwaySettings, seed: int, folder: Path) -> Json:
    """Train both classifiers from the same weights; look near and far."""
    x, y = credo.data.two_moons(settings.num_data, settings.noise, seed=seed)
    near, labels = credo.data.two_moons(1000, settings.noise, seed=1_000_000 + seed)
    plane = _plane()
    distance = torch.cdist(plane, x).min(1).values
    methods: dict[str, credo.MAP | credo.VI] = {
        "map": credo.MAP(lr=settings.lr, temperature=settings.temperature),
        "vi": credo.VI(lr=settings.lr, samples=settings.samples, temperature=settings.temperature),
    }
    result: Json = {"data": x.tolist(), "labels": y.tolist()}
    for name, method in methods.items():
        model = credo.Model(_net(seed), credo.likelihoods.Categorical())
        posterior = credo.fit(
            model, method, (x, y), epochs=settings.epochs, batch_size=settings.batch_size,
            seed=seed, folder=folder / name, progress=False,
        )  # fmt: skip
        draws = 1 if name == "map" else settings.prediction_samples
        generator = torch.Generator().manual_seed(seed)
        at_near = posterior.predict(near, samples=draws, generator=generator, keep_samples=False)
        at_plane = posterior.predict(plane, samples=draws, generator=generator, keep_samples=False)
        far = distance >= FAR
        result |= {
            f"{name}_accuracy": credo.metrics.accuracy(at_near.probs, labels),
            f"{name}_nll": credo.metrics.nll(at_near.probs, labels),
            f"{name}_near_entropy": float(at_near.entropy.mean()),
            f"{name}_far_entropy": float(at_plane.entropy[far].mean()),
            f"{name}_far_confidence": float(at_plane.confidence[far].mean()),
            f"{name}_far_above_99": float((at_plane.confidence[far] > 0.99).float().mean()),
            f"{name}_far_information": float(at_plane.mutual_information[far].mean()),
            f"{name}_near_information": float(at_near.mutual_information.mean()),
            f"{name}_auroc": credo.metrics.auroc(at_near.entropy, at_plane.entropy[far]),
            f"{name}_by_distance": _by_distance(at_plane.entropy, distance),
            f"{name}_map": [round(v, 4) for v in at_plane.entropy.tolist()],
        }
    return result


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring."""
    numbers = summarise(results)
    accurate = all(numbers[f"{name}_accuracy"] >= REQUIRED_ACCURACY for name in METHODS)
    less_sure = sign_of_mean([r["vi_far_entropy"] - r["map_far_entropy"] for r in results])
    rises_more = sign_of_mean([_rise(r, "vi") - _rise(r, "map") for r in results])
    if not accurate:
        return Verdict("inconclusive", numbers)
    if less_sure > 0 and rises_more > 0:
        return Verdict("reproduced", numbers)
    return Verdict("not reproduced" if min(less_sure, rises_more) < 0 else "inconclusive", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Entropy over the plane for both classifiers, and against the distance from the data."""
    first = results[0]
    data, labels = torch.tensor(first["data"]), torch.tensor(first["labels"])
    figure = blank_figure(12.5, 4)
    *maps, curve = figure.subplots(1, 3, width_ratios=(1, 1, 0.95))
    titles = {"map": "One network (MAP)", "vi": "Average over q (VI)"}
    corners = (CENTRE[0] - HALF_WIDTH, CENTRE[0] + HALF_WIDTH,
               CENTRE[1] - HALF_WIDTH, CENTRE[1] + HALF_WIDTH)  # fmt: skip
    for axes, name in zip(maps, METHODS, strict=True):
        entropy = torch.tensor(first[f"{name}_map"]).reshape(CELLS, CELLS)
        image = axes.imshow(entropy.T.numpy(), origin="lower", extent=corners, vmin=0, vmax=0.6932,
                            cmap="magma", interpolation="bilinear")  # fmt: skip
        for label, colour in ((0, "#56B4E9"), (1, "#E69F00")):
            points = data[labels == label].T
            axes.plot(*points, "o", color=colour, markersize=2.5, markeredgecolor="white",
                      markeredgewidth=0.3)  # fmt: skip
        axes.set(title=titles[name], xlabel="x₁", ylabel="x₂")
    figure.colorbar(image, ax=maps, label="entropy of the prediction (nats)", shrink=0.9)
    middles = [(a + b) / 2 for a, b in pairwise(DISTANCES)]
    for name, colour in (("vi", BLUE), ("map", VERMILLION)):
        rows = torch.tensor([r[f"{name}_by_distance"] for r in results])
        for row in rows:
            curve.plot(middles, row, color=colour, linewidth=0.8, alpha=0.45)
        curve.plot(middles, rows.mean(0), "o-", color=colour, markersize=4, label=titles[name])
    curve.axhline(0.6931, color=BLACK, linestyle=":", linewidth=1)
    curve.text(DISTANCES[-1], 0.70, "no idea: ln 2", ha="right", fontsize=8.5, color=GREY)
    curve.set(xlabel="distance to the nearest training point", ylabel="entropy (nats)",
              xlim=(0, DISTANCES[-1]), ylim=(0, 0.76), title="Less sure, not unsure")  # fmt: skip
    curve.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9), fontsize=8.5)
    faint_grid(curve)
    return [save(figure, folder / "uncertainty-away.png")]


def _net(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )


def _plane() -> Tensor:
    """A square grid around the moons, (CELLS², 2), the first coordinate slowest."""
    axes = [torch.linspace(c - HALF_WIDTH, c + HALF_WIDTH, CELLS) for c in CENTRE]
    return torch.cartesian_prod(*axes)


def _by_distance(entropy: Tensor, distance: Tensor) -> list[float]:
    """The mean entropy of the grid's points in each band of `DISTANCES`."""
    bands = pairwise(DISTANCES)
    return [float(entropy[(distance >= a) & (distance < b)].mean()) for a, b in bands]


def _rise(result: Json, name: str) -> float:
    return float(result[f"{name}_far_entropy"] - result[f"{name}_near_entropy"])


EXPERIMENT = Experiment(
    id="004-uncertainty-away",
    paper="004",
    claim="Khan (2019), 'Which is a good classifier?': a Bayesian classifier is less certain away "
    "from the data, 'what the model does not know', than one that rests on a point estimate. "
    "(Pictures without numbers; here a network on two moons, mean-field inference against MAP.)",
    theorem=False,
    minutes=0.3,
    presets={
        "quick": AwaySettings(epochs=200),
        "paper": AwaySettings(epochs=1000, samples=8, prediction_samples=1024),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
