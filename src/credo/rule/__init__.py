"""The Bayesian learning rule as an engine: theory as running code.

    λ ← λ − ρ ∇_μ ( E_q[ℓ(θ)] − τ H(q) )

`Learner` composes a family, an expectation and a curvature into an algorithm; `credo.rule.gallery`
has the named ones. Nothing in the library imports this package: what it ships is written for
speed and held equal to the rule by tests.
"""

from credo.autodiff.loss import Loss
from credo.rule import families
from credo.rule.curvatures import (
    Curvature,
    ExactHessian,
    ExampleSquares,
    FromValues,
    GaussNewton,
    Hutchinson,
    Reparameterised,
    SquaredGradient,
)
from credo.rule.expectations import AtMean, Expectation, GaussHermite, MonteCarlo
from credo.rule.learner import Learner, Step
from credo.rule.rule import (
    expectation_gradient,
    gaussian_step,
    natural_gradient,
    step,
)

__all__ = [
    "AtMean",
    "Curvature",
    "ExactHessian",
    "ExampleSquares",
    "Expectation",
    "FromValues",
    "GaussHermite",
    "GaussNewton",
    "Hutchinson",
    "Learner",
    "Loss",
    "MonteCarlo",
    "Reparameterised",
    "SquaredGradient",
    "Step",
    "expectation_gradient",
    "families",
    "gaussian_step",
    "natural_gradient",
    "step",
]
