r"""Variational online Newton: the rule for a Gaussian with nothing left out.

    S ← (1 − ρ)S + ρE_q[∇²ℓ],        m ← m − ρS⁻¹E_q[∇ℓ]

with the expectations over q itself, by draws or by quadrature. Its resting points are those of the
variational objective E_q[ℓ] − H(q): E_q[∇ℓ] = 0 and S = E_q[∇²ℓ], for a diagonal q the diagonal of
it. Draws make the curvature noisy and, where ℓ is not convex, negative: the improved step keeps S
positive, and VOGN, IVON and Adam are what one gets by replacing ∇²ℓ with something cheaper.

    >>> import torch
    >>> from credo.rule.expectations import GaussHermite
    >>> from credo.families import DiagGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = von(rate=0.5, expectation=GaussHermite(8))
    >>> state = method.init(DiagGaussian(torch.ones(1).double(), torch.ones(1).double()))
    >>> loss = Loss.of(lambda x: (x**4).sum() / 4)
    >>> for _ in range(60):
    ...     state = method.update(state, loss)
    >>> state.q.variance ** 2                          # S = E[3θ²] = 3/S at m = 0: variance² = ⅓
    tensor([0.3333], dtype=torch.float64)

Reference: Khan et al., 2018 (arXiv:1806.04854).
"""

from __future__ import annotations

from credo.families import Gaussian
from credo.rule.curvatures import Curvature, ExactHessian
from credo.rule.expectations import Expectation, MonteCarlo
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="VON, variational online Newton",
    family="full or diagonal Gaussian",
    expectation="Monte Carlo or quadrature",
    curvature="exact Hessian, or Hutchinson",
    step="ρ",
    approximates="nothing",
    test="tests/theorems/test_gallery_optimizers.py::test_von_reaches_the_best_gaussian_by_quadrature",
)


def von(
    rate: float = 0.1,
    expectation: Expectation | None = None,
    curvature: Curvature | None = None,
    prior: Gaussian | None = None,
    temperature: float = 1.0,
    keep_positive: bool = True,
) -> Learner:
    """The rule; one draw a step and the exact Hessian unless told otherwise."""
    step = Step(rate=rate, temperature=temperature, keep_positive=keep_positive)
    return Learner(expectation or MonteCarlo(), curvature or ExactHessian(), step, prior)
