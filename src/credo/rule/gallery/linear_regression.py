r"""Bayesian linear regression: one step of the rule at rate one, from wherever it starts.

The loss ℓ(θ) = ½σ⁻²‖y − Xθ‖² has E_q[ℓ] linear in the expectation parameters of a Gaussian,

    E_q[ℓ] = −⟨λ_data, μ⟩ + const,      λ_data = (Xᵀy/σ², −½XᵀX/σ²)

so its gradient −λ_data is the same at every q. With the prior's −λ_prior and the entropy's λ, the
rule's step λ ← λ − ρ(λ − λ_prior − λ_data) at ρ = 1 is λ_prior + λ_data: the posterior. Nothing is
given up, for AtMean is exact here. The step is taken in its Gaussian form, which corrects the mean
by a residual and so loses no digits to a mean that is far from zero. (Khan,
2019, leaves out the ½, which doubles the precision.)

    >>> import torch
    >>> prior = FullGaussian(torch.zeros(1), torch.eye(1))         # worth one observation, of zero
    >>> x, y = torch.ones(3, 1), torch.tensor([4.0, 4.0, 4.0])
    >>> q = fit(prior, x, y, noise_scale=1.0)
    >>> q.mean, q.precision
    (tensor([3.]), tensor([[4.]]))

Reference: Khan & Rue, 2021 (arXiv:2107.04562); Bishop, "Pattern recognition and machine
learning", 2006, §3.3.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from credo.checks import positive
from credo.errors import DataError
from credo.families import FullGaussian, Gaussian
from credo.rule.gallery.entry import Entry
from credo.rule.learner import precision_of
from credo.rule.rule import gaussian_step
from credo.types import Vector

ENTRY = Entry(
    algorithm="Bayesian linear regression",
    family="full Gaussian",
    expectation="exact",
    curvature="exact Hessian",
    step="ρ = 1, once",
    approximates="nothing",
    test="tests/theorems/test_gallery_sequential.py::"
    "test_one_step_from_anywhere_is_the_posterior_of_linear_regression",
)


def update(
    q: FullGaussian, prior: Gaussian, x: Tensor, y: Vector, noise_scale: float
) -> FullGaussian:
    """One step of the rule from ``q``; x is (N, P), y (N,), ``noise_scale`` is σ."""
    _check(q, prior, x, y)
    weight = positive("noise_scale", noise_scale) ** -2
    gradient = weight * x.mT @ (x @ q.mean - y) - prior.grad_log_prob(q.mean)
    curvature = weight * x.mT @ x + as_full(prior).precision
    return gaussian_step(q, gradient, curvature, rate=1.0)


def fit(prior: Gaussian, x: Tensor, y: Vector, noise_scale: float) -> FullGaussian:
    """The posterior of the weights of y ~ N(xθ, σ²): the step from the prior itself."""
    return update(as_full(prior), prior, x, y, noise_scale)


def sequential(
    prior: Gaussian, batches: Iterable[tuple[Tensor, Vector]], noise_scale: float
) -> FullGaussian:
    """Yesterday's posterior as today's prior, batch by batch."""
    q = as_full(prior)
    for x, y in batches:
        q = fit(q, x, y, noise_scale)
    return q


def as_full(q: Gaussian) -> FullGaussian:
    """The same Gaussian with its precision written out as a matrix."""
    if isinstance(q, FullGaussian):
        return q
    precision = precision_of(q)
    return FullGaussian(q.mean, torch.diag(precision) if precision.dim() == 1 else precision)


def _check(q: Gaussian, prior: Gaussian, x: Tensor, y: Vector) -> None:
    if prior.size != q.size:
        raise DataError(f"prior is over {prior.size} weights, q over {q.size}")
    if x.dim() != 2 or x.shape[1] != q.size:
        raise DataError(f"x must be (N, {q.size}), a column a weight; got {tuple(x.shape)}")
    if y.shape != x.shape[:1]:
        raise DataError(f"y must be ({len(x)},), a number for each row of x; got {tuple(y.shape)}")
    for name, value in (("prior", prior.mean), ("x", x), ("y", y)):
        if value.dtype != q.mean.dtype:
            raise DataError(f"{name} is {value.dtype}, but the weights are {q.mean.dtype}: cast it")
        if not bool(value.isfinite().all()):
            raise DataError(f"{name} has values that are not finite")
