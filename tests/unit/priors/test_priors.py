"""What is particular to each prior; what they share is in tests/contract/test_families.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions

from credo.errors import DataError
from credo.priors import Laplace, Normal, ScaleMixture
from credo.priors.scales import FanIn
from credo.types import Segment

F64 = torch.float64
# Out of the order of the flat vector and with gaps, as a subset of a network's segments can be.
CONV = Segment("conv.weight", (2, 3, 2, 2), 100, 124, 12, 8, "conv", "Conv2d")
CONV_BIAS = Segment("conv.bias", (2,), 40, 42, 12, 8, "conv", "Conv2d")
HEAD = Segment("net.head.weight", (3, 5), 0, 15, 5, 3, "net.head", "Linear")
SEGMENTS = [CONV, CONV_BIAS, HEAD]
LIKE = torch.zeros(200, dtype=F64)


def stds(prior: Normal | Laplace) -> list[float]:
    """One scale per segment, after checking that it is constant inside each."""
    parts = prior.on(SEGMENTS, LIKE).scale.split([24, 2, 15])
    assert all((part == part[0]).all() for part in parts)
    return [part[0].item() for part in parts]


def test_isotropic_normal_is_torchs_and_takes_no_memory() -> None:
    p = Normal(scale=0.3, mean=0.1).on(SEGMENTS, LIKE)
    w = torch.randn(41, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = distributions.Normal(torch.tensor(0.1, dtype=F64), 0.3).log_prob(w).sum()
    torch.testing.assert_close(p.log_prob(w), expected, rtol=1e-13, atol=0)
    assert p.mean.stride() == p.scale.stride() == (0,)


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        (Normal.fan_in(), [12**-0.5, 12**-0.5, 5**-0.5]),
        (Normal.fan_in(gain=3.0), [3 * 12**-0.5, 3 * 12**-0.5, 3 * 5**-0.5]),
        (Normal.glorot(), [0.1**0.5, 0.1**0.5, 0.5]),
        (Normal.kaiming(), [6**-0.5, 6**-0.5, 0.4**0.5]),
        (Normal.kaiming(a=2.0), [30**-0.5, 30**-0.5, 0.08**0.5]),
        (Laplace(FanIn()), [12**-0.5, 12**-0.5, 5**-0.5]),
    ],
)
def test_scale_rules_read_the_fans(prior: Normal | Laplace, expected: list[float]) -> None:
    assert stds(prior) == pytest.approx(expected, rel=1e-14)


def test_rules_agree_with_torchs_initialisers() -> None:
    weight = torch.empty(300, 400, dtype=F64)
    g = torch.Generator().manual_seed(0)
    segment = Segment("w", (300, 400), 0, weight.numel(), 400, 300, "", "Linear")
    for prior, init in [
        (Normal.glorot(), torch.nn.init.xavier_normal_),
        (Normal.kaiming(), torch.nn.init.kaiming_normal_),
    ]:
        init(weight, generator=g)
        scale = prior.on([segment], weight.flatten()).scale[0].item()
        # The standard error of a normal's standard deviation from n draws is σ/√(2n).
        assert abs(weight.std().item() / scale - 1) < 5 / math.sqrt(2 * weight.numel())


def test_per_layer_prefers_exact_names_then_the_first_glob() -> None:
    table = {"*": 9.0, "net.*": 8.0, "conv.bias": 2.0, "net.head": 3.0}
    assert stds(Normal.per_layer(table)) == [9.0, 2.0, 3.0]
    assert stds(Normal.per_layer({"conv": 2.0}, default=0.5)) == [2.0, 2.0, 0.5]


def test_per_layer_names_what_nothing_matches() -> None:
    with pytest.raises(DataError, match=r"'net\.head\.weight'.*default"):
        Normal.per_layer({"conv": 2.0}).on(SEGMENTS, LIKE)


def test_a_rule_that_gives_one_scale_takes_no_memory() -> None:
    assert Normal.fan_in().on([CONV, CONV_BIAS], LIKE).scale.stride() == (0,)


def test_a_layer_without_inputs_gets_a_named_error() -> None:
    bias = Segment("empty.bias", (5,), 0, 5, 0, 5, "empty", "Linear")
    with pytest.raises(DataError, match=r"empty\.bias"):
        Normal.kaiming().on([bias], LIKE)


def test_laplace_scale_is_a_standard_deviation() -> None:
    p = Laplace(scale=0.7).on([HEAD], LIKE)
    reference = distributions.Laplace(torch.tensor(0.0, dtype=F64), 0.7 / math.sqrt(2))
    assert reference.stddev.item() == pytest.approx(0.7, rel=1e-15)
    w = torch.randn(15, dtype=F64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(p.log_prob(w), reference.log_prob(w).sum(), rtol=1e-13, atol=0)


def test_laplace_gradient_is_zero_at_the_kink() -> None:
    assert not Laplace().on([HEAD], LIKE).grad_log_prob(torch.zeros(15, dtype=F64)).any()


def test_l1_penalty_is_the_laplace_prior_of_its_table_row() -> None:
    """λ‖w‖₁ has variance 2/λ² per coordinate, so λ = √(2P) gives variance 1/P."""
    penalty = math.sqrt(2 * 5)
    p = Laplace(FanIn()).on([HEAD], LIKE)
    w, v = torch.randn(2, 15, dtype=F64, generator=torch.Generator().manual_seed(0))
    difference = penalty * (w.abs().sum() - v.abs().sum())
    torch.testing.assert_close(p.log_prob(v) - p.log_prob(w), difference)


def test_mixture_is_torchs() -> None:
    p = ScaleMixture(pi=0.3, scale1=1.5, scale2=0.01).on([HEAD], LIKE)
    weights = distributions.Categorical(torch.tensor([0.3, 0.7], dtype=F64))
    parts = distributions.Normal(torch.zeros(2, dtype=F64), torch.tensor([1.5, 0.01], dtype=F64))
    reference = distributions.MixtureSameFamily(weights, parts)
    w = torch.linspace(-4, 4, 15, dtype=F64)
    torch.testing.assert_close(p.log_prob(w), reference.log_prob(w).sum(), rtol=1e-13, atol=0)
    assert p.scale[0].item() == pytest.approx(reference.stddev.item(), rel=1e-14)


@pytest.mark.parametrize("spike", [1e-3, 1e-20])
def test_mixture_is_finite_where_a_component_underflows(spike: float) -> None:
    p = ScaleMixture(scale2=spike).on([HEAD], torch.zeros(15))
    w = 10 * torch.arange(-7.0, 8.0)
    assert torch.isfinite(p.log_prob(w))
    # Far from the spike only the slab N(0, 1) pulls; at w = 0 nothing does.
    torch.testing.assert_close(p.grad_log_prob(w), -w)


def test_mixture_draws_have_its_fourth_moment() -> None:
    """A normal of the same variance would have 3σ⁴; the mixture has 3(π s₁⁴ + (1−π) s₂⁴)."""
    segment = Segment("w", (100_000,), 0, 100_000, 1, 1, "", "Linear")
    p = ScaleMixture(pi=0.3, scale1=2.0, scale2=0.5).on([segment], LIKE)
    fourth = p.sample(1, torch.Generator().manual_seed(0)).pow(4)
    error = fourth.mean() - 3 * (0.3 * 16 + 0.7 / 16)
    assert abs(error) < 5 * fourth.std() / math.sqrt(fourth.numel())


def test_laplace_draws_have_its_fourth_moment() -> None:
    segment = Segment("w", (100_000,), 0, 100_000, 1, 1, "", "Linear")
    fourth = Laplace(1.0).on([segment], LIKE).sample(1, torch.Generator().manual_seed(0)).pow(4)
    assert abs(fourth.mean() - 6.0) < 5 * fourth.std() / math.sqrt(fourth.numel())


def test_spike_and_slab_is_a_scale_mixture() -> None:
    prior = ScaleMixture.spike_and_slab(slab_probability=0.2, scale=2.0, spike_scale=0.01)
    assert prior == ScaleMixture(pi=0.2, scale1=2.0, scale2=0.01)
