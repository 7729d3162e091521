"""Estimators of E_q[loss] and its gradients."""

from credo.expectations.activation_noise import Flipout, LocalReparameterisation
from credo.expectations.monte_carlo import WeightNoise
from credo.expectations.points import AtMean, Expectation, GaussHermite, MonteCarlo
from credo.expectations.score import ScoreFunction
from credo.expectations.step import Estimator, Step

__all__ = [
    "AtMean",
    "Estimator",
    "Expectation",
    "Flipout",
    "GaussHermite",
    "LocalReparameterisation",
    "MonteCarlo",
    "ScoreFunction",
    "Step",
    "WeightNoise",
]
