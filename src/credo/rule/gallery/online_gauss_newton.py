r"""Online Gauss–Newton: the rule at the mean with a curvature that is never negative.

Newton's S ← (1 − ρ)S + ρ∇²ℓ(m) may lose definiteness where ℓ is not convex. Linearising the network
f inside ℓ drops its second derivatives:

    S ← (1 − ρ)S + ρ(Σ_i J_iᵀΛ_iJ_i + S₀),    m ← m − ρS⁻¹(∇ℓ(m) + S₀(m − m₀))

with J_i = ∂f_i/∂θ and Λ_i the curvature of −log p(y_i | f_i). Σ_i g_i∘g_i instead of the matrix is
the diagonal version (`ExampleSquares`), and VOGN draws θ from q where this looks at the mean. What
is given up: E_q, and the network's own curvature.

    >>> import torch, credo
    >>> from credo.families import FixedGaussian, FullGaussian
    >>> from credo.autodiff.loss import Loss
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0))
    >>> method = online_gauss_newton(FixedGaussian(torch.zeros(1), torch.tensor(1.0)), rate=1.0)
    >>> state = method.init(FullGaussian(torch.zeros(1), torch.eye(1)))
    >>> method.update(state, Loss.of_model(model, (x, 3 * x), num_data=2)).q.mean    # 15/(5 + 1)
    tensor([2.5000])
"""

from __future__ import annotations

from credo.families import Gaussian
from credo.rule.curvatures import Curvature, GaussNewton
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="online Gauss–Newton",
    family="full or diagonal Gaussian",
    expectation="at the mean",
    curvature="Gauss–Newton, or squares of each example",
    step="ρ",
    approximates="E_q by its value at the mean; the network as linear in its weights",
    test="tests/theorems/test_gallery_optimizers.py::test_online_gauss_newton_uses_the_matrix_of_autodiff",
)


def online_gauss_newton(
    prior: Gaussian | None = None, rate: float = 0.1, curvature: Curvature | None = None
) -> Learner:
    """Gauss–Newton steps at this rate; ``curvature`` may be `ExampleSquares` instead."""
    return Learner(AtMean(), curvature or GaussNewton(), Step(rate=rate), prior)
