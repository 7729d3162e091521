"""The examples worth looking at: the most uncertain, and the most confidently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.report.contest import Contest, Section
from credo.report.evidence import Run
from credo.report.pictures import as_pictures, data_uri

SHOWN = 8
MAPS = 4
FEATURES = 6
"""Of a row: as many as a page is wide."""


@dataclass(frozen=True)
class Example:
    """One example.

    Args:
        number: Which of the test examples it is.
        truth: What it is.
        said: What was predicted.
        picture: The address of its picture, or nothing.
        cells: Its features, if it is a row of a table.
        maps: Titled addresses of further pictures, for dense predictions.
        wrong: Whether the prediction was wrong.
    """

    number: int
    truth: str
    said: str
    picture: str = ""
    cells: Sequence[str] = ()
    maps: Sequence[tuple[str, str]] = ()
    wrong: bool = False


@dataclass(frozen=True)
class Gallery:
    """The examples of one method."""

    method: str
    key: str
    seed: int
    uncertain: Sequence[Example]
    mistaken: Sequence[Example]


def examples(contest: Contest) -> Section | None:
    """Galleries of all methods, or None where the test inputs are not known."""
    inputs = contest.evidence.inputs
    if inputs is None or len(inputs) == 0:
        return None
    inputs = np.asarray(inputs)
    make = {"classification": _of_classes, "regression": _of_numbers, "dense": _of_pixels}
    galleries = [
        gallery
        for name in contest.finished
        if (gallery := make[contest.evidence.kind](contest, contest.runs(name)[0], inputs))
    ]
    if not galleries:
        return None
    of = {
        "classification": "First, where a method has the greatest entropy; then, where it was "
        "wrong and most sure of it. Bold is the truth, below it what was predicted and how sure. "
        "Uncertain examples should look hard to a human too; confident mistakes are often wrong "
        "labels, or what the method has never seen.",
        "regression": "First, where a method predicts the greatest standard deviation; then, where "
        "the truth lies most standard deviations away from its mean.",
        "dense": "The images of the greatest mean entropy: what went in, how uncertain each pixel "
        "is (brighter is more), and where the prediction is wrong (bright).",
    }[contest.evidence.kind]
    words = [
        f"{of} From the first seed of each method.",
    ]
    count = _examples_in(contest)
    if count > len(inputs):
        words.append(f"Chosen among the {len(inputs):,} of {count:,} test examples that were kept.")
    return Section("examples", "Examples to look at", words, extra=galleries)


def _examples_in(contest: Contest) -> int:
    targets = contest.evidence.targets
    return 0 if targets is None else len(targets)


def _chosen(run: Run, array: str, inputs: NDArray[Any], index: NDArray[np.int64]) -> Any:
    """The entries of an array at the examples whose inputs are known, or None."""
    if array not in run.arrays:
        return None
    values = np.asarray(run.arrays[array])
    return values[index] if len(values) > index.max(initial=-1) else None


def _of_classes(contest: Contest, run: Run, inputs: NDArray[Any]) -> Gallery | None:
    index = _indices(contest, inputs)
    entropy, confidence, correct, predicted = (
        _chosen(run, name, inputs, index)
        for name in ("entropy", "confidence", "correct", "predicted")
    )
    if entropy is None or confidence is None or correct is None:
        return None
    pictures = as_pictures(inputs)
    targets = contest.evidence.targets
    right = np.asarray(correct, dtype=float) > 0.5

    def example(place: int) -> Example:
        number = int(index[place])
        truth = _class(contest, targets[number]) if targets is not None else ""
        guess = truth if right[place] else "another class"
        guess = _class(contest, predicted[place]) if predicted is not None else guess
        said = f"{guess}, {float(confidence[place]):.0%}" if guess else f"{confidence[place]:.0%}"
        picture, cells = _shown(pictures, inputs, place)
        return Example(number, truth, said, picture, cells, wrong=not right[place])

    unsure = np.argsort(-np.asarray(entropy, dtype=float), kind="stable")[:SHOWN]
    wrong = np.flatnonzero(~right)
    surest = wrong[np.argsort(-np.asarray(confidence, dtype=float)[wrong], kind="stable")][:SHOWN]
    key = contest.looks[run.method].key
    return Gallery(
        run.method, key, run.seed, [example(i) for i in unsure], [example(i) for i in surest]
    )


def _of_numbers(contest: Contest, run: Run, inputs: NDArray[Any]) -> Gallery | None:
    index = _indices(contest, inputs)
    mean, std, error = (_chosen(run, name, inputs, index) for name in ("mean", "std", "error"))
    if mean is None or std is None or error is None:
        return None
    mean, std, error = (
        np.asarray(a, dtype=float).reshape(len(index), -1) for a in (mean, std, error)
    )
    pictures = as_pictures(inputs)

    def example(place: int) -> Example:
        truth = ", ".join(f"{value:.3g}" for value in mean[place] + error[place])
        said = ", ".join(f"{m:.3g} ± {s:.2g}" for m, s in zip(mean[place], std[place], strict=True))
        picture, cells = _shown(pictures, inputs, place)
        return Example(int(index[place]), truth, said, picture, cells)

    widest = np.argsort(-std.mean(1), kind="stable")[:SHOWN]
    farthest = np.argsort(-np.abs(error / std).max(1), kind="stable")[:SHOWN]
    key = contest.looks[run.method].key
    return Gallery(
        run.method, key, run.seed, [example(i) for i in widest], [example(i) for i in farthest]
    )


def _of_pixels(contest: Contest, run: Run, inputs: NDArray[Any]) -> Gallery | None:
    pictures = as_pictures(inputs)
    entropy, correct = (run.arrays.get(name) for name in ("entropy_map", "correct_map"))
    if pictures is None or entropy is None or correct is None or len(entropy) != len(inputs):
        return None
    index = _indices(contest, inputs)
    entropy, correct = np.asarray(entropy, dtype=float), np.asarray(correct, dtype=float)
    most = float(entropy.max()) or 1.0
    shown = np.argsort(-entropy.mean((1, 2)), kind="stable")[:MAPS]

    def example(place: int) -> Example:
        maps = (
            ("entropy", data_uri(entropy[place] / most, "cividis")),
            ("mistakes", data_uri(1 - correct[place], "cividis")),
        )
        said = f"{correct[place].mean():.1%} of pixels right"
        return Example(int(index[place]), "", said, data_uri(pictures[place]), maps=maps)

    key = contest.looks[run.method].key
    return Gallery(run.method, key, run.seed, [example(i) for i in shown], [])


def _indices(contest: Contest, inputs: NDArray[Any]) -> NDArray[np.int64]:
    """Which of the test examples the inputs are."""
    given = contest.evidence.input_index
    return np.arange(len(inputs)) if given is None else np.asarray(given, dtype=np.int64)


def _class(contest: Contest, number: Any) -> str:
    classes, index = contest.evidence.classes, int(number)
    return str(classes[index]) if 0 <= index < len(classes) else str(index)


def _shown(
    pictures: NDArray[np.float64] | None, inputs: NDArray[Any], place: int
) -> tuple[str, list[str]]:
    """A picture, or the first features of a row."""
    if pictures is not None:
        return data_uri(pictures[place]), []
    row = np.asarray(inputs[place]).ravel()
    cells = [f"{value:.3g}" if row.dtype.kind == "f" else str(value) for value in row[:FEATURES]]
    return "", cells + (["…"] if row.size > FEATURES else [])
