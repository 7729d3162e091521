"""The Gaussians of the learning rule: diagonal, dense, and with a fixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gaussians import (
    F64,
    GAUSSIANS,
    P,
    close,
    definite,
    diagonal,
    fixed,
    full,
    leaves,
    matrix,
    numbers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import (
    MultivariateNormal,
    kl_divergence,
)

from credo.errors import DataError
from credo.families.diag_gaussian import DiagGaussian
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian import Gaussian
from credo.rule.families import (
    absorb,
    absorb_positive,
    entropy_gradient,
    expectation_parameters,
    inner,
    log_base,
    log_partition,
    natural_parameters,
    parameter_names,
    sufficient_statistics,
    with_expectation,
    with_natural,
)

every_gaussian = pytest.mark.parametrize("make", GAUSSIANS.values(), ids=GAUSSIANS.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
every_closed_gaussian = pytest.mark.parametrize("q", [full(), diagonal()], ids=["full", "diagonal"])


def torchs(q: Gaussian) -> MultivariateNormal:
    return MultivariateNormal(q.mean, precision_matrix=matrix(q))


# --- what every Gaussian is -----------------------------------------------------------------------


@every_gaussian
def test_density_entropy_and_moments_are_torchs(make: Callable[[torch.dtype], Gaussian]) -> None:
    q, w = make(F64), numbers(2, 3, P, seed=5)
    reference = torchs(q)
    close(q.log_prob(w), reference.log_prob(w))
    close(q.entropy(), reference.entropy())
    close(q.variance, reference.variance)
    close(q.scale, reference.stddev)


@every_gaussian
def test_log_density_is_the_one_of_the_exponential_family(
    make: Callable[[torch.dtype], Gaussian],
) -> None:
    q, w = make(F64), numbers(2, 3, P, seed=5)
    by_parameters = inner(sufficient_statistics(q, w), natural_parameters(q))
    close(by_parameters - log_partition(q) + log_base(q, w), q.log_prob(w))


@every_gaussian
def test_mu_is_the_gradient_of_the_log_partition(make: Callable[[torch.dtype], Gaussian]) -> None:
    q = make(F64)
    natural = leaves(natural_parameters(q))
    gradient = torch.autograd.grad(log_partition(with_natural(q, natural)), natural)
    close(gradient, expectation_parameters(q))


@every_gaussian
def test_entropy_gradient_is_autodiffs(make: Callable[[torch.dtype], Gaussian]) -> None:
    q = make(F64)
    mu = leaves(expectation_parameters(q))
    entropy = with_expectation(q, mu).entropy()
    # A fixed precision makes the entropy a constant, which has no graph.
    expected = tuple(torch.zeros_like(parameter) for parameter in mu)
    if entropy.requires_grad:
        expected = torch.autograd.grad(entropy, mu)
    close(entropy_gradient(q), expected)


@every_gaussian
def test_parameters_round_trip(make: Callable[[torch.dtype], Gaussian]) -> None:
    q = make(F64)
    for other in (
        with_natural(q, natural_parameters(q)),
        with_expectation(q, expectation_parameters(q)),
    ):
        close((other.mean, matrix(other)), (q.mean, matrix(q)))


@every_gaussian
def test_sampled_statistics_have_mean_mu(make: Callable[[torch.dtype], Gaussian]) -> None:
    q, n = make(F64), 20_000
    statistics = sufficient_statistics(q, q.sample(n, torch.Generator().manual_seed(0)))
    for values, expected in zip(statistics, expectation_parameters(q), strict=True):
        assert ((values.mean(0) - expected).abs() < 5 * values.std(0) / math.sqrt(n)).all()


@every_gaussian
def test_curvature_is_solved_for(make: Callable[[torch.dtype], Gaussian]) -> None:
    q, v = make(F64), numbers(2, 3, P, seed=7)
    close(q.solve(v), torch.linalg.solve(matrix(q), v.unsqueeze(-1)).squeeze(-1))
    close(q.solve(v[0, 0]), q.solve(v)[0, 0])


@every_gaussian
def test_another_mean_keeps_the_precision(make: Callable[[torch.dtype], Gaussian]) -> None:
    q, mean = make(F64), numbers(P, seed=8)
    moved = q.with_mean(mean)
    assert type(moved) is type(q)
    assert torch.equal(moved.mean, mean)
    assert torch.equal(matrix(moved), matrix(q))
    close(moved.log_prob(mean + 1), q.log_prob(q.mean + 1))
    with pytest.raises(DataError, match=rf"\({P + 1},\)"):
        q.with_mean(numbers(P + 1))


@every_gaussian
def test_wrong_parameters_are_named(make: Callable[[torch.dtype], Gaussian]) -> None:
    q = make(F64)
    for build, parameters, names in (
        (partial(with_natural, q), natural_parameters(q), parameter_names(q)[0]),
        (partial(with_expectation, q), expectation_parameters(q), parameter_names(q)[1]),
    ):
        with pytest.raises(DataError, match="tuple"):
            build(parameters + parameters)
        for i, name in enumerate(names):
            undefined = [p.clone() for p in parameters]
            undefined[i][-1] = math.nan
            with pytest.raises(DataError, match=f"{name} has values that are not finite"):
                build(tuple(undefined))
            undefined[i] = torch.zeros(P + 1, dtype=F64)
            with pytest.raises(DataError, match=f"{name} must have shape"):
                build(tuple(undefined))


def test_divergence_is_torchs() -> None:
    for q, p in ((full(0), full(1)), (diagonal(0), diagonal(1))):
        close(q.kl(p), kl_divergence(torchs(q), torchs(p)))
    q = fixed(definite())
    p = q.with_mean(numbers(P, seed=9))
    close(q.kl(p), kl_divergence(torchs(q), torchs(p)))
    with pytest.raises(DataError, match=r"FullGaussian.*DiagGaussian"):
        full().kl(diagonal())  # type: ignore[arg-type]


def test_divergence_far_from_zero_does_not_cancel() -> None:
    # ⟨λ, μ⟩ is 1e18 here: the generic formula would have an error of 100.
    shift = torch.full((P,), 1e9, dtype=F64)
    for q, p in ((full(0), full(1)), (diagonal(0), diagonal(1))):
        q, p = q.with_mean(shift), p.with_mean(shift)  # type: ignore[assignment]
        reference = kl_divergence(
            torchs(q.with_mean(torch.zeros(P, dtype=F64))),
            torchs(p.with_mean(torch.zeros(P, dtype=F64))),
        )
        close(q.kl(p), reference)  # type: ignore[arg-type]


@every_gaussian
@every_dtype
def test_parameters_keep_the_dtype(
    make: Callable[[torch.dtype], Gaussian], dtype: torch.dtype
) -> None:
    q = make(dtype)
    for p in (
        q,
        with_natural(q, natural_parameters(q)),
        with_expectation(q, expectation_parameters(q)),
    ):
        for value in (p.mean, matrix(p), log_partition(p), p.entropy(), *natural_parameters(p)):
            assert value.dtype == dtype


# --- mixing curvature in --------------------------------------------------------------------------


@every_closed_gaussian
@pytest.mark.parametrize(("keep", "gain"), [(0.7, 1.0 - 0.7), (0.5, 2.0), (1.0, 0.5), (0.0, 1.0)])
def test_precision_mixes_with_a_diagonal_curvature(q: Gaussian, keep: float, gain: float) -> None:
    h = numbers(P, seed=6).exp()
    mixed = absorb(q, h, keep, gain)
    close(matrix(mixed), keep * matrix(q) + gain * torch.diag(h))
    assert torch.equal(mixed.mean, q.mean)


@pytest.mark.parametrize(("keep", "gain"), [(0.75, 0.25), (0.5, 2.0), (1.0, 0.5), (0.0, 1.0)])
def test_precision_mixes_with_a_dense_curvature(keep: float, gain: float) -> None:
    q, h, before = full(), definite(seed=6), full().precision
    mixed = absorb(q, h, keep, gain)
    close(mixed.precision, keep * q.precision + gain * h)
    close(mixed.cholesky, torch.linalg.cholesky(mixed.precision))
    assert torch.equal(q.precision, before)


@every_closed_gaussian
@pytest.mark.parametrize("rate", [0.1, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_positive_mixture_is_the_retraction(q: Gaussian, rate: float, temperature: float) -> None:
    """S⁺ = ½R[I + (I + ρR⁻¹GR⁻¹)²]R with R = S^½, for a curvature that is not definite."""
    h = 10 * numbers(P, seed=6)
    curvature = (
        h if isinstance(q, DiagGaussian) else torch.diag(h) + numbers(P, P) + numbers(P, P).T
    )
    dense = torch.diag(h) if isinstance(q, DiagGaussian) else curvature
    precision, one = matrix(q), torch.eye(P, dtype=F64)
    values, vectors = torch.linalg.eigh(precision)
    root = vectors @ values.sqrt().diag() @ vectors.T
    inverse_root = vectors @ values.rsqrt().diag() @ vectors.T
    whitened = one + rate * inverse_root @ (dense - temperature * precision) @ inverse_root
    expected = 0.5 * root @ (one + whitened @ whitened) @ root
    close(matrix(absorb_positive(q, curvature, rate, temperature)), expected)


def test_diagonal_curvature_enters_the_positive_mixture_as_a_matrix() -> None:
    h = numbers(P, seed=6)
    dense = absorb_positive(full(), torch.diag(h), 0.3)
    close(absorb_positive(full(), h, 0.3).precision, dense.precision)


@every_closed_gaussian
def test_a_mixture_that_is_not_definite_is_refused(q: Gaussian) -> None:
    hostile = -100 * torch.ones(P, dtype=F64)
    with pytest.raises(DataError, match=r"precision must be positive.* -"):
        absorb(q, hostile, keep=0.5, gain=1.0)
    for undefined in (math.nan, math.inf):
        with pytest.raises(DataError, match=r"precision.*finite"):
            absorb(q, torch.full((P,), undefined, dtype=F64), keep=0.5, gain=1.0)
    assert (torch.linalg.eigvalsh(matrix(absorb_positive(q, hostile, rate=1.0))) > 0).all()


def test_diagonal_refuses_a_dense_curvature_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"curvature\.diagonal\(\)"):
        absorb(diagonal(), definite(), keep=1.0, gain=1.0)
    with pytest.raises(DataError, match=r"curvature\.diagonal\(\)"):
        absorb_positive(diagonal(), definite(), rate=1.0)


@every_closed_gaussian
@pytest.mark.parametrize("shape", [(), (P + 1,), (P, P + 1), (1,)])
def test_curvature_of_another_shape_is_refused(q: Gaussian, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="curvature must be"):
        absorb(q, torch.ones(shape, dtype=F64), keep=1.0, gain=1.0)


def test_fixed_gaussian_ignores_curvature() -> None:
    q = fixed(definite())
    assert absorb(q, definite(seed=1), keep=0.5, gain=0.5) is q
    assert absorb_positive(q, numbers(P), rate=0.5) is q


@every_closed_gaussian
def test_mixing_is_differentiable(q: Gaussian) -> None:
    h = numbers(P, seed=6).exp().requires_grad_()
    for mixed in (absorb(q, h, 0.5, 0.5), absorb_positive(q, h, 0.1)):
        (gradient,) = torch.autograd.grad(mixed.entropy(), h)
        assert torch.isfinite(gradient).all()
        assert (gradient < 0).all()


# --- FullGaussian ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-8, 8), min_size=3, max_size=3), st.floats(-0.9, 0.9))
def test_extreme_precisions_round_trip(exponents: list[float], correlation: float) -> None:
    """Cholesky is exact under scaling of the axes, so sixteen decades of it cost no digits."""
    root = torch.tensor([10.0**e for e in exponents], dtype=F64).sqrt()
    unit = torch.full((3, 3), correlation / 2, dtype=F64).fill_diagonal_(1.0)
    precision = unit * torch.outer(root, root)
    q = FullGaussian(numbers(3) / root, precision)
    d = DiagGaussian(q.mean, 1 / root)
    torch.testing.assert_close(
        with_natural(q, natural_parameters(q)).mean * root, q.mean * root, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(
        with_natural(d, natural_parameters(d)).mean, d.mean, rtol=1e-12, atol=0
    )
    for p in (q, d):
        axes = torch.outer(root, root)
        for other in (
            with_natural(p, natural_parameters(p)),
            with_expectation(p, expectation_parameters(p)),
        ):
            close(matrix(other) / axes, matrix(p) / axes, rtol=1e-10)
        assert torch.isfinite(p.log_prob(p.sample(3, torch.Generator().manual_seed(0)))).all()


@pytest.mark.parametrize(
    ("mean", "precision", "message"),
    [
        (torch.zeros(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "precision.*eigenvalue is -1 "),
        (torch.zeros(2), torch.zeros(2, 2), "precision.*eigenvalue is 0 "),
        (
            torch.zeros(2),
            torch.tensor([[1.0, 0.5], [0.2, 1.0]]),
            r"precision.*symmetric.*0\.5.*0\.2",
        ),
        (torch.zeros(2), torch.tensor([[1.0, math.nan], [0.2, 1.0]]), "precision.*symmetric.*nan"),
        (torch.zeros(2), torch.tensor([[1.0, 0.2], [math.nan, 1.0]]), "precision.*not finite"),
        (torch.zeros(2), torch.tensor([[math.inf, 0.0], [0.0, 1.0]]), "precision.*not finite"),
        (torch.zeros(2), torch.ones(2), r"\(2,\) and \(2,\)"),
        (torch.zeros(2), torch.eye(3), r"\(2,\) and \(3, 3\)"),
        (torch.zeros(()), torch.eye(1), r"\(\) and \(1, 1\)"),
        (torch.zeros(2), torch.eye(2, dtype=F64), "one dtype"),
        (torch.zeros(2, dtype=torch.int64), torch.eye(2, dtype=torch.int64), "floating"),
    ],
)
def test_full_gaussian_refuses(mean: Tensor, precision: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FullGaussian(mean, precision)


def test_asymmetry_by_rounding_is_no_error() -> None:
    features = numbers(200, P).float()
    precision = torch.linalg.inv(torch.linalg.inv(features.T @ features))
    assert not torch.equal(precision, precision.T)
    FullGaussian(torch.zeros(P), precision)


def test_full_gaussian_refuses_parameters_out_of_range() -> None:
    q = full()
    slope, half = natural_parameters(q)
    with pytest.raises(DataError, match=r"precision.*smallest eigenvalue is -"):
        with_natural(q, (slope, -half))
    mean = q.mean
    with pytest.raises(DataError, match=r"second moment.*covariance.*smallest eigenvalue is -1"):
        with_expectation(q, (mean, torch.outer(mean, mean) - torch.eye(P, dtype=F64)))


def test_only_the_symmetric_part_of_a_matrix_counts() -> None:
    q = full()
    skew = numbers(P, P, seed=4)
    skew = skew - skew.mT
    (slope, half), (mean, second) = natural_parameters(q), expectation_parameters(q)
    close(with_natural(q, (slope, half + skew)).precision, q.precision)
    close(with_expectation(q, (mean, second + skew)).precision, q.precision)


def test_the_factor_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    factorise = torch.linalg.cholesky_ex

    def counting(matrix: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return factorise(matrix)

    q = full()
    monkeypatch.setattr(torch.linalg, "cholesky_ex", counting)
    moved = absorb(q, definite(seed=1), keep=0.5, gain=0.5)
    moved = moved.with_mean(moved.mean - moved.solve(q.mean))
    moved.log_prob(moved.sample(2, torch.Generator().manual_seed(0)))
    assert calls == 1


def test_sampling_a_full_gaussian_is_differentiable() -> None:
    mean, precision = numbers(P).requires_grad_(), definite().requires_grad_()

    def draw(mean: Tensor, precision: Tensor) -> Tensor:
        q = FullGaussian(mean, 0.5 * (precision + precision.mT))
        return q.sample(2, torch.Generator().manual_seed(0))

    assert torch.autograd.gradcheck(draw, (mean, precision))


# --- DiagGaussian and FixedGaussian ---------------------------------------------------------------


def test_diagonal_gaussian_refuses_parameters_out_of_range() -> None:
    q = diagonal()
    slope, half = natural_parameters(q)
    bad = half.clone()
    bad[2] = 1.0
    with pytest.raises(DataError, match=r"precision.*entry \[2\] is -2"):
        with_natural(q, (slope, bad))
    bad = expectation_parameters(q)[1].clone()
    bad[1] = q.mean[1] ** 2 - 0.5
    with pytest.raises(DataError, match=r"second moment.*variance.*entry \[1\] is -0\.5"):
        with_expectation(q, (q.mean, bad))


def test_diagonal_precision_that_is_refused_is_named() -> None:
    q = DiagGaussian(torch.zeros(3), torch.tensor(1.0))
    with pytest.raises(DataError, match=r"precision must be positive.*entry \[1\] is -3"):
        absorb(q, torch.tensor([1.0, -4.0, 2.0]), keep=1.0, gain=1.0)


@pytest.mark.parametrize(
    ("mean", "precision", "message"),
    [
        (torch.zeros(2), torch.tensor(0.0), "precision must be positive.*it is 0"),
        (torch.zeros(2), torch.tensor(math.inf), "precision must be positive and finite"),
        (torch.zeros(2), torch.tensor([1.0, -1.0]), r"precision.*entry \[1\] is -1"),
        (torch.zeros(2), torch.tensor([1.0, math.nan]), r"precision.*entry \[1\] is nan"),
        (torch.zeros(2), -torch.eye(2), "precision.*eigenvalue is -1"),
        (torch.zeros(2), torch.ones(3), r"\(2,\) and \(3,\)"),
        (torch.zeros(()), torch.ones(()), r"\(\) and \(\)"),
        (torch.zeros(2), torch.ones(2, dtype=F64), "one dtype"),
    ],
)
def test_fixed_gaussian_refuses(mean: Tensor, precision: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FixedGaussian(mean, precision)


def test_different_fixed_precisions_are_different_families() -> None:
    one, two = (fixed(torch.tensor(x)) for x in (1.0, 2.0))
    with pytest.raises(DataError, match="different precisions"):
        one.kl(two)
    assert one.kl(fixed(torch.tensor(1.0))) == 0


def test_an_isotropic_fixed_gaussian_takes_no_memory() -> None:
    q = FixedGaussian(torch.zeros(1000), torch.tensor(4.0))
    assert q.precision.stride() == q.scale.stride() == (0,)
    tensors, meta = q.pack()
    assert tensors["precision"].numel() == 1
    assert FixedGaussian.unpack(tensors, meta).precision.stride() == (0,)


def test_unit_precision_leaves_a_gradient_bit_for_bit() -> None:
    gradient = numbers(P)
    assert torch.equal(fixed(torch.tensor(1.0)).solve(gradient), gradient)
