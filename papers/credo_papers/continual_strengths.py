"""How strongly each continual learner should hold on to the past: studies for `credo sweep`.

    credo sweep continual-split-mnist --sampler grid --trials 35

One study for each stream of FROMP's table. A trial is one learner with one strength, on the stream
and network of the experiment's quick preset, scored by average accuracy. Its seed is `SEED`, which
no verdict uses: other images, another start. `continual_setup` says which of the presets' strengths
were chosen so; the values tried were some of this grid's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from credo.sweep import Choice, Space, Study
from credo.types import Json
from credo_papers import continual_permuted_mnist, continual_split_cifar, continual_split_mnist
from credo_papers.continual_setup import ContinualSettings, learn_stream
from credo_papers.experiment import Experiment

SEED = 100

KNOBS = {
    "ewc": "strength",
    "online_ewc": "strength",
    "kronecker": "strength",
    "si": "strength",
    "fromp": "temperature",
}
"""The argument of each learner that weighs old tasks against the new one."""

STRENGTHS = tuple(float(10**power) for power in range(-1, 6))


def with_strength(settings: ContinualSettings, learner: str, strength: float) -> ContinualSettings:
    """The same, but that this learner has this strength.

    >>> quick = continual_split_mnist.EXPERIMENT.presets["quick"]
    >>> with_strength(quick, "ewc", 3.0).options["ewc"]
    {'strength': 3.0}
    """
    mine = {**settings.options.get(learner, {}), KNOBS[learner]: strength}
    return replace(settings, options={**settings.options, learner: mine})


def average_accuracy(stream: ContinualSettings, settings: Json, seed: int, folder: Path) -> Json:
    """One learner on one stream; the trial's own seed does not matter."""
    learner = settings["learner"]
    tried = with_strength(stream, learner, settings["strength"])
    report = learn_stream(tried, learner, SEED, folder / "run")
    numbers = report.summary()
    return {name: numbers[name] for name in ("average_accuracy", "forgetting", "average_ece")}


def study(experiment: Experiment[ContinualSettings]) -> Study:
    """The study of an experiment's quick preset."""
    return Study(
        name=experiment.id.removeprefix("004-"),
        about="How strongly each continual learner holds on to old tasks, by average accuracy.",
        space=Space({"learner": Choice(tuple(KNOBS)), "strength": Choice(STRENGTHS)}),
        run=partial(average_accuracy, experiment.presets["quick"]),
        objective="average_accuracy",
        direction="maximize",
    )


STUDIES = {
    one.name: one
    for one in map(
        study,
        (
            continual_split_mnist.EXPERIMENT,
            continual_permuted_mnist.EXPERIMENT,
            continual_split_cifar.EXPERIMENT,
        ),
    )
}
