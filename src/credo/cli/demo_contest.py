"""`credo demo`: several methods side by side on the embedded digits, and a folder to look at.

One more method is one more line in `CONTESTANTS`. All start from the same network and see the same
examples in the same order; the photo patches, which are no digits, are seen by none of them.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from credo import data
from credo.ensembles import SWAG, Ensemble, MCDropout
from credo.laplace import Laplace
from credo.likelihoods import Categorical
from credo.map import MAP
from credo.method import Method
from credo.model import Model
from credo.priors import Normal
from credo.storage import write_atomically
from credo.tools import Comparison, compare
from credo.variational import EVON, IVON, VI
from credo.version import __version__

CONTESTANTS: dict[str, Method[Any]] = {
    "MAP": MAP(),
    "Ensemble of 5": Ensemble(MAP(), members=5),
    "MC dropout": MCDropout(p=0.1),
    "SWAG": SWAG(),
    "Laplace": Laplace(subset="last_layer", optimise_prior="global"),
    "VI": VI(),
    "IVON": IVON(),
    "EVON": EVON(),
}
"""The methods of the table, in its order, with default settings but for two: dropout has none, and
Laplace's method is that of the last layer with a fitted prior, as Daxberger et al. (2021) advise.

All have the standard normal prior. VI's default temperature was chosen on five data sets of which
these digits are one (docs/concepts/defaults.md), so its row flatters it a little.
"""

BATCH_SIZE = 32


def run(folder: Path, seed: int, epochs: int, jobs: int) -> Path:
    """Train all contestants, print the table, write results.json and index.html.

    Args:
        folder: Where to.
        seed: Same seed, same numbers.
        epochs: Passes over the training digits.
        jobs: Methods trained at a time.

    Returns:
        The page's path.
    """
    started = time.perf_counter()
    digits = data.digits()
    out = Console(highlight=False)
    out.print(
        f"Training one network in {len(CONTESTANTS)} ways on {len(digits.train[1]):,} handwritten "
        f"digits\n(epochs: {epochs}, seed: {seed}, at a time: {jobs})."
    )
    with _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a method warned of stands below the table
        result = compare(
            make_model, CONTESTANTS, digits.train, digits.test, ood=digits.ood, seeds=[seed],
            epochs=epochs, batch_size=BATCH_SIZE, folder=folder / "comparison", resume=False,
            jobs=jobs, classes=digits.classes,
        )  # fmt: skip
        page = folder / "index.html"
        result.save_html(page)
    out.print(f"\n{result}\n", markup=False)
    out.print(
        "NLL, ECE, Brier: lower is better; a calibrated model's ECE would be near the\n"
        "floor. OOD: how well the predictions' entropy tells test digits from patches\n"
        "of photographs, from 0.5 (guessing) to 1 (always).\n",
        markup=False,
    )
    total = time.perf_counter() - started
    write_results(folder, result, {"seed": seed, "epochs": epochs, "seconds": total})
    out.print(f"Done in {total:.0f} s. Open {page}", soft_wrap=True)
    return page


def make_model() -> Model:
    """The digits' network: 64-100-100-10, ReLU."""
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(),
        nn.Linear(100, 10),
    )  # fmt: skip
    return Model(net, Categorical(), Normal(scale=1.0))


def write_results(folder: Path, result: Comparison, more: dict[str, Any]) -> None:
    """Write results.json.

    Args:
        folder: Where to.
        result: What was found.
        more: What else belongs in it.
    """
    settings = {each.method: dict(each.settings) for each in result.runs}
    content = {
        "credo": __version__,
        "torch": torch.__version__,
        **more,
        "methods": [{**row, "settings": settings[row["method"]]} for row in result.table],
    }
    write_atomically(folder / "results.json", (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for a second thread; with one the numbers don't vary either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
