r"""Which settings a sweep tries: at random, on a grid, or where optuna expects the best.

"random"  trial i is drawn from a generator seeded by (seed, i).
"grid"    the finest grid with at most as many points as there are trials.
"optuna"  its tree-structured Parzen estimator, seeded. It is asked for as many settings as run at
          once and told their values before it is asked again, always in the trials' order, so the
          same seed and ``jobs`` propose the same settings, and a killed sweep, called again, goes
          through its finished trials to exactly where it was.

References: Bergstra and Bengio 2012 (random search); Bergstra et al. 2011 (Parzen estimator).

    >>> from credo.sweep.space import Space, Uniform
    >>> sampler = make_sampler("grid", Space({"x": Uniform(0, 1)}), "minimize", trials=3, seed=0)
    >>> sampler.ask(2)
    [{'x': 0.0}, {'x': 0.5}, {'x': 1.0}]
    >>> sampler.ask(2)
    []
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch

from credo.checks import import_extra
from credo.noise import key_to_seed
from credo.sweep.space import Choice, Space, points_per_axis
from credo.types import Json

SamplerName: TypeAlias = Literal["random", "grid", "optuna"]


class Sampler(Protocol):
    """Proposes settings and learns what came of them."""

    trials: int
    """How many it will propose in all."""

    def ask(self, count: int) -> list[Json]:
        """Settings to try next, ``count`` of them or all that are known; none when it is over."""
        ...

    def tell(self, values: Sequence[float | None]) -> None:
        """The objectives of the settings asked for last, None for a trial that failed."""
        ...


class Listed:
    """Settings that don't depend on what comes of them, so all are known at once."""

    def __init__(self, settings: list[Json]) -> None:
        self.trials = len(settings)
        self._left = settings

    def ask(self, count: int) -> list[Json]:
        """All of them."""
        asked, self._left = self._left, []
        return asked

    def tell(self, values: Sequence[float | None]) -> None:
        """Nothing is learned."""


class Optuna:
    """The Parzen estimator of optuna over the quantiles of the space's parameters.

    Quantiles rather than values: then a logarithmic or normal parameter keeps its distribution as
    the estimator's prior.
    """

    def __init__(self, space: Space, direction: str, trials: int, seed: int) -> None:
        optuna = import_extra("optuna", "sweep", 'sampler="optuna"', 'use sampler="random"')
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.trials, self._left, self._space = trials, trials, space
        # Optuna forgets trials that failed, and would propose their neighbours again and again;
        # those that were pruned it takes for the worst.
        self._failed = optuna.trial.TrialState.PRUNED
        # Optuna compares options by equality, and True equals 1: it chooses their places.
        self._axes = {
            name: optuna.distributions.CategoricalDistribution(tuple(range(len(p.options))))
            if isinstance(p, Choice)
            else optuna.distributions.FloatDistribution(0.0, 1.0)
            for name, p in space.parameters.items()
        }
        # Settings asked for together would be near copies if each did not know of the others.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(direction=direction, sampler=sampler)
        self._pending: list[Any] = []

    def ask(self, count: int) -> list[Json]:
        """The next ``count``, given all that was told."""
        count = min(count, self._left)
        self._left -= count
        self._pending = [self._study.ask(self._axes) for _ in range(count)]
        return [
            {
                name: parameter.options[trial.params[name]]
                if isinstance(parameter, Choice)
                else parameter.at(trial.params[name])
                for name, parameter in self._space.parameters.items()
            }
            for trial in self._pending
        ]

    def tell(self, values: Sequence[float | None]) -> None:
        """Learn from the values."""
        for trial, value in zip(self._pending, values, strict=True):
            if value is None:
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)


def make_sampler(
    name: SamplerName, space: Space, direction: str, trials: int, seed: int
) -> Sampler:
    """The sampler of this name."""
    if name == "grid":
        return Listed(space.grid(points_per_axis(space, trials)))
    if name == "optuna":
        return Optuna(space, direction, trials, seed)
    generators = (torch.Generator().manual_seed(key_to_seed(seed, i)) for i in range(trials))
    return Listed([space.sample(generator) for generator in generators])
