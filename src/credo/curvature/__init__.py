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

__all__ = [
    "Curvature",
    "ExactHessian",
    "ExampleSquares",
    "FromValues",
    "GaussNewton",
    "Hutchinson",
    "Reparameterised",
    "SquaredGradient",
]
