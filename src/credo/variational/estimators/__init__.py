"""Estimators of E_q[loss] and its gradients; `VI` chooses one by name."""

from credo.variational.estimators.activation_noise import Flipout, LocalReparameterisation
from credo.variational.estimators.monte_carlo import Estimator, GaussianStep, WeightNoise
from credo.variational.estimators.score import ScoreFunction

__all__ = [
    "Estimator",
    "Flipout",
    "GaussianStep",
    "LocalReparameterisation",
    "ScoreFunction",
    "WeightNoise",
]
