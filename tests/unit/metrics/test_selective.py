"""Referral: every point of the curves by brute force, references, costs, and Chow's rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from credo import metrics
from credo.errors import DataError

ROUNDING = 1e-12  # both sides are float64 means of numbers of order one


def binary(seed=0, n=80):
    rng = np.random.default_rng(seed)
    p = rng.random(n)
    y = (rng.random(n) < p).astype(int)
    return p, y, rng.random(n)


def several(seed=0, n=80, classes=4):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), n)
    y = np.array([rng.choice(classes, p=row) for row in probs])
    return probs, y, rng.random(n)


# --- against scikit-learn, one subset after the other ---------------------------------------------


def test_auroc_of_the_kept_equals_scikit_learn():
    p, y, unsure = binary()
    curve = metrics.referral(p, y, unsure, measure="auroc")
    order = np.argsort(unsure)
    for k in range(1, len(y) + 1):
        kept = order[:k]
        if len(set(y[kept])) == 1:
            assert np.isnan(curve.values[k - 1])
        else:
            expected = roc_auc_score(y[kept], p[kept])
            assert curve.values[k - 1] == pytest.approx(expected, abs=ROUNDING)
    known = curve.values[~np.isnan(curve.values)]
    assert len(known) >= len(y) - 5
    assert curve.area == pytest.approx(known.mean(), abs=ROUNDING)
    assert curve.random_area == pytest.approx(roc_auc_score(y, p), abs=ROUNDING)
    assert curve.random_area < curve.oracle_area


def test_auroc_counts_equal_scores_half():
    p, y, unsure = binary(1)
    p = p.round(1)
    curve = metrics.referral(p, y, unsure, measure="auroc")
    kept = np.argsort(unsure)[:50]
    assert curve.at(50 / 80) == pytest.approx(roc_auc_score(y[kept], p[kept]), abs=ROUNDING)


def test_nll_and_accuracy_of_the_kept_equal_scikit_learn():
    probs, y, unsure = several()
    order, classes = np.argsort(unsure), np.arange(4)
    by_nll = metrics.referral(probs, y, unsure, measure="nll")
    by_accuracy = metrics.referral(probs, y, unsure)
    for k in range(1, len(y) + 1):
        kept = order[:k]
        expected = log_loss(y[kept], probs[kept], labels=classes)
        assert by_nll.values[k - 1] == pytest.approx(expected, abs=ROUNDING)
        expected = accuracy_score(y[kept], probs[kept].argmax(1))
        assert by_accuracy.values[k - 1] == pytest.approx(expected, abs=ROUNDING)
    assert by_nll.lower_is_better
    assert not by_accuracy.lower_is_better
    assert by_nll.random_area == pytest.approx(metrics.nll(probs, y), abs=ROUNDING)
    assert by_accuracy.random_area == pytest.approx(metrics.accuracy(probs, y), abs=ROUNDING)


@pytest.mark.parametrize("measure", ["accuracy", "nll"])
def test_no_uncertainty_beats_the_oracle(measure):
    probs, y, _ = several(2)
    rng = np.random.default_rng(3)
    for _ in range(50):
        curve = metrics.referral(probs, y, rng.random(len(y)), measure=measure)
        sign = -1 if curve.lower_is_better else 1
        assert (sign * curve.values <= sign * curve.oracle + ROUNDING).all()
        assert curve.gain < 1
    hindsight = -probs[np.arange(len(y)), y]
    best = metrics.referral(probs, y, hindsight, measure="nll")
    assert best.gain == pytest.approx(1, abs=ROUNDING)


@pytest.mark.parametrize("measure", ["accuracy", "nll", "auroc"])
def test_random_is_the_mean_over_uninformative_uncertainties(measure):
    p, y, _ = binary(4, n=40)
    rng = np.random.default_rng(5)
    draws = np.array(
        [metrics.referral(p, y, rng.random(40), measure=measure).values for _ in range(2000)]
    )
    reference = metrics.referral(p, y, np.zeros(40), measure=measure)
    for kept in (10, 20, 30):
        values = draws[:, kept - 1]
        values = values[~np.isnan(values)]
        error = values.std() / len(values) ** 0.5
        assert abs(values.mean() - reference.random[kept - 1]) < 5 * error
    if measure != "auroc":  # all are tied: the average over orders is the reference itself
        np.testing.assert_allclose(reference.values, reference.random, atol=ROUNDING)
    assert abs(reference.gain) < ROUNDING


def test_entropy_is_the_default_and_tensors_and_maps_work():
    probs, y, _ = several(6)
    entropy = -(probs * np.log(probs)).sum(1)
    expected = metrics.referral(probs, y, entropy)
    found = metrics.referral(torch.tensor(probs), torch.tensor(y))
    np.testing.assert_allclose(found.values, expected.values, atol=ROUNDING)
    dense = torch.tensor(probs).reshape(8, 10, 4).permute(0, 2, 1)
    labels = y.reshape(8, 10).copy()
    labels[0, :3] = 255
    found = metrics.referral(dense, labels, entropy.reshape(8, 10), ignore_index=255)
    expected = metrics.referral(probs[3:], y[3:], entropy[3:])
    np.testing.assert_allclose(found.values, expected.values, atol=ROUNDING)


def test_ties_of_auroc_are_taken_together():
    p, y = [0.9, 0.1, 0.4, 0.6, 0.5], [1, 0, 1, 0, 1]
    curve = metrics.referral(p, y, [0, 0, 1, 1, 2], measure="auroc")
    # (1 and 0) perfect; of the four: pairs 0.9>0.1, 0.9>0.6, 0.4>0.1, 0.4<0.6
    assert np.isnan(curve.values[0])
    assert curve.values[1:4].tolist() == pytest.approx([1.0, 0.875, 0.75])
    reordered = metrics.referral(
        [0.1, 0.9, 0.6, 0.4, 0.5], [0, 1, 0, 1, 1], [0, 0, 1, 1, 2], measure="auroc"
    )
    np.testing.assert_allclose(reordered.values, curve.values, atol=ROUNDING)


def test_at_counts_whole_examples():
    curve = metrics.retention(np.arange(10.0), -np.arange(10.0))
    assert curve.at(0.7) == curve.values[6]
    assert curve.at(0.71) == curve.values[7]
    assert curve.at(1.0) == pytest.approx(4.5)
    assert curve.at(0.0) == curve.values[0]
    with pytest.raises(DataError, match="fraction must be a number from 0 to 1"):
        curve.at(1.5)


# --- costs ----------------------------------------------------------------------------------------


def test_costs_by_brute_force():
    rng = np.random.default_rng(7)
    loss, unsure = (rng.random(60) < 0.3).astype(float), rng.random(60)
    costs = metrics.referral_costs(loss, unsure, error_cost=5.0, referral_cost=0.7)
    order = np.argsort(unsure)
    by_hand = [5.0 * loss[order[:k]].sum() / 60 + 0.7 * (60 - k) / 60 for k in range(61)]
    np.testing.assert_allclose(costs.cost, by_hand, atol=ROUNDING)
    assert costs.cost[0] == pytest.approx(0.7)
    assert costs.cost[-1] == pytest.approx(5.0 * loss.mean())
    # the oracle hands over exactly the errors, which cost less that way
    assert costs.oracle_cost == pytest.approx(0.7 * loss.mean())
    np.testing.assert_allclose(costs.random, np.linspace(0.7, 5.0 * loss.mean(), 61), atol=ROUNDING)
    thresholds = [-1.0, *unsure]
    tried = [(5.0 * loss[unsure <= t].sum() + 0.7 * (unsure > t).sum()) / 60 for t in thresholds]
    assert costs.best_cost == pytest.approx(min(tried))
    assert costs.at(costs.best_threshold) == costs.best_cost
    for threshold, expected in zip(thresholds, tried, strict=True):
        assert costs.at(threshold) == pytest.approx(expected)


def test_prices_decide_who_is_asked():
    loss, unsure = [0.0, 0.0, 1.0, 1.0], [0.1, 0.2, 0.3, 0.4]
    free = metrics.referral_costs(loss, unsure, referral_cost=0.0)
    assert free.best_cost == 0
    dear = metrics.referral_costs(loss, unsure, referral_cost=2.0)
    assert (dear.best_fraction, dear.best_threshold) == (1.0, 0.4)
    everything_wrong = metrics.referral_costs([1.0, 1.0], [0.1, 0.2], referral_cost=0.5)
    assert (everything_wrong.best_fraction, everything_wrong.best_threshold) == (0.0, -np.inf)


def test_a_threshold_does_not_part_equals():
    """Where keeping and referring cost the same, rounding must not choose 6 of 7 tied examples."""
    costs = metrics.referral_costs([1.0] + [0.0] * 6, [0.5] * 7, referral_cost=1 / 7)
    assert 0 < costs.cost.argmin() < 7
    assert costs.best_fraction in (0.0, 1.0)
    assert costs.cost.tolist() == pytest.approx([1 / 7] * 8)


@pytest.mark.parametrize("price", [0.1, 0.25, 0.4])
def test_chows_rule_is_best_where_probabilities_are_right(price):
    rng = np.random.default_rng(8)
    n = 40_000
    p = rng.random(n)
    wrong = ((p > 0.5) != (rng.random(n) < p)).astype(float)
    unsure = np.minimum(p, 1 - p)
    costs = metrics.referral_costs(wrong, unsure, error_cost=1.0, referral_cost=price)
    # E cost(t) = ∫₀ᵗ 2u du + price·(1 − 2t), least at t = price: price − price²
    assert costs.at(price) == pytest.approx(price - price**2, abs=5 * 0.5 / n**0.5)
    assert costs.best_cost <= costs.at(price)
    # the cost is flat around its minimum, (t − price)²: within 5 standard errors of it
    assert abs(costs.best_threshold - price) < (5 * 0.5 / n**0.5) ** 0.5


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.referral(*several()[:2], measure="auroc"), "is for two classes.*are 4"),
        (lambda: metrics.referral([0.5, 0.2], [0, 1], [0.1]), "uncertainty has shape"),
        (lambda: metrics.referral([0.5, 0.2], [0, 1], measure="f1"), "measure must be one of"),
        (lambda: metrics.referral([0.5, 0.2], [0, 1], [np.nan, 0.0]), "NaN or infinite"),
        (lambda: metrics.referral_costs([1.0], [0.1, 0.2]), "uncertainty has shape"),
        (lambda: metrics.referral_costs([1.0], [0.1], error_cost=-1.0), "error_cost must be 0 or"),
        (lambda: metrics.referral_costs([], []), "empty"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(DataError, match=words):
        call()
