r"""Khan (2019), "active deep learning": train on the examples with the largest Λ, by Adam.

"Select 'important' examples while training with Adam", the tutorial says above a picture without
numbers. Here every gradient step sees four batches of candidates and trains on a quarter of them:
the largest tr Λ at the present weights (`credo.active.ImportantBatches`), half of those and half at
random, or all at random, which is ordinary training. All take the same number of steps from the
same weights; choosing costs four forward passes a step beside.

What tr Λ finds is where the network is unsure, and of a wrong label it stays unsure for good. So
everything is run again with a fifth of the training labels flipped to another class at random, and
counted: which share of the examples that are trained on has a flipped label?

The rules, written before any run, ask with 95 % confidence over seeds whether

1. ``faster``: with clean labels the test error, averaged over all checkpoints, is lower for the top
   of tr Λ than for uniform choice;
2. ``better``: so it is at the last checkpoint.

Reproduced if both hold, not reproduced if one is refuted. The caveat is judged apart, as it is not
the tutorial's: ``noise_oversampled``, more flipped labels are chosen than there are among
candidates, in the last half of training; ``noise_hurts``, the last test error is higher than
uniform choice's. (To check the code, seed 100 was run for a third of the steps; nothing was changed
after it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import credo
from credo.active import ImportantBatches
from credo.report.style import (
    BLACK,
    BLUE,
    GREY,
    VERMILLION,
    blank_figure,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.experiment import Experiment, Settings, Verdict, sign_of_mean, summarise
from credo_papers.networks import NetName, build

SHARES = {"top": 1.0, "half": 0.5, "uniform": 0.0}
CAPTIONS = {"top": "largest tr Λ", "half": "half of them random", "uniform": "uniform"}
COLOURS = {"top": VERMILLION, "half": BLUE, "uniform": BLACK}


@dataclass(frozen=True, kw_only=True)
class ImportantSettings(Settings):
    """``epochs`` are passes over the candidates; a step trains on 1/``pool`` of what it sees.

    ``flipped`` is the share of wrong labels in the second half of the runs. The test error is taken
    at ``checkpoints`` places, evenly spaced over the steps.
    """

    net: NetName = "784-100-10"
    num_data: int = 20_000
    epochs: int
    data: str = "mnist"
    test_images: int = 5000
    batch_size: int = 64
    pool: int = 4
    lr: float = 1e-3
    flipped: float = 0.2
    checkpoints: int = 20


def run_one(settings: ImportantSettings, seed: int, folder: Path) -> Json:
    """All ways of choosing, with clean and with flipped labels."""
    data = credo.data.load(settings.data)
    x, clean = data.train[0][: settings.num_data], data.train[1][: settings.num_data]
    test = data.test[0][: settings.test_images], data.test[1][: settings.test_images]
    wrong = flipped_labels(clean, settings.flipped, seed, len(data.classes))
    result: Json = {"flipped": settings.flipped}
    for condition, labels in (("clean", clean), ("flipped", wrong)):
        for way, share in SHARES.items():
            net = build(settings.net, x.shape[1:], seed, len(data.classes))
            sampler = ImportantBatches(
                net, credo.likelihoods.Categorical(), x, settings.batch_size, settings.pool,
                share, seed,
            )  # fmt: skip
            steps, errors, spoilt = train(settings, net, sampler, labels, labels != clean, test)
            result |= {
                "steps": steps,
                f"{condition}_{way}_errors": errors,
                f"{condition}_{way}_mean_error": sum(errors) / len(errors),
                f"{condition}_{way}_error": errors[-1],
                f"{condition}_{way}_spoilt": spoilt,
                f"{condition}_{way}_spoilt_share": float(np.mean(spoilt[len(spoilt) // 2 :])),
            }
    return result


def train(
    settings: ImportantSettings,
    net: nn.Module,
    sampler: ImportantBatches,
    labels: Tensor,
    flipped: Tensor,
    test: tuple[Tensor, Tensor],
) -> tuple[list[int], list[float], list[float]]:
    """A plain loop with Adam: steps, test errors, and the share of flipped labels since the last.

    No more than these lines is needed to train on important examples.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    inputs = sampler.inputs
    assert isinstance(inputs, Tensor)
    total = settings.epochs * len(sampler)
    marks = {
        max(1, round(total * k / settings.checkpoints)) for k in range(settings.checkpoints + 1)
    }
    steps, errors, spoilt, seen = [], [], [], []
    step = 0
    for _ in range(settings.epochs):
        for batch in sampler:
            optimizer.zero_grad()
            cross_entropy(net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            seen.append(float(flipped[batch].float().mean()))
            step += 1
            if step in marks:
                steps.append(step)
                errors.append(_error(net, test))
                spoilt.append(sum(seen) / len(seen))
                seen = []
    return steps, errors, spoilt


def flipped_labels(labels: Tensor, share: float, seed: int, classes: int) -> Tensor:
    """The labels with this share of them moved to another class, each as likely as the others.

    >>> before = torch.zeros(1000, dtype=torch.int64)
    >>> after = flipped_labels(before, 0.2, seed=0, classes=3)
    >>> int((after != before).sum()), sorted(after.unique().tolist())
    (200, [0, 1, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    moves = torch.randint(1, classes, (len(chosen),), generator=generator)
    moved = labels.clone()
    moved[chosen] = (labels[chosen] + moves) % classes
    return moved


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""
    return {
        "faster": [r["clean_uniform_mean_error"] - r["clean_top_mean_error"] for r in results],
        "better": [r["clean_uniform_error"] - r["clean_top_error"] for r in results],
        "noise_oversampled": [r["flipped_top_spoilt_share"] - r["flipped"] for r in results],
        "noise_hurts": [r["flipped_top_error"] - r["flipped_uniform_error"] for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {name: sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {f"{name}_holds": float(sign) for name, sign in signs.items()}
    claim = signs["faster"], signs["better"]
    if min(claim) > 0:
        return Verdict("reproduced", numbers)
    return Verdict("not reproduced" if min(claim) < 0 else "inconclusive", numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Test error over steps with clean and flipped labels, and how many flipped ones are chosen."""
    steps = results[0]["steps"]
    titles = {"clean": "Clean labels", "flipped": f"{results[0]['flipped']:.0%} flipped"}
    with house_style():
        figure = blank_figure(12.5, 3.9)
        *curves, shares = figure.subplots(1, 3)
        for axes, (condition, title) in zip(curves, titles.items(), strict=True):
            for way, caption in CAPTIONS.items():
                errors = 100 * np.array([r[f"{condition}_{way}_errors"] for r in results])
                mean = errors.mean(0)
                axes.plot(steps, mean, color=COLOURS[way], label=caption)
                if len(errors) > 1:
                    band = errors.std(0, ddof=1) / len(errors) ** 0.5
                    axes.fill_between(steps, mean - band, mean + band, color=COLOURS[way],
                                      alpha=0.18)  # fmt: skip
            axes.set(xlabel="gradient steps", ylabel="test error, %", title=title, yscale="log")
            faint_grid(axes)
        curves[0].legend(fontsize=8.5)
        for way in CAPTIONS:
            values = np.array([r[f"flipped_{way}_spoilt"] for r in results])
            shares.plot(steps, 100 * values.mean(0), color=COLOURS[way])
        shares.axhline(100 * results[0]["flipped"], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        shares.set(xlabel="gradient steps", ylabel="wrong labels among the chosen, %",
                   title="What tr Λ asks for", ylim=(0, None))  # fmt: skip
        faint_grid(shares)
        return [save(figure, folder / "important-examples.png")]


@torch.no_grad()
def _error(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    net.eval()
    wrong = (net(test[0]).argmax(1) != test[1]).double().mean()
    net.train()
    return float(wrong)


EXPERIMENT = Experiment(
    id="004-important-examples",
    paper="004",
    claim="Khan (2019), 'Select important examples while training with Adam' (a picture without "
    "numbers). Here: training on the quarter of the candidates with the largest tr Λ lowers the "
    "test error, on average over training and at its end, against uniform choice with as many "
    "gradient steps. Apart from the claim: wrong labels are chosen more often than they occur.",
    theorem=False,
    needs=("mnist",),
    minutes=1,
    presets={
        "quick": ImportantSettings(epochs=25),
        "paper": ImportantSettings(net="LeNet-5", num_data=60_000, epochs=80, test_images=10_000),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
