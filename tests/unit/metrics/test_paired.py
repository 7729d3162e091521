"""Paired differences are scipy's paired t-test, and Holm's correction keeps its promise."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from credo.metrics.paired import holm, paired


@pytest.mark.parametrize("count", [2, 3, 50])
def test_it_is_scipys_paired_t_test(count: int) -> None:
    rng = np.random.RandomState(count)
    values, base = rng.randn(count), rng.randn(count) + 0.5
    found, expected = paired(values, base), ttest_rel(values, base)
    assert found.t == pytest.approx(expected.statistic, rel=1e-10)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-8)


def test_single_and_equal_pairs() -> None:
    assert math.isnan(paired([1.0], [0.5]).p)
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0
    assert paired([], []).count == 0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    one, nothing = holm([0.02, math.nan])
    assert one == 0.02
    assert math.isnan(nothing)
