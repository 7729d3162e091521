"""Exponential families that only the learning rule makes use of."""

from credo.rule.families.beta import Beta
from credo.rule.families.categorical import Categorical
from credo.rule.families.dirichlet import Dirichlet
from credo.rule.families.gamma import Gamma, InverseGamma
from credo.rule.families.kronecker_gaussian import KroneckerGaussian
from credo.rule.families.normal_gamma import NormalGamma
from credo.rule.families.sign_bernoulli import SignBernoulli

__all__ = [
    "Beta",
    "Categorical",
    "Dirichlet",
    "Gamma",
    "InverseGamma",
    "KroneckerGaussian",
    "NormalGamma",
    "SignBernoulli",
]
