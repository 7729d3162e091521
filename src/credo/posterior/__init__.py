"""Posteriors over a network's weights, and what they predict."""

from credo.posterior.posterior import Posterior, load
from credo.posterior.predictive import Predictive

__all__ = ["Posterior", "Predictive", "load"]
