r"""Elastic weight consolidation: Laplace's approximation with yesterday's posterior as prior.

After task A the posterior is N(θ_A, S_A⁻¹). As the prior of task B it adds to the loss

    −log q_A(θ) = ½(θ − θ_A)ᵀS_A(θ − θ_A) + const

EWC's quadratic penalty, with S_A the Fisher matrix of all earlier tasks plus the precision of the
first prior. So EWC is no new algorithm: the rule with the delta method and ``prior=yesterday``. One
penalty, around the last mean, stands for all earlier tasks; one for each task would count the
oldest twice. What is given up: the shape of yesterday's posterior beyond a Gaussian at its mode
and, for a diagonal family, its correlations. Where ℓ_A is quadratic and S_A full, nothing is.

    >>> import torch
    >>> from credo.families import FullGaussian
    >>> start = FullGaussian(torch.zeros(1).double(), torch.eye(1).double())
    >>> task_a = Loss.of(lambda theta: 1.5 * (theta - 4).square().sum())
    >>> task_b = Loss.of(lambda theta: 2.0 * (theta + 1).square().sum())
    >>> yesterday = consolidate(task_a, start)
    >>> penalty(yesterday, torch.zeros(1).double())                      # ½ · (1 + 3) · 3²
    tensor(18.0000, dtype=torch.float64)
    >>> consolidate(task_b, yesterday).mean                              # (4·3 − 4·1)/(4 + 4)
    tensor([1.], dtype=torch.float64)

Reference: Kirkpatrick et al., 2017 (arXiv:1612.00796); Huszár, "On quadratic penalties in
elastic weight consolidation", 2017 (arXiv:1712.03847).
"""

from __future__ import annotations

from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import DataError
from credo.families import Gaussian
from credo.rule.curvatures import Curvature, ExactHessian
from credo.rule.expectations import AtMean
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.laplace import laplace
from credo.rule.learner import Learner, Step
from credo.types import Vector

ENTRY = Entry(
    algorithm="elastic weight consolidation",
    family="full or diagonal Gaussian",
    expectation="at the mean",
    curvature="exact Hessian, Gauss–Newton or Fisher",
    step="ρ, prior = yesterday's posterior",
    approximates="E_q by its value at the mean",
    test="tests/theorems/test_gallery_sequential.py::"
    "test_ewcs_penalty_and_yesterdays_prior_give_the_same_steps",
)


def ewc(yesterday: Gaussian, curvature: Curvature | None = None, rate: float = 1.0) -> Learner:
    """The rule with yesterday's posterior as prior, to be stepped by hand."""
    return Learner(AtMean(), curvature or ExactHessian(), Step(rate=rate), prior=yesterday)


def consolidate(
    loss: Loss, yesterday: Gaussian, curvature: Curvature | None = None, rate: float = 0.5
) -> Gaussian:
    """Today's posterior, tomorrow's ``yesterday``: the rule run to rest, starting from yesterday.

    A diagonal family leaves out correlations and may need a lower ``rate`` to come to rest.
    """
    return laplace(loss, yesterday, prior=yesterday, curvature=curvature, rate=rate)


def penalty(yesterday: Gaussian, theta: Vector) -> Tensor:
    """½(θ − θ_A)ᵀS_A(θ − θ_A) of θ (..., P), as the log-density that is lost by leaving θ_A."""
    return yesterday.log_prob(yesterday.mean) - yesterday.log_prob(theta)


def penalised(loss: Loss, yesterday: Gaussian) -> Loss:
    """ℓ_B + penalty: what EWC minimises, as a loss for any learner without a prior."""
    if yesterday.mean.requires_grad:
        raise DataError("yesterday must be fixed: detach its tensors before it becomes a penalty")
    return Loss.of(lambda theta: loss.value(theta) + penalty(yesterday, theta))
