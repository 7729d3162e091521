"""The metrics beside implementations nobody here wrote: scikit-learn, torchmetrics, scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import (
    binary_calibration_error,
    multiclass_accuracy,
    multiclass_calibration_error,
)
from torchmetrics.functional.regression import continuous_ranked_probability_score

from credo import metrics

ROUNDING = 1e-12  # both sides are float64 means of numbers of order one
FLOAT32_ROUNDING = 1e-6  # torchmetrics' multiclass functions reduce in float32


def _predictions(seed, n=1000, classes=6, sharpness=0.5):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(classes, sharpness), n)
    # right equally often at every confidence, so the bins err in both directions
    y = np.where(rng.random(n) < 0.4, probs.argmax(axis=1), rng.integers(0, classes, n))
    return probs, y


def _scores(seed, tied):
    rng = np.random.default_rng(seed)
    inside, outside = rng.normal(0, 1, 700), rng.normal(0.8, 1.5, 300)
    return (inside.round(), outside.round()) if tied else (inside, outside)


@pytest.mark.parametrize("seed", range(3))
def test_scoring_equals_scikit_learn(seed):
    probs, y = _predictions(seed)
    classes = np.arange(probs.shape[1])
    expected = sklearn_metrics.log_loss(y, probs, labels=classes)
    assert metrics.nll(probs, y) == pytest.approx(expected, abs=ROUNDING)
    expected = sklearn_metrics.accuracy_score(y, probs.argmax(axis=1))
    assert metrics.accuracy(probs, y) == pytest.approx(expected, abs=ROUNDING)
    one_hot = np.eye(len(classes))[y]
    by_class = [sklearn_metrics.brier_score_loss(one_hot[:, c], probs[:, c]) for c in classes]
    assert metrics.brier(probs, y) == pytest.approx(sum(by_class), abs=ROUNDING)


def test_binary_brier_is_twice_the_one_of_scikit_learn():
    rng = np.random.default_rng(0)
    p = rng.random(500)
    y = (rng.random(500) < p).astype(int)
    expected = 2 * sklearn_metrics.brier_score_loss(y, p)
    assert metrics.brier(p, y) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [10, 15])
def test_ece_equals_torchmetrics_away_from_the_edges(seed, bins):
    # random confidences miss the edges, where torchmetrics' bins are [lo, hi) and ours (lo, hi]
    probs, y = _predictions(seed)
    preds, target = torch.tensor(probs), torch.tensor(y)
    expected = multiclass_calibration_error(preds, target, probs.shape[1], n_bins=bins, norm="l1")
    assert metrics.ece(probs, y, bins) == pytest.approx(expected.item(), abs=FLOAT32_ROUNDING)
    # the binning matters here: one bin would let over- and underconfidence cancel
    assert metrics.ece(probs, y, bins) > metrics.ece(probs, y, 1) + 0.05
    expected = multiclass_accuracy(preds, target, probs.shape[1], average="micro")
    assert metrics.accuracy(preds, target) == pytest.approx(expected.item(), abs=FLOAT32_ROUNDING)


def test_classwise_ece_is_the_mean_of_binary_errors_of_torchmetrics():
    probs, y = _predictions(5)
    expected = []
    for c in range(probs.shape[1]):
        # torchmetrics' binary error bins P(y = 1) itself, not the confidence of the top class
        expected.append(
            binary_calibration_error(
                torch.tensor(probs[:, c]), torch.tensor(y == c).int(), n_bins=15, norm="l1"
            ).item()
        )
    assert metrics.classwise_ece(probs, y) == pytest.approx(np.mean(expected), abs=ROUNDING)


@pytest.mark.parametrize("equal_mass", [False, True])
def test_reliability_equals_the_calibration_curve_of_scikit_learn(equal_mass):
    # n divides evenly, so interpolated quantiles cut the examples where the order statistics do
    probs, y = _predictions(7, n=1500)
    diagram = metrics.reliability(probs, y, 15, equal_mass=equal_mass)
    strategy = "quantile" if equal_mass else "uniform"
    right, top = probs.argmax(axis=1) == y, probs.max(axis=1)
    accuracy, confidence = calibration_curve(right, top, n_bins=15, strategy=strategy)
    filled = diagram.count > 0
    assert diagram.accuracy[filled] == pytest.approx(accuracy, abs=ROUNDING)
    assert diagram.confidence[filled] == pytest.approx(confidence, abs=ROUNDING)


@pytest.mark.parametrize("tied", [False, True])
def test_ood_metrics_equal_ranks_and_curves_computed_otherwise(tied):
    inside, outside = _scores(0, tied)
    is_out, scores = np.repeat([0, 1], [700, 300]), np.concatenate([inside, outside])
    u = stats.mannwhitneyu(outside, inside).statistic
    assert metrics.auroc(inside, outside) == pytest.approx(u / 210_000, abs=ROUNDING)
    expected = sklearn_metrics.roc_auc_score(is_out, scores)
    assert metrics.auroc(inside, outside) == pytest.approx(expected, abs=ROUNDING)
    for positive, label, sign in [("out", is_out, 1), ("in", 1 - is_out, -1)]:
        precision, recall, _ = sklearn_metrics.precision_recall_curve(label, sign * scores)
        expected = -np.sum(np.diff(recall) * precision[:-1])
        assert metrics.aupr(inside, outside, positive) == pytest.approx(expected, abs=ROUNDING)
    accepted_out, accepted_in, _ = sklearn_metrics.roc_curve(
        1 - is_out, -scores, drop_intermediate=False
    )
    first = np.argmax(accepted_in >= 0.95)
    assert metrics.fpr95(inside, outside) == pytest.approx(accepted_out[first], abs=ROUNDING)


@pytest.mark.parametrize(
    ("mean", "std", "y"), [(0.0, 1.0, 0.0), (1.0, 0.3, 2.5), (-2.0, 4.0, 1.0), (0.0, 1.0, -6.0)]
)
def test_gaussian_crps_is_the_integral_that_defines_it(mean, std, y):
    law = stats.norm(mean, std)
    below, _ = integrate.quad(lambda t: law.cdf(t) ** 2, mean - 12 * std, y, epsabs=1e-12)
    above, _ = integrate.quad(lambda t: law.sf(t) ** 2, y, mean + 12 * std, epsabs=1e-12)
    assert metrics.crps_gaussian([mean], [std], [y]) == pytest.approx(below + above, abs=1e-9)
    assert metrics.gaussian_nll([mean], [std], [y]) == pytest.approx(-law.logpdf(y), abs=ROUNDING)


def test_sample_crps_equals_torchmetrics_and_the_defining_integral():
    rng = np.random.default_rng(3)
    samples, y = rng.normal(size=(9, 40)).round(1), rng.normal(size=40).round(1)
    expected = continuous_ranked_probability_score(torch.tensor(samples.T), torch.tensor(y))
    assert metrics.crps(samples, y) == pytest.approx(expected.item(), abs=ROUNDING)
    for draws, target in zip(samples.T[:5], y[:5], strict=True):
        # the empirical distribution is a staircase: the integral is a finite sum
        knots = np.sort(np.append(draws, target))
        step = (draws[None] <= knots[:-1, None]).mean(axis=1) - (target <= knots[:-1])
        integral = np.sum(step**2 * np.diff(knots))
        assert metrics.crps(draws[:, None], [target]) == pytest.approx(integral, abs=ROUNDING)


def test_fair_crps_leaves_out_the_pairs_of_a_draw_with_itself():
    rng = np.random.default_rng(4)
    samples, y = rng.normal(size=(6, 20)), rng.normal(size=20)
    gaps = np.abs(samples[:, None] - samples[None]).sum(axis=(0, 1)) / (2 * 6 * 5)
    expected = (np.abs(samples - y).mean(axis=0) - gaps).mean()
    assert metrics.crps(samples, y, fair=True) == pytest.approx(expected, abs=ROUNDING)


def test_rmse_equals_scikit_learn():
    rng = np.random.default_rng(8)
    mean, y = rng.normal(size=(50, 3)), rng.normal(size=(50, 3))
    expected = np.sqrt(sklearn_metrics.mean_squared_error(y, mean))
    assert metrics.rmse(mean, y) == pytest.approx(expected, abs=ROUNDING)
