"""All experiments by id."""

from __future__ import annotations

import difflib
from typing import Any

from credo.errors import DataError
from credo_papers import (
    active_learning,
    adam_landscape,
    alternating,
    and_gradient,
    and_perceptron,
    balanced_rates,
    balanced_resnet,
    bayes_vs_frequentist,
    beta_bernoulli,
    binary_mnist,
    cold_posterior,
    continual_memory,
    continual_permuted_mnist,
    continual_split_cifar,
    continual_split_mnist,
    continual_toy,
    dual_plateau,
    equal_time,
    flat_minimum,
    flat_modes,
    gp_evidence,
    gp_kernel,
    gp_regression,
    important_examples,
    initial_rho,
    kl_weights_study,
    mean_field_collapse,
    memorable_examples,
    noise_confidence,
    one_price,
    optimizer_search,
    optimizer_swap,
    path_derivative,
    penalty_gallery,
    penalty_table,
    policy_search_control,
    rate_disagreement,
    rate_landscape,
    rate_ratio,
    reference_audit,
    referral,
    referral_human_doubt,
    resnet20,
    riskier_fit,
    segmentation,
    sequential_inference,
    sgd_covariance,
    sgd_landscape,
    shift_cifar10,
    shift_mnist,
    squared_gradient_cost,
    uncertainty_away,
    vl_comparison,
    vl_rates,
    vl_runtime,
    width_temperature,
)
from credo_papers.experiment import Experiment

_MODULES = (
    mean_field_collapse,
    width_temperature,
    balanced_resnet,
    cold_posterior,
    penalty_gallery,
    penalty_table,
    vl_comparison,
    vl_rates,
    vl_runtime,
    flat_modes,
    and_gradient,
    and_perceptron,
    beta_bernoulli,
    initial_rho,
    noise_confidence,
    bayes_vs_frequentist,
    path_derivative,
    kl_weights_study,
    optimizer_search,
    sgd_landscape,
    adam_landscape,
    alternating,
    rate_landscape,
    rate_ratio,
    dual_plateau,
    rate_disagreement,
    balanced_rates,
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
    gp_regression,
    gp_kernel,
    gp_evidence,
    memorable_examples,
    continual_toy,
    continual_split_mnist,
    continual_permuted_mnist,
    continual_split_cifar,
    continual_memory,
    active_learning,
    important_examples,
    shift_mnist,
    shift_cifar10,
    referral,
    referral_human_doubt,
    one_price,
    reference_audit,
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
