"""Priors: rules that give every weight of any network its distribution.

``prior.on(segments, like)`` is the distribution over those segments, with ``log_prob``,
``grad_log_prob``, ``sample`` and ``scale`` in closed form. Every ``scale`` is a standard deviation.
A family is a prior too: yesterday's posterior is today's prior.
"""

from __future__ import annotations

from credo.errors import DataError, UnsupportedError
from credo.families import FAMILIES
from credo.priors.elastic_net import ElasticNet, FlatElasticNet
from credo.priors.group import FlatGroupLasso, GroupLasso
from credo.priors.laplace import FlatLaplace, Laplace
from credo.priors.normal import Normal
from credo.priors.penalty.conclusion import NoPrior
from credo.priors.penalty.penalty_of import penalty_of
from credo.priors.penalty.solve import from_penalty
from credo.priors.penalty.tabulated import FlatRadial, FlatTabulated, RadialTabulated, Tabulated
from credo.priors.scale_mixture import FlatScaleMixture, ScaleMixture
from credo.priors.scales import scale_from_config
from credo.types import Json, Prior

__all__ = [
    "PRIORS",
    "ElasticNet",
    "FlatElasticNet",
    "FlatGroupLasso",
    "FlatLaplace",
    "FlatRadial",
    "FlatScaleMixture",
    "FlatTabulated",
    "GroupLasso",
    "Laplace",
    "NoPrior",
    "Normal",
    "RadialTabulated",
    "ScaleMixture",
    "Tabulated",
    "from_config",
    "from_penalty",
    "penalty_of",
]

PRIORS: dict[str, type[Prior]] = {
    prior.__name__: prior
    for prior in (
        ElasticNet,
        GroupLasso,
        Laplace,
        Normal,
        RadialTabulated,
        ScaleMixture,
        Tabulated,
    )
}
"""Every prior rule by the name its config has."""


def from_config(config: Json) -> Prior:
    """The prior whose ``config()`` this is.

    A family that served as a prior is not built here: its config only names it, and its tensors
    are stored beside it, for `credo.families.unpack`.

    Args:
        config: The type's name under ``type``, and its settings.

    >>> from_config(Normal.kaiming().config())
    Normal(scale=Kaiming(a=0.0), mean=0.0)
    """
    settings = dict(config)
    name = settings.pop("type", None)
    if name in FAMILIES:
        raise UnsupportedError(
            f"this prior is a {name} whose tensors are stored apart from its config; "
            "build it with credo.families.unpack(tensors, meta)"
        )
    if not isinstance(name, str) or name not in PRIORS:
        raise DataError(f"no prior has the type {name!r}; there are {', '.join(sorted(PRIORS))}")
    if "scale" in settings:
        settings["scale"] = scale_from_config(settings["scale"])
    try:
        return PRIORS[name](**settings)
    except TypeError as error:
        raise DataError(f"{name} can't be built from the settings {settings}: {error}") from error
