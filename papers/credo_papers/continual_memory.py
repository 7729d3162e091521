r"""Khan (2019), memorable examples: a few that the network chooses are worth many random ones.

FROMP's figure on the size of its memory: accuracy rises with the number of examples remembered of
each task, and where memory is small those with the largest Λ(x) keep more of the old tasks than
random ones. Here on permuted MNIST with FROMP at several sizes; the random ones are balanced over
the classes, as the chosen ones are, so that nothing but the choice differs. The penalty adds up
over what is remembered, so τ goes with 1/size: the old tasks have the same weight at every size.

The rules, written before any run of the verdict's seeds, ask with 95 % confidence over seeds
whether

1. ``chosen_wins``: at the smallest size the chosen examples give the higher average accuracy;
2. ``chosen_grows`` and ``random_grows``: the largest size gives more than the smallest, for both;
3. ``gap_closes``: chosen over random is less at the largest size than at the smallest.

Reproduced if all hold, not reproduced if one is refuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from credo.report.style import (
    BLUE,
    VERMILLION,
    blank_figure,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.continual_permuted_mnist import PAPER_FROMP
from credo_papers.continual_setup import ContinualSettings, learn_stream
from credo_papers.experiment import Experiment, Verdict, judgement, sign_of_mean, summarise

WAYS = {"fromp": "largest Λ(x)", "fromp_random": "random"}
COLOURS = {"fromp": VERMILLION, "fromp_random": BLUE}


@dataclass(frozen=True, kw_only=True)
class MemorySettings(ContinualSettings):
    """``sizes``: examples remembered of each task; ``memory`` is the one that τ is given for."""

    sizes: tuple[int, ...] = (10, 20, 50, 100, 200)


def run_one(settings: MemorySettings, seed: int, folder: Path) -> Json:
    """FROMP with each choice at each size."""
    result: Json = {"sizes": list(settings.sizes)}
    for name in WAYS:
        for score in ("average_accuracy", "forgetting", "average_ece"):
            result[f"{name}_{score}"] = []
        for size in settings.sizes:
            report = learn_stream(_with_memory(settings, name, size), name, seed,
                                  folder / f"{name}-{size}")  # fmt: skip
            numbers = report.summary()
            for score in ("average_accuracy", "forgetting", "average_ece"):
                result[f"{name}_{score}"].append(numbers[score])
    for name in WAYS:
        result[f"{name}_smallest"] = result[f"{name}_average_accuracy"][0]
        result[f"{name}_largest"] = result[f"{name}_average_accuracy"][-1]
    return result


def margins(results: Sequence[Json]) -> dict[str, list[float]]:
    """For each statement, by how much it holds in each seed; negative where it does not."""

    def gap(result: Json, size: str) -> float:
        return float(result[f"fromp_{size}"] - result[f"fromp_random_{size}"])

    return {
        "chosen_wins": [gap(r, "smallest") for r in results],
        "chosen_grows": [r["fromp_largest"] - r["fromp_smallest"] for r in results],
        "random_grows": [r["fromp_random_largest"] - r["fromp_random_smallest"] for r in results],
        "gap_closes": [gap(r, "smallest") - gap(r, "largest") for r in results],
    }


def check(results: list[Json]) -> Verdict:
    """The rules of the module's docstring; ``<statement>_holds`` is 1, −1, or 0 for undecided."""
    numbers = summarise(results)
    signs = {f"{name}_holds": sign_of_mean(values) for name, values in margins(results).items()}
    numbers |= {name: float(sign) for name, sign in signs.items()}
    return Verdict(judgement(signs.values()), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Accuracy, forgetting and calibration against the size of the memory."""
    sizes = results[0]["sizes"]
    labels = {"average_accuracy": "average accuracy, %", "forgetting": "forgetting, points",
              "average_ece": "calibration error (ECE), %"}  # fmt: skip
    with house_style():
        figure = blank_figure(11.0, 3.5)
        for axes, (score, label) in zip(figure.subplots(1, 3), labels.items(), strict=True):
            for name, title in WAYS.items():
                values = 100 * np.array([r[f"{name}_{score}"] for r in results])
                axes.plot(sizes, values.T, color=COLOURS[name], linewidth=0.7, alpha=0.4)
                axes.plot(sizes, values.mean(0), "o-", color=COLOURS[name], markersize=4,
                          label=title)  # fmt: skip
            axes.set(xlabel="examples remembered of each task", ylabel=label, xscale="log")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            faint_grid(axes)
            if score == "average_accuracy":
                axes.set_title("Permuted MNIST, FROMP")
                axes.legend(fontsize=8.5)
        return [save(figure, folder / "continual-memory.png")]


def _with_memory(settings: MemorySettings, name: str, size: int) -> MemorySettings:
    options = dict(settings.options.get(name, {}))
    temperature = options.get("temperature", 1.0) * settings.memory / size
    changed = {**settings.options, name: {**options, "temperature": temperature}}
    return replace(settings, memory=size, options=changed)


EXPERIMENT = Experiment(
    id="004-memory-size",
    paper="004",
    claim="Khan (2019), memorable examples: FROMP's accuracy rises with the size of its memory, "
    "and where that is small the examples with the largest Λ(x) keep more of the old tasks than "
    "random ones.",
    theorem=False,
    needs=("mnist",),
    minutes=3,
    presets={
        "quick": MemorySettings(
            stream="permuted", data="mnist", tasks=5, net="100-100", num_data=2000, epochs=10,
            lr=1e-3, memory=200, learners=tuple(WAYS),
            options=dict.fromkeys(WAYS, PAPER_FROMP),
        ),
        "paper": MemorySettings(
            stream="permuted", data="mnist", tasks=10, net="100-100", num_data=100_000,
            test_images=100_000, epochs=10, lr=1e-3, memory=200, learners=tuple(WAYS),
            options=dict.fromkeys(WAYS, PAPER_FROMP),
        ),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)  # fmt: skip
