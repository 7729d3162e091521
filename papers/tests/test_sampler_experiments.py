"""The experiment on cold posteriors, small, and its verdicts both ways."""

import json
import math

import numpy as np
import pytest

from credo_papers import cold_posterior
from credo_papers.cold_posterior import ColdSettings, check

SMALL = ColdSettings(
    num_data=12, epochs=12, hidden=2, test_data=10, temperatures=(0.1, 1.0), chains=2, leapfrog=2,
    warmup=6, sgld_epochs=24, vi_epochs=20, prediction_samples=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One small run, as it comes back from the disk."""
    with pytest.warns(UserWarning, match="the chains disagree"):
        found = cold_posterior.run_one(SMALL, 0, tmp_path_factory.mktemp("run"))
    return json.loads(json.dumps(found, allow_nan=False))


def test_a_run_gives_numbers_and_a_figure(result, tmp_path):
    assert all(math.isfinite(value) for value in check([result]).numbers.values())
    assert len(result["vi_distances"]) == len(result["vi_distances"][0]) == 2
    for name in ("hmc", "sgld", "vi"):
        assert all(len(result[f"{name}_{key}"]) == 2 for key in cold_posterior.SCORES)
    (figure,) = cold_posterior.figures([result, result], tmp_path)
    assert figure.stat().st_size > 10_000


def test_distances_say_which_temperature_is_nearest():
    ideal = cold_posterior._compare(np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]))
    assert ideal["own_distance"] == 0
    assert ideal["gap"] == pytest.approx((1.5 + 1.0 + 1.5) / 3)
    assert ideal["steps_off"] == 0
    shifted = cold_posterior._compare(np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 0.0], [3.0, 2.0, 1.0]]))
    assert shifted["steps_off"] == pytest.approx(2 / 3)
    assert shifted["gap"] == pytest.approx((-0.5 + 0.0 + 1.5) / 3)


def test_the_verdict_follows_the_rules(result):
    good = result | {"hmc_error": 0.01, "hmc_step": 0.1, "vi_gap": 0.2,
                     "vi_rank_correlation": 0.9, "vi_steps_off": 0.3}  # fmt: skip
    also = good | {"vi_gap": 0.25, "vi_rank_correlation": 1.0, "vi_steps_off": 0.4}
    assert check([good, also]).verdict == "reproduced"
    assert check([good]).verdict == "inconclusive"
    for key, bad in (("vi_gap", -0.2), ("vi_rank_correlation", -0.9), ("vi_steps_off", 2.0)):
        assert check([good | {key: bad}, also | {key: 1.01 * bad}]).verdict == "not reproduced"
    blurred = [r | {"hmc_error": 0.06} for r in (good, also)]
    assert check(blurred).verdict == "inconclusive"
