"""The experiments of Khan (2019) on the learning rule, small, and their verdicts both ways."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats
from sklearn.linear_model import Ridge

from credo.families import DiagGaussian
from credo_papers import (
    flat_minimum,
    riskier_fit,
    sequential_inference,
    sgd_covariance,
    uncertainty_away,
)

MODULES = (
    flat_minimum,
    riskier_fit,
    sequential_inference,
    sgd_covariance,
    uncertainty_away,
)
SMALL = {
    flat_minimum: flat_minimum.FlatSettings(starts=2, temperatures=(1.0, 0.05)),
    sgd_covariance: sgd_covariance.CovarianceSettings(num_data=20, sgd_steps=40),
    riskier_fit: riskier_fit.RiskSettings(catalogues=2, samples=300),
    uncertainty_away: uncertainty_away.AwaySettings(epochs=2, prediction_samples=4, samples=1),
    sequential_inference: sequential_inference.SequentialSettings(num_data=20),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One small run of each, as it comes back from the disk."""
    found = {}
    for module, settings in SMALL.items():
        result = module.run_one(settings, 0, tmp_path_factory.mktemp("run"))
        found[module] = json.loads(json.dumps(result, allow_nan=False))
    return found


def verdict(module, *results):
    return module.check(list(results)).verdict


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    experiment = module.EXPERIMENT
    assert experiment.paper == "004"
    assert experiment.id.startswith("004-")
    assert list(experiment.presets) == ["quick", "paper"]
    json.dumps(experiment.scale("quick"), allow_nan=False)
    numbers = experiment.check([results[module]]).numbers
    assert all(math.isfinite(value) for value in numbers.values())
    figures = experiment.figures([results[module], results[module]], tmp_path)
    assert all(path.stat().st_size > 10_000 for path in figures)


# --- flat minimum ---------------------------------------------------------------------------------


def test_the_smoothed_loss_and_its_derivatives_are_those_of_scipy():
    shape = flat_minimum.BowlWithHole(gap=0.2)

    def loss(theta):
        hole = np.exp(-((theta - shape.sharp) ** 2) / (2 * shape.width**2))
        return 0.5 * (theta - shape.flat) ** 2 - shape.depth * hole

    def expected(function, mean, scale):
        density = stats.norm(mean, scale).pdf
        ends = (mean - 12 * scale, mean + 12 * scale)
        inside = [p for p in (shape.sharp, mean) if ends[0] < p < ends[1]]
        return integrate.quad(
            lambda t: density(t) * function(t), *ends, points=inside, limit=400, epsabs=1e-13
        )[0]

    for mean, scale in ((-2.0, 0.2), (-0.3, 1.1), (0.7, 0.4)):
        m, s = torch.tensor([mean, scale], dtype=torch.float64)
        v = s.square()
        assert float(shape.smoothed(m, v)) == pytest.approx(expected(loss, mean, scale), abs=1e-10)
        # Stein: E ℓ' = E[ℓ (θ − m)]/v and E ℓ'' = E[ℓ ((θ − m)²/v − 1)]/v, by values alone.
        first = expected(lambda t, m=mean: loss(t) * (t - m), mean, scale) / scale**2
        second = (
            expected(lambda t, m=mean, s=scale: loss(t) * (((t - m) / s) ** 2 - 1), mean, scale)
            / scale**2
        )
        assert float(shape.gradient(m, v)) == pytest.approx(first, abs=1e-9)
        assert float(shape.curvature(m, v)) == pytest.approx(second, abs=1e-8)


def test_von_finds_the_gaussian_that_scipy_finds():
    shape = flat_minimum.BowlWithHole(gap=0.15)

    def objective(parameters):
        mean, log_scale = torch.tensor(parameters, dtype=torch.float64)
        return float(shape.objective(mean, (2 * log_scale).exp(), 1.0))

    options = {"xatol": 1e-8, "fatol": 1e-15}
    best = optimize.minimize(objective, [0.0, 0.0], method="Nelder-Mead", options=options)
    start = DiagGaussian(torch.tensor([-2.0]).double(), torch.tensor([0.25]).double())
    mean, scale = flat_minimum.bayes(shape, start, flat_minimum.FlatSettings(), 1.0)[-1]
    # Values alone tell the place of a minimum to the root of their precision.
    assert mean == pytest.approx(best.x[0], abs=1e-6)
    assert math.log(scale) == pytest.approx(best.x[1], abs=1e-6)
    assert objective([mean, math.log(scale)]) <= best.fun + 1e-12


def test_the_switch_is_where_both_minima_are_worth_the_same():
    temperatures = (1.0, 0.5, 0.2)
    heights = {"flat": [0.0, 0.0, 0.0], "sharp": [-1e-16, 0.3, -0.1]}
    assert flat_minimum._switch(temperatures, heights) == pytest.approx(0.5 - 0.75 * 0.3)
    assert flat_minimum._switch(temperatures, heights | {"sharp": [-1.0, -1.0, -1.0]}) == 1.0
    assert flat_minimum._switch(temperatures, heights | {"sharp": [1.0, 1.0, 1.0]}) == 0.0


def test_flat_minimum_judges_both_ways(results):
    result = results[flat_minimum]
    assert verdict(flat_minimum, result) == "reproduced"
    stayed = result | {"ends_in_the_flat_minimum": 0.5}
    assert verdict(flat_minimum, stayed) == "not reproduced"
    assert verdict(flat_minimum, result, stayed) == "inconclusive"
    for wrong in (
        {"second_condition": 1e-5},
        {"first_condition": 1e-5},
        {"objective": result["objective_of_sharp_laplace"] + 1},
        {"best_of_grid_minus_objective": -1e-3},
        {"cold_mean": 0.0},
    ):
        assert verdict(flat_minimum, result | wrong) == "not reproduced"


# --- SGD's covariance -----------------------------------------------------------------------------


def test_sgd_covariance_judges_both_ways(results):
    result = results[sgd_covariance]
    assert verdict(sgd_covariance, result) == "reproduced"
    for wrong in (
        {"step_error": 1e-6},
        {"rescaled_iterates_error": 1e-16},
        {"rest_error": 1e-4},
        {"best_precisions_differ": 1e-3},
        {"best_curvature_residual": 1e-3},
        {"smallest_excess": -1e-3},
        {"largest_excess": result["smallest_excess"]},
    ):
        assert verdict(sgd_covariance, result, result | wrong) == "not reproduced"


def test_the_mode_is_that_of_scipy_and_every_cost_is_positive(results):
    result = results[sgd_covariance]
    problem = sgd_covariance._Problem.draw(20, torch.Generator().manual_seed(0))
    x, y = problem.x.numpy(), problem.y.numpy()

    def loss(w):
        return np.logaddexp(0, x @ w).sum() - y @ (x @ w) + 0.5 * w @ w

    def gradient(w):
        return x.T @ (special.expit(x @ w) - y) + w

    best = optimize.minimize(loss, np.zeros(2), jac=gradient, method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(result["mode"], best.x, atol=1e-8)
    assert min(result["excess"]) == result["smallest_excess"] > 0
    assert result["names"][int(np.argmin(result["excess"]))] == "inverse Hessian"


# --- the riskier fit ------------------------------------------------------------------------------


def test_maximum_likelihood_and_mode_are_those_of_scipy():
    counts = torch.poisson(riskier_fit.true_counts(), torch.Generator().manual_seed(3))
    fitted = riskier_fit.fit(counts, degree=1)
    x, y = fitted.design.numpy(), counts.numpy()
    for found, weight in ((fitted.likeliest, 0.0), (fitted.mode, riskier_fit.PRIOR_SCALE**-2)):

        def loss(theta, weight=weight):
            return np.exp(x @ theta).sum() - y @ (x @ theta) + 0.5 * weight * theta @ theta

        def gradient(theta, weight=weight):
            return x.T @ (np.exp(x @ theta) - y) + weight * theta

        best = optimize.minimize(loss, found.numpy() + 0.1, jac=gradient, options={"gtol": 1e-8})
        np.testing.assert_allclose(found.numpy(), best.x, atol=1e-7)


def test_the_true_region_has_a_thousand_events_and_its_own_design():
    assert float(riskier_fit.true_counts().sum()) == pytest.approx(1000, rel=1e-3)
    risk = -torch.expm1(-riskier_fit.DESIGN_YEARS * riskier_fit.true_rate(riskier_fit.EDGES))
    magnitude = torch.tensor(riskier_fit.design_magnitude(risk)).double()
    actual = -math.expm1(-riskier_fit.DESIGN_YEARS * float(riskier_fit.true_rate(magnitude)))
    # The log risk is not quite a line within a bin of 0.1.
    assert actual == pytest.approx(0.1, abs=2e-3)
    assert riskier_fit.design_magnitude(torch.ones(45)) == riskier_fit.HIGHEST
    assert riskier_fit.design_magnitude(torch.zeros(45)) == riskier_fit.LOWEST


def test_riskier_fit_judges_both_ways(results):
    good = {
        "ratio_many": 0.02,
        "ratio_few": 1.0,
        "bent_width_many": 0.04,
        "bent_width_few": 0.6,
        "straight_error": 0.08,
        "bent_error": 2.0,
        "bent_is_wider": 1.0,
        "straight_covers": 0.9,
        "bent_covers": 0.9,
        "bent_likelihood_exceeded": 0.3,
        "bent_bayes_exceeded": 0.18,
    }

    def judged(**changes):
        base = results[riskier_fit] | good | changes
        wobble = ("bent_error", "bent_likelihood_exceeded")
        seeds = [base | {k: base[k] + 0.001 * i for k in wobble} for i in range(3)]
        return verdict(riskier_fit, *seeds)

    assert judged() == "reproduced"
    assert judged(bent_error=0.01) == "not reproduced"
    assert judged(bent_is_wider=0.5) == "not reproduced"
    assert judged(straight_covers=0.6) == "not reproduced"
    assert judged(bent_covers=0.8) == "not reproduced"
    assert judged(bent_likelihood_exceeded=0.12) == "not reproduced"
    assert judged(ratio_few=0.3) == "inconclusive"
    assert judged(bent_width_few=0.1) == "inconclusive"


# --- uncertainty away from the data ---------------------------------------------------------------


def test_uncertainty_away_judges_both_ways(results):
    def judged(vi_far, map_far, vi_near=0.1, accuracy=0.99):
        base = results[uncertainty_away] | {
            "vi_accuracy": accuracy,
            "map_accuracy": accuracy,
            "vi_near_entropy": vi_near,
            "map_near_entropy": 0.05,
            "map_far_entropy": map_far,
        }
        seeds = [base | {"vi_far_entropy": vi_far + 0.001 * i} for i in range(3)]
        return verdict(uncertainty_away, *seeds)

    assert judged(0.3, 0.02) == "reproduced"
    assert judged(0.02, 0.3) == "not reproduced"
    # Unsure everywhere: more entropy far away, but not because it is far.
    assert judged(0.3, 0.02, vi_near=0.6) == "not reproduced"
    assert judged(0.3, 0.02, accuracy=0.9) == "inconclusive"
    assert verdict(uncertainty_away, results[uncertainty_away]) == "inconclusive"


def test_far_points_are_far_and_the_point_estimate_has_no_mutual_information(results):
    result = results[uncertainty_away]
    assert result["map_far_information"] == 0.0
    assert result["vi_far_information"] > 0.0
    plane, data = uncertainty_away._plane(), torch.tensor(result["data"])
    far = torch.cdist(plane, data).min(1).values >= uncertainty_away.FAR
    entropy = torch.tensor(result["vi_map"])[far].double()
    # The map is rounded to four digits.
    assert float(entropy.mean()) == pytest.approx(result["vi_far_entropy"], abs=1e-4)


# --- sequential inference -------------------------------------------------------------------------


def test_the_last_posterior_is_ridge_regression_on_all_data(results):
    result = results[sequential_inference]
    x = np.stack([np.ones(20), np.array(result["x"])], 1)
    penalty = sequential_inference.PRIOR_PRECISION * sequential_inference.NOISE**2
    ridge = Ridge(alpha=penalty, fit_intercept=False, tol=1e-12).fit(x, result["y"])
    np.testing.assert_allclose(result["means"][-1], ridge.coef_, atol=1e-12)
    newest = result["blocks"][-1]
    line = np.polynomial.polynomial.polyfit(newest["x"], newest["y"], 1)
    # Descent stops at a gradient of 1e-5, and the flattest direction of a block is at 1e-2.
    np.testing.assert_allclose(newest["refit"], line, atol=5e-3)


def test_sequential_inference_judges_both_ways(results):
    result = results[sequential_inference]
    assert verdict(sequential_inference, result) == "reproduced"
    for wrong in (
        {"line_error": 1e-8},
        {"coin_error": 1e-8},
        {"blocks_error": 1e-8},
        {"refit_distance": 1e-6},
    ):
        assert verdict(sequential_inference, result, result | wrong) == "not reproduced"
