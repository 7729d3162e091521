"""All experiments by id."""

from __future__ import annotations

import difflib
from typing import Any

from credo.errors import DataError
from credo.experiments import (
    and_gradient,
    and_perceptron,
    beta_bernoulli,
    binary_mnist,
    equal_time,
    flat_minimum,
    flat_modes,
    initial_rho,
    noise_confidence,
    optimizer_swap,
    policy_search_control,
    resnet20,
    riskier_fit,
    segmentation,
    sequential_inference,
    sgd_covariance,
    squared_gradient_cost,
    uncertainty_away,
    vl_comparison,
    vl_rates,
    vl_runtime,
)
from credo.experiments.experiment import Experiment

_MODULES = (
    vl_comparison,
    vl_rates,
    vl_runtime,
    flat_modes,
    and_gradient,
    and_perceptron,
    beta_bernoulli,
    initial_rho,
    noise_confidence,
    binary_mnist,
    equal_time,
    flat_minimum,
    optimizer_swap,
    policy_search_control,
    resnet20,
    riskier_fit,
    segmentation,
    sequential_inference,
    sgd_covariance,
    squared_gradient_cost,
    uncertainty_away,
)

EXPERIMENTS: dict[str, Experiment[Any]] = {m.EXPERIMENT.id: m.EXPERIMENT for m in _MODULES}


def find(name: str) -> Experiment[Any]:
    """The experiment of this id, or a `DataError` that names the nearest one.

    >>> find("003-and-gradient").theorem
    True
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise DataError(f"no experiment is called {name!r}.{hint} There are {', '.join(EXPERIMENTS)}.")
