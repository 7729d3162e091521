"""Estimators of E_q[loss] and its gradients; `VI` chooses one by name."""

from credo.variational.estimators.activation_noise import Flipout, LocalReparameterisation
from credo.variational.estimators.monte_carlo import WeightNoise
from credo.variational.estimators.score import ScoreFunction
from credo.variational.estimators.step import Estimator, Step

__all__ = [
    "Estimator",
    "Flipout",
    "LocalReparameterisation",
    "ScoreFunction",
    "Step",
    "WeightNoise",
]
