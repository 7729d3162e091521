"""FactorGaussian against torch's own Gaussian of low rank plus a diagonal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, kl_divergence
from torch.testing import assert_close

from credo import kl
from credo.errors import DataError
from credo.families import DiagGaussian, FactorGaussian

F64 = torch.float64
# Condition numbers of some hundreds, so 1e-10 leaves room for four digits lost.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make(size: int = 10, rank: int = 3, seed: int = 0) -> FactorGaussian:
    factor, diagonal = numbers(size, rank, seed=seed + 1), numbers(size, seed=seed + 2).exp()
    return FactorGaussian(numbers(size, seed=seed), factor, diagonal)


def torchs(q: FactorGaussian) -> LowRankMultivariateNormal:
    return LowRankMultivariateNormal(q.mean, q.factor, q.diagonal)


@pytest.mark.parametrize("rank", [1, 3, 14])
def test_density_and_moments_are_torchs(rank: int) -> None:
    q, w = make(rank=rank), numbers(3, 4, 10, seed=7)
    reference = torchs(q)
    assert_close(q.log_prob(w), reference.log_prob(w), **CLOSE)
    assert_close(q.entropy(), reference.entropy(), **CLOSE)
    assert_close(q.variance, reference.variance, **CLOSE)
    assert_close(q.dense_covariance(), reference.covariance_matrix, **CLOSE)
    assert_close(q.dense_precision(), reference.precision_matrix, **CLOSE)
    assert_close(q.kl(make(seed=5)), kl_divergence(reference, torchs(make(seed=5))), **CLOSE)
    assert abs(q.kl(q)) < 1e-12


def test_gradient_products_and_solves() -> None:
    q, w = make(), numbers(3, 10, seed=7).requires_grad_()
    (gradient,) = torch.autograd.grad(q.log_prob(w).sum(), w)
    v = w.detach()
    assert_close(q.grad_log_prob(v), gradient, **CLOSE)
    assert_close(q.solve(v), v @ torchs(q).covariance_matrix, **CLOSE)
    assert_close(q.multiply(q.solve(v)), v, **CLOSE)


@pytest.mark.parametrize("rank", [1, 3, 14])
def test_draws_are_a_root_of_the_covariance_exactly(rank: int) -> None:
    q = make(rank=rank)
    root = q.draw_(torch.empty(10, 10, dtype=F64), torch.eye(10, dtype=F64)) - q.mean
    assert_close(root.T @ root, torchs(q).covariance_matrix, **CLOSE)


def test_divergence_to_a_diagonal_prior_is_torchs() -> None:
    q, prior = make(), DiagGaussian(numbers(10, seed=9), numbers(10, seed=8).exp())
    expected = kl_divergence(
        torch.distributions.MultivariateNormal(q.mean, q.dense_covariance()),
        torch.distributions.MultivariateNormal(prior.mean, torch.diag(prior.variance)),
    )
    assert_close(kl.kl(q, prior), expected, **CLOSE)


def test_variances_of_tiny_weights_do_not_overflow() -> None:
    """In float32 1/v is beyond the largest number where v is a denormal; what is drawn is v's."""
    tiny = FactorGaussian(torch.zeros(4), torch.zeros(4, 2), torch.full((4,), 1e-39))
    draw = tiny.sample(1000, torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(draw).all())
    assert float(draw.std()) == pytest.approx(1e-39**0.5, rel=0.1)


def test_what_does_not_fit_is_named() -> None:
    m, f, d = numbers(10), numbers(10, 3), numbers(10).exp()
    for wrong, message in (
        ((m, f, -d), r"diagonal must be positive, but entry \[0\]"),
        ((m, f, d[1:]), r"mean and diagonal must be \(P,\)"),
        ((m, f[1:], d), "P = 10 and r ≥ 1"),
        ((m, f[:, :0], d), "P = 10 and r ≥ 1"),
        ((m, f * torch.inf, d), "factor must be finite"),
        ((m, f.float(), d), "factor torch.float32"),
    ):
        with pytest.raises(DataError, match=message):
            FactorGaussian(*wrong)
    with pytest.raises(DataError, match="another FactorGaussian"):
        make().kl(make(size=9))
