r"""The Rauch–Tung–Striebel smoother: what the future says about now, as a message of naturals.

The posterior of a whole trajectory is one conjugate step of the rule, whose λ* are the sums of its
local terms; filter and smoother are how the marginals of each x_t are read off λ*. What the
observations after t say about x_{t+1} is smoothed minus predicted. About the deviation of x_{t+1}
from its predicted mean it has the natural parameters

    Λ = S_smoothed − S_predicted,      d = S_smoothed(m_smoothed − m_predicted)

Through x_{t+1} = A x_t + N(0, Q) it becomes a message about the deviation of x_t from its filtered
mean, (AᵀG d, AᵀGΛA) with G = (I + ΛQ)⁻¹; and the rule's step at ρ = 1 with the filtered Gaussian as
prior adds it: S ← S + AᵀGΛA, m ← m + S⁻¹AᵀG d. Exact, and Q is never inverted.

    >>> import torch
    >>> from credo.rule.gallery import kalman_filter
    >>> one = torch.eye(1)
    >>> walk = LinearGaussianModel(one, one, one, one)
    >>> prior = FullGaussian(torch.zeros(1), one)
    >>> result = kalman_filter.filter(walk, prior, torch.tensor([[torch.nan], [3.0]]))
    >>> [round(float(q.mean), 4) for q in smooth(walk, result)]        # yesterday: a third of y
    [1.0, 2.0]

Reference: Rauch, Tung & Striebel, "Maximum likelihood estimates of linear dynamic systems", 1965.
"""

from __future__ import annotations

import torch

from credo.errors import DataError
from credo.families import FullGaussian
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.kalman_filter import Filtered
from credo.rule.gallery.state_space import LinearGaussianModel
from credo.rule.rule import gaussian_step

ENTRY = Entry(
    algorithm="Rauch–Tung–Striebel smoother",
    family="full Gaussian",
    expectation="exact",
    curvature="exact Hessian",
    step="ρ = 1, backwards in time",
    approximates="nothing",
    test="tests/theorems/test_gallery_sequential.py::"
    "test_filter_and_smoother_are_the_marginals_of_the_joint_gaussian",
)


def smooth(model: LinearGaussianModel, result: Filtered) -> tuple[FullGaussian, ...]:
    """p(x_t|y) given all observations, for t = 0, …, T−1, from what the filter found."""
    smoothed = [result.filtered[-1]]
    for t in range(len(result.filtered) - 2, -1, -1):
        smoothed.append(step_back(model, result.filtered[t], result.predicted[t + 1], smoothed[-1]))
    return tuple(reversed(smoothed))


def step_back(
    model: LinearGaussianModel, now: FullGaussian, predicted: FullGaussian, smoothed: FullGaussian
) -> FullGaussian:
    """x_t smoothed, from x_t filtered and x_{t+1} predicted and smoothed."""
    if not now.size == predicted.size == smoothed.size == len(model.transition):
        raise DataError(
            f"model has {len(model.transition)} states, but now, predicted and smoothed are over "
            f"{now.size}, {predicted.size} and {smoothed.size}"
        )
    precision = smoothed.precision - predicted.precision
    shift = smoothed.precision @ (smoothed.mean - predicted.mean)
    one = torch.eye(now.size, dtype=shift.dtype, device=shift.device)
    through = torch.linalg.solve(one + model.transition_noise @ precision, model.transition).mT
    curvature = through @ precision @ model.transition
    curvature = now.precision + 0.5 * (curvature + curvature.mT)
    return gaussian_step(now, -through @ shift, curvature, rate=1.0)
