r"""Gaussian homotopy: gradient descent on a blurred loss, with less and less blur.

With S = s⁻²I held fixed the entropy is a constant, so λ = m/s², μ = m, and the rule is

    m ← m − ρs²E[∇ℓ],        E[∇ℓ] = ∇_m E_{N(m, s²I)}[ℓ] = ∇(ℓ ∗ N(0, s²I))(m)

gradient descent at the rate α = ρs² on the loss convolved with a Gaussian, which has fewer minima
the larger s is. The homotopy follows its minimum from a large s to s = 0, where the delta method
makes it descent on ℓ itself. ``rate`` is α, the same for every s, so ρ = α/s². Nothing of each step
is given up with an exact expectation; that the path ends in the global minimum is not guaranteed.

    >>> import torch
    >>> tilted = Loss.of(lambda x: ((x.square() - 1).square() + 0.5 * x).sum())  # lowest near −1.06
    >>> start = torch.tensor([1.0])
    >>> gaussian_homotopy(tilted, start, scales=[0.0], rate=0.05, steps=200)     # gradient descent
    tensor([0.9304])
    >>> gaussian_homotopy(tilted, start, scales=[0.8, 0.4, 0.0], rate=0.05, steps=200)
    tensor([-1.0575])

Reference: Mobahi & Fisher, "A theoretical analysis of optimization by Gaussian continuation", 2015.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from credo.autodiff.loss import Loss
from credo.errors import DataError
from credo.families import FixedGaussian
from credo.noise import key_to_seed
from credo.rule.expectations import AtMean, Expectation, GaussHermite
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step
from credo.types import Vector

ENTRY = Entry(
    algorithm="Gaussian homotopy",
    family="Gaussian with S = s⁻²I fixed",
    expectation="Gauss–Hermite or Monte Carlo",
    curvature="none",
    step="ρ = α/s², s decreased to 0",
    approximates="nothing at s > 0; E_q by its value at the mean at s = 0",
    test="tests/theorems/test_gallery_search.py"
    "::test_homotopy_descends_the_smoothed_quartic_of_the_closed_form",
)


def gaussian_homotopy(
    loss: Loss,
    start: Vector,
    scales: Sequence[float],
    *,
    rate: float,
    steps: int,
    expectation: Expectation | None = None,
    seed: int = 0,
) -> Vector:
    """The mean (P,) after ``steps`` steps from ``start`` at each s of the decreasing ``scales``.

    ``expectation`` defaults to a Gauss–Hermite grid, for few weights; draws are for more.
    """
    if not scales or scales[-1] < 0 or any(s <= t for s, t in pairwise(scales)):
        raise DataError(f"scales must decrease and not be negative, got {list(scales)}")
    mean = start
    for stage, scale in enumerate(scales):
        variance = scale**2 if scale else 1.0  # at s = 0 any metric will do
        learner = Learner(
            (expectation or GaussHermite()) if scale else AtMean(),
            None,
            Step(rate=rate / variance),
            seed=key_to_seed(seed, stage),
        )
        state = learner.init(FixedGaussian(mean, start.new_tensor(1 / variance)))
        for _ in range(steps):
            state = learner.update(state, loss)
        mean = state.q.mean
    return mean
