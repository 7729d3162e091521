"""The numbers of a comparison are those of `credo.metrics`, and arrays are their terms."""

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score

from credo import metrics
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.posterior.closed_form import NormalPredictive
from credo.posterior.outputs import OutputGaussian
from credo.posterior.predictive import Predictive
from credo.tools.compare_scores import doubts, foreign_scores, score


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_classes_are_scored_as_the_metrics_do():
    predictive, y = Predictive(3 * normal(7, 40, 3), Categorical()), torch.arange(40) % 3
    found = score(predictive, y, "classification")
    probs = predictive.probs
    for name in ("accuracy", "nll", "brier", "ece"):
        assert found.scores[name] == pytest.approx(getattr(metrics, name)(probs, y), rel=1e-12)
    floor = metrics.ece_floor(probs)
    assert (found.scores["ece_floor"], found.scores["ece_floor_std"]) == floor
    assert found.scores["epistemic"] == pytest.approx(float(predictive.mutual_information.mean()))
    assert found.scores["aleatoric"] == pytest.approx(float(predictive.expected_entropy.mean()))
    for name, terms in (("accuracy", "correct"), ("nll", "nll"), ("brier", "brier")):
        assert found.arrays[terms].shape == (40,)
        assert found.arrays[terms].mean() == pytest.approx(found.scores[name], rel=1e-9)
    area = metrics.retention(found.arrays["correct"], found.arrays["entropy"]).area
    assert found.scores["retention_area"] == area


@pytest.mark.parametrize("shape", [(), (1,)])
def test_yes_or_no_is_two_classes(shape):
    logits, y = normal(5, 30, *shape), (torch.arange(30) % 2).reshape(30, *shape).double()
    yes = Predictive(logits, Bernoulli())
    two = torch.stack([torch.zeros_like(logits.reshape(5, 30)), logits.reshape(5, 30)], -1)
    one = score(yes, y, "classification").scores
    other = score(Predictive(two, Categorical()), y.reshape(30).long(), "classification").scores
    assert one == pytest.approx(other, rel=1e-9)


def test_pixels_that_do_not_count_are_left_out():
    outputs, y = normal(4, 6, 3, 5, 5), torch.randint(3, (6, 5, 5))
    y[:, 0] = -1
    found = score(Predictive(outputs, Categorical(ignore_index=-1)), y, "dense", -1)
    rest = score(Predictive(outputs[:, :, :, 1:], Categorical()), y[:, 1:], "dense")
    assert found.scores == pytest.approx(rest.scores, rel=1e-9)
    assert found.arrays["correct"].shape == (6,)
    predicted = Predictive(outputs, Categorical()).labels[y != -1]
    assert found.scores["mean_iou"] == pytest.approx(
        jaccard_score(y[y != -1], predicted, average="macro")
    )


def test_numbers_are_scored_by_the_mixture():
    outputs, y = normal(6, 50, 1), normal(50)
    predictive = Predictive(outputs, Gaussian(scale=0.7))
    found = score(predictive, y, "regression")
    mean = predictive.mean[:, 0]
    assert found.scores["rmse"] == pytest.approx(metrics.rmse(mean, y))
    assert found.scores["nll"] == pytest.approx(-float(predictive.log_prob(y).mean()))
    low, high = (end[:, 0] for end in predictive.interval(0.9))
    assert found.scores["coverage"] == metrics.coverage(low, high, y)
    assert found.scores["width"] == pytest.approx(float((high - low).mean()))
    assert found.arrays["error"] == pytest.approx((y - mean).numpy())
    # CRPS of the mixture, against a million draws of it: four standard errors.
    draws = outputs[torch.randint(6, (200_000,)), 3, 0] + 0.7 * normal(200_000)
    target = y[3:4].numpy()
    estimate = metrics.crps(draws[:, None].numpy(), target, fair=True)
    assert found.arrays["crps"][3] == pytest.approx(estimate, abs=4 / np.sqrt(200_000))


def test_a_formula_and_one_sample_have_the_score_of_a_normal():
    mean, y = normal(20, 1), normal(20)
    gaussian = OutputGaussian(mean, torch.full((20, 1, 1), 0.51, dtype=torch.float64))
    found = score(NormalPredictive(gaussian, Gaussian(scale=0.7)), y, "regression").scores
    assert found["crps"] == pytest.approx(metrics.crps_gaussian(mean[:, 0], 1.0, y), rel=1e-9)
    one = score(Predictive(mean[None], Gaussian(scale=0.5)), y, "regression").scores
    assert one["crps"] == pytest.approx(metrics.crps_gaussian(mean[:, 0], 0.5, y), rel=1e-9)


def test_members_that_differ_in_their_noise_are_scored_by_it():
    parts = [normal(3, 10, 1), normal(3, 10, 1)]
    scales, y = (0.2, 1.5), normal(10, 1)
    merged = Predictive.merge(
        [Predictive(f, Gaussian(scale=s)) for f, s in zip(parts, scales, strict=True)]
    )
    by_hand = metrics.crps_mixture(
        torch.cat(parts), torch.cat([torch.full((3, 10, 1), s) for s in scales]), y
    )
    assert merged.crps(y).numpy() == pytest.approx(by_hand, rel=1e-6)


def test_foreign_inputs_are_told_apart_by_both_kinds_of_doubt():
    near, far = (
        Predictive(5 * normal(1, 30, 3), Categorical()),
        Predictive(normal(8, 20, 3), Categorical()),
    )
    own = doubts(near, "classification")
    found = foreign_scores(
        own, {"a": doubts(far, "classification"), "b": doubts(near, "classification")}
    ).scores
    assert found["ood_auroc: a"] == metrics.auroc(near.entropy, far.entropy)
    assert found["ood_auroc_epistemic: a"] == 1.0
    assert found["ood_auroc: b"] == pytest.approx(0.5)
    assert found["ood_auroc"] == pytest.approx((found["ood_auroc: a"] + 0.5) / 2)
