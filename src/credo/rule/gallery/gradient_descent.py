r"""Gradient descent and SGD: the rule for a Gaussian whose covariance is fixed at I.

With S = I fixed, q = N(m, I) has the natural parameter λ = m and the expectation parameter μ = m,
and its entropy does not depend on either. The rule λ ← λ − ρ∇_μ(E_q[ℓ] − H) and the delta method
E_q[ℓ] ≈ ℓ(m) leave

    m ← m − ρ∇ℓ(m)

A minibatch in ℓ makes it stochastic, and heavy-ball momentum λ⁺ = λ − ρ∇ + γ(λ − λ₋) is Polyak's,
because λ is m. What is given up: uncertainty. Every fixed Σ gives a valid descent, Σ∇ℓ (see
`preconditioned_descent`), so the iterates say nothing about a covariance.

    >>> import torch
    >>> from credo.families import FixedGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = gradient_descent(rate=0.25)
    >>> state = method.init(FixedGaussian(torch.tensor([4.0]), torch.tensor(1.0)))
    >>> method.update(state, Loss.of(lambda x: x.square().sum())).q.mean
    tensor([2.])
"""

from __future__ import annotations

from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="gradient descent, SGD",
    family="Gaussian, S = I fixed",
    expectation="at the mean",
    curvature="none",
    step="ρ, heavy ball",
    approximates="E_q by its value at the mean; no covariance",
    test="tests/theorems/test_gallery_optimizers.py::test_fixed_gaussian_is_torch_sgd",
)


def gradient_descent(rate: float, momentum: float = 0.0) -> Learner:
    """Descent at learning rate ``rate``; run it on ``FixedGaussian(mean, 1)``.

    With ``momentum`` γ the direction is torch's v ← γv + g, whose steps are 1/(1 − γ) times longer
    than those of the average (1 − γ)Σγᵏg that the learner keeps.
    """
    mean_rate = rate / (1.0 - momentum)
    return Learner(AtMean(), None, Step(rate=rate, mean_rate=mean_rate, momentum=momentum))
