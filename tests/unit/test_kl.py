"""Closed-form KL against torch, exact decimal arithmetic and autograd; and what is refused."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions

from credo import kl as kl_module
from credo.errors import DataError, UnsupportedError
from credo.families import (
    Delta,
    DiagGaussian,
    EigenBlock,
    EigenKroneckerGaussian,
    Empirical,
    FullGaussian,
)
from credo.kl import has_closed_form, kl, kl_monte_carlo, kl_per_segment, kl_terms
from credo.priors import FlatLaplace, Laplace, Normal, ScaleMixture
from credo.rule.families import SignBernoulli
from credo.types import Segment

F64 = torch.float64
EPS = torch.finfo(F64).eps
scales = st.floats(1e-6, 1e3)
means = st.floats(-1e3, 1e3)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=F64)


def random_gaussian(seed: int, size: int = 6) -> DiagGaussian:
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(size, generator=g, dtype=F64)
    return DiagGaussian(mean, torch.rand(size, generator=g, dtype=F64) + 0.1)


@settings(deadline=None, max_examples=100)
@given(means, scales, means, scales)
def test_gaussian_kl_is_torchs(mean: float, scale: float, prior_mean: float, prior: float) -> None:
    value = kl(DiagGaussian(one(mean), one(scale)), DiagGaussian(one(prior_mean), one(prior)))
    reference = distributions.kl_divergence(
        distributions.Normal(one(mean), one(scale)),
        distributions.Normal(one(prior_mean), one(prior)),
    ).sum()
    # torch subtracts 1 from numbers near 1, so it has an absolute error of some EPS.
    torch.testing.assert_close(value, reference, rtol=1e-13, atol=20 * EPS)


@settings(deadline=None, max_examples=100)
@given(scales, st.floats(1e-12, 1.0), st.sampled_from([-1.0, 1.0]))
def test_gaussian_kl_keeps_its_digits_where_q_is_nearly_p(
    prior: float, step: float, sign: float
) -> None:
    scale = prior * (1 + 0.999 * sign * step)
    value = kl(DiagGaussian(one(0.0), one(scale)), DiagGaussian(one(0.0), one(prior))).item()
    with localcontext(prec=60):
        square = (Decimal(scale) / Decimal(prior)) ** 2
        exact = float((square - 1 - square.ln()) / 2)
    # KL ≈ step², and its argument ln(σ/s) ≈ step carries an error of EPS.
    assert abs(value - exact) <= 8 * EPS * (step + exact)


@settings(deadline=None, max_examples=100)
@given(means, scales, scales)
def test_kl_is_not_negative(mean: float, scale: float, prior: float) -> None:
    q = DiagGaussian(one(mean), one(scale))
    assert kl(q, FlatLaplace(one(prior))) >= 0
    assert kl(q, DiagGaussian(one(0.0), one(prior))) >= -EPS


def test_kl_of_the_same_gaussian_is_exactly_zero() -> None:
    assert kl(random_gaussian(0), random_gaussian(0)) == 0


def test_formula_of_the_sheet() -> None:
    q, s = random_gaussian(0), 0.7
    p = DiagGaussian(torch.tensor(0.0, dtype=F64), torch.full((6,), s, dtype=F64))
    expected = 0.5 * ((q.variance + q.mean**2) / s**2 - 1 + torch.log(s**2 / q.variance))
    torch.testing.assert_close(kl_terms(q, p), expected)
    torch.testing.assert_close(kl(q, p), expected.sum())


def test_small_scale_seen_from_far_away_is_the_laplace_penalty() -> None:
    """σ → 0 at fixed μ: E|θ| → |μ|, so KL differences are λ times differences of |μ|."""
    sigma, b = 1e-9, 0.5
    p = FlatLaplace(one(b * math.sqrt(2)))
    low, high = (kl(DiagGaussian(one(mean), one(sigma)), p) for mean in (-1.0, 3.0))
    assert (high - low).item() == pytest.approx(2.0 / b, rel=1e-13)


@pytest.mark.parametrize("prior", [Normal(0.5, mean=0.2), Laplace(0.5)], ids=["normal", "laplace"])
def test_gradients_of_the_closed_forms(prior: Normal | Laplace) -> None:
    segment = Segment("w", (4,), 0, 4, 1, 1, "", "Linear")
    p = prior.on([segment], torch.zeros(4, dtype=F64))
    mean = torch.tensor([-1.0, 0.0, 0.3, 40.0], dtype=F64, requires_grad=True)
    scale = torch.tensor([0.1, 0.5, 2.0, 0.01], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, s: kl(DiagGaussian(m, s), p), (mean, scale))


def test_segments_sum_to_the_total() -> None:
    q, p = random_gaussian(0), random_gaussian(1)
    parts = kl_per_segment(q, p, [1, 3, 2])
    torch.testing.assert_close(parts.sum(), kl(q, p))
    torch.testing.assert_close(parts[1], kl_terms(q, p)[1:4].sum())


def test_segments_of_an_eigen_kronecker_q_are_its_blocks() -> None:
    """Its own KL to the same prior over those weights alone; a segment across blocks is refused."""
    values = torch.arange(1.0, 7.0, dtype=F64).reshape(2, 3)
    basis = torch.linalg.qr(torch.arange(9.0, dtype=F64).reshape(3, 3).cos()).Q
    blocks = (EigenBlock(None, basis, values), EigenBlock(None, None, values[:, :1]))
    q = EigenKroneckerGaussian(torch.linspace(-1, 1, 8, dtype=F64), blocks)
    p = DiagGaussian(torch.zeros(8, dtype=F64), torch.linspace(0.5, 2, 8, dtype=F64))
    parts = kl_per_segment(q, p, [6, 2])
    torch.testing.assert_close(parts.sum(), kl(q, p))
    first = EigenKroneckerGaussian(q.mean[:6], blocks[:1])
    torch.testing.assert_close(parts[0], kl(first, DiagGaussian(p.mean[:6], p.scale[:6])))
    torch.testing.assert_close(kl_per_segment(q, p, [8, 0])[0], kl(q, p))
    with pytest.raises(DataError, match="from 0 to 3 are not whole blocks"):
        kl_per_segment(q, p, [3, 5])


@pytest.mark.parametrize("sizes", [[1, 2], [], [7, -1]])
def test_sizes_that_do_not_add_up_are_named(sizes: list[int]) -> None:
    with pytest.raises(DataError, match="over 6 weights"):
        kl_per_segment(random_gaussian(0), random_gaussian(1), sizes)


def test_a_prior_over_one_weight_does_not_broadcast() -> None:
    with pytest.raises(DataError, match="6 weights but p over 1"):
        kl(random_gaussian(0), random_gaussian(1, size=1))


def test_what_has_a_closed_form() -> None:
    q = random_gaussian(0)
    segment = Segment("w", (6,), 0, 6, 1, 1, "", "Linear")
    priors = {prior: prior.on([segment], q.mean) for prior in (Normal(), Laplace(), ScaleMixture())}
    assert [has_closed_form(q, p) for p in priors.values()] == [True, True, False]
    with pytest.raises(UnsupportedError, match="kl_monte_carlo"):
        kl(q, priors[ScaleMixture()])


@pytest.mark.parametrize("q", [Delta(torch.zeros(6)), Empirical(torch.zeros(2, 6))])
def test_kl_of_a_point_mass_is_refused_with_the_remedy(q: Delta | Empirical) -> None:
    for call in (kl, kl_terms, lambda q, p: kl_monte_carlo(q, p, 10)):
        with pytest.raises(UnsupportedError, match=r"infinite.*−prior\.log_prob"):
            call(q, random_gaussian(0))
        with pytest.raises(UnsupportedError, match="infinite: p has no density"):
            call(random_gaussian(0), q)


def test_monte_carlo_finds_the_closed_form() -> None:
    q, p = random_gaussian(0), random_gaussian(1)
    estimate, error = kl_monte_carlo(q, p, 20_000, torch.Generator().manual_seed(0))
    assert abs(estimate - kl(q, p)) < 5 * error
    # The error is that of a mean: four times the samples, half the error.
    _, quarter = kl_monte_carlo(q, p, 5_000, torch.Generator().manual_seed(1))
    assert (quarter / error).item() == pytest.approx(2.0, rel=0.1)


def test_monte_carlo_has_no_error_where_q_is_p() -> None:
    estimate, error = kl_monte_carlo(random_gaussian(0), random_gaussian(0), 100)
    assert estimate == error == 0


def test_monte_carlo_in_bounded_memory_draws_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    q, p = random_gaussian(0), random_gaussian(1)
    drawn: list[int] = []
    sample = DiagGaussian.sample

    def counted(
        self: DiagGaussian, n: int, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        drawn.append(n)
        return sample(self, n, generator)

    monkeypatch.setattr(DiagGaussian, "sample", counted)
    monkeypatch.setattr(kl_module, "_MAX_SAMPLED_NUMBERS", 60)
    estimate, error = kl_monte_carlo(q, p, 1_005, torch.Generator().manual_seed(0))
    assert sum(drawn) == 1_005
    assert max(drawn) == 10
    assert abs(estimate - kl(q, p)) < 5 * error


def test_monte_carlo_needs_two_samples() -> None:
    with pytest.raises(DataError, match="at least 2"):
        kl_monte_carlo(random_gaussian(0), random_gaussian(1), 1)


def test_families_of_one_kind_and_gaussians_against_a_diagonal_have_a_closed_form() -> None:
    """Against torch.distributions, and the Gaussian of full precision against a diagonal one."""
    root = torch.tensor([[1.0, 0.0], [0.7, 1.3]], dtype=torch.float64)
    mean, other = torch.tensor([0.3, -1.0]).double(), torch.tensor([1.0, 2.0]).double()
    full, scale = FullGaussian(mean, root @ root.mT), torch.tensor([0.5, 2.0]).double()
    theirs = torch.distributions.MultivariateNormal(mean, precision_matrix=root @ root.mT)
    diagonal = torch.distributions.MultivariateNormal(other, torch.diag(scale.square()))
    expected = torch.distributions.kl_divergence(theirs, diagonal)
    torch.testing.assert_close(kl(full, DiagGaussian(other, scale)), expected)
    expected = torch.distributions.kl_divergence(
        theirs, torch.distributions.MultivariateNormal(other, precision_matrix=root.mT @ root)
    )
    torch.testing.assert_close(kl(full, FullGaussian(other, root.mT @ root)), expected)


def test_the_rules_families_bring_their_own_closed_form() -> None:
    signs = [SignBernoulli(torch.tensor(values).double()) for values in ([0.3, -2.0], [1.0, 0.0])]
    bits = (torch.distributions.Bernoulli(logits=2 * q.half_logit) for q in signs)
    torch.testing.assert_close(kl_terms(*signs), torch.distributions.kl_divergence(*bits))
