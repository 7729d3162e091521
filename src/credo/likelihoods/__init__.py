"""Likelihoods p(y | f): what the network's outputs f say about the targets y."""

from __future__ import annotations

from credo.errors import DataError, UnsupportedError
from credo.likelihoods.base import BaseLikelihood, Classification, Regression
from credo.likelihoods.bernoulli import Bernoulli
from credo.likelihoods.categorical import Categorical
from credo.likelihoods.from_loss import FromLoss
from credo.likelihoods.gaussian import Gaussian
from credo.likelihoods.heteroscedastic import HeteroscedasticGaussian
from credo.types import Json

__all__ = [
    "BaseLikelihood",
    "Bernoulli",
    "Categorical",
    "Classification",
    "FromLoss",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Regression",
    "from_config",
]

_BY_NAME: dict[str, type[BaseLikelihood]] = {
    cls.__name__: cls for cls in (Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian)
}


def from_config(config: Json) -> BaseLikelihood:
    """The likelihood whose ``config()`` this is, learned noise at the value it had.

    >>> from_config(Gaussian(scale=0.5).config())
    Gaussian(scale=0.5, learned=False)

    Args:
        config: What ``config()`` returned, as it comes out of JSON.
    """
    settings = dict(config)
    name = settings.pop("type", None)
    if name == "FromLoss":
        raise UnsupportedError(
            f"The loss {settings.get('name')!r} is a function, and functions are not stored. "
            "Give it again: credo.load(path, net, likelihood=credo.likelihoods.FromLoss(fn))."
        )
    if not isinstance(name, str) or name not in _BY_NAME:
        raise DataError(f"No likelihood has the type {name!r}; there are {', '.join(_BY_NAME)}.")
    try:
        return _BY_NAME[name](**settings)
    except TypeError as error:
        raise DataError(f"{name} can't be built from the settings {settings}: {error}") from error
