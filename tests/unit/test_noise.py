"""The statistics of every noise source: whatever is fast must still be normal and independent."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import credo
from credo.errors import DataError
from credo.noise import TABLE_BITS, _pairs, key_to_seed, source

SOURCES = ["normal", "table", "pool"]
N, STEPS = 300_001, 20


@pytest.fixture(params=SOURCES)
def draws(request: pytest.FixtureRequest) -> torch.Tensor:
    """(STEPS, N) numbers: an odd N, so that the last weight has no partner.

    The pool's numbers come back in other places, so its standard errors are those of its 1.3
    million different numbers rather than of all six million: a factor of two, within the 5.
    """
    noise = source(request.param, seed=7)
    out = torch.empty(STEPS, N)
    for step in range(STEPS):
        out[step] = noise.draw(out[step], step, 0)
    return out


def test_moments(draws: torch.Tensor) -> None:
    """Within 5 standard errors of N(0, 1): var(z^k) = E z^2k − (E z^k)²."""
    z = draws.double().flatten()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        error = math.sqrt(variance / len(z))
        # The table ends at |z| = 3.8, which costs its fourth and sixth moments a little.
        slack = {4: 0.02, 6: 0.5}.get(power, 0.0)
        assert abs(float((z**power).mean()) - expected) < 5 * error + slack, power


def test_the_distribution_is_normal(draws: torch.Tensor) -> None:
    """Kolmogorov–Smirnov on 10⁵ numbers can't tell it from N(0, 1)."""
    assert stats.kstest(draws[0].numpy(), "norm").pvalue > 1e-3


def test_neighbouring_weights_are_uncorrelated(draws: torch.Tensor) -> None:
    """Also their squares: the table serves weights in pairs, and pairs must not show."""
    z = draws.double()
    for lag in (1, 2, 3, 7, 64, 1000):
        a, b = z[:, :-lag].flatten(), z[:, lag:].flatten()
        error = 1 / math.sqrt(len(a))
        assert abs(float((a * b).mean())) < 5 * error + 1e-4, lag
        # the lattice leaves mixed moments of order four of at most 1.4e-3
        assert abs(float(((a**2 - 1) * (b**2 - 1)).mean())) < 5 * 2 * error + 2e-3, lag


def test_steps_are_uncorrelated(draws: torch.Tensor) -> None:
    z = draws.double()
    correlations = (z @ z.T / N).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(N)
    squares = z**2 - 1
    assert (squares @ squares.T / N).fill_diagonal_(0).abs().max() < 5 * 2 / math.sqrt(N)


def test_few_numbers_are_drawn_ahead_and_are_those_of_their_key() -> None:
    """In any order of steps and samples; over 2,000 steps within 5 standard errors of N(0, I)."""
    size, steps = 601, 2000
    noise, other = source("table", seed=7), source("table", seed=7)
    z = torch.stack([noise.draw(torch.empty(size), step, 0).clone() for step in range(steps)])
    for step in (1999, 3, 17, 4, 3):
        other.draw(torch.empty(size), step, 1)
        assert torch.equal(other.draw(torch.empty(size), step, 0), z[step])
        assert not torch.equal(other.draw(torch.empty(size), step, 1), z[step])
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / z.numel())
    for products in (z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[16:] * z[:-16]):
        assert abs(float(products.mean())) < 5 / math.sqrt(products.numel())


def test_the_table_is_exact_in_its_marginals() -> None:
    pairs = _pairs().view(np.float32).reshape(-1, 2).astype(np.float64)
    for column in pairs.T:
        assert len(np.unique(column)) == 1 << TABLE_BITS
        assert abs(column.mean()) < 1e-7
        assert abs(column.var() - 1) < 1e-6
        assert abs((column**4).mean() - 3) < 0.02
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 2e-4


@pytest.mark.parametrize("draws_name", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_a_function_of_seed_and_key(draws_name, dtype) -> None:
    for size in (33, 200_000, 1_500_000):
        empty = torch.empty(size, dtype=dtype)
        a = source(draws_name, 1).draw(empty, 5, 2).clone()
        later = source(draws_name, 1)
        for key in ((4, 0), (9, 9), (4, 1), (5, 1)):
            later.draw(empty, *key)
        assert torch.equal(a, later.draw(empty, 5, 2))
        for seed, key in ((2, (5, 2)), (1, (5, 3)), (1, (2, 5))):
            assert not torch.equal(a, source(draws_name, seed).draw(empty, *key))
    assert key_to_seed(1, 2) != key_to_seed(2, 1)


@pytest.mark.parametrize("draws_name", SOURCES)
def test_noise_does_not_depend_on_the_number_of_threads(draws_name) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(source(draws_name, 3).draw(torch.empty(200_001), 4, 1).clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_unknown_sources_are_named() -> None:
    with pytest.raises(DataError, match=r"draws must be one of .*dice"):
        source("dice", 0)


def test_fast_noise_trains_to_the_same_elbo() -> None:
    """Four seeds each, on a net wide enough for the pool: ELBOs agree within 5 standard errors."""
    data = credo.data.digits()
    elbos: dict[str, list[float]] = {name: [] for name in SOURCES}
    for draws_name in SOURCES:
        for seed in range(4):
            torch.manual_seed(seed)
            net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 512), torch.nn.ReLU(),
                torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10),
            )  # fmt: skip
            posterior = credo.fit(
                credo.Model(net, credo.likelihoods.Categorical()),
                credo.VI(lr=2e-3, draws=draws_name),
                data.train,
                epochs=10,
                seed=seed,
                progress=False,
            )
            elbos[draws_name].append(posterior.history[-1]["elbo"])
    exact = np.array(elbos["normal"])
    for name in SOURCES[1:]:
        fast = np.array(elbos[name])
        error = math.sqrt((exact.var(ddof=1) + fast.var(ddof=1)) / 4)
        assert abs(fast.mean() - exact.mean()) < 5 * error, (name, fast, exact)
