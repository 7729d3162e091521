r"""Adam: RMSprop's choices, heavy-ball momentum in the natural parameters, and bias correction.

Momentum as a KL proximal term gives λ⁺ = λ − ρ∇ + γ(λ − λ₋). For a Gaussian its mean moves by

    m⁺ = m − ρS⁺⁻¹g + γ S⁺⁻¹S₋(m − m₋)

Adam does this with √S + ε for S, measures m − m₋ by the S that it was made with (S instead of S₋),
leaves S itself without momentum, and divides both averages by what they lack for having started at
zero: written with ν = (1 − β₁)Σβ₁ᵏg, which is −S(m − m₋) up to the rate,

    S ← β₂S + (1 − β₂)g∘g,    ν ← β₁ν + (1 − β₁)g,    m ← m − α ν̂/(√Ŝ + ε)

Khan (2019) drops the factor S⁺⁻¹S; torch's Adam has it, and so have we. What is given up is what
RMSprop gives up.

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = adam(lr=0.1)
    >>> state = method.init(DiagGaussian(torch.tensor([4.0]), torch.tensor([torch.inf])))
    >>> method.update(state, Loss.of(lambda x: x.square().sum())).q.mean    # the first step is lr
    tensor([3.9000])
"""

from __future__ import annotations

from credo.rule.curvatures import SquaredGradient
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="Adam",
    family="diagonal Gaussian",
    expectation="at the mean",
    curvature="squared minibatch gradient",
    step="ρ = 1 − β₂, own rate for m, √S + ε, heavy ball, bias correction",
    approximates="the Hessian by a square; the root",
    test="tests/theorems/test_gallery_optimizers.py::test_heavy_ball_in_natural_parameters_is_torch_adam",
)


def adam(lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Learner:
    """Adam with torch's names and defaults; run it on a `DiagGaussian` of infinite scale."""
    step = Step(
        rate=1.0 - betas[1], mean_rate=lr, momentum=betas[0], damping=eps, root=True, debias="both"
    )
    return Learner(AtMean(), SquaredGradient(), step)
