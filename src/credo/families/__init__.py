"""Distributions over flat vectors of weights: what a posterior can be.

Each is a frozen dataclass of tensors. Those of `FAMILIES` can be stored and read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from credo.errors import FileFormatError
from credo.families import links
from credo.families.base import Atomic, Family
from credo.families.delta import Delta
from credo.families.diag_gaussian import DiagGaussian
from credo.families.eigen_kronecker_gaussian import EigenBlock, EigenKroneckerGaussian
from credo.families.empirical import Empirical
from credo.families.factor_gaussian import FactorGaussian
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian import Gaussian
from credo.families.gaussian_mixture import GaussianMixture
from credo.families.low_rank_gaussian import LowRankGaussian
from credo.families.mixture import Mixture
from credo.types import Json

__all__ = [
    "FAMILIES",
    "Atomic",
    "Delta",
    "DiagGaussian",
    "EigenBlock",
    "EigenKroneckerGaussian",
    "Empirical",
    "FactorGaussian",
    "Family",
    "FixedGaussian",
    "FullGaussian",
    "Gaussian",
    "GaussianMixture",
    "LowRankGaussian",
    "Mixture",
    "links",
    "register",
    "unpack",
]

FAMILIES: dict[str, type[Family]] = {
    family.__name__: family
    for family in (
        Delta,
        DiagGaussian,
        EigenKroneckerGaussian,
        Empirical,
        FactorGaussian,
        FixedGaussian,
        FullGaussian,
        GaussianMixture,
        LowRankGaussian,
        Mixture,
    )
}
"""Every family over flat vectors of weights by the name it is stored under."""

F = TypeVar("F", bound=type[Family])


def register(family: F) -> F:
    """Let `unpack` read this family under its name; for use as a decorator.

    Args:
        family: A class whose ``pack`` and ``unpack`` are inverse to each other.
    """
    FAMILIES[family.__name__] = family
    return family


def unpack(tensors: Mapping[str, Tensor], meta: Json) -> Family:
    """The family that ``Family.pack`` took apart.

    Args:
        tensors: Its tensors by name.
        meta: Its JSON, with the family's name as ``type``.

    >>> import torch
    >>> unpack(*Delta(torch.tensor([1.0, 2.0])).pack())
    Delta(mean=tensor([1., 2.]))
    """
    family = FAMILIES.get(str(meta.get("type")))
    if family is None:
        raise FileFormatError(
            f"no family is called {meta.get('type')!r}; known are {sorted(FAMILIES)}. If the "
            "file was written with the learning rule: import credo.rule first"
        )
    return family.unpack(tensors, meta)
