"""The small families: moments, conjugacy, supports, and numbers at the ends of their ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from credo import noise
from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.rule.families.beta import Beta
from credo.rule.families.categorical import Categorical
from credo.rule.families.dirichlet import Dirichlet
from credo.rule.families.gamma import Gamma
from credo.rule.families.normal_gamma import NormalGamma
from credo.rule.families.sign_bernoulli import SignBernoulli
from credo.rule.families.special import (
    digamma_minus_log,
    dirichlet_concentration,
    gamma_shape,
    stirling_remainder,
    trigamma_excess,
)
from credo.types import Segment


def t(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- special functions ----------------------------------------------------------------------------


def binet(integrand: Callable[[float, float], float], a: float) -> float:
    """∫₀^∞ integrand(u, a)/(e^{2πu} − 1) du, which has no cancellation at any a."""
    value, _ = integrate.quad(
        lambda u: integrand(u, a) / math.expm1(2 * math.pi * u), 0, 7, epsabs=0, epsrel=1e-12
    )
    return value


@pytest.mark.parametrize("a", [0.5, 3.0, 15.9, 16.0, 16.1, 200.0, 1e4, 1e6, 1e9])
def test_cancellation_free_functions_equal_binets_integrals(a: float) -> None:
    delta = -0.5 / a - 2 * binet(lambda u, a: u / (u * u + a * a), a)
    remainder = 2 * binet(lambda u, a: math.atan(u / a), a)
    excess = 0.5 / a + 4 * binet(lambda u, a: u * (a / (u * u + a * a)) ** 2, a)
    # Below 16 the functions are differences of numbers of size 30 at most.
    tolerance = 1e-11 if a < 16 else 1e-14
    for found, expected in (
        (digamma_minus_log(t(a)), delta),
        (stirling_remainder(t(a)), remainder),
        (trigamma_excess(t(a)), excess),
    ):
        assert found.item() == pytest.approx(expected, rel=tolerance, abs=0.0)


@pytest.mark.parametrize("a", [1e-3, 0.7, 15.0, 17.0, 1e5])
def test_cancellation_free_functions_have_the_right_derivatives(a: float) -> None:
    x = t(a).requires_grad_()
    (slope,) = torch.autograd.grad(digamma_minus_log(x).sum(), x)
    assert (slope * a).item() == pytest.approx(trigamma_excess(t(a)).item(), rel=1e-12, abs=0.0)
    (slope,) = torch.autograd.grad(stirling_remainder(x).sum(), x)
    # The difference on the right is 1/(12a²), which rounding of 1/(2a) makes uncertain by ε·a.
    exact = (digamma_minus_log(t(a)) + 0.5 / a).item()
    assert slope.item() == pytest.approx(exact, rel=1e-10 + 1e-14 * a, abs=0.0)


def test_gamma_shape_inverts_over_eighteen_decades() -> None:
    shape = torch.logspace(-6, 12, 2000, dtype=torch.float64)
    torch.testing.assert_close(gamma_shape(-digamma_minus_log(shape)), shape, rtol=1e-12, atol=0.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1, 8), min_size=2, max_size=5))
def test_every_point_below_the_simplex_has_a_concentration(exponents: list[float]) -> None:
    """Σ exp μ_k < 1 is all it takes: means of logs no one computed from an α have one too."""
    target = -(10.0 ** t(*exponents))
    target = target - target.logsumexp(0).clamp(min=-1e-6) - 1e-6
    found = dirichlet_concentration(target)
    again = torch.digamma(found) - torch.digamma(found.sum())
    torch.testing.assert_close(again, target, rtol=1e-10, atol=1e-13)


def test_inverses_lose_nothing_in_float32_and_on_batches() -> None:
    """What float32 gives is the solution at the numbers given, rounded once."""
    alpha = torch.tensor([[0.01, 50.0, 2.0], [1.0, 3e3, 1e4]])
    shape = torch.tensor([[0.01, 3.0], [100.0, 1e6]])
    for solve, target in (
        (dirichlet_concentration, Dirichlet(alpha).expectation[0]),
        (gamma_shape, -digamma_minus_log(shape)),
    ):
        found = solve(target)
        assert (found.dtype, found.shape) == (torch.float32, target.shape)
        torch.testing.assert_close(found.double(), solve(target.double()), rtol=1e-7, atol=0.0)
        torch.testing.assert_close(found[:1], solve(target[:1]), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_float32_survives_large_parameters(size: float) -> None:
    """ln Γ of the largest is 1.5e8 and rounds by 8 in float32; entropies and divergences don't."""

    def pairs(dtype: torch.dtype) -> list[tuple[Any, Any]]:
        one, rate = torch.full((1,), size, dtype=dtype), torch.full((1,), 2.0, dtype=dtype)
        other = one + 3 * one.sqrt()
        zero = torch.zeros_like(one)
        return [
            (Gamma(one, rate), Gamma(other, rate)),
            (Beta(one, 2 * one), Beta(other, 2 * one)),
            (Dirichlet(torch.cat((one, other))), Dirichlet(torch.cat((other, one)))),
            (NormalGamma(zero, rate, one, rate), NormalGamma(zero, rate, other, rate)),
        ]

    for (q, p), (exact_q, exact_p) in zip(pairs(torch.float32), pairs(torch.float64), strict=True):
        assert q.entropy().item() == pytest.approx(exact_q.entropy().item(), rel=1e-5, abs=1e-4)
        # a′(r − 1 − ln r) rounds by √a times the precision.
        slack = 20 * size**0.5 * torch.finfo(torch.float32).eps
        assert q.kl(p).item() == pytest.approx(exact_q.kl(exact_p).item(), rel=1e-4, abs=slack)


# --- moments --------------------------------------------------------------------------------------


def test_means_and_variances_equal_scipys() -> None:
    a, b = t(0.3, 2.5, 40.0), t(1.7, 0.2, 3.0)
    for ours, theirs in (
        (Gamma(a, b), stats.gamma(a, scale=1 / b.numpy())),
        (Beta(a, b), stats.beta(a, b)),
    ):
        np.testing.assert_allclose(ours.mean, theirs.mean(), rtol=1e-12)
        np.testing.assert_allclose(ours.variance, theirs.var(), rtol=1e-12)
    ours, theirs = Dirichlet(a), stats.dirichlet(a.numpy())
    np.testing.assert_allclose(ours.mean, theirs.mean(), rtol=1e-12)
    np.testing.assert_allclose(ours.variance, theirs.var(), rtol=1e-12)
    # x of a Normal–Gamma is Student's t with 2a degrees of freedom.
    joint = NormalGamma(t(0.5), t(3.0), t(2.5), t(1.2))
    student = stats.t(df=5.0, loc=0.5, scale=math.sqrt(1.2 / (3.0 * 2.5)))
    np.testing.assert_allclose(joint.mean, student.mean(), rtol=1e-12)
    np.testing.assert_allclose(joint.variance, student.var(), rtol=1e-12)


def test_moments_that_do_not_exist_are_infinite() -> None:
    assert torch.isinf(NormalGamma(t(0.0), t(1.0), t(1.0), t(1.0)).variance).all()


def test_moments_of_labels_and_signs() -> None:
    labels = Categorical.from_probs(t(0.2, 0.3, 0.5))
    torch.testing.assert_close(labels.mean, t(0.2, 0.3, 0.5))
    torch.testing.assert_close(labels.variance, t(0.16, 0.21, 0.25))
    signs = SignBernoulli(0.5 * (t(0.2) / t(0.8)).log())
    torch.testing.assert_close(signs.mean, t(-0.6))
    torch.testing.assert_close(signs.variance, t(0.64))
    torch.testing.assert_close(signs.scale, t(0.8))


def test_draws_have_the_mean_and_variance_they_claim() -> None:
    n = 20_000
    for q in (
        Gamma(t(0.2, 3.0), t(2.0, 1e3)),
        Beta(t(0.2, 3.0), t(2.0, 0.5)),
        Dirichlet(t(0.2, 3.0, 1.0)),
    ):
        drawn = q.sample(n, generator())
        centred = (drawn - q.mean).square()
        assert ((drawn.mean(0) - q.mean).abs() < 5 * (q.variance / n).sqrt()).all()
        assert ((centred.mean(0) - q.variance).abs() < 5 * centred.std(0) / n**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sparse_dirichlets_draw_corners_in_the_right_proportion(dtype: torch.dtype) -> None:
    """At α = 0.003 most gammas underflow; normalised as they are, they would give ½ : ½."""
    q = Dirichlet(torch.tensor([0.002, 0.001], dtype=dtype))
    first = q.sample(4000, generator())[:, 0]
    assert torch.isfinite(q.log_prob(q.sample(100, generator()))).all()
    assert (((first < 0.01) | (first > 0.99)).double().mean()) > 0.95
    share = first.double().mean().item()
    assert abs(share - 2 / 3) < 5 * math.sqrt(2 / 9 / 4000)


def test_draws_stay_inside_the_support_in_float32() -> None:
    small = torch.full((50,), 0.01)
    for q in (Gamma(small, small), Beta(small, small)):
        assert torch.isfinite(q.log_prob(q.sample(20, generator()))).all()


def test_draws_are_differentiable_in_the_parameters() -> None:
    """E x = a/b has slopes 1/b and −a/b²; E θ₁ = α₁/α₀ has α₂/α₀² and −α₁/α₀²."""
    n = 4000
    a, b = t(0.7).requires_grad_(), t(2.0).requires_grad_()
    drawn = Gamma(a, b).sample(n, generator())
    slopes = torch.autograd.grad(drawn.mean(), (a, b))
    # The path derivatives' standard deviations are below 2 here, so 5 s.e. are 0.16.
    assert slopes[0].item() == pytest.approx(0.5, abs=0.16)
    assert slopes[1].item() == pytest.approx(-0.7 / 4, abs=0.16)
    alpha = t(0.7, 1.3).requires_grad_()
    drawn = Dirichlet(alpha).sample(n, generator())
    (slope,) = torch.autograd.grad(drawn[:, 0].mean(), alpha)
    torch.testing.assert_close(slope, t(1.3, -0.7) / 4, atol=0.03, rtol=0.0)


# --- conjugacy ------------------------------------------------------------------------------------


def test_adding_statistics_to_natural_parameters_is_bayes_rule() -> None:
    """log p(y | θ) is linear in T(θ); its coefficients add to λ. Textbook posteriors come out."""
    beta = Beta(t(2.0), t(3.0))
    posterior = beta.with_natural((beta.natural[0] + 4, beta.natural[1] + 1))
    assert (posterior.a.item(), posterior.b.item()) == pytest.approx((6.0, 4.0))

    rates = Gamma(t(2.0), t(3.0))
    counts = t(4.0, 0.0, 7.0)
    posterior = rates.with_natural((rates.natural[0] + counts.sum(), rates.natural[1] - 3))
    assert (posterior.shape.item(), posterior.rate.item()) == pytest.approx((13.0, 6.0))

    x = t(1.0, 2.5, -0.5, 4.0)
    prior = NormalGamma(t(0.3), t(2.0), t(1.5), t(0.8))
    coefficients = (0.5 * len(x), -0.5 * x.square().sum(), x.sum(), -0.5 * len(x))
    posterior = prior.with_natural(
        tuple(p + c for p, c in zip(prior.natural, coefficients, strict=True))
    )
    scatter = (x - x.mean()).square().sum()
    between = 2.0 * len(x) / (2.0 + len(x)) * (x.mean() - 0.3).square()
    torch.testing.assert_close(posterior.mean, t((2.0 * 0.3 + x.sum()) / 6))
    torch.testing.assert_close(posterior.count, t(6.0))
    torch.testing.assert_close(posterior.shape, t(3.5))
    torch.testing.assert_close(posterior.rate, t(0.8 + 0.5 * (scatter + between)))


def test_families_that_contain_each_other_agree() -> None:
    a, b = t(0.4, 2.0), t(3.0, 0.7)
    x = t([0.1, 0.9], [0.5, 0.3])
    pair = Dirichlet(torch.stack((a, b), -1))
    torch.testing.assert_close(Beta(a, b).log_prob(x), pair.log_prob(torch.stack((x, 1 - x), -1)))


def test_numbers_are_members_too() -> None:
    """Parameters without dimensions: one coordinate, and events without dimensions."""
    one = torch.ones((), dtype=torch.float64)
    for q in (Gamma(one, one), Beta(one, one)):
        assert q.sample(3, generator()).shape == (3,)
        assert q.log_prob(q.sample(3, generator())).shape == (3,)
        assert q.entropy().shape == q.kl(q).shape == ()
    joint = NormalGamma(one, one, one, one)
    assert joint.log_prob(joint.sample(3, generator())).shape == (3,)


def test_gradients_reach_the_fields() -> None:
    shape, rate = t(2.0).requires_grad_(), t(3.0).requires_grad_()
    Gamma(shape, rate).kl(Gamma(t(1.0), t(1.0))).backward()
    assert shape.grad is not None
    assert rate.grad is not None


@pytest.mark.parametrize(
    ("q", "outside", "name"),
    [
        (Gamma(t(1.0), t(1.0)), t(0.0), "x must be positive"),
        (Beta(t(1.0), t(1.0)), t(1.0), "x must be strictly between"),
        (Dirichlet(t(1.0, 1.0)), t(0.0, 1.0), "θ must be positive"),
        (Dirichlet(t(1.0, 1.0)), t(0.5, 0.4), "sum of θ must be 1"),
        (NormalGamma(t(0.0), t(1.0), t(1.0), t(1.0)), t([0.0, 0.0]), "τ must be positive"),
        (SignBernoulli(t(0.0)), t(0.5), "weight must be −1 or"),
        (Categorical(t(0.0)), torch.tensor(2), "label must be from 0 to 1"),
        (Categorical(t(0.0)), torch.tensor(-1), "label must be from 0 to 1"),
        (Categorical(t(0.0)), torch.tensor(1.0), "integer labels"),
    ],
)
def test_events_outside_the_support_are_refused(q: Any, outside: Tensor, name: str) -> None:
    with pytest.raises(DataError, match=name):
        q.log_prob(outside)


# --- labels ---------------------------------------------------------------------------------------


def test_probabilities_make_the_categorical_with_these_probabilities() -> None:
    probs = t([0.2, 0.3, 0.5], [0.98, 0.01, 0.01])
    torch.testing.assert_close(Categorical.from_probs(probs).probs, probs)
    single = Categorical.from_probs(t(1.0))
    assert single.logits.shape == (0,)
    assert (single.entropy().item(), single.log_partition().item()) == (0.0, 0.0)
    assert single.sample(2, generator()).tolist() == [0, 0]


@pytest.mark.parametrize("probs", [t(0.0, 1.0), t(0.5, 0.6), t(-0.1, 1.1), t(float("nan"), 1.0)])
def test_what_are_no_probabilities_is_refused(probs: Tensor) -> None:
    with pytest.raises(DataError, match="probs"):
        Categorical.from_probs(probs)


def test_extreme_logits_stay_finite() -> None:
    q = Categorical(t(800.0, -800.0))
    assert q.entropy().item() == 0.0
    assert q.log_prob(torch.tensor(1)).item() == -1600.0
    assert q.log_partition().item() == 800.0


# --- signs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(deadline=None, max_examples=50)
@given(half_logit=st.floats(-50, 50))
def test_entropy_of_signs_is_stable(dtype: torch.dtype, half_logit: float) -> None:
    value = torch.tensor([half_logit], dtype=dtype, requires_grad=True)
    entropy = SignBernoulli(value).entropy()
    odds = math.exp(-2 * abs(value.item()))
    exact = math.log1p(odds) + 2 * abs(value.item()) * odds / (1 + odds)
    assert 0 <= entropy.item() <= math.log(2) * (1 + 1e-6)
    assert entropy.item() == pytest.approx(exact, rel=1e-4, abs=1e-36)
    (slope,) = torch.autograd.grad(entropy, value)
    assert torch.isfinite(slope).all()


def test_signs_that_are_nearly_certain_keep_their_variance() -> None:
    q = SignBernoulli(t(25.0, -25.0))
    torch.testing.assert_close(q.variance, 4 * (t(-50.0, -50.0)).exp(), rtol=1e-12, atol=0.0)
    assert q.log_prob(t(-1.0, -1.0)).item() == pytest.approx(-50.0)


def test_signs_have_no_gradient() -> None:
    with pytest.raises(UnsupportedError, match="nothing between them"):
        SignBernoulli(t(0.0)).grad_log_prob(t(1.0))


@pytest.mark.parametrize("draws", ["normal", "table"])
def test_signs_walk_with_their_probabilities(draws: noise.Draws) -> None:
    n, p = 4000, torch.tensor([0.5, 0.001, 0.9])
    q = SignBernoulli(0.5 * torch.logit(p))
    out = torch.empty(3)
    walked = torch.stack([w.clone() for w in q.walk(n, noise.source(draws, seed=3), out)])
    assert set(walked.unique().tolist()) == {-1.0, 1.0}
    again = [w.clone() for w in q.walk(4, noise.source(draws, seed=3), out)]
    assert torch.equal(torch.stack(again), walked[:4])
    error = (walked.mean(0) - q.mean).abs()
    assert (error < 5 * q.scale / n**0.5).all()


def test_signs_survive_the_disk_and_serve_as_a_prior() -> None:
    q = SignBernoulli(torch.tensor([0.5, -2.0]))
    tensors, meta = q.pack()
    assert torch.equal(SignBernoulli.unpack(tensors, meta).half_logit, q.half_logit)
    with pytest.raises(FileFormatError, match="half_logit"):
        SignBernoulli.unpack({"mean": q.mean}, meta)
    segment = Segment("w", (2,), 0, 2, 1, 2, "", "Linear")
    assert q.on([segment], torch.zeros(2, dtype=torch.float64)).mean.dtype == torch.float64
