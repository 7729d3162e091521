import math

import numpy as np
import pytest
from scipy import stats

from credo.metrics.paired import holm, paired


@pytest.mark.parametrize("count", [2, 3, 50])
def test_paired_differences_are_those_of_scipy(count):
    rng = np.random.default_rng(count)
    one, other = rng.normal(size=count), rng.normal(0.3, 2.0, size=count)
    found, expected = paired(one, other), stats.ttest_rel(one, other)
    assert math.isclose(found.t, expected.statistic, rel_tol=1e-12)
    assert math.isclose(found.p, expected.pvalue, rel_tol=1e-10)
    assert math.isclose(found.difference, (one - other).mean(), rel_tol=1e-12)
    assert math.isclose(found.standard_error, stats.sem(one - other), rel_tol=1e-12)
    assert found.count == count


def test_what_methods_share_cancels():
    shared = np.random.default_rng(0).normal(0, 100, size=5)
    assert paired(shared + np.array([0.9, 1.0, 1.1, 1.0, 1.05]), shared).p < 1e-4


def test_one_difference_and_equal_differences_are_no_proof():
    assert math.isnan(paired([1.0], [0.5]).p)
    same = paired([0.5, 0.5], [0.25, 0.25])
    assert same.difference == 0.25
    assert math.isnan(same.p)
    assert paired([0.5, 0.7], [0.5, 0.7]).p == 1.0


def test_holm_is_that_of_its_definition():
    p = [0.01, 0.04, 0.03, 0.005]
    # By hand: sorted 0.005·4, 0.01·3, 0.03·2, 0.04·1, and never less than the one before.
    assert np.allclose(holm(p), [0.03, 0.06, 0.06, 0.02], rtol=1e-12)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    corrected = holm([0.02, math.nan])
    assert corrected[0] == 0.02
    assert math.isnan(corrected[1])


def test_under_no_difference_holm_errs_as_often_as_it_may():
    """400 tables of 7 equal methods: in about 5 % of them, at most, one is called significant."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        baseline = rng.normal(size=10)
        p = holm([paired(rng.normal(size=10), baseline).p for _ in range(7)])
        wrong += min(p) < 0.05
    # The level plus three standard errors of a share of 400.
    assert wrong / 400 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
