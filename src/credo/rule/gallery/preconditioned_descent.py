r"""Preconditioned descent: the rule for a Gaussian with any fixed precision S.

λ = Sm and μ = m, so λ ← λ − ρ∇_μE_q[ℓ] reads S m ← S m − ρ∇ℓ(m), that is

    m ← m − ρS⁻¹∇ℓ(m)

S need not be the curvature: any fixed S gives a descent whose fixed points are the same. So an
optimizer's preconditioner is no evidence of a posterior covariance.

    >>> import torch
    >>> from credo.families import FixedGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = preconditioned_descent(rate=1.0)
    >>> state = method.init(FixedGaussian(torch.tensor([4.0, 4.0]), torch.tensor([2.0, 200.0])))
    >>> curvatures = torch.tensor([2.0, 200.0])
    >>> method.update(state, Loss.of(lambda x: 0.5 * curvatures @ x.square())).q.mean
    tensor([0., 0.])
"""

from __future__ import annotations

from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="preconditioned descent",
    family="Gaussian, any S fixed",
    expectation="at the mean",
    curvature="none",
    step="ρ",
    approximates="E_q by its value at the mean; the covariance is not learned",
    test="tests/theorems/test_gallery_optimizers.py::test_fixed_precision_is_a_linear_solve",
)


def preconditioned_descent(rate: float) -> Learner:
    """Descent at this rate; run it on ``FixedGaussian(mean, precision)``."""
    return Learner(AtMean(), None, Step(rate=rate))
