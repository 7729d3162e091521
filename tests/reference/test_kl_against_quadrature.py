"""KL against scipy's adaptive quadrature, and our own Gauss–Hermite rule against scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from credo.errors import DataError
from credo.families import DiagGaussian
from credo.kl import kl, kl_monte_carlo
from credo.priors import FlatLaplace, Laplace, Normal, ScaleMixture
from credo.rule.quadrature import expectation, gauss_hermite
from credo.types import Segment

F64 = torch.float64
ONE_WEIGHT = [Segment("w", (1,), 0, 1, 1, 1, "", "Linear")]


def gaussian(mean: float, scale: float) -> DiagGaussian:
    return DiagGaussian(torch.tensor([mean], dtype=F64), torch.tensor([scale], dtype=F64))


def integrated_kl(mean: float, scale: float, log_prior) -> float:  # type: ignore[no-untyped-def]
    """∫ q ln(q/p) by adaptive quadrature over ε = (θ − μ)/σ, split at the prior's kink θ = 0."""
    q = stats.norm(mean, scale)

    def integrand(eps: float) -> float:
        theta = mean + scale * eps
        return stats.norm.pdf(eps) * (q.logpdf(theta) - log_prior(theta))

    kink = min(max(-mean / scale, -12.0), 12.0)
    points = sorted({-12.0, kink, 12.0})
    pieces = itertools.pairwise(points)
    return sum(integrate.quad(integrand, a, b, epsabs=1e-12, limit=200)[0] for a, b in pieces)


MEANS_AND_SCALES = [(0.0, 1.0), (0.3, 0.05), (-2.0, 0.5), (5.0, 3.0), (0.0, 1e-3), (-1e-3, 1e-3)]


@pytest.mark.parametrize(("mean", "scale"), MEANS_AND_SCALES)
def test_gaussian_against_gaussian(mean: float, scale: float) -> None:
    p = Normal(0.7, mean=0.1).on(ONE_WEIGHT, torch.zeros(1, dtype=F64))
    reference = integrated_kl(mean, scale, stats.norm(0.1, 0.7).logpdf)
    # quad is asked for 1e-12; the tail beyond 12σ holds less than 1e-30.
    assert kl(gaussian(mean, scale), p).item() == pytest.approx(reference, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("mean", "scale"), MEANS_AND_SCALES)
def test_gaussian_against_laplace(mean: float, scale: float) -> None:
    p = Laplace(0.7).on(ONE_WEIGHT, torch.zeros(1, dtype=F64))
    reference = integrated_kl(mean, scale, stats.laplace(0, 0.7 / math.sqrt(2)).logpdf)
    assert kl(gaussian(mean, scale), p).item() == pytest.approx(reference, rel=1e-10, abs=1e-10)


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_gaussian_against_laplace_is_scipys_folded_normal(
    mean: float, scale: float, prior: float
) -> None:
    """E|θ| is the mean of the folded normal; KL adds the two normalisers."""
    b = prior / math.sqrt(2)
    z = abs(mean) / scale
    mean_abs = stats.foldnorm.mean(z) * scale if z < 30 else abs(mean)
    expected = mean_abs / b + math.log(2 * b) - stats.norm(mean, scale).entropy()
    value = kl(gaussian(mean, scale), FlatLaplace(torch.tensor([prior], dtype=F64))).item()
    # Up to three terms of size ln(1e9) cancel.
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize(
    "prior",
    [ScaleMixture(0.25, 1.0, 0.1), ScaleMixture.spike_and_slab(0.5, 1.0, 0.05)],
    ids=["mixture", "spike and slab"],
)
def test_monte_carlo_against_mixtures(prior: ScaleMixture) -> None:
    def log_prior(theta: float) -> float:
        slab = prior.pi * stats.norm.pdf(theta, scale=prior.scale1)
        return math.log(slab + (1 - prior.pi) * stats.norm.pdf(theta, scale=prior.scale2))

    p = prior.on(ONE_WEIGHT, torch.zeros(1, dtype=F64))
    g = torch.Generator().manual_seed(0)
    estimate, error = kl_monte_carlo(gaussian(0.2, 0.3), p, 50_000, g)
    assert abs(estimate.item() - integrated_kl(0.2, 0.3, log_prior)) < 5 * error.item()


@pytest.mark.parametrize("order", [1, 2, 5, 20, 32, 100])
def test_nodes_and_weights_are_scipys(order: int) -> None:
    nodes, weights = gauss_hermite(order, torch.zeros((), dtype=F64))
    expected_nodes, expected_weights = special.roots_hermitenorm(order)
    np.testing.assert_allclose(nodes, expected_nodes, rtol=1e-12, atol=1e-13)
    expected_weights = expected_weights / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-9, atol=1e-16)
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-14)


def test_expectation_is_exact_for_polynomials_up_to_twice_the_order() -> None:
    mean, scale = torch.tensor([0.5, -2.0], dtype=F64), torch.tensor(1.5, dtype=F64)
    for degree in range(10):
        expected = [stats.norm(m, 1.5).moment(degree) for m in mean.tolist()]
        result = expectation(lambda t, k=degree: t**k, mean, scale, order=5)
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)
    tenth = expectation(lambda t: t**10, mean, scale, order=5)
    assert not np.allclose(tenth, [stats.norm(m, 1.5).moment(10) for m in mean.tolist()])


def test_expectation_of_an_exponential_is_the_moment_generating_function() -> None:
    mean = torch.tensor([[0.1], [-1.0]], dtype=F64)
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    result = expectation(torch.exp, mean, scale)
    torch.testing.assert_close(result, torch.exp(mean + scale**2 / 2), rtol=1e-13, atol=0)
    assert result.shape == (2, 3)


def test_expectation_of_a_vector_valued_function_keeps_its_dimensions() -> None:
    mean, scale = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    result = expectation(lambda t: torch.stack([t, t**2], dim=-1), mean, scale)
    expected = torch.tensor([0.0, 1.0], dtype=F64).expand(4, 2)
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


def test_expectation_keeps_dtype_and_gradient() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    result = expectation(torch.square, torch.tensor(1.0), scale)
    assert result.dtype == torch.float32
    (gradient,) = torch.autograd.grad(result, scale)
    assert gradient.item() == pytest.approx(1.0, rel=1e-5)


def test_order_zero_is_refused() -> None:
    with pytest.raises(DataError, match=r"order must be .*0"):
        gauss_hermite(0, torch.zeros(()))
