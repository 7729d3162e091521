"""The experiments on shift, referral and price, small, and their verdicts both ways."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import stored_results, verdict_of_one
from torch.nn.functional import interpolate

import credo
from credo.data import digits
from credo_papers import (
    one_price,
    pima_table,
    referral,
    referral_human_doubt,
    saved_scores,
    shift_cifar10,
    shift_mnist,
    shift_rules,
    shift_setup,
)

MNIST = shift_setup.ShiftSettings(
    data="mnist", foreign=("notmnist",), num_data=96, held_out=40, epochs=1, batch_size=48,
    members=2, prediction_samples=2, test_images=30, foreign_images=20, rotations=(45, 90),
    rolls=(4,),
)  # fmt: skip
CIFAR = replace(
    MNIST, data="cifar10", foreign=("svhn",), rotations=(), rolls=(), severities=(1, 5),
    corruptions=("gaussian_noise", "contrast"),
)  # fmt: skip
TABLE = referral.ReferralSettings(
    num_data=60, epochs=2, splits=2, batch_size=30, members=2, prediction_samples=4
)
HUMAN = referral_human_doubt.HumanDoubtSettings(
    num_data=96, epochs=1, batch_size=48, members=2, prediction_samples=2, test_images=60
)
PRICE = one_price.PriceSettings(
    num_data=96, epochs=3, batch_size=48, members=2, prediction_samples=2, test_images=40,
    shifts=("contrast",), severities=(3,),
)  # fmt: skip
SMALL = {
    shift_mnist: MNIST, shift_cifar10: CIFAR, referral: TABLE, referral_human_doubt: HUMAN,
    one_price: PRICE,
}  # fmt: skip
SCATTER = (-1e-3, 0.0, 1e-3)


def small_images(name):
    """The embedded 8×8 digits in the sizes of the real sets."""
    images = digits()
    size, channels = (32, 3) if name in ("cifar10", "svhn") else (28, 1)
    train, test = (
        (interpolate(x[:200], size=size).expand(-1, channels, -1, -1), y[:200])
        for x, y in (images.train, images.test)
    )
    return replace(images, train=train, test=test)


def toy_pima():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 8, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(120, generator=generator) > 0).long()
    x[::7, 4] = float("nan")
    return x, y


def toy_counts():
    return np.random.default_rng(0).integers(1, 20, (200, 10))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credo.data.load", small_images)
        patch.setattr(referral, "pima", toy_pima)
        patch.setattr(referral_human_doubt, "human_counts", toy_counts)
        with warnings.catch_warnings():  # a step or two trains nothing
            warnings.filterwarnings("ignore", message="the network does not look trained")
            warnings.filterwarnings("ignore", message="the KL never moved")
            warnings.filterwarnings("ignore", message="SWAG collected")
            return stored_results(SMALL, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    verdict = verdict_of_one(module.EXPERIMENT, "004", results[module], tmp_path)
    assert verdict == "inconclusive"  # one seed decides nothing
    has_swag = hasattr(credo, "SWAG")
    assert bool(results[module]["skipped"]) != has_swag


# --- what is saved --------------------------------------------------------------------------------


def test_scores_are_made_once_and_again_where_settings_changed(tmp_path):
    path, calls = tmp_path / "a" / "scores.json", []

    def make():
        calls.append(1)
        return {"nll": 0.5, "curve": [1.0, 2.0]}

    for _ in range(2):
        assert saved_scores.saved(path, MNIST, make) == {"nll": 0.5, "curve": [1.0, 2.0]}
    assert len(calls) == 1
    saved_scores.saved(path, replace(MNIST, epochs=2), make)
    assert len(calls) == 2
    path.write_text("{")
    saved_scores.saved(path, MNIST, make)
    assert len(calls) == 3


def test_a_method_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delattr(credo, "SWAG", raising=False)
    monkeypatch.setattr(shift_setup, "swag", lambda: None)
    made = shift_setup.methods(MNIST)
    assert made["swag"] is None
    assert made["multiswag"] is None
    assert list(made) == [n for n in shift_setup.CAPTIONS if n not in shift_setup.AFTER_MAP]


# --- shift ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_hold_clean_and_shifted_sets(results):
    result = results[shift_mnist]
    for name in shift_rules.present([result]):
        assert len(result[f"{name}_rotation_nll"]) == 3
        assert len(result[f"{name}_roll_nll"]) == 2
        assert result[f"{name}_rotation_nll"][0] == result[f"{name}_clean_nll"]
        shifted = result[f"{name}_rotation_nll"][1:] + result[f"{name}_roll_nll"][1:]
        assert result[f"{name}_shift_nll"] == pytest.approx(np.mean(shifted))
        assert 0 <= result[f"{name}_notmnist_auroc"] <= 1
    # a temperature changes no decision
    assert result["scaled_clean_accuracy"] == result["map_clean_accuracy"]
    assert result["scaled_temperature"] > 0


def test_temperature_scaling_finds_the_temperature_of_the_labels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=generator) * 2
    labels = torch.multinomial(torch.softmax(logits / 2.5, 1), 1, generator=generator)[:, 0]
    net = torch.nn.Identity()

    class Fixed:
        def predict(self, x, samples):
            return type("P", (), {"outputs": net(x)[None]})()

    images = shift_setup.Images(None, (logits, labels), None, {}, torch.zeros(1), torch.ones(1))
    predict, temperature = shift_setup.scaled_by_temperature(Fixed(), images)
    # the curvature of the NLL gives a standard error near 0.07
    assert temperature == pytest.approx(2.5, abs=0.35)
    expected = torch.softmax(logits / temperature, 1)
    torch.testing.assert_close(predict(logits), expected)


def shift_results(**changes):
    """Three seeds in which all statements hold, but for what is given."""
    base = {}
    for name in (*shift_rules.SINGLE, "ensemble"):
        base |= {
            f"{name}_clean_accuracy": 0.98,
            f"{name}_shift_accuracy": 0.50,
            f"{name}_clean_confidence": 0.98,
            f"{name}_shift_confidence": 0.70,
            f"{name}_clean_ece": 0.01,
            f"{name}_shift_ece": 0.20,
            f"{name}_clean_nll": 0.08,
            f"{name}_shift_nll": 2.0,
        }
    base |= {"ensemble_shift_nll": 1.5, "ensemble_shift_ece": 0.15} | changes
    return [
        {key: value + (s if key.startswith(("ensemble", "scaled_shift")) else 0)
         for key, value in base.items()}
        for s in SCATTER
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        ("calibration_is_lost", {"scaled_shift_ece": 0.04, "ensemble_shift_ece": 0.0}),
        ("ensemble_better_calibrated", {"ensemble_shift_ece": 0.25}),
        ("ensemble_best", {"vi_shift_nll": 1.4}),
        ("uncertainty_lags", {"dropout_shift_confidence": 0.5}),
    ],
)
def test_shift_is_refuted_by_any_one_statement(statement, changes):
    assert shift_rules.check(shift_results()).verdict == "reproduced"
    refuted = shift_rules.check(shift_results(**changes))
    assert refuted.verdict == "not reproduced"
    assert refuted.numbers[f"{statement}_holds"] == -1
    assert shift_rules.check(shift_results()[:1]).verdict == "inconclusive"


# --- referral -------------------------------------------------------------------------------------


def test_missing_values_are_filled_by_the_training_rows():
    x, _ = toy_pima()
    train, test = pima_table.filled(x[:80], x[80:])
    assert not bool(train.isnan().any() | test.isnan().any())
    rows = x[:80, 4].isnan()
    assert bool(rows.any())
    assert float(train[rows, 4].abs().max()) == 0  # the mean, scaled
    torch.testing.assert_close(train.mean(0), torch.zeros(8), atol=1e-5, rtol=0)


def test_curves_are_at_the_shares_and_costs_are_read_off_other_rows():
    rng = np.random.default_rng(0)
    p = torch.tensor(rng.random(400))
    y = (torch.tensor(rng.random(400)) < p).long()
    probs = torch.stack([1 - p, p], 1)
    scores = referral.referral_scores(probs, y, binary=True)
    assert len(scores["auroc_curve"]) == len(referral.SHARES)
    assert scores["accuracy_all"] == credo.metrics.accuracy(probs, y)
    assert scores["accuracy_half"] > scores["accuracy_all"]
    # referring all costs 0.25; at right probabilities Chow's rule saves a quarter of that
    assert scores["cost_by_chow"] < scores["cost_of_keeping"]
    assert scores["cost"] < 0.26


def referral_results(**changes):
    base = {}
    for name in referral.CAPTIONS:
        base |= {
            f"{name}_accuracy_kept": 0.80,
            f"{name}_accuracy_all": 0.75,
            f"{name}_auroc_kept": 0.85,
            f"{name}_auroc_all": 0.80,
            f"{name}_agreement": 0.2,
        }
    base |= {"ensemble_dropout_accuracy_kept": 0.82} | changes
    return [
        {key: value + (s if "kept" in key and "ensemble_dropout" in key else 0)
         for key, value in base.items()}
        for s in SCATTER
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "statement", "changes"),
    [
        (referral, "beats_random", {"vi_accuracy_kept": 0.74}),
        (referral, "auroc_beats_random", {"map_auroc_kept": 0.79}),
        (referral, "ensemble_dropout_wins", {"ensemble_accuracy_kept": 0.84}),
        (referral_human_doubt, "beats_random", {"vi_accuracy_kept": 0.74}),
        (referral_human_doubt, "doubts_agree", {"vi_agreement": -0.1}),
        (referral_human_doubt, "ensemble_dropout_wins", {"swag_accuracy_kept": 0.84}),
    ],
)
def test_referral_is_refuted_by_any_one_statement(module, statement, changes):
    assert module.check(referral_results()).verdict == "reproduced"
    refuted = module.check(referral_results(**changes))
    assert refuted.verdict == "not reproduced"
    assert refuted.numbers[f"{statement}_holds"] == -1
    open_question = referral_results(ensemble_dropout_accuracy_kept=0.80)
    assert module.check(open_question).verdict == "inconclusive"


# --- price ----------------------------------------------------------------------------------------


def price_results(**changes):
    """Three seeds in which EVON alone matches the ensemble, but for what is given."""
    base = {}
    for data in one_price.TITLES:
        for name in ("map", "ensemble", *one_price.CANDIDATES):
            base |= {
                f"{data}_{name}_nll": 0.10,
                f"{data}_{name}_shift_nll": 1.0,
                f"{data}_{name}_seconds": 10.0,
            }
        base |= {f"{data}_{name}_nll": 0.13 for name in one_price.CANDIDATES}
        base |= {f"{data}_evon_nll": 0.09, f"{data}_evon_seconds": 13.0}
        base |= {f"{data}_ensemble_seconds": 50.0}
    base |= changes
    return [{key: value * (1 + s) for key, value in base.items()} for s in SCATTER]


@pytest.mark.parametrize(
    "changes",
    [
        {"cifar10_evon_nll": 0.11},
        {"mnist_evon_shift_nll": 1.1},
        {"fashion-mnist_evon_seconds": 16.0},
    ],
)
def test_a_price_is_refuted_where_no_candidate_matches_everywhere(changes):
    assert one_price.check(price_results()).verdict == "reproduced"
    assert one_price.check(price_results()).numbers["evon_matches"] == 1
    refuted = one_price.check(price_results(**changes))
    assert refuted.verdict == "not reproduced"
    assert refuted.numbers["evon_matches"] == -1
    assert one_price.check(price_results()[:1]).verdict == "inconclusive"


def test_a_mean_above_the_limit_that_scatters_leaves_it_open():
    results = price_results()
    for result, factor in zip(results, (0.9, 1.0, 1.4), strict=True):
        result["mnist_evon_nll"] = 0.10 * factor
    assert one_price.check(results).verdict == "inconclusive"


@pytest.mark.slow
def test_every_price_is_that_of_a_whole_training(results):
    result = results[one_price]
    for data in one_price.TITLES:
        for name in one_price.present([result]):
            assert result[f"{data}_{name}_seconds"] > 0
    json.dumps(result)
