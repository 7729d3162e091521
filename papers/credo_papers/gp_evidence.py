r"""Khan (2019), "DNN2GP": the process's marginal likelihood finds good hyperparameters.

The paper it presents (Khan, Immer, Abedi & Korzepa, 2019, arXiv:1906.01930) draws −log p(ỹ)
of the network's Gaussian process beside the test error against the prior's precision δ, the width
of the network and the noise σ, on a noisy sine: both are low at the same place, and the first needs
no test set. Here, as in the code behind it, inputs lie in three
clusters with shares 0.45, 0.1 and 0.45 and noise 0.1, 1 and 0.1, n = 100, tanh, two layers of 20
units; every setting is trained anew by MAP from the same weights, then made a process.

Rules of the verdict, written before the first run. For each of δ, width and σ let the regret be the
test loss at the setting with the most evidence, less the lowest test loss of the grid, divided by
the spread (mean less lowest) of the grid: 0 for the best choice, 1 for one no better than chance.
The test loss is the squared error for δ and width, and for σ the negative log-likelihood, since the
squared error does not know the noise. With 95 % confidence over seeds

- ``<name>``: the regret is below `REGRET` for each of the three.

Reproduced if all hold, not reproduced if one regret is above with that confidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor, nn

import credo
from credo.functionspace import to_gp
from credo.report.style import BLUE, VERMILLION, blank_figure, faint_grid, house_style, save
from credo.types import Json
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)

REGRET = 0.5
NAMES = {"precision": "prior precision δ", "width": "width", "noise": "noise σ"}
CENTRES, SHARES, NOISES = (-3.0, 0.0, 3.0), (0.45, 0.1, 0.45), (0.1, 1.0, 0.1)


@dataclass(frozen=True, kw_only=True)
class EvidenceSettings(Settings):
    """The grids, and where the other two hyperparameters stay while one moves."""

    net: str = "1-20-20-1, tanh"
    num_data: int = 100
    epochs: int = 300
    precisions: tuple[float, ...] = (0.01, 0.04, 0.16, 0.63, 2.5, 10.0, 40.0, 100.0)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    noises: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.5)
    precision: float = 0.63
    width: int = 20
    noise: float = 0.3
    lr: float = 1e-2
    test_points: int = 1000


def clustered_sine(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sine seen in three clusters, the middle one sparse and noisy: (n, 1) each."""
    generator = Generator().manual_seed(seed)
    which = torch.multinomial(torch.tensor(SHARES), n, replacement=True, generator=generator)
    x = torch.tensor(CENTRES)[which] + 0.6 * torch.randn(n, generator=generator)
    y = x.sin() + torch.tensor(NOISES)[which] * torch.randn(n, generator=generator)
    return x.unsqueeze(1), y.unsqueeze(1)


def run_one(settings: EvidenceSettings, seed: int, folder: Path) -> Json:
    """One training for every setting of every grid."""
    data = clustered_sine(settings.num_data, seed)
    test = clustered_sine(settings.test_points, seed + 1_000_000)
    grids: dict[str, tuple[float, ...]] = {
        "precision": settings.precisions, "width": settings.widths, "noise": settings.noises,
    }  # fmt: skip
    result: Json = {}
    for name, grid in grids.items():
        evidence, loss = [], []
        for value in grid:
            here = replace(settings, **{name: value})  # type: ignore[arg-type]
            scores = scored(here, data, test, seed)
            evidence.append(-scores["evidence"] / settings.num_data)
            loss.append(scores["nll" if name == "noise" else "error"])
        spread = float(np.mean(loss) - np.min(loss))
        regret = (loss[int(np.argmin(evidence))] - min(loss)) / max(spread, 1e-12)
        result |= {
            f"{name}_grid": list(grid),
            f"{name}_evidence": evidence,
            f"{name}_loss": loss,
            f"{name}_regret": float(regret),
        }
    return result


def scored(
    settings: EvidenceSettings, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int
) -> dict[str, float]:
    """Evidence, test squared error and test negative log-likelihood of one setting."""
    width = settings.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).double()
    model = credo.Model(
        net,
        credo.likelihoods.Gaussian(settings.noise),
        credo.priors.Normal(settings.precision**-0.5),
    )
    pair = data[0].double(), data[1].double()
    method = credo.Laplace(structure="diag", train=credo.MAP(lr=settings.lr))
    posterior = credo.fit(
        model, method, pair, epochs=settings.epochs, batch_size=settings.num_data, seed=seed,
        progress=False,
    )  # fmt: skip
    pseudo = to_gp(posterior).pseudo_data(pair)
    error = posterior.predict(test[0].double(), at="mean").mean - test[1].double()
    squared = float(error.square().mean())
    # What the network predicts with this noise; the model's own uncertainty is another story.
    nll = 0.5 * squared / settings.noise**2 + float(np.log(settings.noise))
    return {"evidence": pseudo.log_marginal_likelihood(), "error": squared, "nll": nll}


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<name>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = []
    for name in NAMES:
        signs.append(sign_of_mean([REGRET - r[f"{name}_regret"] for r in results]))
        numbers[f"{name}_holds"] = float(signs[-1])
    return Verdict(judgement(signs), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Minus the log evidence and the test loss against each hyperparameter, all seeds."""
    with house_style():
        figure = blank_figure(11.5, 3.4)
        for axes, (name, label) in zip(figure.subplots(1, 3), NAMES.items(), strict=True):
            grid = results[0][f"{name}_grid"]
            other = axes.twinx()
            for shown, key, colour in (
                (axes, "evidence", BLUE), (other, "loss", VERMILLION),
            ):  # fmt: skip
                curves = np.array([r[f"{name}_{key}"] for r in results])
                shown.plot(grid, curves.T, color=colour, linewidth=0.7, alpha=0.4)
                shown.plot(grid, curves.mean(0), "o-", color=colour, markersize=4)
                best = grid[int(curves.mean(0).argmin())]
                shown.axvline(best, color=colour, linewidth=1, linestyle=(0, (1, 2)))
            axes.set(xscale="log", xlabel=label, title=f"{label.capitalize()}")
            axes.set_ylabel("−log evidence per example", color=BLUE)
            loss = "test NLL" if name == "noise" else "test squared error"
            other.set_ylabel(loss, color=VERMILLION)
            faint_grid(axes)
        return [save(figure, folder / "gp-evidence.png")]


EXPERIMENT = Experiment(
    id="004-gp-evidence",
    paper="004",
    claim="Khan, Immer, Abedi & Korzepa (2019), DNN2GP: the marginal likelihood of the network's "
    "Gaussian process is best near the hyperparameters with the best test error. Here: the prior "
    "precision, width and noise with the most evidence lose less than half of what a random choice "
    "from the grid loses.",
    theorem=False,
    minutes=0.7,
    presets={
        "quick": EvidenceSettings(),
        "paper": EvidenceSettings(
            epochs=5000,
            precisions=tuple(float(10 ** (-2 + 4 * i / 20)) for i in range(21)),
            widths=tuple(sorted({round(10 ** (3 * i / 29)) for i in range(30)})),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
