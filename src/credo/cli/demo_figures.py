"""The demo's figures and the page around them, drawn from what its comparison found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credo import metrics, report
from credo.data.image_set import ImageSetWithOod
from credo.storage import write_atomically
from credo.tools import Comparison
from credo.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ece_floor": "its floor",
    "brier": "Brier", "ood_auroc": "OOD AUROC", "train_seconds": "seconds",
}  # fmt: skip
MOST_UNCERTAIN = 10
PANELS = 4
"""Methods whose diagrams are drawn side by side."""


def write_page(
    path: Path, result: Comparison, digits: ImageSetWithOod, seed: int, epochs: int
) -> dict[str, Any]:
    """Write figures and page; returns what results.json says of them.

    Args:
        path: The page; figures are beside it.
        result: What the demo found.
        digits: What it was tried on.
        seed: Of the demo.
        epochs: Of the demo.
    """
    pictures = _draw(result, digits, path.parent)
    header = ["method", *COLUMNS.values()]
    rows = [
        [row["method"], *(f"{row[name]:.3f}" if name in row else "—" for name in COLUMNS)]
        for row in result.table
    ]
    page = report.page(
        "Credo demo",
        "The same small network, trained in several ways on scikit-learn's handwritten digits. "
        "NLL is the mean negative log-probability of the true digit, ECE the expected calibration "
        "error beside what a calibrated model would score, OOD AUROC how well the predictive "
        "entropy tells test digits from patches of photographs.",
        header,
        rows,
        [[False] * len(header)] * len(rows),
        pictures,
        f"Credo {__version__}, seed {seed}, {epochs} epochs. All numbers are in results.json.",
    )
    write_atomically(path, page.encode())
    return {"figures": [picture.file for picture in pictures]}


def _draw(result: Comparison, digits: ImageSetWithOod, folder: Path) -> list[report.Picture]:
    images, labels = digits.test
    finished = [run for run in result.runs if run.error is None]
    drawn: list[tuple[Figure, report.Picture]] = []
    for place in range(0, len(finished), PANELS):
        some = finished[place : place + PANELS]
        number = f"-{place // PANELS + 1}" if len(finished) > PANELS else ""
        bins = {run.method: metrics.reliability(run.arrays["probs"], labels) for run in some}
        doubts = {run.method: (run.arrays["entropy"], run.arrays["ood_entropy"]) for run in some}
        drawn += [
            (
                report.reliability_diagrams(bins),
                report.Picture(
                    f"reliability{number}.png", "Does confidence come true?",
                    "Accuracy of the test digits against the confidence they were given, with "
                    "95 % intervals. On the dotted line a method keeps its promises, below it "
                    "promises too much. The strip shows where the confidences lie.",
                ),
            ),
            (
                report.entropy_histograms(
                    doubts, most=math.log(len(digits.classes)),
                    names=("test digits", "photo patches, which are no digits"),
                    notes={r.method: f"AUROC {r.scores['ood_auroc']:.3f}" for r in some},
                ),
                report.Picture(
                    f"entropy{number}.png", "Does it notice what it has never seen?",
                    "Entropy of the predictions for test digits and for patches of photographs. A "
                    "good method is sure of the former and unsure of the latter.",
                ),
            ),
        ]  # fmt: skip
    last = finished[-1]
    doubtful = last.arrays["entropy"].argsort()[::-1][:MOST_UNCERTAIN].copy()
    drawn.append(
        (
            report.image_grid(
                images[doubtful, 0].numpy(), last.arrays["probs"][doubtful],
                labels[doubtful].numpy(), digits.classes,
            ),
            report.Picture(
                "uncertain.png", f"The test digits that {last.method} is least sure of",
                "Each with the probabilities of the ten digits: green the true one, vermillion the "
                "one it was taken for.",
            ),
        )
    )  # fmt: skip
    for figure, picture in drawn:
        report.save(figure, folder / picture.file)
    return [picture for _, picture in drawn]
