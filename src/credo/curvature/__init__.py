"""What stands for ∇²ℓ in the learning rule."""

from credo.curvature.estimators import (
    Curvature,
    ExactHessian,
    ExampleSquares,
    FromValues,
    GaussNewton,
    Hutchinson,
    Reparameterised,
    SquaredGradient,
)
from credo.curvature.spectrum import ExtremeEigenvalues, extreme_eigenvalues

__all__ = [
    "Curvature",
    "ExactHessian",
    "ExampleSquares",
    "ExtremeEigenvalues",
    "FromValues",
    "GaussNewton",
    "Hutchinson",
    "Reparameterised",
    "SquaredGradient",
    "extreme_eigenvalues",
]
