"""Truths about the metrics that follow from their definitions, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credo import metrics
from credo.errors import DataError

ROUNDING = 1e-12  # float64 means of numbers of order one

# every metric of (probs, y), with its remaining arguments filled in
CLASSIFICATION = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "gibbs_nll": lambda probs, y, **kw: metrics.gibbs_nll(_stacked(probs), y, **kw),
    "brier": metrics.brier,
    "ece": metrics.ece,
    "adaptive_ece": metrics.adaptive_ece,
    "classwise_ece": metrics.classwise_ece,
    "reliability": lambda probs, y, **kw: metrics.reliability(probs, y, 7, **kw).error,
    "accuracy_vs_confidence": lambda probs, y, **kw: float(
        metrics.accuracy_vs_confidence(probs, y, [0.4], **kw)[0]
    ),
}
each_classification_metric = pytest.mark.parametrize(
    "metric", CLASSIFICATION.values(), ids=CLASSIFICATION.keys()
)


def _stacked(probs):
    return torch.stack([probs, probs]) if torch.is_tensor(probs) else np.stack([probs, probs])


def _predictions(n=200, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), n)
    return probs, rng.integers(0, classes, n)


# --- what perfect, ignorant and wrong predictors score


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_uniform_predictor_scores_log_c_and_one_minus_one_over_c(classes):
    probs = np.full((7, classes), 1 / classes)
    y = np.arange(7) % classes
    assert metrics.nll(probs, y) == pytest.approx(math.log(classes), abs=ROUNDING)
    assert metrics.brier(probs, y) == pytest.approx(1 - 1 / classes, abs=ROUNDING)
    assert metrics.confidence(probs) == pytest.approx(1 / classes, abs=ROUNDING)


def test_certain_and_right_scores_zero_and_certain_and_wrong_the_worst():
    right, wrong = np.eye(3), np.eye(3)[[1, 2, 0]]
    y = np.arange(3)
    assert metrics.nll(right, y) == metrics.brier(right, y) == metrics.ece(right, y) == 0
    assert metrics.accuracy(right, y) == 1
    assert metrics.nll(wrong, y) == pytest.approx(-math.log(1e-12))
    assert metrics.brier(wrong, y) == 2
    assert metrics.ece(wrong, y) == metrics.adaptive_ece(wrong, y) == 1
    assert metrics.accuracy(wrong, y) == 0


def test_gibbs_loss_is_at_least_the_loss_of_the_average_and_equal_without_disagreement():
    rng = np.random.default_rng(1)
    samples = rng.dirichlet(np.ones(4), (6, 50))
    y = rng.integers(0, 4, 50)
    by_hand = -np.log(samples[:, np.arange(50), y]).mean()
    assert metrics.gibbs_nll(samples, y) == pytest.approx(by_hand, abs=ROUNDING)
    assert metrics.gibbs_nll(samples, y) > metrics.nll(samples.mean(0), y)
    same = np.broadcast_to(samples[0], samples.shape)
    assert metrics.gibbs_nll(same, y) == pytest.approx(metrics.nll(samples[0], y), abs=ROUNDING)


# --- layouts and dtypes


@each_classification_metric
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_float_dtype_score_as_their_float64_values(metric, dtype):
    probs, y = _predictions()
    stored = torch.tensor(probs).to(dtype).requires_grad_()
    expected = metric(stored.detach().double().numpy(), y) if dtype.itemsize > 2 else None
    got = metric(stored, torch.tensor(y))
    assert isinstance(got, float)
    if expected is not None:
        assert got == pytest.approx(expected, abs=ROUNDING)
    else:
        # two or three digits of storage; an example may change its bin, so only the size is kept
        assert got == pytest.approx(metric(probs, y), abs=0.05)


@each_classification_metric
def test_one_dimensional_probabilities_are_those_of_class_one(metric):
    rng = np.random.default_rng(2)
    p, y = rng.random(300), rng.integers(0, 2, 300)
    two_columns = np.stack([1 - p, p], axis=1)
    assert metric(p, y) == metric(two_columns, y)
    assert metric(p, y.astype(bool)) == metric(p, y.astype(float)) == metric(p, y)


@each_classification_metric
def test_dense_predictions_are_one_example_per_pixel(metric):
    rng = np.random.default_rng(3)
    flat, y = rng.dirichlet(np.ones(3), 2 * 4 * 5), rng.integers(0, 3, (2, 4, 5))
    dense = np.moveaxis(flat.reshape(2, 4, 5, 3), -1, 1)
    assert dense.shape == (2, 3, 4, 5)
    assert metric(dense, y) == pytest.approx(metric(flat, y.ravel()), abs=ROUNDING)
    assert metric(torch.tensor(dense), torch.tensor(y)) == metric(dense, y)


@each_classification_metric
@pytest.mark.parametrize("mark", [255, -100, 2])
def test_ignored_labels_are_dropped_whatever_was_predicted_there(metric, mark):
    probs, y = _predictions(60, 4)
    y = np.where(y == 2, 1, y)
    keep = np.arange(60) % 3 > 0
    expected = metric(probs[keep], y[keep])
    probs = np.where(keep[:, None], probs, np.nan)
    y = np.where(keep, y, mark)
    assert metric(probs, y, ignore_index=mark) == pytest.approx(expected, abs=ROUNDING)


@each_classification_metric
def test_inputs_are_not_written_to_and_order_does_not_matter(metric):
    probs, y = _predictions()
    before = probs.copy(), y.copy()
    first = metric(probs, y)
    assert np.array_equal(probs, before[0])
    assert np.array_equal(y, before[1])
    order = np.random.default_rng(0).permutation(len(y))
    assert metric(probs[order], y[order]) == pytest.approx(first, abs=ROUNDING)


# --- calibration


def _bias_of_perfect_calibration(low, high, bins, n):
    """Mean ECE of n calibrated examples, confidence uniform on (low, high): half-normal noise."""
    edges = np.clip(np.arange(bins + 1) / bins, low, high)
    grid = edges[:-1] + (np.diff(edges)[:, None] * (np.arange(1000) + 0.5) / 1000).T
    variance = (grid * (1 - grid)).mean(axis=0)
    mass = np.diff(edges) / (high - low)
    return float(np.sum(np.sqrt(2 / np.pi * mass * variance / n)))


@pytest.mark.parametrize(
    ("n", "quoted", "repeats"), [(10**3, 0.039, 60), (10**4, 0.011, 30), (10**5, 0.0039, 10)]
)
def test_calibrated_predictions_have_the_known_finite_sample_error(n, quoted, repeats):
    rng = np.random.default_rng(n)
    p = rng.random((repeats, n))
    y = rng.random((repeats, n)) < p
    # class 1's probability is uniform on (0, 1); the top class's is uniform on (½, 1)
    for metric, low in [(metrics.classwise_ece, 0.0), (metrics.ece, 0.5)]:
        values = np.array([metric(*row) for row in zip(p, y, strict=True)])
        predicted = _bias_of_perfect_calibration(low, 1.0, 15, n)
        error = values.std(ddof=1) / math.sqrt(repeats)
        # the half-normal law is itself off by O(1/√n_b) relative in the extreme bins: 2 %
        assert abs(values.mean() - predicted) < 5 * error + 0.02 * predicted
    # the quoted value is one simulation rounded to two digits; its spread is about a fifth
    assert _bias_of_perfect_calibration(0.0, 1.0, 15, n) == pytest.approx(quoted, rel=0.2)


def test_overconfidence_is_the_gap_between_confidence_and_accuracy():
    y = np.array([0] * 7 + [1] * 3)
    probs = np.tile([0.95, 0.05], (10, 1))
    for metric in (metrics.ece, metrics.adaptive_ece, metrics.classwise_ece):
        assert metric(probs, y) == pytest.approx(0.25, abs=ROUNDING)
    assert metrics.ece(probs, y) == pytest.approx(
        abs(metrics.confidence(probs) - metrics.accuracy(probs, y)), abs=ROUNDING
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("bins", [5, 10, 15, 20])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(dtype, bins):
    top = np.arange(bins // 2 + 1, bins + 1) / bins
    diagram = metrics.reliability(top.astype(dtype), np.ones(len(top), int), bins)
    expected = np.zeros(bins, int)
    expected[bins // 2 :] = 1
    assert diagram.count.tolist() == expected.tolist()
    assert np.isnan(diagram.accuracy[0])


def test_reliability_describes_every_example_once():
    probs, y = _predictions(500)
    for equal_mass in (False, True):
        diagram = metrics.reliability(probs, y, 15, equal_mass=equal_mass)
        filled = diagram.count > 0
        share = diagram.count[filled] / 500
        assert diagram.count.sum() == 500
        assert share @ diagram.accuracy[filled] == pytest.approx(metrics.accuracy(probs, y))
        assert share @ diagram.confidence[filled] == pytest.approx(metrics.confidence(probs))
        assert len(diagram.edges) == 16
        upper, lower = diagram.edges[1:][filled], diagram.edges[:-1][filled]
        assert np.all(diagram.confidence[filled] <= upper)
        assert np.all(diagram.confidence[filled] >= lower)


@pytest.mark.parametrize("n", [1, 7, 15, 16, 100, 1501])
def test_equal_mass_bins_differ_by_at_most_one_example(n):
    p = 0.5 + 0.5 * np.random.default_rng(n).random(n)
    count = metrics.reliability(p, np.ones(n, int), 15, equal_mass=True).count
    assert count.sum() == n
    assert count.max() - count.min() <= 1


# --- out of distribution


SCORES = st.lists(st.integers(-3, 3), min_size=1, max_size=30)


@settings(deadline=None, max_examples=50)
@given(SCORES, SCORES)
def test_auroc_is_the_probability_of_ranking_right_with_ties_counting_half(familiar, foreign):
    inside, outside = np.array(familiar, float), np.array(foreign, float)
    pairs = np.sign(outside[:, None] - inside[None, :])
    value = metrics.auroc(inside, outside)
    assert value == pytest.approx((pairs.mean() + 1) / 2, abs=ROUNDING)
    assert metrics.auroc(-inside, -outside) == pytest.approx(1 - value, abs=ROUNDING)
    assert metrics.auroc(np.exp(inside), np.exp(outside)) == pytest.approx(value, abs=ROUNDING)


def test_scores_without_information_and_with_all_of_it():
    equal_in, equal_out = np.ones(30), np.ones(10)
    assert metrics.auroc(equal_in, equal_out) == 0.5
    assert metrics.aupr(equal_in, equal_out) == 0.25
    assert metrics.aupr(equal_in, equal_out, positive="in") == 0.75
    assert metrics.fpr95(equal_in, equal_out) == 1
    assert metrics.auroc(equal_in, equal_out + 1) == 1
    assert metrics.aupr(equal_in, equal_out + 1) == 1
    assert metrics.aupr(equal_in, equal_out + 1, positive="in") == 1
    assert metrics.fpr95(equal_in, equal_out + 1) == 0


def test_the_positive_class_may_be_swapped_by_swapping_the_arguments():
    rng = np.random.default_rng(4)
    inside, outside = rng.normal(size=80), rng.normal(1, 1, 50)
    assert metrics.aupr(inside, outside, positive="in") == metrics.aupr(-outside, -inside)


@pytest.mark.parametrize("n", [1, 19, 20, 21, 100, 1000])
def test_fpr95_accepts_just_enough_familiar_examples(n):
    inside = np.random.default_rng(n).permutation(n).astype(float)
    # probing each gap between in-scores finds the threshold: accepted up to it, not beyond
    outside = np.arange(n) + 0.5
    accepted = math.ceil(95 * n / 100)
    assert metrics.fpr95(inside, outside) == pytest.approx((accepted - 1) / n)
    assert metrics.fpr95(inside, [accepted - 1.0]) == 1


# --- retention


def test_retention_by_hand_with_both_references():
    curve = metrics.retention([1, 0, 1, 0], [0.4, 0.3, 0.1, 0.9])
    assert curve.fractions.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.accuracy == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    assert curve.oracle == pytest.approx([1, 1, 2 / 3, 1 / 2])
    assert curve.random == pytest.approx([0.5] * 4)
    assert curve.area == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert curve.oracle_area == pytest.approx((1 + 1 + 2 / 3 + 1 / 2) / 4)
    assert curve.random_area == 0.5


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=40))
def test_no_uncertainty_beats_the_oracle_and_ties_do_not_depend_on_order(examples):
    right, doubt = np.array(examples, float).T
    curve = metrics.retention(right, doubt)
    assert np.all(curve.accuracy <= curve.oracle + ROUNDING)
    assert curve.accuracy[-1] == pytest.approx(right.mean())
    backwards = metrics.retention(right[::-1], doubt[::-1])
    assert curve.accuracy == pytest.approx(backwards.accuracy, abs=ROUNDING)
    assert metrics.retention(right, -right).area == pytest.approx(curve.oracle_area)
    indifferent = metrics.retention(right, np.zeros(len(right)))
    assert indifferent.accuracy == pytest.approx(indifferent.random, abs=ROUNDING)


def test_ties_are_averaged_over_their_orders():
    rng = np.random.default_rng(5)
    right, doubt = rng.integers(0, 2, 40).astype(float), rng.integers(0, 3, 40).astype(float)
    curve = metrics.retention(right, doubt)
    # breaking ties at random by noise smaller than any difference of doubt
    draws = np.array(
        [metrics.retention(right, doubt + 0.1 * rng.random(40)).accuracy for _ in range(2000)]
    )
    error = draws.std(axis=0, ddof=1) / math.sqrt(2000)
    assert np.all(np.abs(draws.mean(axis=0) - curve.accuracy) < 5 * error + ROUNDING)


def test_retention_takes_scores_and_maps():
    error, doubt = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    curve = metrics.retention(-error, doubt)
    assert curve.random_area == pytest.approx(-error.double().mean().item(), abs=ROUNDING)
    assert curve.area == pytest.approx(curve.random_area, abs=ROUNDING)


def test_accuracy_vs_confidence_equals_selecting_by_hand():
    probs, y = _predictions(400, 3)
    thresholds = np.linspace(0, 1, 21)
    top, right = probs.max(1), probs.argmax(1) == y
    curve = metrics.accuracy_vs_confidence(probs, y, thresholds)
    for threshold, value in zip(thresholds, curve, strict=True):
        chosen = right[top >= threshold]
        assert value == pytest.approx(chosen.mean()) if len(chosen) else np.isnan(value)
    assert curve[0] == metrics.accuracy(probs, y)
    stored_in_float32 = np.array([0.9, 0.7], np.float32)
    assert metrics.accuracy_vs_confidence(stored_in_float32, [1, 0], [0.9])[0] == 1


# --- regression


def test_regression_scores_by_hand():
    mean, y = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 1.0], [2.0, 1.0]])
    assert metrics.rmse(mean, y) == pytest.approx(math.sqrt(5 / 4))
    assert metrics.coverage(mean - 1, mean + 1, y) == 0.75
    assert metrics.coverage([0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]) == 1
    assert metrics.coverage(np.full(2, -np.inf), np.full(2, np.inf), [1.0, 2.0]) == 1
    one_scale = metrics.gaussian_nll(mean, 0.5, y)
    assert one_scale == metrics.gaussian_nll(mean, np.full((2, 2), 0.5), y)
    assert metrics.crps_gaussian(mean, 0.5, y) == metrics.crps_gaussian(
        torch.tensor(mean), torch.tensor(0.5), torch.tensor(y)
    )


def test_crps_of_a_point_is_the_absolute_error():
    mean, y = np.array([0.0, 3.0]), np.array([2.0, 2.5])
    assert metrics.crps(mean[None], y) == pytest.approx(1.25)
    assert metrics.crps_gaussian(mean, 1e-9, y) == pytest.approx(1.25, abs=1e-8)


def test_fair_crps_estimates_the_score_of_the_distribution_for_any_number_of_samples():
    rng = np.random.default_rng(6)
    repeats = 20_000
    mean, std, y = 0.3, 1.7, -0.8
    exact = metrics.crps_gaussian([mean], [std], [y])
    for size in (2, 5):
        draws = rng.normal(mean, std, (size, repeats))
        fair = [metrics.crps(part, np.full(100, y), fair=True) for part in np.split(draws, 200, 1)]
        error = np.std(fair, ddof=1) / math.sqrt(200)
        assert abs(np.mean(fair) - exact) < 5 * error
        # the plain score adds E|X − X′|/(2S) = std/(√π S)
        plain = metrics.crps(draws, np.full(repeats, y))
        assert abs(plain - exact - std / math.sqrt(math.pi) / size) < 5 * error


# --- refusals

GOOD = np.array([[0.5, 0.5], [0.2, 0.8]])


@each_classification_metric
@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), "empty"),
        (GOOD * [1, np.nan], [0, 1], "NaN"),
        (GOOD, [0, 1, 1], r"shape \(2,\), got \(3,\)"),
        (GOOD, np.eye(2), "one-hot"),
        (GOOD, [0, 2], "0…1"),
        (GOOD, [-1, 0], "ignore_index"),
        (GOOD, [0.5, 1.0], "integers, found 0.5"),
        (GOOD, [np.nan, 1.0], "NaN"),
        (GOOD, ["a", "b"], "real numbers"),
        (GOOD * 1.01, [0, 1], "sum to 1"),
        (np.array([[1.5, -0.5], [0.2, 0.8]]), [0, 1], r"\[0, 1\], found -0.5"),
        (np.array([1.5, 0.3]), [0, 1], r"\[0, 1\]"),
        (np.ones((2, 1)), [0, 0], "one class"),
    ],
)
def test_bad_classification_input_is_refused_by_name(metric, probs, y, message):
    with pytest.raises(DataError, match=message):
        metric(probs, y)


@each_classification_metric
def test_nothing_left_after_ignoring_is_refused(metric):
    with pytest.raises(DataError, match="ignore_index=255"):
        metric(GOOD, [255, 255], ignore_index=255)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse([[1.0], [2.0]], [1.0, 2.0]), r"\(2, 1\) but y has shape \(2,\)"),
        (lambda: metrics.rmse([np.inf], [1.0]), "infinite"),
        (lambda: metrics.rmse([], []), "empty"),
        (lambda: metrics.rmse([[1.0], [1.0, 2.0]], [1.0]), "ragged"),
        (lambda: metrics.gaussian_nll([0.0], [0.0], [1.0]), "std must be positive"),
        (lambda: metrics.crps_gaussian([0.0], [-1.0], [1.0]), "std must be positive"),
        (lambda: metrics.crps_gaussian([0.0, 1.0], [1.0], [1.0, 2.0]), "std has shape"),
        (lambda: metrics.crps([1.0, 2.0], [1.0, 2.0]), "one sample"),
        (lambda: metrics.crps(1.0, 1.0), "draws first"),
        (lambda: metrics.crps([[1.0]], [1.0], fair=True), "S ≥ 2"),
        (lambda: metrics.coverage([1.0], [0.0], [0.5]), "lower exceeds upper"),
        (lambda: metrics.coverage([np.nan], [0.0], [0.5]), "NaN"),
        (lambda: metrics.coverage([0.0], [1.0, 2.0], [0.5]), "upper has shape"),
        (lambda: metrics.auroc([], [1.0]), "in_scores is empty"),
        (lambda: metrics.aupr([1.0], [np.nan]), "out_scores has 1 of 1"),
        (lambda: metrics.aupr([1.0], [2.0], positive="ood"), "'ood'"),
        (lambda: metrics.fpr95([np.nan], [2.0]), "in_scores"),
        (lambda: metrics.retention([1, 0], [1.0]), "uncertainty has shape"),
        (lambda: metrics.retention([], []), "empty"),
        (lambda: metrics.ece(GOOD, [0, 1], bins=0), "bins"),
        (lambda: metrics.classwise_ece(GOOD, [0, 1], bins=2.5), "bins"),
        (lambda: metrics.confidence(0.5), "single number"),
        (lambda: metrics.confidence([[2.0, 2.0]]), "sum to 1"),
        (lambda: metrics.gibbs_nll([0.5, 0.5], [0, 1]), "samples first"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_rounding_of_averaged_probabilities_is_forgiven():
    just_above_one = np.float32(1) + np.finfo(np.float32).eps
    assert metrics.nll(np.array([just_above_one]), [1]) == 0
    assert metrics.ece(np.array([just_above_one]), [1]) < 1e-6


def test_ece_floor_is_what_calibrated_predictions_score() -> None:
    generator = np.random.default_rng(3)
    probs = generator.dirichlet([0.4] * 5, size=2000)
    floor, spread = metrics.ece_floor(probs)
    labels = [
        (probs.cumsum(axis=1) > generator.random((2000, 1))).argmax(axis=1) for _ in range(50)
    ]
    scores = np.array([metrics.ece(probs, y) for y in labels])
    # 50 and 400 draws: the means differ by √(1/50 + 1/400) spreads, 5 times that at most.
    assert abs(scores.mean() - floor) < 5 * spread * (1 / 50 + 1 / 400) ** 0.5
    sharpened = probs**3 / (probs**3).sum(axis=1, keepdims=True)
    floor, spread = metrics.ece_floor(sharpened)
    assert metrics.ece(sharpened, labels[0]) > floor + 10 * spread
