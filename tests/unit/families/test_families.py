"""What is particular to each family; what they share is in tests/contract/test_families.py."""

from __future__ import annotations

import math
import warnings
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credo.errors import DataError, UnsupportedError
from credo.families import Delta, DiagGaussian, Empirical, links
from credo.types import Segment

F64 = torch.float64
LINKS = [links.EXP, links.SOFTPLUS]


def gaussian(size: int = 5) -> DiagGaussian:
    g = torch.Generator().manual_seed(1)
    mean = torch.randn(size, generator=g, dtype=F64)
    return DiagGaussian(mean, torch.rand(size, generator=g, dtype=F64) + 0.1)


# --- links ------------------------------------------------------------------------------------


def exact_softplus(rho: float) -> float:
    with localcontext(prec=60):
        return float((1 + Decimal(rho).exp()).ln())


@settings(deadline=None, max_examples=100)
@given(st.floats(-80, 300))
def test_softplus_is_exact_to_rounding(rho: float) -> None:
    sigma = links.SOFTPLUS.forward(torch.tensor(rho, dtype=F64)).item()
    # exp, log1p and their composition: a few units in the last place (2e-16 each).
    assert sigma == pytest.approx(exact_softplus(rho), rel=2e-15)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("sigma", [1e-300, 1e-30, 4.54e-5, 0.7, 1.0, 36.0, 200.0])
def test_link_undoes_its_inverse(link: links.Link, sigma: float) -> None:
    rho = link.inverse(torch.tensor(sigma, dtype=F64))
    # σ = e^ρ turns the rounding of ρ (|ρ|·2e-16 at most 700·2e-16) into a relative error.
    assert link.forward(rho).item() == pytest.approx(sigma, rel=5e-13)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_link_derivative_is_the_gradient_of_forward(link: links.Link) -> None:
    rho = torch.tensor([-600.0, -40.0, -1.0, 0.0, 3.0, 39.0, 41.0, 500.0], dtype=F64)
    rho.requires_grad_()
    (gradient,) = torch.autograd.grad(link.forward(rho).sum(), rho)
    torch.testing.assert_close(link.derivative(rho).detach(), gradient, rtol=1e-14, atol=0)


def test_softplus_survives_extremes_in_float32() -> None:
    rho = torch.tensor([-1000.0, -80.0, 89.0, 1e30])
    sigma = links.SOFTPLUS.forward(rho)
    assert sigma[1] > 0
    assert torch.equal(sigma[[0, 2, 3]], torch.tensor([0.0, 89.0, 1e30]))
    assert torch.isfinite(links.SOFTPLUS.derivative(rho)).all()
    assert links.SOFTPLUS.inverse(torch.tensor(1e30)) == 1e30


def test_initial_scale_of_the_thesis() -> None:
    assert links.SOFTPLUS.forward(torch.tensor(-10.0)).item() == pytest.approx(4.54e-5, rel=1e-4)


def test_unknown_link_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"'relu'.*exp.*softplus"):
        links.by_name("relu")


# --- DiagGaussian -----------------------------------------------------------------------------


def test_gaussian_density_and_entropy_are_torchs() -> None:
    q = gaussian()
    reference = torch.distributions.Independent(torch.distributions.Normal(q.mean, q.scale), 1)
    w = torch.randn(3, 4, q.size, dtype=F64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(q.log_prob(w), reference.log_prob(w), rtol=1e-13, atol=0)
    torch.testing.assert_close(q.entropy(), reference.entropy(), rtol=1e-13, atol=0)
    assert q.log_prob(w).shape == (3, 4)


@pytest.mark.parametrize("which", ["mean", "scale"])
def test_a_number_stands_for_a_constant_vector(which: str) -> None:
    tensors = {"mean": torch.tensor(0.5, dtype=F64), "scale": torch.tensor(0.5, dtype=F64)}
    other = {"mean": "scale", "scale": "mean"}[which]
    full = {which: tensors[which], other: tensors[other].repeat(4)}
    q, reference = (
        DiagGaussian(**full),
        DiagGaussian(**{k: v.repeat(4) for k, v in tensors.items()}),
    )
    w = torch.linspace(-1, 1, 4, dtype=F64)
    assert getattr(q, which).stride() == (0,)
    assert q.log_prob(w) == reference.log_prob(w)
    assert q.entropy() == reference.entropy()
    assert torch.equal(q.grad_log_prob(w), reference.grad_log_prob(w))


def test_an_isotropic_gaussian_takes_two_numbers_on_disk() -> None:
    q = DiagGaussian(torch.zeros(()).expand(10**6), torch.ones(()))
    tensors, meta = q.pack()
    assert {name: t.numel() for name, t in tensors.items()} == {"mean": 1, "scale": 1}
    assert DiagGaussian.unpack(tensors, meta).scale.stride() == (0,)


def test_casting_an_isotropic_gaussian_keeps_it_free_of_memory() -> None:
    segment = Segment("w", (1000,), 0, 1000, 1, 1, "", "Linear")
    q = DiagGaussian(torch.zeros(()).expand(1000), torch.ones(()))
    assert q.on([segment], like=torch.zeros(1000, dtype=F64)).scale.stride() == (0,)


def test_draw_writes_in_place_what_sample_returns() -> None:
    q = gaussian()
    eps = torch.randn(2, q.size, dtype=F64, generator=torch.Generator().manual_seed(3))
    out = torch.empty(2, q.size, dtype=F64)
    address = out.data_ptr()
    assert q.draw_(out, eps) is out
    assert out.data_ptr() == address
    torch.testing.assert_close(out, q.sample(2, torch.Generator().manual_seed(3)), rtol=0, atol=0)
    q.draw_(eps, eps)
    assert torch.equal(eps, out)


def test_draw_leaves_no_graph_behind_trainable_parameters() -> None:
    mean = torch.zeros(3, requires_grad=True)
    q = DiagGaussian(mean, torch.zeros(3, requires_grad=True).exp())
    assert not q.draw_(torch.empty(3), torch.ones(3)).requires_grad


def test_sampling_is_differentiable() -> None:
    mean = torch.zeros(3, dtype=F64, requires_grad=True)
    rho = torch.full((3,), -1.0, dtype=F64, requires_grad=True)
    q = DiagGaussian(mean, rho.exp())
    w = q.sample(1, torch.Generator().manual_seed(0))
    w.sum().backward()
    assert torch.equal(mean.grad, torch.ones(3, dtype=F64))
    torch.testing.assert_close(rho.grad, w.detach()[0])


def test_gradient_survives_scales_whose_square_underflows() -> None:
    q = DiagGaussian(torch.zeros(1), torch.tensor([1e-25]))
    assert q.grad_log_prob(torch.tensor([1e-25])).item() == pytest.approx(-1e25, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        (torch.zeros(()), torch.ones(()), "expand one"),
        (torch.zeros(3), torch.ones(2), r"\(3,\) and \(2,\)"),
        (torch.zeros(3), torch.ones(1), r"\(3,\) and \(1,\)"),
        (torch.zeros(2, 3), torch.ones(2, 3), r"\(2, 3\)"),
        (torch.zeros(3), torch.ones(3, dtype=F64), "one dtype"),
        (torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), "floating"),
    ],
)
def test_gaussian_refuses(mean: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DiagGaussian(mean, scale)


# --- Delta ------------------------------------------------------------------------------------


def test_delta_refuses_what_is_no_vector() -> None:
    with pytest.raises(DataError, match=r"\(2, 2\)"):
        Delta(torch.zeros(2, 2))


def test_delta_tells_how_to_score_a_point_estimate() -> None:
    with pytest.raises(UnsupportedError, match=r"prior\.log_prob\(mean\)"):
        Delta(torch.zeros(2)).log_prob(torch.zeros(2))


# --- Empirical --------------------------------------------------------------------------------


def test_weighted_bag_equals_a_bag_with_repeats() -> None:
    rows = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    weighted = Empirical(rows, torch.tensor([2.0, 1.0, 3.0], dtype=F64))
    repeated = Empirical(rows.repeat_interleave(torch.tensor([2, 1, 3]), dim=0))
    torch.testing.assert_close(weighted.mean, repeated.mean)
    torch.testing.assert_close(weighted.variance, repeated.variance)


def test_bag_is_a_sequence_of_its_samples() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    bag = Empirical(rows)
    assert len(bag) == 3
    assert bag[1].data_ptr() == rows[1].data_ptr()
    assert torch.equal(torch.stack(list(bag)), rows)


def test_draws_follow_the_weights_and_skip_zeros() -> None:
    bag = Empirical(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([3.0, 0.0, 1.0]))
    draws = bag.sample(10_000, torch.Generator().manual_seed(0)).squeeze(1)
    assert not (draws == 1).any()
    share = (draws == 0).double().mean().item()
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 10_000)


def test_constant_weights_survive_storage() -> None:
    bag = Empirical(torch.zeros(3, 2), torch.ones(()).expand(3))
    restored = Empirical.unpack(*bag.pack())
    assert restored.weights is not None
    assert torch.equal(restored.weights, torch.ones(3))


def test_a_single_sample_has_zero_variance_and_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(Empirical(torch.ones(1, 2)).variance, torch.zeros(2))


@pytest.mark.parametrize(
    ("samples", "weights", "message"),
    [
        (torch.zeros(3), None, r"\(S, P\)"),
        (torch.zeros(0, 3), None, "S ≥ 1"),
        (torch.zeros(2, 3), torch.ones(3), "one per sample"),
        (torch.zeros(2, 3), torch.tensor([1.0, -1.0]), "not negative"),
        (torch.zeros(2, 3), torch.zeros(2), "not all zero"),
        (torch.zeros(2, 3), torch.tensor([1.0, math.nan]), "finite"),
        (torch.zeros(2, 3), torch.ones(2, dtype=F64), "one dtype"),
    ],
)
def test_bag_refuses(samples: torch.Tensor, weights: torch.Tensor | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Empirical(samples, weights)
