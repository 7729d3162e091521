r"""Newton's method: the rule for a full Gaussian, looked at from its mean only, at rate one.

The rule S ← (1 − ρ)S + ρE[∇²ℓ], m ← m − ρS⁻¹E[∇ℓ] with the delta method E_q f ≈ f(m) and ρ = 1 is

    S ← ∇²ℓ(m),        m ← m − S⁻¹∇ℓ(m)

What is given up: the expectation. Newton sees the curvature at a point, the rule its average over
q, and so prefers flat minima. A damped step ρ < 1 run to convergence is Laplace's approximation.

    >>> import torch
    >>> from credo.families import FullGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = newton()
    >>> state = method.init(FullGaussian(torch.zeros(1), torch.ones(1, 1)))
    >>> method.update(state, Loss.of(lambda x: 2 * (x - 3).square().sum())).q.mean
    tensor([3.])
"""

from __future__ import annotations

from credo.rule.curvatures import ExactHessian
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="Newton's method",
    family="full Gaussian",
    expectation="at the mean",
    curvature="exact Hessian",
    step="ρ = 1",
    approximates="E_q by its value at the mean",
    test="tests/theorems/test_gallery_optimizers.py::test_newton_solves_a_quadratic_in_one_step",
)


def newton(rate: float = 1.0) -> Learner:
    """Newton's method; ``rate`` below one damps it."""
    return Learner(AtMean(), ExactHessian(), Step(rate=rate))
