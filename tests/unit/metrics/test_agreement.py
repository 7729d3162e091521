"""Distances to a reference's predictions: against scipy, and what they refuse."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm, wasserstein_distance

from credo.errors import DataError
from credo.metrics import agreement, total_variation, w2


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_agreement_and_total_variation_of_all_layouts() -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]])
    q = np.array([[0.5, 0.4, 0.1], [0.2, 0.3, 0.5]])
    assert agreement(p, q) == 0.5
    # mean of 0.2 and 0.2
    assert total_variation(p, q) == pytest.approx(0.2)
    assert total_variation(torch.tensor(p), q.tolist()) == pytest.approx(0.2)
    assert total_variation([0.9, 0.4], [0.6, 0.6]) == pytest.approx((0.3 + 0.2) / 2)
    assert agreement([0.9, 0.4], [0.6, 0.6]) == 0.5
    dense = [np.moveaxis(a.reshape(1, 1, 2, 3), -1, 1) for a in (p, q)]
    assert agreement(*dense) == 0.5
    assert total_variation(*dense) == pytest.approx(0.2)


def test_total_variation_is_scipys_distance_of_discrete_measures() -> None:
    """On the points 0 and 1 the earth mover's distance is |p − p'|."""
    p, q = 0.3, 0.85
    expected = wasserstein_distance([0, 1], [0, 1], [1 - p, p], [1 - q, q])
    assert total_variation([p], [q]) == pytest.approx(expected)


def test_w2_is_the_cheapest_assignment() -> None:
    """scipy finds it among all permutations, without knowing that sorting does."""
    ours, theirs = draws(0, 30, 4), 1.5 * draws(1, 30, 4) + 0.3
    expected = []
    for x, y in zip(ours.T, theirs.T, strict=True):
        cost = (x[:, None] - y) ** 2
        expected.append(np.sqrt(cost[linear_sum_assignment(cost)].mean()))
    assert w2(ours, theirs) == pytest.approx(np.mean(expected), rel=1e-12)
    assert w2(torch.tensor(ours).reshape(30, 2, 2), theirs.reshape(30, 2, 2)) == pytest.approx(
        np.mean(expected), rel=1e-12
    )


@pytest.mark.parametrize("sizes", [(6, 4), (3, 7), (1, 5)])
def test_w2_of_unequal_numbers_is_that_of_every_draw_repeated(sizes: tuple[int, int]) -> None:
    ours, theirs = draws(0, sizes[0], 3), draws(1, sizes[1], 3)
    repeated = np.repeat(ours, sizes[1], axis=0), np.repeat(theirs, sizes[0], axis=0)
    assert w2(ours, theirs) == pytest.approx(w2(*repeated), rel=1e-12)


def test_w2_of_two_gaussians_is_the_formula() -> None:
    """√((m − m')² + (s − s')²), by draws at equal quantiles: the tails cut off are small."""
    u = (np.arange(20_000) + 0.5) / 20_000
    ours, theirs = norm.ppf(u, 1.0, 2.0)[:, None], norm.ppf(u, -0.5, 0.7)[:, None]
    assert w2(ours, theirs) == pytest.approx(np.hypot(1.5, 1.3), rel=1e-3)


def test_what_can_not_be_compared_is_refused() -> None:
    p = [[0.5, 0.5], [0.2, 0.8]]
    for metric in (agreement, total_variation):
        with pytest.raises(DataError, match="reference_probs has shape"):
            metric(p, p[:1])
        with pytest.raises(DataError, match="sum to 1"):
            metric(p, [[0.5, 0.6], [0.2, 0.8]])
        with pytest.raises(DataError, match="NaN"):
            metric([[np.nan, 1.0], [0.2, 0.8]], p)
    with pytest.raises(DataError, match=r"draws first, \(S, B\)"):
        w2([1.0, 2.0], [[1.0], [2.0]])
    with pytest.raises(DataError, match="reshape"):
        w2(draws(0, 5, 3), draws(1, 5, 2))
    with pytest.raises(DataError, match="NaN or infinite"):
        w2([[np.inf]], [[1.0]])
