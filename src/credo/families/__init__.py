"""Distributions: over flat vectors of weights, and the exponential families of the learning rule.

Each is a frozen dataclass of tensors. Those of `FAMILIES` can be a posterior over weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from credo.errors import FileFormatError
from credo.families import links
from credo.families.base import Atomic, Family
from credo.families.beta import Beta
from credo.families.categorical import Categorical
from credo.families.delta import Delta
from credo.families.diag_gaussian import DiagGaussian
from credo.families.dirichlet import Dirichlet
from credo.families.eigen_kronecker_gaussian import EigenBlock, EigenKroneckerGaussian
from credo.families.empirical import Empirical
from credo.families.exponential import ExponentialFamily
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gamma import Gamma, InverseGamma
from credo.families.gaussian import Gaussian
from credo.families.gaussian_mixture import GaussianMixture
from credo.families.kronecker_gaussian import KroneckerGaussian
from credo.families.low_rank_gaussian import LowRankGaussian
from credo.families.normal_gamma import NormalGamma
from credo.families.sign_bernoulli import SignBernoulli
from credo.types import Json

__all__ = [
    "FAMILIES",
    "Atomic",
    "Beta",
    "Categorical",
    "Delta",
    "DiagGaussian",
    "Dirichlet",
    "EigenBlock",
    "EigenKroneckerGaussian",
    "Empirical",
    "ExponentialFamily",
    "Family",
    "FixedGaussian",
    "FullGaussian",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "InverseGamma",
    "KroneckerGaussian",
    "LowRankGaussian",
    "NormalGamma",
    "SignBernoulli",
    "links",
    "unpack",
]

FAMILIES: dict[str, type[Family]] = {
    family.__name__: family
    for family in (
        Delta,
        DiagGaussian,
        EigenKroneckerGaussian,
        Empirical,
        FixedGaussian,
        FullGaussian,
        GaussianMixture,
        KroneckerGaussian,
        LowRankGaussian,
        SignBernoulli,
    )
}
"""Every family over flat vectors of weights by the name it is stored under."""


def unpack(tensors: Mapping[str, Tensor], meta: Json) -> Family:
    """The family that ``Family.pack`` took apart.

    >>> import torch
    >>> unpack(*Delta(torch.tensor([1.0, 2.0])).pack())
    Delta(mean=tensor([1., 2.]))
    """
    family = FAMILIES.get(str(meta.get("type")))
    if family is None:
        raise FileFormatError(
            f"no family is called {meta.get('type')!r}; known are {sorted(FAMILIES)}"
        )
    return family.unpack(tensors, meta)
