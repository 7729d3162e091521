"""Posteriors over a network's weights, and what they predict."""

from credo.posterior.dropout import DropoutPosterior
from credo.posterior.loading import load
from credo.posterior.mixture import MixturePosterior, merge
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.posterior.refreshed import RefreshedPosterior

__all__ = [
    "DropoutPosterior",
    "MixturePosterior",
    "Posterior",
    "Predictive",
    "RefreshedPosterior",
    "load",
    "merge",
]
