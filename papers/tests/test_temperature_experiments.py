"""The experiments of Huix et al. (2022) on the temperature, small, and their verdicts both ways."""

import copy
import json
import math

import pytest
import torch

from credo_papers import EXPERIMENTS, mean_field_collapse

SMALL = mean_field_collapse.CollapseSettings(widths=(200, 20_000, 400_000), atoms=1)


@pytest.fixture(scope="module")
def collapse(tmp_path_factory):
    """One run, as it comes back from the disk."""
    result = mean_field_collapse.run_one(SMALL, 0, tmp_path_factory.mktemp("run"))
    return json.loads(json.dumps(result, allow_nan=False))


def verdict(*results) -> str:
    return mean_field_collapse.check(list(results)).verdict


def test_the_collapse_is_reproduced_with_numbers_and_a_figure(collapse, tmp_path) -> None:
    experiment = EXPERIMENTS["000-collapse"]
    assert experiment.theorem
    assert "our own sharpening" in experiment.claim
    found = experiment.check([collapse])
    assert found.verdict == "reproduced"
    # KL falls by the ratio of widths, 2000, give or take what the narrowest still differs by.
    assert found.numbers["squared_kl_fell_to"] == pytest.approx(1 / 2000, rel=0.05)
    assert all(math.isfinite(value) for value in found.numbers.values())
    for name in mean_field_collapse.LOSSES:
        assert found.numbers[f"{name}_kl_slope"] == pytest.approx(-1, abs=0.05)
        assert collapse[f"{name}_kl"][-1] < 1e-3 < collapse[f"{name}_balanced_kl"][-1]
    (figure,) = experiment.figures([collapse, collapse], tmp_path)
    assert figure.stat().st_size > 10_000


def test_every_rule_can_fail(collapse) -> None:
    good = collapse
    assert verdict(good) == verdict(good, good) == "reproduced"
    for change in (
        lambda r: r.update(squared_kl=[1 / math.sqrt(width) for width in r["widths"]]),
        lambda r: r.update(entropy_collapse_constant=1.02 * r["entropy_collapse_constant"]),
        lambda r: r.update(squared_output=[0.1] * len(r["widths"])),
        lambda r: r.update(entropy_limit_kl=1.02 * r["entropy_limit_kl"]),
        lambda r: r.update(squared_distance=[0.1 / math.sqrt(width) for width in r["widths"]]),
        lambda r: r["squared_gap_constant"].__setitem__(0, 1.001 * r["squared_gap_constant"][0]),
        lambda r: r["entropy_gap_constant"].__setitem__(-1, 1.02 * r["entropy_gap_constant"][-1]),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert verdict(bad) == verdict(good, bad) == "not reproduced"


def test_data_are_the_seeds_and_every_class_is_there() -> None:
    def made(seed: int):
        return mean_field_collapse.problems(SMALL, torch.Generator().manual_seed(seed))

    for seed in range(20):
        assert set(made(seed)["entropy"].y.tolist()) == {0, 1, 2}
    assert torch.equal(made(3)["squared"].y, made(3)["squared"].y)
    assert not torch.equal(made(3)["squared"].y, made(4)["squared"].y)
