r"""Laplace's approximation: where the rule with the delta method comes to rest.

Steps S ← (1 − ρ)S + ρ∇²ℓ(m), m ← m − ρS⁻¹∇ℓ(m) with ρ < 1 stand still only if

    ∇ℓ(m*) = 0,        S* = ∇²ℓ(m*)

which is N(m*, S*⁻¹) at a minimum m*. What is given up: the expectation. At the rule's own optimum
E_q[∇ℓ] = 0 and S = E_q[∇²ℓ], averages that see the shape of a minimum, not only its curvature at
one point.

    >>> import torch
    >>> from credo.families import FullGaussian
    >>> from credo.autodiff.loss import Loss
    >>> loss = Loss.of(lambda x: (torch.cosh(x) + 0.5 * x).sum())
    >>> q = laplace(loss, FullGaussian(torch.zeros(1).double(), torch.eye(1).double()))
    >>> torch.sinh(q.mean), torch.cosh(q.mean) / q.precision       # ∇ℓ = 0 and S = ∇²ℓ
    (tensor([-0.5000], dtype=torch.float64), tensor([[1.0000]], dtype=torch.float64))
"""

from __future__ import annotations

from credo.autodiff.loss import Loss
from credo.errors import ConvergenceError
from credo.families import Gaussian
from credo.rule.curvatures import Curvature, ExactHessian
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="Laplace's approximation",
    family="full or diagonal Gaussian",
    expectation="at the mean",
    curvature="exact Hessian or Gauss–Newton",
    step="ρ < 1, until it rests",
    approximates="E_q by its value at the mean",
    test="tests/theorems/test_gallery_optimizers.py::test_laplace_rests_at_the_map_and_its_hessian",
)


def laplace(
    loss: Loss,
    q: Gaussian,
    prior: Gaussian | None = None,
    curvature: Curvature | None = None,
    rate: float = 0.5,
    tolerance: float = 1e-10,
    max_steps: int = 1000,
) -> Gaussian:
    """The resting point of the rule from ``q``; ``tolerance`` is relative to q's own scale."""
    method = Learner(AtMean(), curvature or ExactHessian(), Step(rate=rate), prior)
    state = method.init(q)
    for _ in range(max_steps):
        before = state.q.mean.clone()
        method.update(state, loss)
        if float(((state.q.mean - before) / state.q.scale).abs().max()) < tolerance:
            return _settle(method, state.q, loss)
    raise ConvergenceError(
        f"no rest after {max_steps} steps: the mean still moves. Start nearer to a minimum, lower "
        f"rate={rate}, or raise max_steps"
    )


def _settle(method: Learner, q: Gaussian, loss: Loss) -> Gaussian:
    """S at m* itself: the average over the way there has not quite forgotten its start."""
    final = Learner(method.expectation, method.curvature, Step(rate=1.0), method.prior)
    return final.update(final.init(q), loss).q
