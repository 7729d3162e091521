r"""RMSprop: a diagonal Gaussian, squared gradients for curvature, and a square root.

The rule for a diagonal Gaussian at the mean is S ← (1 − ρ)S + ρ diag∇²ℓ, m ← m − ρS⁻¹∇ℓ. Take the
squared minibatch gradient for the curvature, a rate α of its own for the mean, √S + ε for S there:

    S ← (1 − ρ)S + ρ ĝ∘ĝ,      m ← m − α ĝ/(√S + ε)

which is RMSprop with smoothing constant 1 − ρ. It starts from the flat Gaussian, S = 0. What is
given up: the square of a minibatch's gradient is no curvature (it is smaller by about the batch
size), and the root repairs the units of the step but makes S useless as a precision.

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = rmsprop(lr=0.1, alpha=0.99, eps=0.0)
    >>> state = method.init(DiagGaussian(torch.tensor([4.0]), torch.tensor([torch.inf])))
    >>> method.update(state, Loss.of(lambda x: x.square().sum())).q.mean   # the first step is 10·lr
    tensor([3.])
"""

from __future__ import annotations

from credo.rule.curvatures import SquaredGradient
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="RMSprop",
    family="diagonal Gaussian",
    expectation="at the mean",
    curvature="squared minibatch gradient",
    step="ρ = 1 − α, own rate for m, √S + ε",
    approximates="the Hessian by a square; the root",
    test="tests/theorems/test_gallery_optimizers.py::test_square_root_of_squares_is_torch_rmsprop",
)


def rmsprop(lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8) -> Learner:
    """RMSprop with torch's names and defaults; run it on a `DiagGaussian` of infinite scale."""
    step = Step(rate=1.0 - alpha, mean_rate=lr, damping=eps, root=True)
    return Learner(AtMean(), SquaredGradient(), step)
