"""Every family and every prior through one table. A new one is a new row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import pytest
import safetensors.torch
import torch
from torch import Tensor

from credo import families, priors
from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.families import (
    Delta,
    DiagGaussian,
    EigenBlock,
    EigenKroneckerGaussian,
    Empirical,
    FactorGaussian,
    Family,
    FixedGaussian,
    FullGaussian,
    GaussianMixture,
    LowRankGaussian,
    Mixture,
)
from credo.priors import (
    ElasticNet,
    GroupLasso,
    Laplace,
    Normal,
    RadialTabulated,
    ScaleMixture,
    Tabulated,
)
from credo.rule.families import KroneckerGaussian, SignBernoulli
from credo.types import FlatDistribution, Prior, Segment

P = 6
SEGMENTS = [
    Segment("body.weight", (2, 2), 10, 14, 2, 2, "body", "Linear"),
    Segment("head.bias", (2,), 3, 5, 4, 2, "head", "Linear"),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definite(size: int, seed: int, dtype: torch.dtype) -> Tensor:
    root = numbers(size, size, seed=seed)
    return (root @ root.mT + torch.eye(size, dtype=torch.float64)).to(dtype)


def full(seed: int, dtype: torch.dtype) -> FullGaussian:
    return FullGaussian(numbers(P, seed=seed + 3).to(dtype), definite(P, seed, dtype))


FAMILIES: dict[str, Callable[[torch.dtype], Family]] = {
    "delta": lambda dtype: Delta(numbers(P).to(dtype)),
    "gaussian": lambda dtype: DiagGaussian(
        numbers(P).to(dtype), numbers(P, seed=1).exp().to(dtype)
    ),
    "isotropic gaussian": lambda dtype: DiagGaussian(
        torch.zeros((), dtype=dtype).expand(P), torch.full((), 0.3, dtype=dtype)
    ),
    "full gaussian": lambda dtype: full(0, dtype),
    "fixed gaussian": lambda dtype: FixedGaussian(numbers(P).to(dtype), definite(P, 1, dtype)),
    "low-rank gaussian": lambda dtype: LowRankGaussian(
        numbers(P).to(dtype), numbers(P, 2, seed=1).to(dtype), numbers(P, seed=2).exp().to(dtype)
    ),
    "factor gaussian": lambda dtype: FactorGaussian(
        numbers(P).to(dtype), numbers(P, 2, seed=1).to(dtype), numbers(P, seed=2).exp().to(dtype)
    ),
    "kronecker gaussian": lambda dtype: KroneckerGaussian(
        numbers(P).to(dtype), ((definite(2, 0, dtype), definite(3, 1, dtype)),)
    ),
    "eigen-kronecker gaussian": lambda dtype: EigenKroneckerGaussian(
        numbers(P).to(dtype),
        (
            EigenBlock.of_factors(definite(2, 0, dtype), definite(2, 1, dtype), shift=0.5),
            EigenBlock(None, None, numbers(2, 1, seed=2).exp().to(dtype)),
        ),
    ),
    "mixture of gaussians": lambda dtype: GaussianMixture(
        numbers(1).to(dtype), (full(0, dtype), full(1, dtype))
    ),
    "mixture of any": lambda dtype: Mixture(
        (full(0, dtype), DiagGaussian(numbers(P).to(dtype), numbers(P, seed=1).exp().to(dtype)))
    ),
    "mixture of points": lambda dtype: Mixture(
        (Delta(numbers(P).to(dtype)), Delta(numbers(P, seed=1).to(dtype)))
    ),
    "signs": lambda dtype: SignBernoulli(numbers(P).to(dtype)),
    "bag": lambda dtype: Empirical(numbers(5, P).to(dtype)),
    "weighted bag": lambda dtype: Empirical(
        numbers(5, P).to(dtype), torch.tensor([1, 2, 0, 4, 5], dtype=dtype)
    ),
}
QUARTIC = tuple(-((0.025 * i - 3.0) ** 4) for i in range(241))
"""The table of −x⁴, whose slope and curvature at 3 are both −108."""
PRIORS: dict[str, Prior] = {
    "normal": Normal(0.5, mean=-0.3),
    "fan-in": Normal.fan_in(gain=2.0),
    "glorot": Normal.glorot(),
    "kaiming": Normal.kaiming(a=0.1),
    "per layer": Normal.per_layer({"head": 0.1, "*": 2.0}, default=1.0),
    "laplace": Laplace(0.5),
    "laplace by fan-in": Laplace(priors.scales.FanIn()),
    "mixture": ScaleMixture(0.25, 1.0, 0.1),
    "spike and slab": ScaleMixture.spike_and_slab(),
    "group lasso": GroupLasso(0.5),
    "transposed group lasso": GroupLasso.fan_in(gain=2.0, groups="outgoing"),
    "elastic net": ElasticNet(0.5, l1_ratio=0.2),
    "elastic net by fan-in": ElasticNet.fan_in(),
    "tabulated": Tabulated(-3.0, 0.025, QUARTIC, left=(-108.0, -108.0), right=(-108.0, -108.0)),
    "tabulated by radius": RadialTabulated(2, 0.025, QUARTIC[120:], right=(-108.0, -108.0)),
}
DTYPES = [torch.float32, torch.float64]

every_family = pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_tables_are_complete() -> None:
    made = {type(make(torch.float64)) for make in FAMILIES.values()}
    assert made == set(families.FAMILIES.values())
    assert {type(prior) for prior in PRIORS.values()} == set(priors.PRIORS.values())


def distribution_rows() -> list[tuple[str, Callable[[torch.dtype], FlatDistribution]]]:
    rows: list[tuple[str, Callable[[torch.dtype], FlatDistribution]]] = list(FAMILIES.items())
    for name, prior in PRIORS.items():
        rows.append(
            (name, lambda dtype, prior=prior: prior.on(SEGMENTS, torch.zeros(20, dtype=dtype)))
        )
    return rows


ROWS = distribution_rows()
ATOMIC = {name for name, make in FAMILIES.items() if not make(torch.float64).is_continuous} - {
    "signs"
}
DISCRETE = {"signs"}
"""Families with probabilities where others have densities: nothing to differentiate."""
NO_ENTROPY = {"mixture of gaussians", "mixture of any"}
"""Families whose entropy has no closed form; they refuse it and offer an estimate."""


def over(names: Iterable[str]) -> pytest.MarkDecorator:
    rows = dict(ROWS)
    chosen = [name for name in rows if name in set(names)]
    return pytest.mark.parametrize("make", [rows[name] for name in chosen], ids=chosen)


every_distribution = over(dict(ROWS))
every_density = over(dict(ROWS).keys() - ATOMIC - DISCRETE)
every_atomic_family = over(ATOMIC)
every_family_with_entropy = over(FAMILIES.keys() - ATOMIC - NO_ENTROPY)


# --- all distributions: families, and priors on segments -----------------------------------------


@every_distribution
@every_dtype
def test_samples_are_of_the_right_kind(
    make: Callable[[torch.dtype], FlatDistribution], dtype: torch.dtype
) -> None:
    q = make(dtype)
    assert isinstance(q, FlatDistribution)
    assert q.size == P
    draws = q.sample(4, torch.Generator().manual_seed(0))
    assert (draws.shape, draws.dtype) == ((4, P), dtype)
    assert torch.equal(draws, q.sample(4, torch.Generator().manual_seed(0)))


@every_distribution
def test_the_global_generator_is_left_alone(
    make: Callable[[torch.dtype], FlatDistribution],
) -> None:
    q, before = make(torch.float64), torch.get_rng_state()
    q.sample(3, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


@every_distribution
def test_samples_own_their_memory(make: Callable[[torch.dtype], FlatDistribution]) -> None:
    q, g = make(torch.float64), torch.Generator()
    expected = q.sample(3, g.manual_seed(0)).clone()
    q.sample(3, g.manual_seed(0)).zero_()
    assert torch.equal(q.sample(3, g.manual_seed(0)), expected)


@every_distribution
def test_no_samples_is_a_named_error(make: Callable[[torch.dtype], FlatDistribution]) -> None:
    with pytest.raises(DataError, match="at least 1, got 0"):
        make(torch.float64).sample(0)


@every_atomic_family
def test_what_needs_a_density_is_refused_with_the_reason(
    make: Callable[[torch.dtype], Family],
) -> None:
    q, w = make(torch.float64), numbers(P)
    for call in (lambda: q.log_prob(w), lambda: q.grad_log_prob(w), q.entropy):
        with pytest.raises(UnsupportedError, match=r"points|point mass|no closed form"):
            call()


@every_density
def test_gradient_in_closed_form_is_autograds(
    make: Callable[[torch.dtype], FlatDistribution],
) -> None:
    q = make(torch.float64)
    w = numbers(3, P, seed=2).requires_grad_()
    log_prob = q.log_prob(w)
    assert log_prob.shape == (3,)
    (expected,) = torch.autograd.grad(log_prob.sum(), w)
    torch.testing.assert_close(q.grad_log_prob(w.detach()), expected, rtol=1e-12, atol=1e-12)


@every_density
def test_points_of_another_size_are_a_named_error(
    make: Callable[[torch.dtype], FlatDistribution],
) -> None:
    q = make(torch.float64)
    for wrong in (torch.zeros(P + 1), torch.zeros(P, 1), torch.zeros(())):
        with pytest.raises(DataError, match=rf"\(\.\.\., {P}\)"):
            q.log_prob(wrong.double())
        with pytest.raises(DataError, match=rf"\(\.\.\., {P}\)"):
            q.grad_log_prob(wrong.double())


@every_density
def test_density_is_the_one_samples_come_from(
    make: Callable[[torch.dtype], FlatDistribution],
) -> None:
    """Stein's identity E ∇log q(w)·w = −P holds only if draws and density belong together."""
    q = make(torch.float64)
    draws = q.sample(20_000, torch.Generator().manual_seed(0))
    products = (q.grad_log_prob(draws) * draws).sum(-1)
    assert abs(products.mean() + P) < 5 * products.std() / math.sqrt(len(products))


# --- families -------------------------------------------------------------------------------------


@every_family
@every_dtype
def test_moments_are_those_of_the_samples(
    make: Callable[[torch.dtype], Family], dtype: torch.dtype
) -> None:
    q = make(dtype)
    assert q.mean.shape == q.variance.shape == (P,)
    assert q.mean.dtype == q.variance.dtype == q.scale.dtype == dtype
    torch.testing.assert_close(q.scale.square(), q.variance)
    draws = q.sample(20_000, torch.Generator().manual_seed(0)).double()
    squares = (draws - q.mean.double()).square()
    rounding = 1e-6
    for values, expected in ((draws, q.mean), (squares, q.variance)):
        error = (values.mean(0) - expected.double()).abs()
        assert (error <= 5 * values.std(0) / math.sqrt(len(values)) + rounding).all()


@every_family_with_entropy
def test_entropy_is_minus_the_expected_log_density(make: Callable[[torch.dtype], Family]) -> None:
    q = make(torch.float64)
    values = -q.log_prob(q.sample(20_000, torch.Generator().manual_seed(0)))
    assert abs(values.mean() - q.entropy()) < 5 * values.std() / math.sqrt(len(values))


@every_family
@every_dtype
def test_storage_is_exact(make: Callable[[torch.dtype], Family], dtype: torch.dtype) -> None:
    q = make(dtype)
    tensors, meta = q.pack()
    stored = safetensors.torch.load(safetensors.torch.save(tensors))
    restored = families.unpack(stored, json.loads(json.dumps(meta)))
    assert type(restored) is type(q)
    again, meta_again = restored.pack()
    assert meta_again == meta
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert all(tensor.dtype == dtype for tensor in again.values())
    g = torch.Generator()
    assert torch.equal(restored.sample(3, g.manual_seed(0)), q.sample(3, g.manual_seed(0)))


@every_family
def test_storage_carries_no_graph(make: Callable[[torch.dtype], Family]) -> None:
    tensors, meta = make(torch.float64).pack()
    trained = {
        name: t.clone().requires_grad_() if name != "weights" else t for name, t in tensors.items()
    }
    packed, _ = families.unpack(trained, meta).pack()
    assert not any(t.requires_grad for t in packed.values())


@every_family
def test_a_family_is_its_own_prior(make: Callable[[torch.dtype], Family]) -> None:
    q = make(torch.float64)
    assert q.on(SEGMENTS, like=torch.zeros(20, dtype=torch.float64)) is q
    cast = q.on(SEGMENTS, like=torch.zeros(20))
    assert (type(cast), cast.mean.dtype) == (type(q), torch.float32)
    torch.testing.assert_close(cast.mean, q.mean.float())
    with pytest.raises(DataError, match=r"over 6 weights.*hold 4"):
        q.on(SEGMENTS[:1], like=torch.zeros(20))


@every_family
def test_config_of_a_family_says_that_tensors_are_elsewhere(
    make: Callable[[torch.dtype], Family],
) -> None:
    q = make(torch.float64)
    assert q.config() == {"type": type(q).__name__, "stored": True}
    with pytest.raises(UnsupportedError, match=r"families\.unpack"):
        priors.from_config(q.config())


@every_family
def test_damaged_storage_is_a_named_error(make: Callable[[torch.dtype], Family]) -> None:
    tensors, meta = make(torch.float64).pack()
    name = next(iter(tensors))
    hurt = tensors[name].clone()
    hurt.view(-1)[0] = math.nan
    damaged = [
        ({**tensors, name: hurt}, meta, "not finite"),
        ({**tensors, "extra": torch.zeros(1)}, meta, "extra"),
        ({}, meta, r"got \[\]"),
        ({**tensors, name: torch.zeros(P, P, P)}, meta, "don't fit"),
        ({**tensors, name: tensors[name].long()}, meta, "floating"),
        (tensors, {**meta, "size": "6"}, "positive integer"),
        (tensors, {**meta, "size": -1}, "positive integer"),
        (tensors, {"type": meta["type"]}, "positive integer"),
        (tensors, {**meta, "type": "Cauchy"}, "'Cauchy'"),
        (tensors, {**meta, "type": ["Delta"]}, "no family"),
    ]
    for bad_tensors, bad_meta, message in damaged:
        with pytest.raises(FileFormatError, match=message):
            families.unpack(bad_tensors, bad_meta)


@pytest.mark.parametrize("name", ["delta", "gaussian", "bag", "weighted bag"])
def test_a_size_that_lies_is_a_named_error(name: str) -> None:
    tensors, meta = FAMILIES[name](torch.float64).pack()
    with pytest.raises(FileFormatError, match="size 7"):
        families.unpack(tensors, {**meta, "size": P + 1})


def test_a_negative_stored_scale_is_a_named_error() -> None:
    tensors, meta = FAMILIES["gaussian"](torch.float64).pack()
    with pytest.raises(FileFormatError, match="negative"):
        families.unpack({**tensors, "scale": -tensors["scale"]}, meta)


# --- priors ---------------------------------------------------------------------------------------


@every_prior
@every_dtype
def test_scale_is_the_standard_deviation_of_the_samples(prior: Prior, dtype: torch.dtype) -> None:
    p = prior.on(SEGMENTS, torch.zeros(20, dtype=dtype))
    assert (p.scale.shape, p.scale.dtype) == ((P,), dtype)
    draws = p.sample(40_000, torch.Generator().manual_seed(0)).double()
    squares = (draws - draws.mean(0)).square()
    error = (squares.mean(0) - p.scale.double().square()).abs()
    assert (error < 5 * squares.std(0) / math.sqrt(len(squares))).all()


@every_prior
def test_config_survives_json(prior: Prior) -> None:
    # Keys are sorted as some writers do: no prior may depend on their order.
    config = json.loads(json.dumps(prior.config(), sort_keys=True))
    assert priors.from_config(config) == prior


@every_prior
def test_segments_count_in_the_order_given(prior: Prior) -> None:
    like = torch.zeros(20, dtype=torch.float64)
    forward = prior.on(SEGMENTS, like).scale
    backward = prior.on(SEGMENTS[::-1], like).scale
    assert torch.equal(forward, torch.cat([backward[2:], backward[:2]]))


@every_prior
def test_a_prior_over_nothing_is_a_named_error(prior: Prior) -> None:
    with pytest.raises(DataError, match="at least one weight"):
        prior.on([], torch.zeros(20))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Normal(0.0),
            "scale must be a positive finite number or a ScaleRule, but it is 0.0",
        ),
        (lambda: Normal(-1.0), "positive"),
        (lambda: Normal(math.inf), "finite"),
        (lambda: Normal("1"), "'1'"),
        (lambda: Normal(1.0, mean=math.nan), "mean must be a finite number"),
        (lambda: Normal.fan_in(gain=0.0), "gain"),
        (lambda: Normal.kaiming(a=math.inf), "a must be"),
        (lambda: Normal.per_layer({"head": 0.0}), "'head'"),
        (lambda: Normal.per_layer({}, default=-1.0), "default"),
        (lambda: Laplace(0.0), "scale"),
        (lambda: ScaleMixture(pi=0.0), "pi"),
        (lambda: ScaleMixture(pi=1.0), "less than 1.*Normal"),
        (lambda: ScaleMixture(scale1=0.0), "scale1"),
        (lambda: ScaleMixture(scale2=math.nan), "scale2"),
        (lambda: GroupLasso(-1.0), "scale"),
        (lambda: GroupLasso(groups="sideways"), "incoming.*sideways"),
        (lambda: ElasticNet(l1_ratio=0.0), "l1_ratio"),
        (lambda: ElasticNet(l1_ratio=1.0), r"less than 1.*Laplace"),
        (lambda: priors.from_config({"type": "Cauchy"}), "'Cauchy'.*Laplace, Normal"),
        (lambda: priors.from_config({}), "None"),
        (lambda: priors.from_config({"type": "Normal", "width": 1.0}), "width"),
        (lambda: priors.from_config({"type": "Normal", "scale": {"rule": "x"}}), "'x'.*FanIn"),
        (
            lambda: priors.from_config({"type": "Normal", "scale": {"rule": "Glorot", "a": 1}}),
            "Glorot",
        ),
        (
            lambda: priors.from_config(
                {"type": "Normal", "scale": {"rule": "PerLayer", "table": 1}}
            ),
            "PerLayer",
        ),
    ],
)
def test_bad_settings_are_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()
