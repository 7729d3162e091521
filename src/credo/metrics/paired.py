r"""Which differences between methods are more than chance: paired, and corrected for their number.

Methods of one comparison share the test examples and, seed by seed, the first weights and the order
of the data. What they share cancels in the difference d of two methods:

    t = mean(d) / (std(d) / √n),        Student's t with n − 1 degrees of freedom

over one of two units, which answer different questions:

- seeds: would training again, with other seeds, give the same order? n is the number of seeds.
- examples: do these trained networks differ on other examples of the same kind? n is the number of
  test examples; an example's difference is its mean over the seeds.

Of m differences to one baseline some look significant by chance, so p-values are corrected by
Holm's method: the k-th smallest is multiplied by m − k + 1, and none may be less than one before
it. The probability that any of the m is called significant by mistake is then at most the level.

References: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979; Demšar, "Statistical comparisons of classifiers over multiple data sets", JMLR
7, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr


@dataclass(frozen=True)
class Paired:
    """A mean difference, how well it is known, and whether it may be chance.

    Args:
        difference: The mean of the differences.
        standard_error: Of that mean; NaN for a single one.
        t: The ratio of the two.
        p: Probability of a |t| as large if there were no difference. NaN for a single one, and
            where all are one number other than 0: a few seeds' accuracies coincide easily, and say
            nothing of how far others would be off.
        count: How many differences.
    """

    difference: float
    standard_error: float
    t: float
    p: float
    count: int


def paired(values: ArrayLike, baseline: ArrayLike) -> Paired:
    """The paired difference of two series, by Student's t.

    Args:
        values: Of one method, unit by unit.
        baseline: Of the other, in the same order.

    >>> found = paired([1.0, 2.0, 4.0], [0.5, 1.0, 2.5])
    >>> found.difference, round(found.p, 4)
    (1.0, 0.0742)
    """
    gaps = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    count = gaps.size
    mean = float(gaps.mean()) if count else math.nan
    if count < 2:
        return Paired(mean, math.nan, math.nan, math.nan, count)
    error = float(gaps.std(ddof=1) / math.sqrt(count))
    if error == 0:
        return Paired(mean, 0.0, math.nan if mean else 0.0, math.nan if mean else 1.0, count)
    t = mean / error
    return Paired(mean, error, t, float(2 * stdtr(count - 1, -abs(t))), count)


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number; those that are NaN stay so and do not count.

    Args:
        p: As they are.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = list(p)
    order = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    least = 0.0
    for rank, i in enumerate(order):
        least = min(1.0, max(least, (len(order) - rank) * p[i]))
        corrected[i] = least
    return corrected
