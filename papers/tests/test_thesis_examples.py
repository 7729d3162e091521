"""The worked examples of Book (2020), as statements that hold exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from credo_papers import and_gradient, and_model, beta_bernoulli

TABLE = [((0, 0), 0), ((0, 1), 0), ((1, 0), 0), ((1, 1), 1)]


def log_joint_by_hand(w1, w2, b, copies):
    """log P(y, w) of the AND node, without torch or the truth table of the package."""
    total = stats.norm.logpdf([w1, w2, b]).sum()
    for (x1, x2), y in TABLE:
        p = 1 / (1 + math.exp(-(w1 * x1 + w2 * x2 + b)))
        total += copies * stats.bernoulli.logpmf(y, p)
    return total


# --- eq. 2.4.4 ------------------------------------------------------------------------------------


def test_corrected_gradient_is_the_gradient_sample_by_sample():
    generator = torch.Generator().manual_seed(0)
    mean, scale, eps = torch.randn(3, 20, 3, generator=generator, dtype=torch.float64)
    scale = scale.exp()
    for m, s, e in zip(mean, scale, eps, strict=True):
        truth = and_gradient.autodiff_gradient(m, s, e)
        corrected = and_gradient.corrected_gradient(m + s * e)
        # Rounding of a dozen float64 terms of size at most about 30.
        torch.testing.assert_close(corrected, truth, rtol=1e-12, atol=1e-12)


def test_printed_gradient_is_not_the_gradient():
    mean, scale = torch.tensor([0.5, -0.3, 0.2]).double(), torch.tensor([0.4, 0.7, 1.1]).double()
    eps = torch.zeros(3, dtype=torch.float64)
    truth = and_gradient.autodiff_gradient(mean, scale, eps)
    printed = and_gradient.printed_gradient(mean)
    assert (printed - truth).abs().max() > 1
    # Neither of the two errors alone repairs it: the sign of the likelihood, or 1 for w.
    likelihood = printed - 1
    assert not torch.allclose(likelihood + mean, truth, atol=1e-3)
    assert not torch.allclose(-likelihood + 1, truth, atol=1e-3)


def test_expected_corrected_gradient_is_the_gradient_of_the_loss_by_finite_differences():
    mean, scale = torch.tensor([0.5, -0.3, 0.2]).double(), torch.tensor([0.4, 0.7, 1.1]).double()
    expected, _ = and_gradient.expected_gradients(mean, scale)
    step = 1e-5
    for k in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[k] = step
        losses = [-float(and_model.elbo(mean + d, scale, copies=1)) for d in (shift, -shift)]
        # A central difference errs by step² and by rounding/step, both near 1e-10.
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(expected[k]), abs=1e-8)


# --- §2.4: the exact posterior and the best mean-field q ------------------------------------------


@pytest.mark.parametrize("copies", [1, 25])
def test_grid_gives_the_evidence_and_moments_that_gauss_legendre_gives(copies):
    exact = and_model.exact_posterior(copies)
    # 100 points on [−9, 9] are 0.28 apart in the middle, where the posterior's scale is 0.5.
    points, weights = np.polynomial.legendre.leggauss(100)
    points, weights = 9 * points, 9 * weights
    w1, w2, b = np.meshgrid(points, points, points, indexing="ij")
    mass = np.einsum("i,j,k->ijk", weights, weights, weights)
    log_joint = stats.norm.logpdf(w1) + stats.norm.logpdf(w2) + stats.norm.logpdf(b)
    for (x1, x2), y in TABLE:
        f = w1 * x1 + w2 * x2 + b
        log_joint = log_joint + copies * (y * f - np.logaddexp(0, f))
    density = np.exp(log_joint) * mass
    evidence = density.sum()
    assert exact.log_evidence == pytest.approx(math.log(evidence), abs=1e-6)
    assert float(exact.mean[0]) == pytest.approx((density * w1).sum() / evidence, abs=1e-6)
    assert float(exact.mean[2]) == pytest.approx((density * b).sum() / evidence, abs=1e-6)


def test_likelihood_is_the_bernoulli_of_the_truth_table():
    w = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64)
    log_prior = stats.norm.logpdf(w.numpy()).sum()
    expected = log_joint_by_hand(0.7, -1.2, 0.4, copies=3) - log_prior
    assert float(and_model.log_likelihood(w, copies=3)) == pytest.approx(expected, rel=1e-12)


def test_expected_log_likelihood_needs_only_one_dimension():
    mean, scale = torch.tensor([0.5, -0.3, 0.2]).double(), torch.tensor([0.4, 0.7, 1.1]).double()
    total = 0.0
    for (x1, x2), y in TABLE:
        x = np.array([x1, x2, 1.0])
        logit = stats.norm(mean.numpy() @ x, math.sqrt(scale.numpy() ** 2 @ x**2))
        value, _ = integrate.quad(
            lambda f, y=y, logit=logit: logit.pdf(f) * (y * f - np.logaddexp(0, f)), -15, 15
        )
        total += value
    found = float(and_model.expected_log_likelihood(mean, scale, copies=1))
    # quad promises 1e-8, and order 64 does better.
    assert found == pytest.approx(total, abs=1e-7)


@pytest.mark.parametrize("copies", [1, 25])
def test_elbo_is_below_the_evidence_and_its_optimum_is_stationary(copies):
    best = and_model.mean_field_optimum(copies)
    mean, scale = best.mean.requires_grad_(), best.scale.requires_grad_()
    value = and_model.elbo(mean, scale, copies)
    gradients = torch.autograd.grad(value, (mean, scale))
    # L-BFGS stops at a relative change of 1e-12 in the loss, hence near 1e-5 in the gradient.
    assert all(float(g.abs().max()) < 1e-3 for g in gradients)
    assert float(value.detach()) < and_model.exact_posterior(copies).log_evidence


def test_four_observations_do_not_teach_and_but_a_hundred_do():
    few, many = (and_model.exact_posterior(copies).probs for copies in (1, 25))
    assert few.max() < 0.5
    assert many[3] > 0.5 > many[:3].max()


# --- eq. 2.0.5 ------------------------------------------------------------------------------------


def test_thesis_example_has_its_maxima_at_a_half_and_six_tenths():
    result = beta_bernoulli.run_one(beta_bernoulli.CoinSettings(), 0, None)
    # The maximum of a smooth function is known to the root of its rounding: 1e-8 with a margin.
    assert result["mle"] == pytest.approx(0.5, abs=1e-6)
    assert result["map"] == pytest.approx(0.6, abs=1e-6)
    assert result["map_if_prior_counts_were_a_and_b"] == pytest.approx(4 / 7, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(a=st.floats(1.1, 20), b=st.floats(1.1, 20), n=st.integers(0, 30), share=st.floats(0, 1))
def test_posterior_mode_counts_a_minus_one_and_b_minus_one(a, b, n, share):
    s = round(share * n)
    mode = beta_bernoulli.posterior_mode(a, b, s, n)
    posterior = stats.beta(a + s, b + n - s)
    grid = np.linspace(1e-4, 1 - 1e-4, 2001)
    assert posterior.logpdf(mode) >= posterior.logpdf(grid).max() - 1e-9
