"""Every Gaussian and every mixture as a family over weights: drawn, walked, stored, cast."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from gaussians import (
    F64,
    FAMILIES,
    MIXTURES,
    P,
    close,
    full,
    numbers,
)

from credo.errors import DataError, FileFormatError
from credo.families.base import Family
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian_mixture import GaussianMixture
from credo.noise import source
from credo.types import Segment

every_family = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)


@every_family
@every_dtype
def test_draws_are_of_the_right_kind(
    make: Callable[[torch.dtype], Family], dtype: torch.dtype
) -> None:
    q, before = make(dtype), torch.get_rng_state()
    draws = q.sample(5, torch.Generator().manual_seed(0))
    assert (draws.shape, draws.dtype) == ((5, P), dtype)
    expected = draws.clone()
    draws.zero_()
    assert torch.equal(q.sample(5, torch.Generator().manual_seed(0)), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert q.log_prob(expected).dtype == q.variance.dtype == q.scale.dtype == dtype
    with pytest.raises(DataError, match="at least 1, got 0"):
        q.sample(0)
    with pytest.raises(DataError, match=rf"\(\.\.\., {P}\)"):
        q.log_prob(torch.zeros(P + 1, dtype=dtype))
    with pytest.raises(DataError, match=rf"\(\.\.\., {P}\)"):
        q.grad_log_prob(torch.zeros(P + 1, dtype=dtype))


@every_family
def test_gradient_in_closed_form_is_autodiffs(make: Callable[[torch.dtype], Family]) -> None:
    q, w = make(F64), numbers(3, P, seed=2).requires_grad_()
    (expected,) = torch.autograd.grad(q.log_prob(w).sum(), w)
    close(q.grad_log_prob(w.detach()), expected)


@every_family
def test_walk_draws_from_the_family_into_the_buffer(make: Callable[[torch.dtype], Family]) -> None:
    q, out, n = make(F64), torch.empty(P, dtype=F64), 5_000
    draws = []
    for draw in q.walk(n, source("normal", 3), out):
        assert draw.data_ptr() == out.data_ptr()
        draws.append(draw.clone())
    walked = torch.stack(draws)
    again = [draw.clone() for draw in q.walk(3, source("normal", 3), out)]
    assert torch.equal(torch.stack(again), walked[:3])
    # Stein: E ∇log q(w)·w = −P holds only if draws and density belong together.
    products = (q.grad_log_prob(walked) * walked).sum(-1)
    assert abs(products.mean() + P) < 5 * products.std() / math.sqrt(n)
    error = walked.mean(0) - q.mean
    assert (error.abs() < 5 * walked.std(0) / math.sqrt(n)).all()
    with pytest.raises(DataError, match="at least 1, got 0"):
        next(q.walk(0, source("normal", 3), out))


@every_family
@every_dtype
def test_storage_round_trips(make: Callable[[torch.dtype], Family], dtype: torch.dtype) -> None:
    q = make(dtype)
    tensors, meta = q.pack()
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    restored = type(q).unpack(tensors, meta)
    assert restored.mean.dtype == dtype
    w = numbers(3, P).to(dtype)
    assert torch.equal(restored.log_prob(w), q.log_prob(w))


@every_family
def test_a_family_is_the_prior_of_its_own_network(make: Callable[[torch.dtype], Family]) -> None:
    q = make(F64)
    segment = Segment("w", (P,), 0, P, 1, 1, "", "Linear")
    assert q.on([segment], like=torch.zeros(1, dtype=F64)) is q
    cast = q.on([segment], like=torch.zeros(1))
    w = numbers(3, P).float()
    # Curvature of order 10 at distances of order 10, in float32.
    torch.testing.assert_close(cast.log_prob(w), q.log_prob(w.double()).float(), rtol=1e-4, atol=0)


@every_family
def test_damaged_storage_is_a_named_error(make: Callable[[torch.dtype], Family]) -> None:
    q = make(F64)
    tensors, meta = q.pack()
    damaged = [
        ({**tensors, "mean": tensors["mean"] * math.nan}, meta, "not finite"),
        ({**tensors, "extra": torch.zeros(1)}, meta, "extra"),
        ({}, meta, r"got \[\]"),
        ({**tensors, "mean": torch.zeros(P, P, P)}, meta, "don't fit"),
        ({**tensors, "mean": torch.zeros(())}, meta, "don't fit"),
        ({**tensors, "mean": tensors["mean"].long()}, meta, "floating"),
        (tensors, {**meta, "size": "6"}, "positive integer"),
        (tensors, {**meta, "size": P + 1}, f"size {P + 1}|don't fit"),
    ]
    for bad_tensors, bad_meta, message in damaged:
        with pytest.raises(FileFormatError, match=message):
            type(q).unpack(bad_tensors, bad_meta)


def test_damage_particular_to_a_family_is_a_named_error() -> None:
    tensors, meta = full().pack()
    with pytest.raises(FileFormatError, match=r"precision.*eigenvalue"):
        FullGaussian.unpack({**tensors, "precision": -tensors["precision"]}, meta)
    with pytest.raises(FileFormatError, match="don't fit"):
        FullGaussian.unpack({**tensors, "precision": torch.ones((), dtype=F64)}, meta)
    tensors, meta = MIXTURES["diagonal mixture"](F64).pack()
    for bad_tensors, bad_meta, message in (
        ({**tensors, "log_odds": tensors["log_odds"] * math.nan}, meta, "log_odds.*not finite"),
        ({**tensors, "log_odds": torch.zeros(3, dtype=F64)}, meta, "don't fit"),
        ({**tensors, "log_odds": torch.zeros(2)}, meta, "one dtype"),
        ({**tensors, "scale": tensors["scale"][0]}, meta, "don't fit"),
        ({**tensors, "scale": -tensors["scale"]}, meta, "negative"),
        (tensors, {**meta, "component": "Cauchy"}, "'Cauchy'"),
        (tensors, {**meta, "component": ["DiagGaussian"]}, "component"),
        (tensors, {**meta, "component": "FullGaussian"}, "precision"),
    ):
        with pytest.raises(FileFormatError, match=message):
            GaussianMixture.unpack(bad_tensors, bad_meta)
