"""R-hat and effective sample size against processes whose answers are known."""

import math

import numpy as np
import pytest
import torch
from scipy import signal, special, stats

from credo.errors import DataError
from credo.metrics import effective_sample_size, r_hat

CHAINS, DRAWS = 4, 4000


def autoregressive(rho: float, chains: int = CHAINS, draws: int = DRAWS, seed: int = 0):
    """x_t = ρ x_{t−1} + √(1 − ρ²) ξ_t, stationary from the start."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(chains, draws)) * math.sqrt(1 - rho**2)
    noise[:, 0] = rng.normal(size=chains)
    return signal.lfilter([1.0], [1.0, -rho], noise, axis=1)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, -0.4])
def test_autoregressive_chains_are_worth_what_theory_says(rho):
    """S(1 − ρ)/(1 + ρ); the estimate's own deviation is a few per cent at this length."""
    sizes = [effective_sample_size(autoregressive(rho, seed=seed)) for seed in range(6)]
    expected = CHAINS * DRAWS * (1 - rho) / (1 + rho)
    assert np.mean(sizes) == pytest.approx(expected, rel=0.08)


def test_mixed_chains_have_r_hat_one():
    for draws in (autoregressive(0.0), autoregressive(0.5)):
        assert 1.0 - 1e-3 < r_hat(draws) < 1.01


def test_chains_apart_in_place_spread_or_time_are_told():
    draws = autoregressive(0.0)
    shifted = draws + np.arange(CHAINS)[:, None]
    # Normal chains at 0, 1, 2, 3: var⁺/W = 1 + var(0, 0, 1, 1, 2, 2, 3, 3), ranks aside.
    assert r_hat(shifted) == pytest.approx(math.sqrt(1 + 10 / 7), rel=0.1)
    assert effective_sample_size(shifted) < 20
    stretched = draws * np.array([1, 1, 1, 5])[:, None]
    assert r_hat(stretched) > 1.1
    assert r_hat(draws[:1] + np.linspace(0, 3, DRAWS)) > 1.3


def test_stuck_chains():
    assert r_hat(np.repeat([[0.0], [1.0]], 10, axis=1)) == math.inf
    constant = np.full((2, 10), 3.0)
    assert r_hat(constant) == 1.0
    assert effective_sample_size(constant) == 20
    # Ranks forget the distance: two chains apart are two half-normals of variance 1 − 2/π at
    # ±√(2/π), each of them twice among the half-chains.
    apart = np.repeat([[0.0], [1.0]], DRAWS, axis=1) + 1e-6 * autoregressive(0.0, 2)
    within = 1 - 2 / math.pi
    expected = math.sqrt(1 + 4 / 3 * 2 / math.pi / within)
    assert r_hat(apart) == pytest.approx(expected, rel=0.01)
    assert effective_sample_size(apart) < 6


def test_r_hat_without_ranks_is_gelmans():
    """For normal draws the ranks change next to nothing: compare with the formula by hand."""
    draws = autoregressive(0.0, draws=1000) + np.array([0, 0, 0, 0.4])[:, None]
    halves = draws.reshape(2 * CHAINS, 500)
    within = halves.var(1, ddof=1).mean()
    by_hand = math.sqrt((499 / 500 * within + halves.mean(1).var(ddof=1)) / within)
    assert r_hat(draws) == pytest.approx(by_hand, abs=2e-3)


def test_heavy_tails_and_monotone_maps_change_nothing():
    draws = autoregressive(0.3)
    cauchy = stats.cauchy.ppf(special.ndtr(draws))
    assert effective_sample_size(cauchy) == pytest.approx(effective_sample_size(draws), rel=1e-9)
    # The folded part is not invariant, the ranks of the bulk are.
    assert r_hat(cauchy) == pytest.approx(r_hat(draws), abs=2e-3)


def test_every_trailing_quantity_is_answered_for_itself():
    parts = [autoregressive(rho) for rho in (0.0, 0.5)] + [np.zeros((CHAINS, DRAWS))]
    together = torch.from_numpy(np.stack(parts, axis=2))
    for function in (r_hat, effective_sample_size):
        alone = [function(part) for part in parts]
        np.testing.assert_allclose(function(together), alone, rtol=1e-12)
        square = function(together[..., :2].reshape(CHAINS, DRAWS, 1, 2))
        assert square.shape == (1, 2)


def test_of_an_odd_number_of_draws_the_middle_one_is_left_out():
    draws = autoregressive(0.2, draws=101)
    without = np.delete(draws, 50, axis=1)
    assert r_hat(draws) == r_hat(without)


@pytest.mark.parametrize("bad", [np.zeros(10), np.zeros((4, 3)), np.full((2, 8), np.nan)])
def test_what_can_not_be_judged_is_refused(bad):
    for function in (r_hat, effective_sample_size):
        with pytest.raises(DataError):
            function(bad)
