r"""The Kalman filter: the rule's conjugate step, with a prediction for its prior.

    x_{t+1} = A x_t + N(0, Q),      y_t = C x_t + N(0, R)

**Predict**: N(m, P) ↦ N(Am, APAᵀ + Q), linear in the expectation parameters. **Update**: the loss
½‖y − Cx‖² in the metric R⁻¹ is that of linear regression, so one step of the rule at ρ = 1 adds

    λ ← λ_predicted + (CᵀR⁻¹y, −½CᵀR⁻¹C)

and the whole filter is `linear_regression.fit` with whitened rows R^{−½}C and targets R^{−½}y. Both
steps are exact. The evidence is Bayes' theorem log p(y) = log p(y|x) + log p(x) − log p(x|y), read
at x = the filtered mean. A missing entry of y, given as NaN, adds nothing.

    >>> import torch
    >>> one = torch.eye(1)
    >>> walk = LinearGaussianModel(transition=one, transition_noise=one,
    ...                            observation=one, observation_noise=one)
    >>> result = filter(walk, FullGaussian(torch.zeros(1), one), torch.tensor([[2.0], [torch.nan]]))
    >>> [q.variance for q in result.filtered]
    [tensor([0.5000]), tensor([1.5000])]

Reference: Kalman, 1960; Khan & Rue, 2021 (arXiv:2107.04562).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families import FullGaussian, Gaussian
from credo.families.base import check_floating
from credo.rule.gallery import linear_regression
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.state_space import LinearGaussianModel, check_covariance
from credo.types import Vector

ENTRY = Entry(
    algorithm="Kalman filter",
    family="full Gaussian",
    expectation="exact",
    curvature="exact Hessian",
    step="predict, then ρ = 1",
    approximates="nothing",
    test="tests/theorems/test_gallery_sequential.py::test_the_kalman_filter_is_josephs_form",
)


@dataclass(frozen=True)
class Filtered:
    """p(x_t|y_{<t}) and p(x_t|y_{≤t}) for t = 0, …, T−1, and log p(y), 0-dim."""

    predicted: tuple[FullGaussian, ...]
    filtered: tuple[FullGaussian, ...]
    log_evidence: Tensor


def filter(model: LinearGaussianModel, prior: Gaussian, observations: Tensor) -> Filtered:
    """``prior`` is p(x_0), before the first observation; ``observations`` (T, M), NaN = missing."""
    check_floating(model=model.observation, prior=prior.mean, observations=observations)
    measured, states = model.observation.shape
    if prior.size != states:
        raise DataError(f"prior must be over the model's {states} states, not {prior.size}")
    if observations.dim() != 2 or observations.shape[1] != measured or not len(observations):
        raise DataError(f"observations must be (T, {measured}), got {tuple(observations.shape)}")
    if bool(observations.isinf().any()):
        raise DataError("observations has infinite values; a missing one is NaN")
    predicted = [linear_regression.as_full(prior)]
    filtered: list[FullGaussian] = []
    log_evidence = observations.new_zeros(())
    for t, y in enumerate(observations):
        if t:
            predicted.append(predict(model, filtered[-1]))
        posterior, log_prob = update(model, predicted[-1], y)
        filtered.append(posterior)
        log_evidence = log_evidence + log_prob
    return Filtered(tuple(predicted), tuple(filtered), log_evidence)


def predict(model: LinearGaussianModel, q: FullGaussian) -> FullGaussian:
    """N(Am, APAᵀ + Q)."""
    spread = model.transition @ q.covariance @ model.transition.mT + model.transition_noise
    check_covariance("a prediction's covariance, APAᵀ + transition_noise,", spread)
    precision = torch.cholesky_inverse(torch.linalg.cholesky(spread))
    return FullGaussian(model.transition @ q.mean, precision)


def update(
    model: LinearGaussianModel, predicted: FullGaussian, y: Vector
) -> tuple[FullGaussian, Tensor]:
    """The state given y (M,) too, and log p(y) before it was seen."""
    seen = ~y.isnan()
    if not bool(seen.any()):
        return predicted, y.new_zeros(())
    noise = torch.linalg.cholesky(model.observation_noise[seen][:, seen])
    rows = torch.linalg.solve_triangular(noise, model.observation[seen], upper=False)
    targets = torch.linalg.solve_triangular(noise, y[seen].unsqueeze(-1), upper=False).squeeze(-1)
    q = linear_regression.fit(predicted, rows, targets, noise_scale=1.0)
    log_likelihood = (
        -0.5 * (targets - rows @ q.mean).square().sum()
        - noise.diagonal().log().sum()
        - 0.5 * len(targets) * math.log(2 * math.pi)
    )
    return q, log_likelihood + predicted.log_prob(q.mean) - q.log_prob(q.mean)
