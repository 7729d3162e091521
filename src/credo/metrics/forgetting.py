r"""How well a learner of several tasks keeps what it has learned: numbers of its accuracy matrix.

R_ij is the accuracy on task j after learning tasks 1 … i, (T, T); b_j that before any learning.

==================== ================================================ =========================
function             is                                               reference
==================== ================================================ =========================
`average_accuracy`   (1/T) Σ_j R_Tj
`backward_transfer`  (1/(T−1)) Σ_{j<T} (R_Tj − R_jj)                  Lopez-Paz & Ranzato, 2017
`forward_transfer`   (1/(T−1)) Σ_{j>1} (R_{j−1,j} − b_j)              the same
`forgetting`         (1/(T−1)) Σ_{j<T} (max_{i<T} R_ij − R_Tj)        Chaudhry et al., 2018
==================== ================================================ =========================

Backward transfer is negative where tasks are forgotten; forgetting compares with the best that ever
was instead of with the accuracy just after learning, and so is at least −backward transfer. All but
the average are NaN for one task.

    >>> matrix = [[1.0, 0.5], [0.7, 0.9]]
    >>> average_accuracy(matrix), round(backward_transfer(matrix), 2), round(forgetting(matrix), 2)
    (0.8, -0.3, 0.3)
    >>> round(forward_transfer(matrix, [0.5, 0.4]), 2)
    0.1

References: Lopez-Paz & Ranzato, "Gradient episodic memory for continual learning", 2017
(arXiv:1706.08840); Chaudhry, Dokania, Ajanthan & Torr, "Riemannian walk for incremental learning",
2018 (arXiv:1801.10112). The first has b_j of random initial weights, as here.
"""

from __future__ import annotations

import math

import numpy as np

from credo.errors import DataError
from credo.metrics._inputs import FloatArray, Values, as_floats


def average_accuracy(matrix: Values) -> float:
    """The mean over tasks after the last one.

    Args:
        matrix: Accuracy on task j after task i, (T, T).
    """
    return float(_square(matrix)[-1].mean())


def backward_transfer(matrix: Values) -> float:
    """What learning later tasks did to earlier ones, on average over all but the last.

    Args:
        matrix: Accuracy on task j after task i, (T, T).
    """
    accuracies = _square(matrix)
    if len(accuracies) < 2:
        return math.nan
    return float((accuracies[-1] - accuracies.diagonal())[:-1].mean())


def forward_transfer(matrix: Values, before: Values) -> float:
    """What learning earlier tasks did for later ones, beyond what was known before.

    Args:
        matrix: Accuracy on task j after task i, (T, T).
        before: Accuracies b before the first task, (T,).
    """
    accuracies, baseline = _square(matrix), as_floats(before, "before")
    if baseline.shape != accuracies.shape[:1]:
        raise DataError(
            f"before must have one accuracy for each of {len(accuracies)} tasks, but its shape is "
            f"{baseline.shape}"
        )
    if len(accuracies) < 2:
        return math.nan
    return float((accuracies.diagonal(1) - baseline[1:]).mean())


def forgetting(matrix: Values) -> float:
    """From the best accuracy a task ever had to its last one, on average over all but the last.

    Args:
        matrix: Accuracy on task j after task i, (T, T).
    """
    return float(forgetting_per_task(matrix).mean()) if len(_square(matrix)) > 1 else math.nan


def forgetting_per_task(matrix: Values) -> FloatArray:
    """max_{i<T} R_ij − R_Tj of all tasks but the last, (T − 1,).

    Args:
        matrix: Accuracy on task j after task i, (T, T).
    """
    accuracies = _square(matrix)
    return np.asarray((accuracies[:-1].max(0) if len(accuracies) > 1 else accuracies[0])[:-1]
                      - accuracies[-1, :-1])  # fmt: skip


def _square(matrix: Values) -> FloatArray:
    accuracies = as_floats(matrix, "the accuracy matrix")
    if accuracies.ndim != 2 or accuracies.shape[0] != accuracies.shape[1] or not len(accuracies):
        raise DataError(
            f"the accuracy matrix is (T, T), tasks learned by tasks tested, but its shape is "
            f"{accuracies.shape}"
        )
    return accuracies
