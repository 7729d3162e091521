"""`credo demo`: several methods side by side on the embedded digits, and a folder to look at.

One more method is one more line in `CONTESTANTS`. All start from the same network and see the same
examples in the same order; the photo patches, which are no digits, are seen by none of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from credo import data, metrics, report
from credo.data.image_set import ImageSetWithOod
from credo.likelihoods import Categorical, Gaussian
from credo.map import MAP
from credo.method import Method
from credo.model import Model
from credo.posterior.predictive import Predictive
from credo.priors import Normal
from credo.storage import write_atomically
from credo.train import fit
from credo.train.progress import Bar, Reporter, progress_bar
from credo.types import Json
from credo.variational import VI
from credo.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTESTANTS: dict[str, Callable[[], Method[Any]]] = {
    "MAP": lambda: MAP(),
    "VI, η = 1": lambda: VI(temperature=1.0),
    "VI, balanced": lambda: VI(),
}
"""The methods of the table, in its order: default settings, and the ELBO proper between them.

All have the standard normal prior. The default temperature, η = 0.1·n/P, was chosen on five data
sets of which these digits are one (docs/concepts/defaults.md), so its row flatters it a little.
"""

BATCH_SIZE = 32
SAMPLES = 64
NOISE = 0.1
REGRESSION_POINTS = 100
REGRESSION_EPOCHS = 25
"""For each epoch of the digits: a hundred points, all in one batch, make short epochs."""
GAP = 1.5
MOST_UNCERTAIN = 10


@dataclass(frozen=True)
class Column:
    """One column of scores: its heading, how to print it, and which end is good (0: neither)."""

    heading: str
    format: str
    better: int = 0


COLUMNS = {
    "accuracy": Column("accuracy", "{:.1%}", +1),
    "nll": Column("NLL", "{:.3f}", -1),
    "ece": Column("ECE", "{:.3f}", -1),
    "confidence": Column("confidence", "{:.1%}"),
    "ood_auroc": Column("OOD AUROC", "{:.3f}", +1),
    "seconds": Column("seconds", "{:.1f}"),
}


@dataclass(frozen=True)
class Result:
    """What one contestant predicted, and how good that was."""

    name: str
    settings: Json
    inside: Predictive
    outside: Predictive
    scores: dict[str, float]


@dataclass(frozen=True)
class Band:
    """A regression with a gap in its data: the predictive along x, and what was observed."""

    x: Tensor
    predictive: Predictive
    observed: tuple[Tensor, Tensor]

    def epistemic_std(self, where: Tensor) -> float:
        """Mean epistemic standard deviation at the x that ``where`` selects."""
        return float(self.predictive.epistemic_std[where].mean())


def run(folder: Path, seed: int, epochs: int) -> Path:
    """Train all contestants, print the table, write figures, results.json and index.html.

    Returns the page's path.
    """
    started = time.perf_counter()
    digits = data.digits()
    out = Console(highlight=False)
    out.print(
        f"Training one network in {len(CONTESTANTS)} ways on {len(digits.train[1]):,} handwritten "
        f"digits\n(epochs: {epochs}, seed: {seed}), then a regression with a gap in its data."
    )
    updates = _num_updates(epochs, digits)
    with _one_thread(), progress_bar(True, updates, "starting", transient=True) as line:
        bar = _DemoBar(line)
        _warm_up()
        results = [
            contest(name, make(), digits, seed, epochs, bar) for name, make in CONTESTANTS.items()
        ]
        band = regression(seed, epochs * REGRESSION_EPOCHS, bar)
        bar.label("figures")
        pictures = draw(results, band, digits, folder)
    out.print(_table(results))
    out.print(
        "NLL, ECE: lower is better. OOD AUROC: how well the predictions' entropy tells\n"
        "test digits from patches of photographs, from 0.5 (guessing) to 1 (always).\n"
    )
    total = time.perf_counter() - started
    page = write_report(folder, results, band, pictures, seed, epochs, total)
    out.print(f"Done in {total:.0f} s. Open {page}", soft_wrap=True)
    return page


def network() -> nn.Sequential:
    """The digits' network: 64-100-100-10, ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(),
        nn.Linear(100, 10),
    )  # fmt: skip


def contest(
    name: str, method: Method[Any], digits: ImageSetWithOod, seed: int, epochs: int, bar: _DemoBar
) -> Result:
    """Train one contestant and score it."""
    bar.label(name)
    model = Model(_initialised(network, seed), Categorical(), Normal(scale=1.0))
    started = time.perf_counter()
    posterior = fit(model, method, digits.train, epochs, BATCH_SIZE, seed, progress=bar)
    seconds = time.perf_counter() - started
    images, labels = digits.test
    inside = posterior.predict(images, SAMPLES)
    outside = posterior.predict(digits.ood, SAMPLES)
    scores = {
        "accuracy": metrics.accuracy(inside.probs, labels),
        "nll": metrics.nll(inside.probs, labels),
        "ece": metrics.ece(inside.probs, labels),
        "confidence": float(inside.confidence.mean()),
        "ood_auroc": metrics.auroc(inside.entropy, outside.entropy),
        "seconds": seconds,
    }
    return Result(name, method.config(), inside, outside, scores)


def regression(seed: int, epochs: int, bar: _DemoBar) -> Band:
    """A tanh network on a sine that is seen on both sides of a gap only."""
    bar.label("regression")
    observed = data.sinus_with_gap(REGRESSION_POINTS, seed, NOISE)
    net = _initialised(lambda: nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), seed)
    model = Model(net, Gaussian(scale=NOISE), Normal(scale=2.0))
    method = VI(noise="local", temperature=1.0, lr=1e-2, scale_lr=2e-2)
    posterior = fit(model, method, observed, epochs, REGRESSION_POINTS, seed, progress=bar)
    x = torch.linspace(-5, 5, 301)[:, None]
    return Band(x, posterior.predict(x, samples=256), observed)


def draw(
    results: list[Result], band: Band, digits: ImageSetWithOod, folder: Path
) -> list[report.Picture]:
    """Write all figures; the last contestant's doubts are the ones shown as images."""
    images, labels = digits.test
    last = results[-1]
    doubtful = last.inside.entropy.argsort(descending=True)[:MOST_UNCERTAIN]
    x, (observed_x, observed_y) = band.x[:, 0], band.observed
    drawn: list[tuple[Figure, report.Picture]] = [
        (
            report.reliability_diagrams(
                {r.name: metrics.reliability(r.inside.probs, labels)
                 for r in results}
            ),
            report.Picture(
                "reliability.png", "Does confidence come true?",
                "Accuracy of the test digits against the confidence they were given, with 95 % "
                "intervals. On the dotted line a method keeps its promises, below it promises too "
                "much, above it too little. The strip shows where the confidences lie.",
            ),
        ),
        (
            report.entropy_histograms(
                {r.name: (r.inside.entropy.numpy(), r.outside.entropy.numpy()) for r in results},
                most=math.log(len(digits.classes)),
                names=("test digits", "photo patches, which are no digits"),
                notes={r.name: f"AUROC {r.scores['ood_auroc']:.3f}" for r in results},
            ),
            report.Picture(
                "entropy.png", "Does it notice what it has never seen?",
                "Entropy of the predictions for test digits and for patches of photographs. A good "
                "method is sure of the former and unsure of the latter.",
            ),
        ),
        (
            report.image_grid(
                images[doubtful, 0].numpy(), last.inside.probs[doubtful].numpy(),
                labels[doubtful].numpy(), digits.classes,
            ),
            report.Picture(
                "uncertain.png", f"The test digits that {last.name} is least sure of",
                "Each with the probabilities of the ten digits: green the true one, vermillion the "
                "one it was taken for.",
            ),
        ),
        (
            report.regression_band(
                x.numpy(), band.predictive.mean[:, 0].numpy(),
                band.predictive.epistemic_std[:, 0].numpy(), band.predictive.std[:, 0].numpy(),
                observed=(observed_x[:, 0].numpy(), observed_y[:, 0].numpy()),
                truth=np.sin(x.numpy()),
            ),
            report.Picture(
                "regression.png", "A regression that knows where its data ends",
                "A sine was observed on both sides of a gap. The dark band is what more data would "
                "remove: it is narrow at the data and widens in the gap. The light band adds the "
                "noise of the observations. Beyond both ends a mean-field posterior, as this one "
                "is, stays surer than it should.",
            ),
        ),
    ]  # fmt: skip
    for figure, picture in drawn:
        report.save(figure, folder / picture.file)
    return [picture for _, picture in drawn]


def write_report(
    folder: Path,
    results: list[Result],
    band: Band,
    pictures: list[report.Picture],
    seed: int,
    epochs: int,
    seconds: float,
) -> Path:
    """Write results.json and index.html; returns the latter's path."""
    distance = band.x.abs()[:, 0]
    content = {
        "credo": __version__,
        "torch": torch.__version__,
        "seed": seed,
        "epochs": epochs,
        "seconds": seconds,
        "methods": [{"method": r.name, **r.scores, "settings": r.settings} for r in results],
        "regression": {
            "epistemic_std_in_gap": band.epistemic_std(distance < GAP),
            "epistemic_std_at_data": band.epistemic_std((distance > GAP) & (distance < 4)),
        },
        "figures": [picture.file for picture in pictures],
    }
    write_atomically(folder / "results.json", (json.dumps(content, indent=2) + "\n").encode())
    page = report.page(
        "Credo demo",
        "The same small network, trained in several ways on scikit-learn's handwritten digits. "
        "NLL is the mean negative log-probability of the true digit, ECE the expected calibration "
        "error, OOD AUROC how well the predictive entropy tells test digits from patches of "
        "photographs. Bold is best. Balanced is the default temperature, η = 0.1·n/P; it was "
        "chosen on five data sets of which this is one, so its row flatters it a little.",
        ["method", *(column.heading for column in COLUMNS.values())],
        [[r.name, *_cells(r)] for r in results],
        [[False, *marks] for marks in _best(results)],
        pictures,
        f"Credo {__version__}, torch {torch.__version__}, seed {seed}, {epochs} epochs, "
        f"{seconds:.0f} seconds. All numbers are in results.json.",
    )
    path = folder / "index.html"
    write_atomically(path, page.encode())
    return path


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for column in COLUMNS.values():
        table.add_column(column.heading, justify="right", no_wrap=True)
    for result, marks in zip(results, _best(results), strict=True):
        cells = zip(_cells(result), marks, strict=True)
        table.add_row(result.name, *(f"[bold]{c}[/bold]" if mark else c for c, mark in cells))
    return table


def _cells(result: Result) -> list[str]:
    return [column.format.format(result.scores[key]) for key, column in COLUMNS.items()]


def _best(results: list[Result]) -> list[list[bool]]:
    """For every row and column, whether no other row prints better."""
    marks = []
    for index, column in enumerate(COLUMNS.values()):
        # compared as printed, so that equal cells are bold together
        values = [float(_cells(r)[index].rstrip("%")) * column.better for r in results]
        marks.append([column.better != 0 and value == max(values) for value in values])
    return [list(row) for row in zip(*marks, strict=True)]


def _initialised(make: Callable[[], nn.Sequential], seed: int) -> nn.Sequential:
    """A network whose initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _warm_up() -> None:
    """The first optimizer of a process makes torch import much: no contestant should pay for it."""
    point = torch.zeros(1, 1)
    net = _initialised(lambda: nn.Sequential(nn.Linear(1, 1)), seed=0)
    fit(Model(net, Gaussian()), MAP(), (point, point), epochs=1, progress=False)


def _num_updates(epochs: int, digits: ImageSetWithOod) -> int:
    per_epoch = math.ceil(len(digits.train[1]) / BATCH_SIZE)
    return epochs * (len(CONTESTANTS) * per_epoch + REGRESSION_EPOCHS)


class _DemoBar(Reporter):
    """One progress bar over several calls of `fit`."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def label(self, text: str) -> None:
        """Say what is being done."""
        self._bar.show(f"{text:<12}")

    def step(self, epoch: int, batch: int, nll: float) -> None:
        """A step of some `fit` is done."""
        self._bar.advance()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread; with one the numbers don't vary either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
