"""Every exponential family through one table: what makes it one. A new family is a new row.

The rows are in ``tests/support/exponential_zoo.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from exponential_zoo import ROWS, Row, kl_by_torch, t
from hypothesis import given, settings
from torch import Tensor

from credo.errors import DataError
from credo.families.diag_gaussian import DiagGaussian
from credo.families.factor_gaussian import FactorGaussian
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.gaussian import Gaussian
from credo.rule.families import (
    entropy_gradient,
    expectation_parameters,
    log_base,
    log_partition,
    natural_parameters,
    parameter_names,
    sufficient_statistics,
    with_expectation,
    with_natural,
)
from credo.rule.families.categorical import Categorical
from credo.rule.families.exponential import ExponentialFamily, Member, Parameters, inner
from credo.rule.families.gamma import Gamma

EPS = torch.finfo(torch.float64).eps

every_family = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def concrete_subclasses(base: type) -> Iterator[type]:
    for subclass in base.__subclasses__():
        if not inspect.isabstract(subclass):
            yield subclass
        yield from concrete_subclasses(subclass)


def test_the_table_is_complete() -> None:
    ours = {
        family
        for base in (ExponentialFamily, Gaussian)
        for family in concrete_subclasses(base)
        if family.__module__.startswith("credo.")
    }
    # Fitted to iterates, never by the rule: its precision is no factor and diagonal.
    ours.remove(FactorGaussian)
    assert {type(row.make(0)) for row in ROWS.values()} == ours


# --- the two coordinate systems ---------------------------------------------------------------


def leaves(parameters: Parameters) -> Parameters:
    return tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)


def assert_same(
    found: Parameters, expected: Parameters, rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


@every_family
def test_expectation_is_the_gradient_of_the_log_partition(row: Row) -> None:
    q = row.make(0)
    natural = leaves(natural_parameters(q))
    value = log_partition(with_natural(row.ambient(q), natural))
    torch.testing.assert_close(log_partition(q), value.detach())
    assert_same(torch.autograd.grad(value, natural), expectation_parameters(q))


@every_family
def test_entropy_gradient_is_that_of_autodiff(row: Row) -> None:
    q = row.make(0)
    expectation = leaves(expectation_parameters(q))
    entropy = with_expectation(row.ambient(q), expectation).entropy()
    # FixedGaussian's entropy does not depend on μ at all, which leaves nothing to differentiate.
    entropy = entropy + 0.0 * sum(part.sum() for part in expectation)
    gradient = torch.autograd.grad(entropy, expectation)
    assert_same(gradient, entropy_gradient(q))
    if not isinstance(q, FixedGaussian):
        assert_same(gradient, tuple(-parameter for parameter in natural_parameters(q)))


@every_family
def test_both_coordinate_systems_name_the_same_member(row: Row) -> None:
    q = row.make(0)
    for again in (
        with_natural(q, natural_parameters(q)),
        with_expectation(q, expectation_parameters(q)),
    ):
        assert type(again) is type(q)
        assert_same(natural_parameters(again), natural_parameters(q), rtol=1e-11, atol=1e-11)
        assert_same(
            expectation_parameters(again), expectation_parameters(q), rtol=1e-11, atol=1e-11
        )


@every_family
def test_the_inverse_map_has_the_inverse_jacobian(row: Row) -> None:
    """Both maps are differentiable once everywhere: ∂λ/∂μ · ∂μ/∂λ leaves a gradient as it is."""
    q = row.make(0)
    direction = natural_parameters(row.make(7))

    natural = leaves(natural_parameters(q))
    pairing = inner(expectation_parameters(with_natural(row.ambient(q), natural)), direction)
    covector = torch.autograd.grad(pairing, natural)
    expectation = leaves(expectation_parameters(q))
    pairing = inner(natural_parameters(with_expectation(row.ambient(q), expectation)), covector)
    assert_same(torch.autograd.grad(pairing, expectation), direction)


# --- densities -----------------------------------------------------------------------------------


def draws(q: Member, n: int, seed: int = 5) -> Tensor:
    return q.sample(n, torch.Generator().manual_seed(seed))


@every_family
def test_log_prob_is_linear_in_the_statistics(row: Row) -> None:
    q = row.make(0)
    theta = draws(q, 10)
    by_definition = (
        inner(sufficient_statistics(q, theta), natural_parameters(q))
        - log_partition(q)
        + log_base(q, theta)
    )
    torch.testing.assert_close(q.log_prob(theta), by_definition, rtol=1e-10, atol=1e-10)


@every_family
def test_log_prob_entropy_and_kl_equal_torch(row: Row) -> None:
    q, p = row.make(0), row.make(3)
    theta = draws(q, 10)
    torch.testing.assert_close(q.log_prob(theta), row.reference(q).log_prob(theta))
    assert q.log_prob(theta[0]).shape == ()
    torch.testing.assert_close(q.entropy(), row.reference(q).entropy().sum())
    torch.testing.assert_close(q.kl(p), kl_by_torch(row.reference(q), row.reference(p)).sum())


@every_family
def test_kl_is_a_bregman_divergence(row: Row) -> None:
    q, p = row.make(0), row.make(3)
    difference = tuple(
        there - here
        for here, there in zip(natural_parameters(q), natural_parameters(p), strict=True)
    )
    bregman = log_partition(p) - log_partition(q) - inner(expectation_parameters(q), difference)
    torch.testing.assert_close(q.kl(p), bregman, rtol=1e-10, atol=1e-10)
    assert q.kl(p) > 0.01
    assert abs(q.kl(q).item()) < 1e-12


@every_family
def test_drawn_statistics_average_to_the_expectation(row: Row) -> None:
    q = row.make(0)
    n = 20_000
    for drawn, mean in zip(
        sufficient_statistics(q, draws(q, n)), expectation_parameters(q), strict=True
    ):
        standard_error = drawn.std(0) / n**0.5
        assert ((drawn.mean(0) - mean).abs() < 5 * standard_error).all()


@every_family
def test_draws_follow_their_generator_alone(row: Row) -> None:
    q = row.make(0)
    before = torch.get_rng_state()
    first = draws(q, 8)
    assert first.shape[0] == 8
    assert torch.equal(first, draws(q, 8))
    assert not torch.equal(first, draws(q, 8, seed=6))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(q.sample(8), first)


# --- what is kept, what is refused ----------------------------------------------------------------


def fields(q: Any) -> dict[str, Any]:
    return {name: getattr(q, name) for name in inspect.signature(type(q)).parameters}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors, or tuples of tensors, in another dtype."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dtype_is_kept_and_float32_is_close(row: Row, dtype: torch.dtype) -> None:
    q, p = row.make(0), row.make(3)
    small_q, small_p = (type(q)(*cast(tuple(fields(m).values()), dtype)) for m in (q, p))
    theta = draws(small_q, 4)
    numbers = [
        *natural_parameters(small_q),
        *expectation_parameters(small_q),
        *expectation_parameters(with_natural(small_q, natural_parameters(small_q))),
        *natural_parameters(with_expectation(small_q, expectation_parameters(small_q))),
        *sufficient_statistics(small_q, theta),
        *entropy_gradient(small_q),
        log_partition(small_q),
        small_q.log_prob(theta),
        small_q.entropy(),
        small_q.kl(small_p),
    ]
    assert {number.dtype for number in numbers} == {dtype}
    assert theta.dtype == (torch.int64 if isinstance(q, Categorical) else dtype)
    torch.testing.assert_close(small_q.entropy().double(), q.entropy(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(small_q.kl(small_p).double(), q.kl(p), rtol=1e-4, atol=1e-5)


def doors(q: Member) -> list[tuple[Callable[[Any], Member], Parameters, tuple[str, ...]]]:
    natural_names, expectation_names = parameter_names(q)
    return [
        (partial(with_natural, q), natural_parameters(q), natural_names),
        (partial(with_expectation, q), expectation_parameters(q), expectation_names),
    ]


@every_family
def test_parameters_that_do_not_fit_are_refused_by_name(row: Row) -> None:
    q = row.make(0)
    for door, parameters, names in doors(q):
        assert len(names) == len(parameters)
        for wrong in (parameters[:-1], (*parameters, parameters[0]), list(parameters)):
            with pytest.raises(DataError) as refusal:
                door(wrong)
            assert all(name in str(refusal.value) for name in names)
        for index, name in enumerate(names):
            for wrong in (parameters[index].unsqueeze(0), parameters[index] * float("nan")):
                with pytest.raises(DataError) as refusal:
                    door((*parameters[:index], wrong, *parameters[index + 1 :]))
                assert name in str(refusal.value)


@every_family
def test_parameters_out_of_range_are_refused_by_name(row: Row) -> None:
    q = row.make(0)
    broken = (row.bad_natural, row.bad_expectation)
    for (door, parameters, _), breakages in zip(doors(q), broken, strict=True):
        for index, wrong, word in breakages:
            with pytest.raises(DataError, match=re.escape(word)):
                door((*parameters[:index], wrong, *parameters[index + 1 :]))


@every_family
def test_fields_out_of_range_are_refused_by_name(row: Row) -> None:
    q = row.make(0)
    for name, wrong in row.bad_fields:
        with pytest.raises(DataError, match=name):
            type(q)(**{**fields(q), name: wrong})


@every_family
def test_integer_fields_and_mixed_dtypes_are_refused(row: Row) -> None:
    q = row.make(0)
    for name, value in fields(q).items():
        with pytest.raises(DataError, match="floating"):
            type(q)(**{**fields(q), name: cast(value, torch.int64)})


@every_family
def test_events_of_another_shape_are_refused(row: Row) -> None:
    q = row.make(0)
    theta = draws(q, 2)
    for wrong in (theta[..., :-1], theta[0][..., :1].reshape(-1)[0]):
        with pytest.raises(DataError, match="expected"):
            q.log_prob(wrong)


@every_family
def test_another_family_is_refused(row: Row) -> None:
    q = row.make(0)
    stranger: Any = DiagGaussian(t(0.0), t(1.0))
    if type(stranger) is type(q):
        stranger = Gamma(t(1.0), t(1.0))
    with pytest.raises(DataError, match=type(stranger).__name__):
        q.kl(stranger)


@every_family
def test_no_draws_are_refused(row: Row) -> None:
    with pytest.raises(DataError, match="at least 1"):
        row.make(0).sample(0)


# --- extreme members ------------------------------------------------------------------------------


def flat(parameters: Parameters) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def condition(q: Member) -> Tensor:
    """How far rounding of μ can move each λ: Σ_j |∂λ_i/∂μ_j| (1 + |μ_j|), by autodiff."""
    expectation = leaves(expectation_parameters(q))
    natural = flat(natural_parameters(with_expectation(q, expectation)))
    size = 1 + flat(expectation_parameters(q)).abs()
    rows = (torch.autograd.grad(entry, expectation, retain_graph=True) for entry in natural)
    return torch.stack([(flat(gradient).abs() * size).sum() for gradient in rows])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.extreme is not None])
def test_round_trips_of_extreme_members_lose_what_rounding_must(name: str) -> None:
    strategy = ROWS[name].extreme
    assert strategy is not None

    @settings(deadline=None, max_examples=25, database=None, derandomize=True)
    @given(strategy)
    def check(q: Member) -> None:
        natural, expectation = flat(natural_parameters(q)), flat(expectation_parameters(q))
        back = with_natural(q, natural_parameters(q))
        # A precision with correlation ±0.99 loses two digits more when the mean is solved for.
        slack = 1 + natural.abs()
        assert ((flat(natural_parameters(back)) - natural).abs() <= 1e4 * EPS * slack).all()
        back = with_expectation(q, expectation_parameters(q))
        assert (
            (flat(natural_parameters(back)) - natural).abs() <= 100 * EPS * (condition(q) + slack)
        ).all()
        shift = (flat(expectation_parameters(back)) - expectation).abs()
        assert (shift <= 100 * EPS * (1 + expectation.abs())).all()
        for number in (q.entropy(), log_partition(q), q.kl(back)):
            assert torch.isfinite(number)

    check()
