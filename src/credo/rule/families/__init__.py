"""Exponential families for the learning rule: its own, and the Gaussians of `credo.families`.

`natural_parameters`, `with_natural` and the other functions of `credo.rule.families.exponential`
serve both. Importing this package makes files with the rule's own families readable.
"""

from credo.rule.families import (
    diag_gaussian,
    eigen_kronecker_gaussian,
    fixed_gaussian,
    full_gaussian,
    kronecker_steps,
    structured_gaussian,
)
from credo.rule.families.beta import Beta
from credo.rule.families.categorical import Categorical
from credo.rule.families.dirichlet import Dirichlet
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    entropy_gradient,
    expectation_parameters,
    inner,
    log_base,
    log_partition,
    natural_parameters,
    parameter_names,
    sufficient_statistics,
    with_expectation,
    with_natural,
)
from credo.rule.families.gamma import Gamma
from credo.rule.families.gaussian import absorb, absorb_positive
from credo.rule.families.gaussian_mixture import joint_statistics
from credo.rule.families.kronecker_gaussian import KroneckerGaussian
from credo.rule.families.low_rank_gaussian import absorb_factor
from credo.rule.families.normal_gamma import NormalGamma
from credo.rule.families.sign_bernoulli import SignBernoulli

__all__ = [
    "Beta",
    "Categorical",
    "Dirichlet",
    "ExponentialFamily",
    "Gamma",
    "KroneckerGaussian",
    "NormalGamma",
    "Parameters",
    "SignBernoulli",
    "absorb",
    "absorb_factor",
    "absorb_positive",
    "diag_gaussian",
    "eigen_kronecker_gaussian",
    "entropy_gradient",
    "expectation_parameters",
    "fixed_gaussian",
    "full_gaussian",
    "inner",
    "joint_statistics",
    "kronecker_steps",
    "log_base",
    "log_partition",
    "natural_parameters",
    "parameter_names",
    "structured_gaussian",
    "sufficient_statistics",
    "with_expectation",
    "with_natural",
]
