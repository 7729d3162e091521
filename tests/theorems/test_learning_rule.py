"""The rule is natural-gradient descent, is mirror descent, and has a Gaussian form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import DataError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian
from credo.rule import rule
from credo.rule.curvatures import FromValues, Hutchinson, Reparameterised
from credo.rule.expectations import GaussHermite, MonteCarlo
from credo.rule.families import (
    Beta,
    Categorical,
    Dirichlet,
    Gamma,
    NormalGamma,
    SignBernoulli,
    absorb_positive,
    entropy_gradient,
    expectation_parameters,
    natural_parameters,
    with_expectation,
    with_natural,
)
from credo.rule.families.exponential import Member, Parameters, inner


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).exp() + 0.5


def precision(size: int, seed: int = 0) -> Tensor:
    root = numbers(size, size, seed=seed)
    return root @ root.mT + torch.eye(size, dtype=torch.float64)


MEMBERS: dict[str, Callable[[int], Member]] = {
    "diagonal Gaussian": lambda seed: DiagGaussian(numbers(3, seed=seed), positive(3, seed=seed)),
    "full Gaussian": lambda seed: FullGaussian(numbers(2, seed=seed), precision(2, seed)),
    "fixed Gaussian": lambda seed: FixedGaussian(numbers(2, seed=seed), precision(2, 7)),
    "signs": lambda seed: SignBernoulli(numbers(3, seed=seed)),
    "categorical": lambda seed: Categorical(numbers(3, seed=seed)),
    "beta": lambda seed: Beta(positive(2, seed=seed), positive(2, seed=seed + 1)),
    "gamma": lambda seed: Gamma(positive(2, seed=seed), positive(2, seed=seed + 1)),
    "normal-gamma": lambda seed: NormalGamma(
        numbers(1, seed=seed), positive(1, seed=1), positive(1, seed=2), positive(1, seed=3)
    ),
    "dirichlet": lambda seed: Dirichlet(positive(3, seed=seed)),
}
every_family = pytest.mark.parametrize("make", MEMBERS.values(), ids=MEMBERS.keys())


def objective(target: Member) -> Callable[[Member], Tensor]:
    """E_q[ℓ] of a loss that is not conjugate: KL to a member and a nonlinear term in μ."""
    return lambda q: q.kl(target) + 0.1 * sum(m.tanh().sum() for m in expectation_parameters(q))  # type: ignore[misc]


def with_entropy(
    loss: Callable[[Member], Tensor], temperature: float = 1.0
) -> Callable[[Member], Tensor]:
    return lambda q: loss(q) - temperature * q.entropy()


def symmetrised(parameters: Parameters) -> Parameters:
    """Only the symmetric part of a matrix parameter means anything."""
    return tuple(0.5 * (p + p.mT) if p.dim() == 2 else p for p in parameters)


def assert_same(a: Parameters, b: Parameters, tolerance: float) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@every_family
def test_the_rule_is_natural_gradient_descent(make: Callable[[int], Member]) -> None:
    """∇_μ = F(λ)⁻¹∇_λ, with F the Hessian of A by autodiff: for the loss and for the entropy.

    F's condition number, up to 1e4 here, multiplies rounding.
    """
    q, whole = make(0), with_entropy(objective(make(5)))
    by_expectation = symmetrised(rule.expectation_gradient(q, whole))
    by_fisher = rule.natural_gradient(q, rule.natural_parameter_gradient(q, whole))
    assert_same(by_expectation, symmetrised(by_fisher), 1e-8)
    stepped = rule.step(q, symmetrised(rule.expectation_gradient(q, objective(make(5)))), rate=1e-2)
    expected = tuple(p - 1e-2 * g for p, g in zip(natural_parameters(q), by_fisher, strict=True))
    assert_same(natural_parameters(stepped), symmetrised(expected), 1e-8)


@every_family
def test_the_rule_is_mirror_descent(make: Callable[[int], Member]) -> None:
    """λ⁺ minimises ⟨∇_μL, μ⟩ + KL(q_μ‖q)/ρ: its gradient in μ is zero there, and it is a minimum.

    KL(q_μ‖q) is the Bregman divergence of A's conjugate, the geometry of mirror descent.
    """
    q, rate, whole = make(0), 0.05, with_entropy(objective(make(5)))
    gradient = symmetrised(rule.expectation_gradient(q, whole))
    loss_gradient = symmetrised(rule.expectation_gradient(q, objective(make(5))))
    moved = rule.step(q, loss_gradient, rate)

    def proximal(other: Member) -> Tensor:
        return inner(expectation_parameters(other), gradient) + other.kl(q) / rate

    assert_same(
        symmetrised(rule.expectation_gradient(moved, proximal)),
        tuple(torch.zeros_like(p) for p in natural_parameters(q)),
        1e-7,
    )
    best = proximal(moved)
    for seed in range(3):
        nudged = tuple(
            p + 1e-3 * s
            for p, s in zip(
                natural_parameters(moved),
                symmetrised(tuple(numbers(*p.shape, seed=seed) for p in natural_parameters(q))),
                strict=True,
            )
        )
        assert proximal(with_natural(moved, nudged)) > best


def test_mirror_descent_by_a_general_optimizer() -> None:
    """The same for signs, where scipy can solve the proximal problem without knowing the answer."""
    q, rate = SignBernoulli(numbers(2)), 0.3
    gradient = numbers(2, seed=3)

    def proximal(mean: np.ndarray) -> float:
        other = with_expectation(q, (torch.tensor(mean),))
        whole = gradient - entropy_gradient(q)[0]
        return float(whole @ other.mean + other.kl(q) / rate)

    found = minimize(proximal, np.zeros(2), bounds=[(-0.999, 0.999)] * 2, tol=1e-14)
    moved = rule.step(q, (gradient,), rate)
    # A minimum found from values alone is known to the square root of rounding.
    np.testing.assert_allclose(moved.mean.numpy(), found.x, atol=1e-6)


def test_black_box_descent_is_another_algorithm() -> None:
    """Plain ∇_λ takes a step that depends on the coordinates; the rule's does not."""
    q, whole = SignBernoulli(torch.tensor([2.0]).double()), with_entropy(lambda q: q.mean.sum())
    (gradient,) = rule.natural_parameter_gradient(q, whole)
    plain = SignBernoulli(q.half_logit - 0.1 * gradient)
    natural = rule.step(q, rule.expectation_gradient(q, lambda q: q.mean.sum()), 0.1)
    fisher = 1 - math.tanh(2.0) ** 2
    torch.testing.assert_close(
        q.half_logit - plain.half_logit, fisher * (q.half_logit - natural.half_logit)
    )


@every_family
def test_one_step_at_rate_one_solves_a_conjugate_problem(
    make: Callable[[int], Member],
) -> None:
    """ℓ = −log p with p in the family: ∇_μE_q[ℓ] = −λ_p, so λ⁺ = λ_p whatever q was."""
    q, target = make(0), make(5)
    if isinstance(q, FixedGaussian):
        pytest.skip("its base measure is not constant: the next test is its own")
    minus_natural = tuple(-p for p in natural_parameters(target))
    solved = rule.step(q, minus_natural, rate=1.0)
    assert_same(natural_parameters(solved), natural_parameters(target), 1e-12)
    half_way = rule.step(q, minus_natural, rate=0.5)
    mixed = tuple(
        0.5 * (a + b)
        for a, b in zip(natural_parameters(q), natural_parameters(target), strict=True)
    )
    assert_same(natural_parameters(half_way), mixed, 1e-12)


def test_a_family_with_a_base_measure_keeps_its_natural_parameter() -> None:
    """∇_μH = 0 for a fixed covariance: without a loss nothing moves, where (1 − ρ)λ would decay."""
    q = MEMBERS["fixed Gaussian"](0)
    assert_same(
        natural_parameters(rule.step(q, (torch.zeros(2).double(),), 0.5)),
        natural_parameters(q),
        1e-15,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@every_family
def test_temperature_weighs_the_entropy(make: Callable[[int], Member], temperature: float) -> None:
    q, loss = make(0), objective(make(5))
    gradient = symmetrised(rule.expectation_gradient(q, with_entropy(loss, temperature)))
    expected = tuple(p - 1e-2 * g for p, g in zip(natural_parameters(q), gradient, strict=True))
    found = rule.step(
        q, symmetrised(rule.expectation_gradient(q, loss)), 1e-2, temperature=temperature
    )
    assert_same(natural_parameters(found), expected, 1e-8)


def quartic(theta: Tensor) -> Tensor:
    """A loss without convexity whose expectations quadrature gives exactly."""
    return (theta**4).sum() / 4 - 2 * theta.sum() ** 2 + theta.prod() + theta.sum()


GAUSSIANS: dict[str, Callable[[], Gaussian]] = {
    "diagonal": lambda: DiagGaussian(numbers(2), positive(2, seed=1)),
    "full": lambda: FullGaussian(numbers(2), precision(2)),
}


def moments(q: Gaussian) -> tuple[Tensor, Tensor]:
    """E_q[∇ℓ] and E_q[∇²ℓ] of the quartic by quadrature, exact."""
    loss = Loss.of(quartic)
    points = list(GaussHermite(6).points(q, torch.Generator()))
    gradient = sum((w * loss.gradient(theta) for w, theta in points), torch.zeros(2).double())
    hessian = sum((w * loss.hessian(theta) for w, theta in points), torch.zeros(2, 2).double())
    return gradient, hessian.diagonal() if isinstance(q, DiagGaussian) else hessian


def bonnet_price(q: Gaussian, gradient: Tensor, hessian: Tensor) -> Parameters:
    """∇_μE_q[ℓ] from E_q[∇ℓ] and E_q[∇²ℓ]: (E[∇ℓ] − E[H]m, ½E[H])."""
    along = hessian * q.mean if hessian.dim() == 1 else hessian @ q.mean
    return gradient - along, 0.5 * hessian


@pytest.mark.parametrize("name", GAUSSIANS)
def test_bonnet_and_price_are_the_gradient_in_expectation_parameters(name: str) -> None:
    """(E[∇ℓ] − E[H]m, ½E[H]) equals autodiff through μ ↦ q; Khan (2019) has E[H]m twice."""
    q = GAUSSIANS[name]()

    def expected_loss(q: Gaussian) -> Tensor:
        return sum(w * quartic(theta) for w, theta in GaussHermite(6).points(q, torch.Generator()))  # type: ignore[return-value]

    by_autodiff = symmetrised(rule.expectation_gradient(q, expected_loss))
    assert_same(bonnet_price(q, *moments(q)), by_autodiff, 1e-9)


@pytest.mark.parametrize("name", GAUSSIANS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gaussian_form_is_the_rule(name: str, temperature: float) -> None:
    """S first, then m with the new S, equals the step in natural parameters ."""
    q = GAUSSIANS[name]()
    gradient, hessian = moments(q)
    hessian = hessian.abs() if hessian.dim() == 1 else hessian @ hessian
    direct = rule.gaussian_step(q, gradient, hessian, 0.3, temperature=temperature)
    general = rule.step(q, bonnet_price(q, gradient, hessian), 0.3, temperature=temperature)
    assert_same(natural_parameters(direct), natural_parameters(general), 1e-11)
    assert_same(expectation_parameters(direct), expectation_parameters(general), 1e-11)


@pytest.mark.parametrize("name", GAUSSIANS)
def test_improved_step_differs_in_second_order(name: str) -> None:
    """Its difference from the rule's falls as ρ²: by 4 when the rate is halved."""
    q = GAUSSIANS[name]()
    gradient, hessian = moments(q)
    gaps = []
    for rate in (2e-3, 1e-3):
        plain = rule.gaussian_step(q, gradient, hessian, rate)
        improved = rule.gaussian_step(q, gradient, hessian, rate, keep_positive=True)
        gaps.append((natural_parameters(plain)[1] - natural_parameters(improved)[1]).norm())
    assert gaps[0] / gaps[1] == pytest.approx(4.0, rel=0.05)


@settings(deadline=None, max_examples=50)
@given(
    rate=st.floats(1e-3, 10.0),
    values=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    dense=st.booleans(),
)
def test_improved_step_stays_positive_definite(
    rate: float, values: list[float], dense: bool
) -> None:
    """For any symmetric curvature and any rate; S⁺ ⪰ ½S by completing the square."""
    q: Gaussian
    if dense:
        matrix = torch.tensor(values).double()[[0, 1, 1, 2]].reshape(2, 2)
        q = FullGaussian(numbers(2), precision(2))
        before = -2 * natural_parameters(q)[1]
        after = -2 * natural_parameters(absorb_positive(q, matrix, rate))[1]
        slack = torch.linalg.eigvalsh(after - 0.5 * before).min()
        assert slack > -1e-9 * after.norm()
    else:
        q = DiagGaussian(numbers(3), positive(3))
        after = absorb_positive(q, torch.tensor(values).double(), rate).variance.reciprocal()
        assert (after >= 0.5 * q.variance.reciprocal() * (1 - 1e-9)).all()


def test_plain_step_says_what_to_do_when_it_loses_definiteness() -> None:
    q = FullGaussian(numbers(2), precision(2))
    with pytest.raises(DataError, match=r"precision.*smallest eigenvalue"):
        rule.gaussian_step(q, numbers(2), -100 * precision(2), 0.5)


def test_heavy_ball_adds_the_last_difference_of_natural_parameters() -> None:
    """With a quadratic loss, fixed covariance and momentum the iterates are Polyak's."""
    q = FixedGaussian(numbers(2), torch.tensor(1.0).double())
    hessian, before, previous = precision(2), q.mean, q
    current, polyak = q, q.mean
    for _ in range(30):
        moved = rule.step(current, (hessian @ current.mean,), 0.05, momentum=0.9, previous=previous)
        previous, current = current, moved
        before, polyak = polyak, polyak - 0.05 * hessian @ polyak + 0.9 * (polyak - before)
        torch.testing.assert_close(current.mean, polyak, rtol=1e-12, atol=1e-12)


ESTIMATORS = {
    "reparameterised": Reparameterised(),
    "score": FromValues(),
    "hutchinson": Hutchinson(),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("family", GAUSSIANS)
def test_estimators_have_the_mean_of_bonnet_and_price(name: str, family: str) -> None:
    """5 standard errors over 500 pairs of draws, entry by entry."""
    q, estimator = GAUSSIANS[family](), ESTIMATORS[name]
    dense = family == "full"
    if dense and estimator.diagonal_only:
        pytest.skip("Hutchinson's estimate is a diagonal")
    loss, generator = Loss.of(quartic), torch.Generator().manual_seed(0)
    draws = [
        estimator.at(loss, theta, q, dense, generator)
        for _, theta in MonteCarlo(1000, antithetic=True).points(q, generator)
    ]
    for found, exact in zip(
        (torch.stack([g for g, _ in draws]), torch.stack([h for _, h in draws])),
        moments(q),
        strict=True,
    ):
        # Antithetic pairs are averaged first: the two halves of the list.
        pairs = 0.5 * (found[:500] + found[500:])
        error = pairs.std(0) / math.sqrt(len(pairs))
        assert ((pairs.mean(0) - exact).abs() <= 5 * error + 1e-12).all()


def test_mismatched_arguments_are_refused_by_name() -> None:
    q = DiagGaussian(numbers(3), positive(3))
    with pytest.raises(DataError, match=r"shapes \(\(3,\), \(3,\)\)"):
        rule.step(q, (numbers(3),), 0.1)
    with pytest.raises(DataError, match="rate must be a positive"):
        rule.step(q, (numbers(3), numbers(3)), -0.1)
    with pytest.raises(DataError, match="temperature must be 0 or a positive"):
        rule.step(q, (numbers(3), numbers(3)), 0.1, temperature=-1.0)
    with pytest.raises(DataError, match="another DiagGaussian over 3 weights, got a Gamma"):
        rule.step(
            q, natural_parameters(q), 0.1, momentum=0.9, previous=Gamma(positive(3), positive(3))
        )
    with pytest.raises(DataError, match=r"one entry for each weight"):
        rule.gaussian_step(q, numbers(2), positive(3), 0.1)
