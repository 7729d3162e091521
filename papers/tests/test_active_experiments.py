"""The experiments of Khan (2019) on active learning, small, and their verdicts both ways."""

import math

import numpy as np
import pytest
import torch
from small_runs import stored_results, verdict_of_one

from credo_papers import active_learning, important_examples

ACTIVE = active_learning.ActiveSettings(
    data="digits", num_data=200, candidates=60, test_images=80, start=12, per_round=6, rounds=2,
    epochs=3, table_epochs=3, prediction_samples=4,
)  # fmt: skip
IMPORTANT = important_examples.ImportantSettings(
    data="digits", num_data=400, test_images=100, batch_size=16, epochs=8, checkpoints=4, lr=0.01
)
SMALL = {active_learning: ACTIVE, important_examples: IMPORTANT}
SCATTER = (-1e-3, 0.0, 1e-3)


def toy_table(name, split=0):
    """As `credo_papers.uci_tables.uci`, without its file."""
    generator = torch.Generator().manual_seed(split)
    x = torch.randn(90, 8, generator=generator)
    y = 5 + 3 * x[:, :1] - x[:, 1:2].square()
    return x[:60], y[:60], x[60:], y[60:]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active_learning, "uci", toy_table)
        return stored_results(SMALL, tmp_path_factory)


@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    found = verdict_of_one(module.EXPERIMENT, "004", results[module], tmp_path)
    assert found == "inconclusive"  # one seed decides nothing


# --- active learning ------------------------------------------------------------------------------


def test_acquisitions_start_alike_and_differ_in_what_they_ask_for(results):
    result = results[active_learning]
    for kind, names in (("digits", active_learning.DIGITS), ("table", active_learning.TABLE)):
        curves = [result[f"{kind}_{name}_curve"] for name in names]
        assert len({curve[0] for curve in curves}) == 1
        assert len({tuple(curve) for curve in curves}) > 1
        for name in names:
            assert result[f"{kind}_{name}_labels"] == [12, 18, 24]
            area = np.trapezoid(result[f"{kind}_{name}_curve"], [12, 18, 24]) / 12
            assert result[f"{kind}_{name}_area"] == pytest.approx(area)


def active_results(**changes):
    """Three seeds in which every choice helps, but for what is given."""
    base = {
        "digits_random_area": 0.70,
        "digits_relevance_area": 0.75,
        "digits_bald_area": 0.76,
        "table_random_area": 0.60,
        "table_variance_area": 0.50,
    } | changes
    return [
        {key: value + (0 if "random" in key else scatter) for key, value in base.items()}
        for scatter in SCATTER
    ]


@pytest.mark.parametrize(
    ("statement", "key", "fails", "leaves_open"),
    [
        ("relevance_helps", "digits_relevance_area", 0.65, 0.70),
        ("bald_helps", "digits_bald_area", 0.65, 0.70),
        ("variance_helps", "table_variance_area", 0.65, 0.60),
    ],
)
def test_active_learning_is_refuted_by_any_one_statement(statement, key, fails, leaves_open):
    assert active_learning.check(active_results()).verdict == "reproduced"
    refuted = active_learning.check(active_results(**{key: fails}))
    assert refuted.verdict == "not reproduced"
    assert refuted.numbers[f"{statement}_holds"] == -1
    undecided = active_learning.check(active_results(**{key: leaves_open}))
    assert undecided.verdict == "inconclusive"
    assert undecided.numbers[f"{statement}_holds"] == 0


# --- important examples ---------------------------------------------------------------------------


def test_flips_are_as_many_as_asked_for_and_never_the_label_itself():
    labels = torch.arange(1000) % 10
    moved = important_examples.flipped_labels(labels, 0.3, seed=1, classes=10)
    assert int((moved != labels).sum()) == 300
    assert int(moved.min()) == 0
    assert int(moved.max()) == 9
    again = important_examples.flipped_labels(labels, 0.3, seed=1, classes=10)
    assert torch.equal(moved, again)


def test_all_ways_take_the_same_steps_and_only_flips_are_counted(results):
    result = results[important_examples]
    # 400 examples in pools of 64 are 7 steps a pass.
    assert result["steps"][-1] == 8 * 7
    for way in important_examples.SHARES:
        assert result[f"clean_{way}_spoilt_share"] == 0
        assert 0 < result[f"flipped_{way}_spoilt_share"] < 1
        errors = result[f"clean_{way}_errors"]
        assert len(errors) == len(result["steps"])
        assert result[f"clean_{way}_error"] == errors[-1]
        assert result[f"clean_{way}_mean_error"] == pytest.approx(np.mean(errors))
        assert errors[-1] < 0.5  # ten classes: it has learned something
    # Chosen at random, flips come as often as they are: 512 trained examples in the last half,
    # five standard errors of a proportion.
    share = result["flipped_uniform_spoilt_share"]
    assert abs(share - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 400)


def important_results(**changes):
    """Three seeds in which the claim and the caveat hold, but for what is given."""
    base = {
        "flipped": 0.2,
        "clean_uniform_mean_error": 0.06,
        "clean_top_mean_error": 0.04,
        "clean_uniform_error": 0.03,
        "clean_top_error": 0.02,
        "flipped_top_spoilt_share": 0.5,
        "flipped_top_error": 0.09,
        "flipped_uniform_error": 0.05,
    } | changes
    return [
        {key: value + (scatter if "top" in key else 0) for key, value in base.items()}
        for scatter in SCATTER
    ]


@pytest.mark.parametrize(
    ("statement", "key", "fails", "leaves_open"),
    [
        ("faster", "clean_top_mean_error", 0.07, 0.06),
        ("better", "clean_top_error", 0.05, 0.03),
    ],
)
def test_important_examples_need_both_statements(statement, key, fails, leaves_open):
    assert important_examples.check(important_results()).verdict == "reproduced"
    refuted = important_examples.check(important_results(**{key: fails}))
    assert refuted.verdict == "not reproduced"
    assert refuted.numbers[f"{statement}_holds"] == -1
    assert important_examples.check(important_results(**{key: leaves_open})).verdict == (
        "inconclusive"
    )


@pytest.mark.parametrize(
    ("statement", "key", "fails"),
    [
        ("noise_oversampled", "flipped_top_spoilt_share", 0.1),
        ("noise_hurts", "flipped_top_error", 0.04),
    ],
)
def test_the_caveat_is_reported_and_does_not_vote(statement, key, fails):
    verdict = important_examples.check(important_results(**{key: fails}))
    assert verdict.verdict == "reproduced"
    assert verdict.numbers[f"{statement}_holds"] == -1
    assert important_examples.check(important_results()).numbers[f"{statement}_holds"] == 1
