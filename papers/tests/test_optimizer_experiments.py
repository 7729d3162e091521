"""The experiments of Khan (2019) on VOGN, small, and their verdicts both ways."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize
from small_runs import stored_results, verdict_of_one
from torch.nn.functional import interpolate

import credo
from credo.autodiff.loss import Loss
from credo.data import digits
from credo.errors import ConvergenceError
from credo.families import DiagGaussian
from credo_papers import equal_time, optimizer_swap, squared_gradient_cost

SWAP = optimizer_swap.SwapSettings(
    net="784-100-10", num_data=128, epochs=2, batch_size=64, temperature=0.03, vogn_lr=1e-3,
    vogn_hess_init=0.01, ivon_lr=0.1, ivon_hess_init=0.1, ivon_beta2=0.99, prediction_samples=3,
    curve_images=50, ood_images=60,
)  # fmt: skip
COST = squared_gradient_cost.CostSettings(
    num_data=100, order=4, steps=30, flips=(0.0, 0.05), noises=(1.0, 2.0)
)
EQUAL = equal_time.EqualTimeSettings(
    net="784-100-10", num_data=128, held_out=40, epochs=2, batch_size=64, prediction_samples=3,
)  # fmt: skip
SMALL = {optimizer_swap: SWAP, squared_gradient_cost: COST, equal_time: EQUAL}
RIGHT, WRONG = 0, 1
"""Places of the two levels in `COST`."""


def small_images(name):
    """The embedded 8×8 digits in the sizes of the real sets."""
    images = digits()
    size, channels = (28, 1) if name in ("mnist", "notmnist") else (32, 3)
    train, test = (
        (interpolate(x[:200], size=size).expand(-1, channels, -1, -1), y[:200])
        for x, y in (images.train, images.test)
    )
    return replace(images, train=train, test=test)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo.data.load", small_images)
        return stored_results(SMALL, tmp_path_factory)


@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    verdict_of_one(module.EXPERIMENT, "004", results[module], tmp_path)


# --- optimizer swap -------------------------------------------------------------------------------


def test_swap_scores_every_method_on_every_data_set(results):
    result = results[optimizer_swap]
    for data in optimizer_swap.DATA:
        for name in optimizer_swap.METHODS:
            prefix = f"{data}_{name}"
            assert len(result[f"{prefix}_curve"]) == SWAP.epochs
            assert result[f"{prefix}_half_time_nll"] == result[f"{prefix}_curve"][0]
            assert sorted(result[f"{prefix}_seconds"]) == result[f"{prefix}_seconds"]
            count, confidence, hits = (
                np.array(result[f"{prefix}_bin_{key}"]) for key in ("count", "confidence", "hits")
            )
            assert count.sum() == 200
            assert hits.sum() / 200 == pytest.approx(result[f"{prefix}_accuracy"])
            error = np.abs(hits - confidence).sum() / 200
            assert error == pytest.approx(result[f"{prefix}_ece"])


def test_the_quick_preset_holds_all_methods_to_one_objective():
    settings = optimizer_swap.EXPERIMENT.presets["quick"]
    methods = optimizer_swap.methods(settings)
    assert list(methods) == list(optimizer_swap.METHODS)
    assert methods["adam"].temperature == 0
    bayesian = [methods[name].temperature for name in ("vogn", "ivon", "vi")]
    assert bayesian == [settings.temperature] * 3


def swap_results(**vogn):
    """Three seeds in which VOGN has all that is claimed, but for what is given."""
    adam = {"accuracy": 0.90, "half_time_nll": 0.30, "ece": 0.05, "auroc": 0.80}
    better = {"accuracy": 0.895, "half_time_nll": 0.31, "ece": 0.02, "auroc": 0.85} | vogn
    return [
        {
            f"{data}_{name}_{key}": value + jitter
            for data in optimizer_swap.DATA
            for name, scores, jitter in (("adam", adam, 0.0), ("vogn", better, scatter))
            for key, value in scores.items()
        }
        for scatter in (-1e-3, 0.0, 1e-3)
    ]


@pytest.mark.parametrize(
    ("statement", "holds", "fails", "undecided"),
    [
        ("accuracy", 0.885, 0.87, 0.88),
        ("half_time_nll", 0.325, 0.34, 0.33),
        ("ece", 0.04, 0.06, 0.05),
        ("auroc", 0.81, 0.79, 0.80),
    ],
)
def test_swap_is_refuted_by_any_one_statement(statement, holds, fails, undecided):
    def verdict(value):
        return optimizer_swap.check(swap_results(**{statement: value})).verdict

    assert verdict(holds) == "reproduced"
    assert verdict(fails) == "not reproduced"
    assert verdict(undecided) == "inconclusive"
    assert optimizer_swap.check(swap_results()[:1]).verdict == "inconclusive"


def test_swap_tells_which_statement_failed():
    numbers = optimizer_swap.check(swap_results(ece=0.06)).numbers
    assert numbers["mnist_calibration_holds"] == numbers["cifar10_calibration_holds"] == -1
    assert numbers["mnist_ood_holds"] == numbers["cifar10_accuracy_holds"] == 1


# --- equal time -----------------------------------------------------------------------------------


def equal_time_results(**vi):
    """Two seeds in which the recipe wins everywhere, but for what is given."""
    adam = {"nll": 1.0, "ece": 0.04, "accuracy": 0.6, "ece_floor": 0.01, "ece_spread": 0.002}
    better = adam | {"nll": 0.85, "ece": 0.019, "accuracy": 0.61} | vi
    return [
        {
            f"{data}_{name}_{key}": value
            for data in equal_time.TITLES
            for name, scores in (("adam", adam), ("vi", better))
            for key, value in scores.items()
        }
    ] * 2


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ({}, "reproduced"),
        ({"nll": 0.91}, "not reproduced"),
        ({"accuracy": 0.599}, "not reproduced"),
        ({"ece": 0.021}, "not reproduced"),
        ({"ece": 0.021, "ece_floor": 0.018}, "reproduced"),
    ],
)
def test_equal_time_needs_all_three_on_every_set(scores, verdict):
    assert equal_time.check(equal_time_results(**scores)).verdict == verdict
    assert equal_time.check(equal_time_results(**scores)[:1]).verdict == "inconclusive"


def test_equal_time_gives_both_the_same_pull():
    """Weight decay λ is T/(ns²), whatever the temperature."""
    both = equal_time.contestants(EQUAL, "cifar10", num_data=100)
    (adam, adam_scale, _), (vi, vi_scale, _) = both["adam"], both["vi"]
    tuned = equal_time.TUNED["cifar10"]
    for method, scale in ((adam, adam_scale), (vi, vi_scale)):
        assert method.temperature / (100 * scale**2) == pytest.approx(tuned.weight_decay)


# --- squared-gradient cost ------------------------------------------------------------------------


def drawn(name, level, num_data=60):
    problem = squared_gradient_cost.PROBLEMS[name]
    truth = torch.tensor(problem.truth, dtype=torch.float64)
    return problem, problem.draw(truth, level, num_data, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", squared_gradient_cost.PROBLEMS)
def test_expectations_are_those_of_automatic_differentiation(name):
    problem, batch = drawn(name, 0.3)
    mean = torch.tensor(problem.truth, dtype=torch.float64)
    # At a scale of nearly nothing the grid is one point; curvature moves by the scale squared.
    q = DiagGaussian(mean, torch.full_like(mean, 1e-6))
    loss = Loss.of_model(credo.Model(problem.net(), problem.likelihood), batch, num_data=60)
    gradient, squares = loss.example_squares(mean)
    expected = {
        "exact": loss.hessian_diagonal(mean),
        "gauss_newton": loss.gauss_newton(mean).diagonal(),
        "squared_gradients": squares,
    }
    for curvature, reference in expected.items():
        found = squared_gradient_cost.expected(problem, batch, q, curvature, order=3)
        torch.testing.assert_close(found.curvature, reference, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.gradient, gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", squared_gradient_cost.PROBLEMS)
def test_the_exact_resting_point_is_the_minimum_that_scipy_finds(name):
    problem, batch = drawn(name, squared_gradient_cost.PROBLEMS[name].right)
    delta, order = squared_gradient_cost.PRIOR_PRECISION, 6
    weights, offsets = squared_gradient_cost._grid(3, order)
    loss = Loss.of_model(credo.Model(problem.net(), problem.likelihood), batch, num_data=60)
    values = torch.func.vmap(loss.value)

    def objective(parameters):
        leaf = torch.tensor(parameters, requires_grad=True)
        mean, log_scale = leaf.chunk(2)
        theta = mean + log_scale.exp() * offsets
        prior = 0.5 * delta * (mean.square() + (2 * log_scale).exp()).sum()
        total = weights @ values(theta) + prior - log_scale.sum()
        (slope,) = torch.autograd.grad(total, leaf)
        return total.item(), slope.numpy()

    first = [*problem.truth, -2.0, -2.0, -2.0]
    best = optimize.minimize(objective, first, jac=True, options={"gtol": 1e-8})
    start = torch.tensor(problem.start, dtype=torch.float64)
    q = DiagGaussian(start, torch.full_like(start, 60**-0.5))
    q = squared_gradient_cost.resting_point(problem, batch, q, "exact", order)
    # The grid moves with q, so quadrature's own error (order 6) tells the two apart a little.
    np.testing.assert_allclose(q.mean.numpy(), best.x[:3], atol=2e-3)
    np.testing.assert_allclose(q.scale.log().numpy(), best.x[3:], atol=2e-3)


def test_squares_know_the_noise_that_the_model_does_not():
    # Linear in its last weight at a fixed hidden layer, so the ratio is the noise's variance.
    problem, batch = drawn("network", 2.0, num_data=20_000)
    truth = torch.tensor(problem.truth, dtype=torch.float64)
    q = DiagGaussian(truth, torch.full_like(truth, 1e-6))
    squares, exact = (
        squared_gradient_cost.expected(problem, batch, q, curvature, order=1).curvature
        for curvature in ("squared_gradients", "gauss_newton")
    )
    # A mean of 20,000 squares of normals times J²: its relative error is below √(2·10/20,000).
    np.testing.assert_allclose((squares / exact).numpy(), 4.0, rtol=5 * 0.032)


def test_a_solver_that_does_not_rest_says_so(monkeypatch):
    monkeypatch.setattr(squared_gradient_cost, "MAX_STEPS", 2)
    problem, batch = drawn("logistic", 0.0)
    q = DiagGaussian(torch.zeros(3).double(), torch.full((3,), 0.1).double())
    with pytest.raises(ConvergenceError, match="exact moves after 2 steps"):
        squared_gradient_cost.resting_point(problem, batch, q, "exact", 3)


@pytest.mark.parametrize("kind", ["vogn", "ivon"])
def test_the_optimizers_come_to_rest_where_quadrature_says(kind):
    problem, batch = drawn("network", 2.0, num_data=200)
    settings = replace(COST, steps=600, beta2=0.98)
    start = torch.tensor(problem.start, dtype=torch.float64)
    q = DiagGaussian(start, torch.full_like(start, 0.05))
    curvature = "squared_gradients" if kind == "vogn" else "exact"
    rest = squared_gradient_cost.resting_point(problem, batch, q, curvature, 5)
    found = squared_gradient_cost.optimised(kind, problem, batch, rest.mean, settings, seed=0)
    # IVON's curvature scatters by some 2.5 times itself in each of 400 averaged steps, which leaves
    # 6 % of its scale; VOGN's by far less. Exact scales are twice VOGN's here, off by 0.7.
    tolerance = 0.05 if kind == "vogn" else 0.3
    np.testing.assert_allclose((found.scale / rest.scale).log().numpy(), 0.0, atol=tolerance)


def cost_results(result, **changes):
    """Three seeds that agree with the claim, but for the entries given."""
    base = copy.deepcopy(result)
    for name in squared_gradient_cost.PROBLEMS:
        for method in squared_gradient_cost.METHODS:
            strays = method in ("vogn", "squared_gradients")
            base[f"{name}_{method}_off"] = [0.02, 0.4 if strays else 0.02]
    for key, (place, value) in changes.items():
        base[key][place] = value
    seeds = [copy.deepcopy(base) for _ in range(3)]
    for seed, scatter in zip(seeds, (-1e-3, 0.0, 1e-3), strict=True):
        for key in seed:
            if key.endswith("_off"):
                seed[key] = [value + scatter for value in seed[key]]
    return seeds


def test_cost_is_refuted_by_scales_that_agree_or_stray_where_they_should_not(results):
    result = results[squared_gradient_cost]

    def verdict(**changes):
        return squared_gradient_cost.check(cost_results(result, **changes)).verdict

    assert verdict() == "reproduced"
    assert verdict(logistic_vogn_off=(RIGHT, 0.3)) == "not reproduced"
    assert verdict(network_vogn_off=(WRONG, 0.05)) == "not reproduced"
    assert verdict(logistic_squared_gradients_off=(WRONG, 0.05)) == "not reproduced"
    assert verdict(network_ivon_off=(WRONG, 0.3)) == "not reproduced"
    assert verdict(logistic_gauss_newton_off=(WRONG, 0.3)) == "not reproduced"
    assert verdict(network_vogn_off=(WRONG, 0.1)) == "inconclusive"
    assert squared_gradient_cost.check(cost_results(result)[:1]).verdict == "inconclusive"
    refuted = cost_results(result, network_ivon_off=(WRONG, 0.3))
    numbers = squared_gradient_cost.check(refuted).numbers
    assert [key for key, value in numbers.items() if value == -1] == ["network_wrong_ivon_holds"]
