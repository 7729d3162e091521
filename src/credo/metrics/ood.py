"""Telling foreign inputs from familiar ones by a score that is higher for foreign inputs.

``in_scores`` belong to in-distribution examples, ``out_scores`` to out-of-distribution (OOD) ones:
entropy, mutual information, or minus the confidence. Any shapes; only the order of scores counts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from credo.checks import checked
from credo.metrics._inputs import FloatArray, Values, as_floats


def auroc(in_scores: Values, out_scores: Values) -> float:
    """Area under the ROC curve with OOD as the positive class: P(out > in) + ½ P(out = in).

    One half for scores that tell nothing, one for perfect separation; auroc(−s) = 1 − auroc(s).

    Args:
        in_scores: Scores of in-distribution examples, any shape.
        out_scores: Scores of out-of-distribution examples, any shape.

    >>> auroc([0.1, 0.3], [0.3, 0.4])
    0.875
    """
    from sklearn.metrics import roc_auc_score  # takes long to import, so only when it is used

    scores, is_out = _pooled(in_scores, out_scores)
    return float(roc_auc_score(is_out, scores))


@checked
def aupr(in_scores: Values, out_scores: Values, positive: Literal["out", "in"] = "out") -> float:
    """Area under the precision–recall curve as average precision, Σ (recall gain) · precision.

    Chance level is the share of the positive class, so values compare only at equal shares.

    Args:
        in_scores: Scores of in-distribution examples, any shape.
        out_scores: Scores of out-of-distribution examples, any shape.
        positive: Which examples are to be found: "out", by high scores, or "in", by low ones.

    >>> aupr([0.1, 0.2], [0.3, 0.4]), aupr([1.0, 1.0, 1.0], [1.0])
    (1.0, 0.25)
    """
    from sklearn.metrics import average_precision_score

    scores, is_out = _pooled(in_scores, out_scores)
    if positive == "out":
        return float(average_precision_score(is_out, scores))
    return float(average_precision_score(1 - is_out, -scores))


def fpr95(in_scores: Values, out_scores: Values) -> float:
    """Fraction of OOD examples accepted at the threshold that accepts 95 % of the familiar ones.

    Accepting means score ≤ t, where t is the smallest in-score that accepts at least 95 %, the
    ⌈0.95 n⌉-th smallest. Others swap the roles (familiar examples flagged when 95 % of the OOD
    ones are), which is a different number. Reference: Liang, Li & Srikant, ICLR 2018.

    Args:
        in_scores: Scores of in-distribution examples, any shape.
        out_scores: Scores of out-of-distribution examples, any shape.

    >>> fpr95(np.arange(100.0), [94.0, 94.5, 200.0, 300.0])
    0.25
    """
    familiar = as_floats(in_scores, "in_scores").ravel()
    foreign = as_floats(out_scores, "out_scores").ravel()
    rank = -(-95 * familiar.size // 100) - 1
    return float((foreign <= np.partition(familiar, rank)[rank]).mean())


def _pooled(in_scores: Values, out_scores: Values) -> tuple[FloatArray, FloatArray]:
    familiar = as_floats(in_scores, "in_scores").ravel()
    foreign = as_floats(out_scores, "out_scores").ravel()
    is_out = np.concatenate([np.zeros(familiar.size), np.ones(foreign.size)])
    return np.concatenate([familiar, foreign]), is_out
