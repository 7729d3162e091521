"""Wolinski et al. (2020): a penalty is the KL to a prior if and only if (★) holds, and which."""

import math
import warnings

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import credo
from credo.errors import DataError, UnsupportedError
from credo.families import Delta, DiagGaussian, FixedGaussian, FullGaussian, GaussianMixture
from credo.priors import (
    Laplace,
    NoPrior,
    Normal,
    RadialTabulated,
    ScaleMixture,
    Tabulated,
    from_config,
    from_penalty,
    penalty_of,
)
from credo.priors.penalty.heat_flow import (
    fourier_flow,
    highest_frequency,
    mean_abs,
    normal_entropy,
    polynomial_flow,
)
from credo.priors.penalty.solve import solve_penalty
from credo.rule.families import Beta
from credo.types import Segment

F64 = torch.float64
MU, SIGMA = sympy.symbols("mu sigma")
LINE = torch.linspace(-6, 6, 1201, dtype=F64)


def weights(count):
    return [Segment("w", (count,), 0, count, fan_in=1, fan_out=1, layer="", layer_type="Linear")]


def density(prior, points=LINE):
    """That of one weight, at these points."""
    flat = prior.on(weights(1), torch.zeros(1, dtype=F64))
    return flat.log_prob(points[:, None]).exp().numpy()


def is_normal(prior, scale, mean=0.0):
    """Ten digits: what a least-squares fit of thousands of values keeps."""
    return type(prior) is Normal and (prior.scale, prior.mean) == (
        pytest.approx(scale, rel=1e-10),
        pytest.approx(mean, abs=1e-9 * scale, rel=1e-9),
    )


def is_laplace(prior, scale):
    return type(prior) is Laplace and prior.scale == pytest.approx(scale, rel=1e-9)


def mixture(means, scales, share=0.5):
    logit = torch.tensor([math.log(share / (1 - share))], dtype=F64)
    parts = [
        FullGaussian(torch.tensor([m], dtype=F64), torch.tensor([[s**-2]], dtype=F64))
        for m, s in zip(means, scales, strict=True)
    ]
    return GaussianMixture(logit, tuple(parts))


# --- the heat flow --------------------------------------------------------------------------------


def test_powers_flow_backwards_to_hermite_polynomials():
    sigma, mu = 0.7, np.linspace(-2, 2, 9)
    fourth = polynomial_flow(np.array([0, 0, 0, 0, 1.0]), -(sigma**2))
    expected = mu**4 - 6 * sigma**2 * mu**2 + 3 * sigma**4
    np.testing.assert_allclose(np.polynomial.Polynomial(fourth)(mu), expected, rtol=1e-13)
    for power in range(9):
        coefficients = np.eye(9)[power]
        hermite = sigma**power * np.polynomial.hermite_e.HermiteE.basis(power)(mu / sigma)
        flown = np.polynomial.Polynomial(polynomial_flow(coefficients, -(sigma**2)))(mu)
        np.testing.assert_allclose(flown, hermite, atol=1e-12)
    # And forwards it is the average, here by scipy: E θ⁶ for θ ~ N(1.3, 0.7²).
    sixth = np.polynomial.Polynomial(polynomial_flow(np.eye(7)[6], sigma**2))(1.3)
    assert sixth == pytest.approx(stats.norm(1.3, sigma).moment(6), rel=1e-12)


def test_the_radial_flow_is_the_average_over_a_gaussian_in_several_dimensions():
    sigma, radius = 0.4, 1.3
    for dim in (2, 3, 5):
        fourth = np.polynomial.Polynomial(polynomial_flow(np.eye(5)[4], sigma**2, dim))(radius)
        # ‖θ‖²/σ² is noncentral chi-squared.
        chi = stats.ncx2(dim, radius**2 / sigma**2)
        assert fourth == pytest.approx(sigma**4 * chi.moment(2), rel=1e-10)


def test_cosines_are_amplified_by_the_inverse_of_the_gaussians_transform():
    x = np.arange(4096) * 40 / 4096 - 20
    k, variance = 2 * math.pi / 40 * 13, 0.25
    flown = fourier_flow(np.cos(k * x), x[1] - x[0], -variance, highest_frequency(0.5, 25))
    # Rounding of 1e-16 at the highest frequency kept is multiplied by e²⁵ = 7e10.
    np.testing.assert_allclose(flown, math.exp(variance * k**2 / 2) * np.cos(k * x), atol=1e-4)
    assert flown.max() == pytest.approx(1.68411, abs=1e-5)


def test_the_absolute_value_blows_up_as_more_frequencies_are_undone():
    x = (np.arange(4096) - 2048) * 40 / 4096
    found = [
        np.abs(fourier_flow(np.abs(x), 40 / 4096, -0.25, highest_frequency(0.5, c))).max()
        for c in (5, 10, 20)
    ]
    assert found == pytest.approx([22, 92, 5e5], rel=0.05)


# --- the corollary: quadratic penalties -----------------------------------------------------------


def right_l2(mu, sigma, scale):
    """b = 1/(2σ0²) multiplies μ², a = ½[σ²/σ0² + ln(σ0²/σ²) − 1] stands alone."""
    b = 1 / (2 * scale**2)
    a = 0.5 * (sigma**2 / scale**2 + np.log(scale**2 / sigma**2) - 1)
    return a + b * mu**2


@pytest.mark.parametrize("scale", [0.02, 0.5, 30.0])
def test_the_corollary_with_a_and_b_the_right_way_round(scale):
    prior = from_penalty(lambda mu, sigma: right_l2(mu, sigma, scale))
    assert is_normal(prior, scale)
    penalty = penalty_of(Normal(scale))
    mu = np.linspace(-3, 3, 7) * scale
    np.testing.assert_allclose(penalty(mu, 0.3), right_l2(mu, 0.3, scale), rtol=1e-12, atol=1e-12)


def test_the_corollary_as_printed_with_a_and_b_exchanged_is_no_prior():
    def printed(mu, sigma, scale=0.5):
        a = 1 / (2 * scale**2)
        b = 0.5 * (sigma**2 / scale**2 + np.log(scale**2 / sigma**2) - 1)
        return a + b * mu**2

    answer = from_penalty(printed, sigmas=[0.1, 0.2, 0.3])
    assert not answer
    assert "depends on σ" in answer.reason


@pytest.mark.parametrize("penalty", [lambda mu, sigma: 2 * mu**2, 2 * MU**2])
def test_a_bare_quadratic_is_no_prior_while_sigma_is_trained(penalty):
    answer = from_penalty(penalty, sigmas=[math.sqrt(0.1), math.sqrt(0.5)])
    assert isinstance(answer, NoPrior)
    assert answer.evidence["A_at_0"] == pytest.approx((-0.0676, -0.0724), abs=5e-5)
    assert "-0.06765, -0.07236" in str(answer)
    # With σ fixed, or none, it is the Gaussian of variance 1/(2λ).
    assert is_normal(from_penalty(penalty, sigma=0.3), 0.5)
    assert is_normal(from_penalty(penalty, "dirac"), 0.5)
    assert is_normal(from_penalty(penalty, Delta), 0.5)


def test_means_are_found_too():
    assert is_normal(from_penalty(penalty_of(Normal(0.1, mean=4.0))), 0.1, 4.0)
    assert is_normal(from_penalty(MU**2 - 3 * MU, sigma=0.2), math.sqrt(0.5), 1.5)


# --- L1 -------------------------------------------------------------------------------------------


def test_the_absolute_value_of_a_gaussians_mean_is_no_prior():
    for options in ({}, {"sigma": 0.5}):
        for penalty in (np.abs, torch.abs, lambda mu, sigma: mu.abs(), sympy.Abs(MU)):
            answer = from_penalty(penalty, **options)
            assert not answer
            assert "blows up" in answer.reason
            first, _, last = answer.evidence["max_abs_A"]
            assert last > 100 * first
    assert is_laplace(from_penalty(np.abs, "dirac"), math.sqrt(2))


@pytest.mark.parametrize("rate", [0.1, 3.0, 40.0])
def test_the_averaged_absolute_value_less_the_entropy_is_laplace(rate):
    def penalty(mu, sigma):
        return rate * mean_abs(mu, sigma) - normal_entropy(sigma)

    # scale is a standard deviation: √2/λ.
    assert is_laplace(from_penalty(penalty), math.sqrt(2) / rate)
    assert is_laplace(from_penalty(penalty, sigma=0.3 / rate), math.sqrt(2) / rate)
    without_entropy = from_penalty(lambda mu, sigma: rate * mean_abs(mu, sigma))
    assert "depends on σ" in without_entropy.reason


# --- exact terms and general penalties ------------------------------------------------------------


def test_a_quartic_penalty_has_the_prior_that_hermite_polynomials_say():
    sigma = 0.3
    expected = np.exp(-(LINE**4 - 6 * sigma**2 * LINE**2).numpy())
    expected /= integrate.quad(lambda x: math.exp(-(x**4) + 6 * sigma**2 * x**2), -9, 9)[0]
    for penalty in (lambda mu, sigma: mu**4, MU**4):
        found = density(from_penalty(penalty, sigma=sigma))
        # A spline of step h misses a quartic by h⁴/16, here less than 1e-8.
        np.testing.assert_allclose(found, expected, atol=1e-7)
    averaged = MU**4 + 6 * SIGMA**2 * MU**2 + 3 * SIGMA**4 - sympy.log(SIGMA)
    found = density(from_penalty(averaged))
    np.testing.assert_allclose(found, stats.gennorm(4).pdf(LINE), atol=1e-7)


def test_a_cosine_is_amplified_in_the_log_density():
    sigma, k = 0.4, 3.0
    size = math.exp(sigma**2 * k**2 / 2)
    log_density = lambda x: -(x**2) / 2 - size * np.cos(k * x)  # noqa: E731
    total = integrate.quad(lambda x: math.exp(log_density(x)), -12, 12, limit=200)[0]
    expected = np.exp(log_density(LINE.numpy())) / total
    for penalty in (
        lambda mu, sigma: mu**2 / 2 + np.cos(k * mu),
        MU**2 / 2 + sympy.cos(k * MU),
    ):
        # Energies of 100 are rounded to 1e-14, which e²⁰ multiplies.
        np.testing.assert_allclose(density(from_penalty(penalty, sigma=sigma)), expected, atol=1e-5)
    with_average = MU**2 / 2 + SIGMA**2 / 2 - sympy.log(SIGMA)
    cosine = sympy.cos(3 * MU)
    assert from_penalty(with_average + sympy.exp(-9 * SIGMA**2 / 2) * cosine)
    assert not from_penalty(with_average + cosine)


MIXTURES = [
    mixture([-1.0, 1.0], [0.5, 0.5]),
    mixture([-1.0, 2.0], [0.5, 0.8], 0.7),
    ScaleMixture(0.3, 1.5, 0.3),
]


@pytest.mark.parametrize("prior", MIXTURES, ids=["two wells", "uneven", "scales"])
def test_a_mixtures_penalty_leads_back_to_the_mixture(prior):
    # With σ a third of the narrowest part, little of ln α is beyond the highest frequency, 6.3/σ.
    found = from_penalty(penalty_of(prior), sigma=0.1)
    assert isinstance(found, Tabulated)
    np.testing.assert_allclose(density(found), density(prior), atol=1e-5)


def test_a_mixtures_penalty_is_accepted_with_sigma_trained():
    prior = ScaleMixture(0.5, 1.0, 0.5)
    found = from_penalty(penalty_of(prior))
    np.testing.assert_allclose(density(found), density(prior), atol=5e-6)
    wrong = penalty_of(prior)
    assert not from_penalty(lambda mu, sigma: wrong(mu, sigma) + 1e-3 * sigma, sigmas=[0.1, 0.3])


@settings(deadline=None, max_examples=15)
@given(scale=st.floats(1e-3, 1e3), mean=st.floats(-3, 3), shape=st.floats(0.1, 0.9))
def test_penalty_of_and_from_penalty_undo_each_other(scale, mean, shape):
    assert is_normal(from_penalty(penalty_of(Normal(scale, mean * scale))), scale, mean * scale)
    assert is_laplace(from_penalty(penalty_of(Laplace(scale))), scale)
    prior = ScaleMixture(shape, scale, 0.4 * scale)
    found = from_penalty(penalty_of(prior), sigma=0.05 * scale)
    points = LINE * scale
    # The widest cut-off leaves of ln α what is 120/scale fast, and a table has 2,049 knots.
    np.testing.assert_allclose(
        density(found, points) * scale, density(prior, points) * scale, atol=1e-5
    )


def test_penalties_are_kls():
    mu, sigma = 0.7, 0.4
    q = stats.norm(mu, sigma)
    x = np.linspace(mu - 4, mu + 4, 160_001)
    for prior in (Normal(0.5, 0.1), Laplace(0.8), *MIXTURES):
        log_ratio = q.logpdf(x) - np.log(density(prior, torch.from_numpy(x)))
        # A kink costs Simpson's rule the square of its step, 2.5e-9.
        expected = integrate.simpson(q.pdf(x) * log_ratio, x=x)
        assert float(penalty_of(prior)(mu, sigma)) == pytest.approx(expected, abs=5e-9)
        nll = -math.log(density(prior, torch.tensor([mu], dtype=F64))[0])
        assert float(penalty_of(prior, "dirac")(mu)) == pytest.approx(nll, rel=1e-12)
    leaves = torch.tensor(0.7, dtype=F64, requires_grad=True), torch.tensor(0.4, dtype=F64)
    penalty_of(MIXTURES[2])(*leaves).backward()
    assert torch.isfinite(leaves[0].grad)


# --- normalisation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalty",
    [
        lambda mu, sigma: 0.0,
        lambda mu, sigma: -(mu**2),
        lambda mu, sigma: mu,
        lambda mu, sigma: np.cos(mu),
        lambda mu, sigma: 0.5 * np.log1p(mu**2),  # 1/|θ|: just not enough
        -(MU**2),
        sympy.Integer(1),
        MU**3,
    ],
)
def test_what_has_no_finite_integral_is_no_prior(penalty):
    answer = from_penalty(penalty, sigma=0.2)
    assert not answer
    assert "no finite integral" in answer.reason


def test_tails_may_be_heavy():
    """(1 + θ²/ν)^(−(ν+1)/2) is Student's t: with the Dirac family its penalty is (ν+1)/2·ln(…)."""
    for freedom in (1.0, 3.0, 8.0):
        found = from_penalty(lambda mu, v=freedom: 0.5 * (v + 1) * np.log1p(mu**2 / v), "dirac")
        points = torch.tensor([0.0, 1.0, 10.0, 1e3, 1e5], dtype=F64)
        expected = stats.t(freedom).logpdf(points)
        # Beyond the table the power law is right to 1e-3 in its exponent.
        np.testing.assert_allclose(np.log(density(found, points)), expected, rtol=5e-3, atol=1e-4)


# --- several dimensions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3, 7])
def test_quadratics_of_the_radius_are_isotropic_gaussians(dim):
    def penalty(radius, sigma):
        return (radius**2 + dim * sigma**2) / (2 * 0.5**2) - dim * np.log(sigma)

    assert is_normal(from_penalty(penalty, dim=dim), 0.5)
    assert not from_penalty(lambda radius, sigma: radius**2, dim=dim)
    expression = 2 * (MU**2 + dim * SIGMA**2) - dim * sympy.log(SIGMA)
    assert is_normal(from_penalty(expression, dim=dim), 0.5)


@pytest.mark.parametrize("dim", [2, 3])
def test_a_radial_penalty_that_is_no_polynomial_is_deconvolved(dim):
    """−ln α = ½‖θ‖² − 2e^{−‖θ‖²/2w²}: the average of the bump is a wider, lower bump."""
    width = 0.7

    def penalty(radius, sigma):
        wider = width**2 + sigma**2
        bump = (width**2 / wider) ** (dim / 2) * np.exp(-(radius**2) / (2 * wider))
        return (radius**2 + dim * sigma**2) / 2 - 2 * bump - dim * np.log(sigma)

    def log_density(radius):
        return -(radius**2) / 2 + 2 * np.exp(-(radius**2) / (2 * width**2))

    shell = {2: 2 * math.pi, 3: 4 * math.pi}[dim]
    total, _ = integrate.quad(
        lambda t: shell * t ** (dim - 1) * math.exp(log_density(t)), 0, 12, epsabs=1e-12
    )
    points = torch.zeros(61, dim, dtype=F64)
    points[:, 1] = torch.linspace(-4, 4, 61)
    expected = np.exp(log_density(points[:, 1].numpy())) / total
    for options in ({"sigma": 0.3}, {}):
        found = from_penalty(penalty, dim=dim, **options)
        assert isinstance(found, RadialTabulated)
        flat = found.on(weights(dim), torch.zeros(dim, dtype=F64))
        # Three dimensions divide by the radius, and so rounding near 0 by a small one.
        np.testing.assert_allclose(flat.log_prob(points).exp(), expected, atol=5e-5)
    assert not from_penalty(lambda radius, sigma: penalty(radius, 0.3), sigmas=[0.3, 0.4], dim=dim)


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_group_lasso_of_points_has_the_variance_of_the_table(dim):
    """The layer factors of Wolinski et al. (2020): λ‖w‖ has variance (n + 1)/λ² per weight."""
    for_points = from_penalty(lambda radius: 3 * radius, "dirac", dim=dim)
    flat = for_points.on(weights(2 * dim), torch.zeros(2 * dim, dtype=F64))
    assert float(flat.scale[0]) ** 2 == pytest.approx((dim + 1) / 9, rel=1e-6)
    if dim <= 3:
        assert "blows up" in from_penalty(lambda radius: 3 * radius, sigma=0.1, dim=dim).reason
    else:
        with pytest.raises(UnsupportedError, match="10 dimensions"):
            from_penalty(lambda radius: 3 * radius, sigma=0.1, dim=dim)


# --- tables ---------------------------------------------------------------------------------------


GRID = np.linspace(-20, 20, 4096)
SIGMAS = (0.2, 0.3, 0.4)


def tabled(penalty):
    return GRID, np.stack([penalty(GRID, sigma) for sigma in SIGMAS])


def test_tables_of_values_are_solved_like_functions():
    assert is_laplace(from_penalty(tabled(penalty_of(Laplace(0.5))), sigmas=SIGMAS), 0.5)
    assert is_normal(from_penalty(tabled(penalty_of(Normal(2.0))), sigmas=SIGMAS), 2.0)
    assert not from_penalty(tabled(lambda mu, sigma: np.abs(mu)), sigmas=SIGMAS)
    prior = mixture([-1.0, 1.5], [0.6, 0.6])
    table = tabled(penalty_of(prior))
    np.testing.assert_allclose(
        density(from_penalty(table, sigmas=SIGMAS)), density(prior), atol=1e-5
    )
    order = [2, 0, 1]
    shuffled = (GRID, table[1][order])
    assert from_penalty(shuffled, sigmas=[SIGMAS[i] for i in order]) == from_penalty(
        table, sigmas=SIGMAS
    )
    single = (GRID, table[1].astype(np.float32))
    np.testing.assert_allclose(
        density(from_penalty(single, sigmas=SIGMAS)), density(prior), atol=5e-3
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_penalty((GRID[:8], GRID[:8] ** 2), sigma=0.1), "at least 16 points"),
        (lambda: from_penalty((GRID**3, GRID**2), sigma=0.1), "equal steps"),
        (lambda: from_penalty((GRID[::-1], GRID**2), sigma=0.1), "equal steps"),
        (lambda: from_penalty((GRID, GRID * math.nan), sigma=0.1), "not finite"),
        (lambda: from_penalty((GRID, GRID[1:]), sigma=0.1), r"\(1, 4096\)"),
        (lambda: from_penalty((GRID, GRID**2), sigmas=[0.1, 0.2]), r"\(2, 4096\)"),
        (lambda: from_penalty((GRID, GRID**2)), "sigmas="),
        (lambda: from_penalty((GRID / 40, np.cosh(GRID)), sigma=0.1), "20σ"),
        (lambda: from_penalty((GRID, np.log1p(GRID**2)), "dirac"), "too short"),
        (lambda: from_penalty((GRID, GRID**2), sigma=0.1, dim=2), "begin at 0"),
        (lambda: from_penalty(np.sqrt, sigma=0.1), "not a number at μ = -"),
        (lambda: from_penalty(lambda mu: mu[:3], "dirac"), "a number for every μ"),
        (lambda: from_penalty(np.square, sigma=-0.1), "positive"),
        (lambda: from_penalty(np.square, sigmas=[0.1, -0.1]), "positive"),
        (lambda: from_penalty(np.square, sigmas=[0.1]), "two different sigmas"),
        (lambda: from_penalty(np.square, sigma=0.1, sigmas=[0.1, 0.2]), "not both"),
        (lambda: from_penalty(np.square, "dirac", sigma=0.1), "no σ"),
        (lambda: from_penalty(np.square, FixedGaussian), "sigma="),
        (lambda: from_penalty(np.square, dim=0), "dim"),
        (lambda: from_penalty("mu**2"), "sympy expression"),
        (lambda: from_penalty(sympy.Symbol("x") ** 2), r"\['x'\]"),
        (lambda: penalty_of(Normal.fan_in()), "every layer"),
        (lambda: penalty_of(Normal())(0.0, -1.0), "sigma must be positive"),
        (lambda: Tabulated(0.0, 0.1, (1.0,) * 9, (-1.0, 0.0), (1.0, 0.0)), "fall fast enough"),
        (lambda: Tabulated(0.0, 0.1, (1.0, 2.0), (-1.0, 0.0), (-1.0, 0.0)), "4 finite values"),
        (lambda: Tabulated(0.0, 0.1, ("a",) * 9, (-1.0, 0.0), (-1.0, 0.0)), "must be numbers"),
        (lambda: RadialTabulated(1, 0.1, (1.0,) * 9, (-1.0, 0.0)), "at least 2"),
    ],
)
def test_bad_input_is_a_named_error(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_families_that_do_not_move_are_refused_by_name():
    for family in (Beta, GaussianMixture, "cauchy"):
        with pytest.raises(UnsupportedError, match=r"translation invariant"):
            from_penalty(np.square, family)
    with pytest.raises(UnsupportedError, match="FullGaussian: it correlates"):
        from_penalty(np.square, FullGaussian)
    with pytest.raises(UnsupportedError, match="cauchy"):
        penalty_of(Normal(), "cauchy")
    assert is_normal(from_penalty(2 * MU**2, FixedGaussian, sigma=0.3), 0.5)
    assert not from_penalty(2 * MU**2, DiagGaussian)


def test_a_prior_finer_than_the_penalty_can_tell_is_warned_of():
    with pytest.warns(UserWarning, match="smaller σ"):
        from_penalty(penalty_of(ScaleMixture(0.5, 1.0, 0.02)), sigma=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_penalty(penalty_of(ScaleMixture(0.5, 1.0, 0.1)), sigma=0.02)


# --- the priors it makes --------------------------------------------------------------------------


def test_no_prior_is_false_and_refuses_to_train():
    answer = from_penalty(np.abs)
    model = credo.Model(torch.nn.Linear(2, 1), credo.likelihoods.Gaussian(0.1), answer)
    with pytest.raises(UnsupportedError, match=r"can't be a prior.*blows up"):
        credo.fit(model, credo.MAP(), (torch.randn(8, 2), torch.randn(8, 1)), progress=False)
    with pytest.raises(UnsupportedError, match="blows up"):
        answer.config()


def double_well(mu):
    return 4 * (mu**2 - 1) ** 2


def test_a_tabulated_prior_is_the_density_it_says():
    prior = from_penalty(double_well, "dirac")
    total, _ = integrate.quad(lambda x: math.exp(-double_well(x)), -5, 5, epsabs=1e-12)
    second, _ = integrate.quad(lambda x: x**2 * math.exp(-double_well(x)), -5, 5, epsabs=1e-12)
    flat = prior.on(weights(2), torch.zeros(2, dtype=F64))
    points = torch.linspace(-2, 2, 101, dtype=F64)  # where the energy is below 40 nats
    expected = -double_well(points) - math.log(total)
    torch.testing.assert_close(flat.log_prob(points[:, None].repeat(1, 2)), 2 * expected)
    slopes = -16 * points * (points**2 - 1)
    found = flat.grad_log_prob(points[:, None].repeat(1, 2))[:, 0]
    torch.testing.assert_close(found, slopes, rtol=1e-4, atol=1e-5)
    assert float(flat.scale[0]) == pytest.approx(math.sqrt(second / total), rel=1e-7)
    draws = flat.sample(10_000, torch.Generator().manual_seed(0)).flatten().numpy()
    knots = np.linspace(-3, 3, 3001)
    cdf = integrate.cumulative_simpson(np.exp(-double_well(knots)), x=knots, initial=0) / total
    # The smallest p-value that one test in a thousand has.
    assert stats.kstest(draws, lambda x: np.interp(x, knots, cdf)).pvalue > 1e-3
    assert from_config(prior.config()) == prior


def test_samples_of_a_radial_prior_have_gamma_radii():
    prior = from_penalty(lambda radius: 2 * radius, "dirac", dim=3)
    flat = prior.on(weights(6), torch.zeros(6, dtype=F64))
    draws = flat.sample(4000, torch.Generator().manual_seed(0)).reshape(-1, 3)
    assert stats.kstest(draws.norm(dim=1), stats.gamma(3, scale=0.5).cdf).pvalue > 1e-3
    assert abs(draws.mean(0)).max() < 5 * float(flat.scale[0]) / math.sqrt(len(draws))
    with pytest.raises(DataError, match="groups of 3"):
        prior.on(weights(4), torch.zeros(4))


@pytest.mark.filterwarnings("ignore:after 100 steps the loss")  # there is nothing to learn
@pytest.mark.parametrize("method", [credo.MAP(lr=0.1), credo.VI(lr=0.1, init_scale=0.1)])
def test_a_solved_prior_trains(method):
    """Without data worth speaking of, a weight ends in a well of its prior: ±1."""
    prior = from_penalty(double_well, "dirac")
    net = torch.nn.Linear(1, 40, bias=False)
    model = credo.Model(net, credo.likelihoods.Gaussian(1e3), prior)
    data = (torch.ones(4, 1), torch.zeros(4, 40))
    posterior = credo.fit(model, method, data, epochs=100, batch_size=4, seed=0, progress=False)
    # MAP finds the wells; a mean-field Gaussian sits a little inside of them.
    assert (posterior.mean.abs() - 1).abs().median() < 0.12


def test_every_answer_shows_its_working():
    solution = solve_penalty(lambda mu, sigma: 2 * mu**2, sigmas=[0.1, 0.2])
    assert solution.curves.shape == (2, len(solution.points))
    np.testing.assert_allclose(
        solution.curves[0],
        -normal_entropy(0.1) - 2 * (solution.points**2 - 0.1**2),
        atol=1e-9,
    )
