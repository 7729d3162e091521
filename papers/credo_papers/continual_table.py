"""A table of continual learners on one stream: accuracy, forgetting and calibration of each.

What the streams' experiments share: `run_one`, the rules of `check`, the figure. A statement is a
pair (better, worse) of learners that the published table separates; it holds, or is refuted, with
95 % confidence of the mean difference in average accuracy over seeds. Reproduced if all statements
hold, not reproduced if one is refuted. The published accuracies themselves are in the numbers as
``<learner>_published`` and are not judged at another scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from credo.report.style import (
    BLACK,
    BLUE,
    GREY,
    PALE,
    VERMILLION,
    blank_figure,
    coloured,
    faint_grid,
    house_style,
    save,
)
from credo.types import Json
from credo_papers.continual_setup import LEARNERS, ContinualSettings, learn_stream
from credo_papers.experiment import Verdict, judgement, sign_of_mean, summarise

Statement = tuple[str, str]

SCORES = {
    "average_accuracy": "accuracy",
    "forgetting": "forgetting",
    "backward_transfer": "backward",
    "forward_transfer": "forward",
    "average_nll": "nll",
    "average_ece": "ece",
    "seconds": "seconds",
    "memory_bytes": "memory_bytes",
}


def run_one(settings: ContinualSettings, seed: int, folder: Path) -> Json:
    """All learners on the stream of this seed."""
    result: Json = {"learners": list(settings.learners)}
    for name in settings.learners:
        report = learn_stream(settings, name, seed, folder / name)
        numbers = report.summary()
        result |= {f"{name}_{short}": numbers[key] for key, short in SCORES.items()}
        result[f"{name}_matrix"] = report.accuracy.tolist()
    return result


def differences(results: Sequence[Json], statement: Statement) -> list[float]:
    """Of average accuracy, in each seed."""
    better, worse = statement
    return [r[f"{better}_accuracy"] - r[f"{worse}_accuracy"] for r in results]


def judge(
    results: list[Json], statements: Sequence[Statement], published: Mapping[str, float]
) -> Verdict:
    """The rules of the module's docstring; ``<better>_over_<worse>_holds`` is 1, −1 or 0."""
    numbers = summarise(results)
    numbers |= {f"{name}_published": value for name, value in published.items()}
    signs = {}
    for better, worse in statements:
        sign = sign_of_mean(differences(results, (better, worse)))
        signs[f"{better}_over_{worse}_holds"] = float(sign)
    numbers |= signs
    return Verdict(judgement(signs.values()), numbers)


def checker(
    statements: Sequence[Statement], published: Mapping[str, float]
) -> Callable[[list[Json]], Verdict]:
    """`judge` for an experiment."""
    return lambda results: judge(results, statements, published)


def drawer(
    title: str, file: str, published: Mapping[str, float], source: str = "published"
) -> Callable[..., list[Path]]:
    """`draw` for an experiment."""
    return lambda results, folder: [draw(results, folder / file, title, published, source)]


def draw(
    results: list[Json],
    path: Path,
    title: str,
    published: Mapping[str, float],
    source: str = "published",
) -> Path:
    """Accuracy, forgetting and calibration of each learner; accuracy as the tasks come.

    ``source`` says in the legend what the published numbers are of.
    """
    names = sorted(
        results[0]["learners"], key=lambda n: np.mean([r[f"{n}_accuracy"] for r in results])
    )
    with house_style():
        figure = blank_figure(13.5, 0.9 + 0.32 * len(names) + 0.8)
        *dots, curve = figure.subplots(1, 4, width_ratios=(1.25, 0.9, 0.9, 1.35))
        for axes, (short, label) in zip(
            dots,
            {"accuracy": "average accuracy, %", "forgetting": "forgetting, points",
             "ece": "calibration error (ECE), %"}.items(),
            strict=True,
        ):  # fmt: skip
            for place, name in enumerate(names):
                values = 100 * np.array([r[f"{name}_{short}"] for r in results])
                axes.plot(values, [place] * len(values), "o", color=BLUE, markersize=3, alpha=0.45)
                axes.plot(values.mean(), place, "o", color=BLUE, markersize=6)
                if short == "accuracy" and name in published:
                    axes.plot(100 * published[name], place, "|", color=VERMILLION, markersize=11,
                              markeredgewidth=2)  # fmt: skip
            axes.set(xlabel=label, ylim=(-0.6, len(names) - 0.4))
            axes.set_yticks(range(len(names)), [""] * len(names))
            axes.grid(axis="x", color=PALE, linewidth=0.6)
        dots[0].set_yticks(range(len(names)), [LEARNERS[n].title for n in names])
        dots[0].set_title(title)
        handles: list[Any] = [
            *dots[0].plot([], [], "o", color=BLUE, label="here, mean and seeds"),
            *dots[0].plot([], [], "|", color=VERMILLION, markersize=11, markeredgewidth=2,
                          label=source),
        ]  # fmt: skip
        if published:
            figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2)
        _curves(curve, results, names)
        return save(figure, path)


def _curves(axes: Any, results: list[Json], names: Sequence[str]) -> None:
    """Mean accuracy over the tasks so far."""
    shown = [n for n in ("joint", "fromp", "vcl", "si", "ewc", "naive") if n in names]
    for name, colour in coloured(shown):
        matrices = np.array([r[f"{name}_matrix"] for r in results])
        tasks = matrices.shape[1]
        averages = 100 * np.array([matrices[:, i, : i + 1].mean(1) for i in range(tasks)])
        places = range(1, tasks + 1)
        axes.plot(places, averages, color=colour, linewidth=0.7, alpha=0.4)
        axes.plot(places, averages.mean(1), color=colour, label=LEARNERS[name].title)
    axes.set(xlabel="tasks learned", ylabel="accuracy over these, %")
    axes.set_xticks(range(1, tasks + 1))
    axes.tick_params(colors=GREY, labelcolor=BLACK)
    axes.legend(fontsize=8)
    faint_grid(axes)
