"""The experiments of Khan (2019) on function space, small, and their verdicts both ways."""

import copy
import json
import os

import numpy as np
import pytest
import torch
from small_runs import stored_results, verdict_of_one

from credo_papers import gp_evidence, gp_kernel, gp_regression, memorable_examples

SMALL = {
    gp_regression: gp_regression.RegressionSettings(num_data=40, epochs=20, grid=40),
    gp_kernel: gp_kernel.KernelSettings(
        data="digits", num_data=200, epochs=1, candidates=200, per_class=6
    ),
    gp_evidence: gp_evidence.EvidenceSettings(
        num_data=30, epochs=5, precisions=(0.1, 1.0), widths=(2, 4), noises=(0.1, 0.3),
        test_points=50,
    ),
}  # fmt: skip
SCATTER = (-1e-3, 0.0, 1e-3)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return stored_results(SMALL, tmp_path_factory)


@pytest.mark.parametrize("module", SMALL, ids=lambda m: m.EXPERIMENT.id)
def test_every_run_gives_numbers_and_figures(module, results, tmp_path):
    found = verdict_of_one(module.EXPERIMENT, "004", results[module], tmp_path)
    assert found == "inconclusive"  # one seed decides nothing


def with_values(result, **values):
    """Three seeds around these values."""
    return [copy.deepcopy(result) | {k: v + s for k, v in values.items()} for s in SCATTER]


def test_uncertainty_that_does_not_rise_refutes(results):
    first = results[gp_regression]
    good = {
        f"{name}_{where}_rise": 1.0
        for name in gp_regression.PROBLEMS
        for where in ("gap", "beyond")
    }
    fits = {f"{name}_error": 1.0 for name in gp_regression.PROBLEMS}
    check = gp_regression.check
    assert check(with_values(first, **good, **fits)).verdict == "reproduced"
    bad = good | {"snelson_gap_rise": -1.0}
    assert check(with_values(first, **bad, **fits)).verdict == "not reproduced"
    unfitted = fits | {"sinus_error": 3.0}
    assert check(with_values(first, **good, **unfitted)).verdict == "inconclusive"


def test_blocks_must_be_there_and_learned(results):
    first, check = results[gp_kernel], gp_kernel.check
    good = {"smallest_margin": 0.1, "margin": 0.3, "margin_before": 0.1}
    assert check(with_values(first, **(good | {"margin_before": 0.1}))).verdict != "not reproduced"
    three = [first | good | {"margin": 0.3 + s} for s in SCATTER]
    assert check(three).verdict == "reproduced"
    flat = [r | {"smallest_margin": -0.1 + s} for r, s in zip(three, SCATTER, strict=True)]
    assert check(flat).verdict == "not reproduced"


def test_margins_see_blocks_and_leave_the_diagonal_out():
    labels = torch.tensor([0, 0, 1, 1])
    blocks = torch.tensor(
        [[1.0, 0.8, 0.1, 0.1], [0.8, 1, 0.1, 0.1], [0.1, 0.1, 1, 0.2], [0.1, 0.1, 0.2, 1]]
    )
    np.testing.assert_allclose(gp_kernel.class_margins(blocks, labels), [0.7, 0.1], atol=1e-6)
    scaled = torch.diag(torch.tensor([4.0, 9.0])) + 3.0
    assert torch.allclose(gp_kernel.correlation(scaled).diagonal(), torch.ones(2))


def test_evidence_that_chooses_badly_refutes(results):
    first, check = results[gp_evidence], gp_evidence.check
    good = {f"{name}_regret": 0.1 for name in gp_evidence.NAMES}
    assert check(with_values(first, **good)).verdict == "reproduced"
    assert check(with_values(first, **(good | {"width_regret": 1.5}))).verdict == "not reproduced"
    assert all(first[f"{name}_regret"] >= 0 for name in gp_evidence.NAMES)


@pytest.mark.skipif("CREDO_DATA" not in os.environ, reason="needs the data sets of CREDO_DATA")
def test_memorable_images_are_ranked_and_drawn(tmp_path):
    settings = memorable_examples.MemorableSettings(num_data=200, epochs=1, ranked=100, shown=3)
    result = memorable_examples.run_one(settings, 0, tmp_path)
    first = json.loads(json.dumps(result, allow_nan=False))
    assert first["mnist_most_score"] > first["mnist_least_score"]
    check = memorable_examples.check
    assert check([first]).verdict == "inconclusive"
    good = {
        "mnist_most_errors": 0.5, "mnist_least_errors": 0.0, "cifar10_most_errors": 0.5,
        "cifar10_least_errors": 0.1, "cifar10_most_entropy": 0.5, "cifar10_least_entropy": 0.1,
    }  # fmt: skip
    seeds = [first | good | {"mnist_most_errors": 0.5 + s} for s in SCATTER]
    assert check(seeds).verdict == "reproduced"
    refuted = [r | {"cifar10_most_entropy": 0.0 + s} for r, s in zip(seeds, SCATTER, strict=True)]
    assert check(refuted).verdict == "not reproduced"
    figures = memorable_examples.figures([first], tmp_path)
    assert [path.name for path in figures] == ["memorable-mnist.png", "memorable-cifar10.png"]
