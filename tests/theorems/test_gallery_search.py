"""Ensembles and searches of the gallery, each held to an equality or a bound that it must satisfy.

References: autodiff of integrals by the trapezoidal rule (spectrally accurate for smooth integrands
that vanish at both ends), polynomial moments in closed form, scipy.optimize, torch.optim.SGD with
torch's own dropout layer, enumeration of all masks, and the regret bound of Hedge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brute, minimize
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from credo import likelihoods
from credo.autodiff.loss import Loss
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian, GaussianMixture
from credo.model import Model
from credo.rule.curvatures import ExactHessian, FromValues
from credo.rule.expectations import AtMean, GaussHermite, MonteCarlo
from credo.rule.families import Categorical, natural_parameters
from credo.rule.gallery import (
    dropout,
    evolution_strategies,
    exponential_weights,
    gaussian_homotopy,
    newton_ensemble,
)
from credo.rule.gallery.dropout import Dropout
from credo.rule.gallery.evolution_strategies import evolution_strategy
from credo.rule.gallery.exponential_weights import hedge_rate, hedge_step
from credo.rule.gallery.newton_ensemble import NewtonEnsemble
from credo.rule.learner import Learner, Step
from credo.rule.rule import expectation_gradient, gaussian_step, step

f64 = torch.float64


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=f64)


def largest_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, absolute below 1 and relative above."""
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


def generator(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "module",
    [newton_ensemble, evolution_strategies, gaussian_homotopy, exponential_weights, dropout],
)
def test_the_test_an_entry_names_exists(module: object) -> None:
    file, name = module.ENTRY.test.split("::")
    assert file == "tests/theorems/test_gallery_search.py"
    assert name in globals()


# --- mixtures of Gaussians ------------------------------------------------------------------------

GRID = torch.linspace(-12, 12, 4001, dtype=f64)
SPACING = float(GRID[1] - GRID[0])


def double_well(theta: Tensor) -> Tensor:
    """Two unequal modes, not symmetric and not Gaussian."""
    return (0.25 * (theta.square() - 4).square() + 0.3 * theta).sum(-1)


def mixture_1d(odds: float = 0.4) -> GaussianMixture:
    parts = ((-1.6, 2.0), (1.2, 1.5))
    components = (FullGaussian(vector(m), vector(s).reshape(1, 1)) for m, s in parts)
    return GaussianMixture(vector(odds), tuple(components))


def free_energy(q: GaussianMixture) -> Tensor:
    """E_q[ℓ + log q] of the double well, by the trapezoidal rule."""
    points = GRID.unsqueeze(-1)
    log_q = q.log_prob(points)
    return SPACING * (log_q.exp() * (double_well(points) + log_q)).sum()


class Trapezoid:
    """E over a Gaussian of one weight, on a grid of nine standard deviations to either side."""

    at_mean_only = False
    values_only = False
    is_grid = True

    def points(self, q: Gaussian, generator: Generator) -> Iterator[tuple[float, Tensor]]:
        nodes = torch.linspace(-9, 9, 151, dtype=f64)
        shares = torch.exp(-0.5 * nodes.square())
        shares /= shares.sum()
        for share, node in zip(shares.tolist(), nodes, strict=True):
            yield share, q.mean + q.scale * node


def test_gradients_of_a_mixture_are_component_expectations_times_the_weight() -> None:
    """∂_{m_k}L = π_kE[∇f], ∂_{v_k}L = ½π_kE[∇²f], ∂_{π_k}L = (E_k − E_K)[f] with f = ℓ + log q."""
    q = mixture_1d()
    means = torch.cat([c.mean for c in q.components]).requires_grad_()
    variances = torch.cat([c.variance for c in q.components]).requires_grad_()
    first_weight = q.weights[0].clone().requires_grad_()
    parts = tuple(
        FullGaussian(means[k : k + 1], variances[k].reciprocal().reshape(1, 1)) for k in range(2)
    )
    log_odds = (first_weight / (1 - first_weight)).log().reshape(1)
    by_autodiff = torch.autograd.grad(
        free_energy(GaussianMixture(log_odds, parts)), (means, variances, first_weight)
    )

    loss, method = Loss.of(double_well), NewtonEnsemble(0.1, Trapezoid())
    found = [method.derivatives(q, c, loss, generator()) for c in q.components]
    values, gradients, hessians = (
        torch.stack(parts).reshape(2) for parts in zip(*found, strict=True)
    )
    # Both sides are quadratures whose own error is below 1e-12.
    assert largest_gap(q.weights * gradients, by_autodiff[0]) < 1e-9
    assert largest_gap(0.5 * q.weights * hessians, by_autodiff[1]) < 1e-9
    assert largest_gap(values[0] - values[1], by_autodiff[2]) < 1e-9


def test_a_step_of_the_ensemble_is_the_rule_in_every_block() -> None:
    """λ_k − ρ∇_{μ_k}L/π_k, where π_k is component k's share of the joint Fisher matrix."""
    q, rate = mixture_1d(), 0.05
    method = NewtonEnsemble(rate, Trapezoid())
    moved = method.update(method.init(q), Loss.of(double_well)).q
    for k, component in enumerate(q.components):

        def energy(part: FullGaussian, k: int = k) -> Tensor:
            parts = [*q.components[:k], part, *q.components[k + 1 :]]
            return free_energy(GaussianMixture(q.log_odds, tuple(parts)))

        gradient = expectation_gradient(component, energy)
        block = tuple(part / q.weights[k] for part in gradient)
        expected = step(component, block, rate, temperature=0.0)
        for a, b in zip(
            natural_parameters(moved.components[k]), natural_parameters(expected), strict=True
        ):
            assert largest_gap(a, b) < 1e-9
    (by_weight,) = expectation_gradient(
        Categorical(q.log_odds), lambda pi: free_energy(GaussianMixture(pi.logits, q.components))
    )
    assert largest_gap(moved.log_odds, q.log_odds - rate * by_weight) < 1e-9


def bowl(theta: Tensor) -> Tensor:
    x, y = theta.unbind(-1)
    return (1 + x.exp()).log() + 0.5 * (x - y).square() + 0.1 * x.square() + 0.02 * y**4


@pytest.mark.parametrize(
    "expectation",
    [AtMean(), GaussHermite(3), MonteCarlo(2, antithetic=True)],
    ids=["at mean", "quadrature", "antithetic draws"],
)
@pytest.mark.parametrize("dense", [True, False], ids=["full", "diagonal"])
def test_an_ensemble_of_one_is_von(expectation: object, dense: bool) -> None:
    """∇ log q averages to 0 over points symmetric about m, and ∇² log q = −S."""
    mean, scale = vector(2.0, -1.0), vector(0.6, 1.1)
    q = FullGaussian(mean, torch.diag(scale**-2)) if dense else DiagGaussian(mean, scale)
    loss = Loss.of(bowl)
    ensemble = NewtonEnsemble(0.2, expectation, seed=3)
    learner = Learner(expectation, ExactHessian(), Step(rate=0.2), seed=3)
    state, von, by_rule = ensemble.init(GaussianMixture(vector(), (q,))), learner.init(q), q
    for _ in range(15):
        gradient, hessian = learner.estimate(von, loss)
        state = ensemble.update(state, loss)
        von = learner.move(von, gradient, hessian)
        by_rule = gaussian_step(by_rule, gradient, hessian, 0.2)
        (component,) = state.q.components
        # The same numbers summed in another order, in a contracting iteration.
        for other in (von.q, by_rule):
            for a, b in zip(natural_parameters(component), natural_parameters(other), strict=True):
                assert largest_gap(a, b) < 1e-12


def far_wells(theta: Tensor) -> Tensor:
    x, y = theta.unbind(-1)
    return (x.square() - 25).square() / 50 + 0.5 * x + (y - 0.2 * x).square() + 0.1 * y**4


def test_far_apart_components_at_their_means_are_independent_newton_methods() -> None:
    starts = (vector(-5.4, -1.2), vector(5.3, 0.5))
    sharp = torch.diag(vector(4.0, 2.0))
    loss, method = Loss.of(far_wells), NewtonEnsemble(rate=1.0)
    state = method.init(GaussianMixture(vector(0.0), tuple(FullGaussian(m, sharp) for m in starts)))
    points = list(starts)
    for _ in range(8):
        state = method.update(state, loss)
        for k, point in enumerate(points):
            hessian = torch.autograd.functional.hessian(far_wells, point)
            slope = torch.autograd.functional.jacobian(far_wells, point)
            points[k] = point - torch.linalg.solve(hessian, slope)
            # The wells are twenty standard deviations apart: e^{−200} of the other is left.
            assert largest_gap(state.q.components[k].precision, hessian) < 1e-12
            assert largest_gap(state.q.components[k].mean, points[k]) < 1e-12

    state = method.update(state, loss)
    evidence = [
        -far_wells(m) - 0.5 * torch.logdet(torch.autograd.functional.hessian(far_wells, m))
        for m in points
    ]
    assert largest_gap(state.q.log_odds, (evidence[0] - evidence[1]).reshape(1)) < 1e-12


def test_the_ensemble_fits_two_modes_better_than_any_single_gaussian() -> None:
    log_normaliser = float((SPACING * (-double_well(GRID.unsqueeze(-1))).exp().sum()).log())

    def divergence(q: GaussianMixture) -> float:
        return float(free_energy(q)) + log_normaliser

    method = NewtonEnsemble(0.1, GaussHermite(24), keep_positive=True)
    components = tuple(DiagGaussian(vector(m), vector(0.8)) for m in (-0.5, 1.0))
    state = method.init(GaussianMixture(vector(0.0), components))
    path = [divergence(state.q)]
    for _ in range(80):
        state = method.update(state, Loss.of(double_well))
        path.append(divergence(state.q))
    assert all(later < sooner for sooner, later in itertools.pairwise(path))

    def single(parameters: np.ndarray) -> float:
        lone = DiagGaussian(vector(parameters[0]), vector(math.exp(parameters[1])))
        return divergence(GaussianMixture(vector(), (lone,)))

    best = min(minimize(single, (m, 0.0), method="Nelder-Mead").fun for m in (-2.0, 0.0, 2.0))
    assert path[-1] < 0.2 * best
    assert 0 < path[-1] < 0.1 * path[0]


def test_an_ensemble_refuses_to_work_from_values_only() -> None:
    with pytest.raises(UnsupportedError, match="differentiates the loss"):
        NewtonEnsemble(0.1, MonteCarlo(4, estimator="score"))
    with pytest.raises(DataError, match="rate"):
        NewtonEnsemble(0.0)


# --- evolution strategies -------------------------------------------------------------------------


def polynomial(theta: Tensor) -> Tensor:
    x, y = theta.unbind(-1)
    return 0.5 * x**4 + x * y.square() - 2 * x + 0.3 * y.square()


def polynomial_mean(m: Tensor, v: Tensor) -> Tensor:
    """E of the polynomial under N(m, V), by Isserlis's theorem."""
    (x, y), xx, yy, xy = m, v[0, 0], v[1, 1], 0.5 * (v[0, 1] + v[1, 0])
    fourth = x**4 + 6 * x**2 * xx + 3 * xx**2
    return 0.5 * fourth + x * (y**2 + yy) + 2 * y * xy - 2 * x + 0.3 * (y**2 + yy)


def searching() -> FullGaussian:
    return FullGaussian(vector(0.7, -0.4), torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=f64))


def test_scores_of_a_polynomial_by_quadrature_are_the_gradients_of_bonnet_and_price() -> None:
    q, loss = searching(), Loss.of(polynomial)
    mean, covariance = q.mean.clone().requires_grad_(), q.covariance.requires_grad_()
    by_mean, by_covariance = torch.autograd.grad(
        polynomial_mean(mean, covariance), (mean, covariance)
    )
    for way in (FromValues(), ExactHessian()):
        found = [
            (share, *way.at(loss, theta, q, True, generator()))
            for share, theta in GaussHermite(6).points(q, generator())
        ]
        # Degree 6 at most, for which six nodes an axis are exact: only rounding is left.
        assert largest_gap(sum(s * g for s, g, _ in found), by_mean) < 1e-12
        assert largest_gap(sum(s * h for s, _, h in found), 2 * by_covariance) < 1e-12


@pytest.mark.parametrize("antithetic", [True, False])
def test_evolution_strategies_estimate_the_gradients_of_bonnet_and_price(antithetic: bool) -> None:
    q, loss = searching(), Loss.of(polynomial)
    mean, covariance = q.mean.clone().requires_grad_(), q.covariance.requires_grad_()
    by_mean, by_covariance = torch.autograd.grad(
        polynomial_mean(mean, covariance), (mean, covariance)
    )
    gradients, hessians = [], []
    for seed in range(100):
        method = evolution_strategy(rate=0.1, samples=20, antithetic=antithetic, seed=seed)
        gradient, hessian = method.estimate(method.init(q), loss)
        gradients.append(gradient)
        hessians.append(hessian)
    for draws, truth in ((gradients, by_mean), (hessians, 2 * by_covariance)):
        drawn = torch.stack(draws)
        error = drawn.std(0) / math.sqrt(len(drawn))
        assert bool(((drawn.mean(0) - truth).abs() < 5 * error).all())


def test_an_evolution_step_is_the_rule_without_entropy_to_second_order() -> None:
    """keep_positive adds ½ρ²GS⁻¹G, so the distance to rule.step falls by four when ρ is halved."""
    q, loss = searching(), Loss.of(polynomial)

    def gap(rate: float) -> float:
        method = evolution_strategy(rate, samples=20, seed=1)
        state = method.init(q)
        gradient, hessian = method.estimate(state, loss)
        along = (gradient - hessian @ q.mean, 0.5 * hessian)
        exact = step(q, along, rate, temperature=0.0)
        return largest_gap(method.move(state, gradient, hessian).q.precision, exact.precision)

    assert gap(1e-3) / gap(5e-4) == pytest.approx(4, rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["diagonal", "full", "fixed"])
def test_evolution_strategies_descend_a_function_of_jumps(seed: int, kind: str) -> None:
    target = vector(1.5, -0.7)

    def terraces(theta: Tensor) -> Tensor:
        return (2 * (theta - target).abs()).floor().sum()

    mean = vector(-1.0, 2.0)
    q = {
        "diagonal": DiagGaussian(mean, vector(1.0, 1.0)),
        "full": FullGaussian(mean, torch.eye(2, dtype=f64)),
        "fixed": FixedGaussian(mean, vector(4.0, 4.0)),
    }[kind]
    loss = Loss.of(terraces)
    assert float(loss.gradient(mean).abs().max()) == 0
    assert float(loss.value(mean)) >= 10
    method = evolution_strategy(rate=0.1, mean_rate=0.3, samples=40, seed=seed)
    state = method.init(q)
    for _ in range(60):
        state = method.update(state, loss)
    assert float(loss.value(state.q.mean)) == 0
    if kind != "fixed":
        assert float(state.q.scale.max()) < 0.7


# --- Gaussian homotopy ----------------------------------------------------------------------------


def tilted_wells(theta: Tensor) -> Tensor:
    x, y = theta.unbind(-1)
    return (x.square() - 1).square() + 0.3 * x + (y - x).square()


def test_homotopy_descends_the_smoothed_quartic_of_the_closed_form() -> None:
    """E(x² − 1)² = m⁴ + 6m²s² + 3s⁴ − 2(m² + s²) + 1, so E∇ = 4m³ + 12ms² − 4m."""
    loss = Loss.of(lambda x: (x.square() - 1).square().sum())
    for scale, m in itertools.product((0.1, 0.5, 2.0), (-1.3, 0.2, 3.0)):
        learner = Learner(GaussHermite(8), None, Step(rate=1.0))
        state = learner.init(FixedGaussian(vector(m), vector(scale**-2)))
        gradient, _ = learner.estimate(state, loss)
        exact = vector(4 * m**3 + 12 * m * scale**2 - 4 * m)
        assert largest_gap(gradient, exact) < 1e-10

        moved = gaussian_homotopy.gaussian_homotopy(
            loss, vector(m), [scale], rate=0.01, steps=1, expectation=GaussHermite(8)
        )
        assert largest_gap(moved, m - 0.01 * exact) < 1e-10


def test_homotopy_finds_the_global_minimum_where_gradient_descent_is_stuck() -> None:
    lowest = brute(lambda x: float(tilted_wells(torch.from_numpy(x))), ((-2, 2), (-2, 2)), Ns=21)
    loss, start = Loss.of(tilted_wells), vector(1.2, 1.0)
    search = gaussian_homotopy.gaussian_homotopy
    settings = {"rate": 0.06, "steps": 100, "expectation": GaussHermite(3)}
    stuck = search(loss, start, [0.0], **settings)
    found = search(loss, start, [1.0, 0.6, 0.3, 0.0], **settings)
    assert float(loss.gradient(stuck).abs().max()) < 1e-4
    assert float(stuck[0]) > 0.9
    # brute's polish by Nelder–Mead is good to about 1e-4.
    assert largest_gap(found, torch.from_numpy(lowest)) < 1e-3
    assert float(loss.gradient(found).abs().max()) < 1e-4


def test_homotopy_with_draws_finds_it_too() -> None:
    found = gaussian_homotopy.gaussian_homotopy(
        Loss.of(tilted_wells),
        vector(1.2, 1.0),
        [1.0, 0.5, 0.0],
        rate=0.03,
        steps=100,
        expectation=MonteCarlo(4, antithetic=True),
        seed=1,
    )
    assert float(found[0]) < -0.9


@pytest.mark.parametrize("scales", [[], [0.5, 0.5], [0.1, 0.5], [0.5, -0.1]])
def test_homotopy_refuses_scales_that_do_not_decrease(scales: list[float]) -> None:
    with pytest.raises(DataError, match="scales"):
        gaussian_homotopy.gaussian_homotopy(
            Loss.of(tilted_wells), vector(0.0, 0.0), scales, rate=0.1, steps=1
        )


# --- exponential weights --------------------------------------------------------------------------


def test_a_hedge_step_multiplies_the_weights_by_the_exponentiated_losses() -> None:
    draws = generator(2)
    q = Categorical(torch.randn(7, 5, generator=draws, dtype=f64))
    for rate in (0.01, 1.0, 10.0):
        losses = torch.rand(7, 6, generator=draws, dtype=f64)
        product = q.probs * torch.exp(-rate * losses)
        expected = product / product.sum(-1, keepdim=True)
        assert largest_gap(hedge_step(q, losses, rate).probs, expected) < 1e-14


def regret(rounds: int, experts: int, adversary: Callable[[Tensor, int], Tensor]) -> float:
    """What Hedge lost more than the best expert in hindsight."""
    rate = hedge_rate(rounds, experts)
    q = Categorical(torch.zeros(experts - 1, dtype=f64))
    own, each = 0.0, torch.zeros(experts, dtype=f64)
    for t in range(rounds):
        losses = adversary(q.probs, t)
        own += float(q.probs @ losses)
        each += losses
        q = hedge_step(q, losses, rate)
    return own - float(each.min())


@settings(deadline=None, max_examples=50)
@given(data=st.data(), experts=st.integers(2, 6), rounds=st.integers(1, 40))
def test_regret_stays_below_its_bound_for_any_losses(
    data: st.DataObject, experts: int, rounds: int
) -> None:
    loss = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    row = st.lists(loss, min_size=experts, max_size=experts)
    rows = data.draw(st.lists(row, min_size=rounds, max_size=rounds))
    bound = math.sqrt(rounds * math.log(experts) / 2)
    assert regret(rounds, experts, lambda _, t: vector(*rows[t])) <= bound + 1e-12


@pytest.mark.parametrize(("experts", "rounds"), [(2, 50), (2, 500), (10, 200)])
def test_regret_stays_below_its_bound_against_greedy_adversaries(experts: int, rounds: int) -> None:
    def hit_the_heaviest(probs: Tensor, t: int) -> Tensor:
        return F.one_hot(probs.argmax(), experts).to(f64)

    def hit_the_heavier_half(probs: Tensor, t: int) -> Tensor:
        return (probs.argsort().argsort() >= experts // 2).to(f64)

    bound = math.sqrt(rounds * math.log(experts) / 2)
    worst = max(regret(rounds, experts, a) for a in (hit_the_heaviest, hit_the_heavier_half))
    # Not idle: an adversary that reads the weights forces a sizeable part of the bound.
    assert 0.2 * bound < worst <= bound


def test_with_entropy_constant_losses_lead_to_the_gibbs_distribution() -> None:
    losses, q = vector(0.3, 2.0, -1.0, 0.7), Categorical(vector(3.0, -2.0, 0.5))
    for _ in range(100):
        q = hedge_step(q, losses, rate=0.3, temperature=1.0)
    # 0.7^100 < 1e-15 of the start is left.
    assert largest_gap(q.probs, torch.softmax(-losses, 0)) < 1e-14


def test_hedge_refuses_losses_of_another_number_of_experts() -> None:
    with pytest.raises(DataError, match="losses"):
        hedge_step(Categorical(vector(0.0)), vector(1.0), rate=1.0)
    with pytest.raises(DataError, match="experts"):
        hedge_rate(10, 1)


# --- dropout --------------------------------------------------------------------------------------

HIDDEN, DROP = 5, 0.4


def network(with_dropout: bool) -> nn.Sequential:
    middle = [nn.Dropout(DROP)] if with_dropout else []
    return nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, 2)).double()


def outgoing_units() -> Tensor:
    """For parameters in torch's order: columns of the last weight belong to hidden units."""
    stay = -torch.ones(3 * HIDDEN + HIDDEN, dtype=torch.long)
    columns = torch.arange(HIDDEN).repeat(2)
    return torch.cat([stay, columns, -torch.ones(2, dtype=torch.long)])


def small_problem() -> tuple[Tensor, Tensor, Tensor]:
    draws = generator(5)
    inputs = torch.randn(8, 3, generator=draws, dtype=f64)
    targets = torch.randint(2, (8,), generator=draws)
    return inputs, targets, 0.5 * torch.randn(len(outgoing_units()), generator=draws, dtype=f64)


def test_dropout_is_sgd_on_the_network_with_torchs_own_dropout_layer() -> None:
    """The layer's masks, one for each example, are recovered by repeating its draw on ones."""
    inputs, targets, start = small_problem()
    reference = network(with_dropout=True)
    nn.utils.vector_to_parameters(start.clone(), reference.parameters())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    model = Model(network(with_dropout=False), likelihoods.Categorical())
    loss = Loss.of_model(model, (inputs, targets))
    method = Dropout(outgoing_units(), drop=DROP, rate=0.1)
    q = FixedGaussian(start, vector(1.0)[0])
    with torch.random.fork_rng():
        for seed in range(200):
            torch.manual_seed(seed)
            kept = F.dropout(torch.ones(8, HIDDEN, dtype=f64), DROP) > 0
            torch.manual_seed(seed)
            optimizer.zero_grad()
            F.cross_entropy(reference(inputs), targets).backward()
            by_torch = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
            by_rule = method.masked(loss, kept, q.mean).gradient(q.mean)
            assert largest_gap(by_rule, by_torch) < 1e-12
            optimizer.step()
            q = method.update(q, loss, kept)
    end = nn.utils.parameters_to_vector(reference.parameters()).detach()
    # Rounding in another order, over 200 steps.
    assert largest_gap(q.mean, end) < 1e-10
    assert (q.mean - start).abs().max() > 0.1


@pytest.mark.parametrize("inverted", [True, False])
def test_dropout_with_a_mask_for_the_batch_is_sgd_with_units_set_to_zero(inverted: bool) -> None:
    inputs, targets, start = small_problem()
    reference = network(with_dropout=False)
    nn.utils.vector_to_parameters(start.clone(), reference.parameters())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    model = Model(network(with_dropout=False), likelihoods.Categorical())
    loss = Loss.of_model(model, (inputs, targets))
    method = Dropout(outgoing_units(), drop=DROP, rate=0.1, inverted=inverted)
    q, draws = FixedGaussian(start, vector(1.0)[0]), generator(7)
    for _ in range(200):
        kept = method.draw(draws)
        multiplier = kept.to(f64) / (1 - DROP if inverted else 1.0)
        optimizer.zero_grad()
        hidden = reference[1](reference[0](inputs)) * multiplier
        F.cross_entropy(reference[2](hidden), targets).backward()
        optimizer.step()
        q = method.update(q, loss, kept)
    end = nn.utils.parameters_to_vector(reference.parameters()).detach()
    assert largest_gap(q.mean, end) < 1e-10


@pytest.mark.parametrize("inverted", [True, False])
def test_dropouts_mean_gradient_over_all_masks_is_that_of_the_expected_loss(inverted: bool) -> None:
    """E_z[c·z∘∇ℓ(c·z∘m)] = ∇_m Σ_z q(z)ℓ(c·z∘m), by enumeration of the masks."""
    inputs, targets, m = small_problem()
    model = Model(network(with_dropout=False), likelihoods.Categorical())
    loss = Loss.of_model(model, (inputs, targets))
    method = Dropout(outgoing_units(), drop=DROP, rate=0.1, inverted=inverted)
    leaf = m.clone().requires_grad_()
    expected, mean = torch.zeros((), dtype=f64), torch.zeros_like(m)
    slab = 1 / (1 - DROP) if inverted else 1.0
    for bits in itertools.product((0, 1), repeat=HIDDEN):
        chance = math.prod(1 - DROP if bit else DROP for bit in bits)
        theta = leaf.clone()
        last = slice(4 * HIDDEN, 6 * HIDDEN)
        theta[last] = (leaf[last].reshape(2, HIDDEN) * slab * vector(*bits)).reshape(-1)
        expected = expected + chance * loss.value(theta)
        kept = torch.tensor(bits, dtype=torch.bool)
        mean += chance * method.masked(loss, kept, m).gradient(m)
    (by_autodiff,) = torch.autograd.grad(expected, leaf)
    assert largest_gap(mean, by_autodiff) < 1e-14


def test_the_term_that_dropout_leaves_out_vanishes_as_spike_and_slab_get_narrow() -> None:
    """∇ log q at the slab's mean is −r·s₀·c·m, with r the responsibility of the spike."""
    mean = vector(0.5)
    left_out = []
    for precision in (4.0, 100.0, 1000.0):
        slab, spike = (
            DiagGaussian(m, vector(precision**-0.5)) for m in (mean, torch.zeros_like(mean))
        )
        q = GaussianMixture(vector(math.log((1 - DROP) / DROP)), (slab, spike))
        spikes_share = q.responsibilities(mean)[1]
        assert largest_gap(q.grad_log_prob(mean), -spikes_share * precision * mean) < 1e-12
        left_out.append(float(q.grad_log_prob(mean).abs()))
    assert left_out[0] > 0.5
    assert left_out[2] < 1e-40


def test_units_are_dropped_with_the_probability_asked_for() -> None:
    method = Dropout(torch.tensor([0, 0, 1, -1]), drop=0.3, rate=0.1)
    kept = method.draw(generator(), examples=20_000).to(f64)
    assert kept.shape == (20_000, 2)
    error = math.sqrt(0.3 * 0.7 / 20_000)
    assert float((kept.mean(0) - 0.7).abs().max()) < 5 * error


def test_dropout_refuses_what_does_not_fit() -> None:
    with pytest.raises(DataError, match="drop must be"):
        Dropout(torch.tensor([0]), drop=1.0, rate=0.1)
    with pytest.raises(DataError, match="units"):
        Dropout(torch.tensor([-1]), drop=0.5, rate=0.1)
    method, q = Dropout(torch.tensor([0, 1]), 0.5, 0.1), FixedGaussian(vector(1, 2), vector(1, 1))
    loss = Loss.of(lambda theta: theta.sum())
    with pytest.raises(DataError, match="kept"):
        method.update(q, loss, torch.tensor([True]))
    with pytest.raises(DataError, match="masks need a loss"):
        method.update(q, loss, torch.ones(3, 2, dtype=torch.bool))
