"""How good predictions and their uncertainties are: pure functions of arrays or tensors.

Classification metrics take probabilities and labels in the layouts that `Labelled` describes:
(B, C) with (B,), a plain (B,) meaning P(y = 1), or dense (B, C, H, W) with (B, H, W); all of them
drop labels equal to ``ignore_index``. The probabilities to score are those of the predictive
distribution, the mean over posterior samples of the softmax and not the softmax of the mean.

>>> from credo import metrics
>>> probs, y = [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]], [0, 1, 1, 0]
>>> metrics.accuracy(probs, y), round(metrics.nll(probs, y), 4), round(metrics.ece(probs, y), 4)
(0.75, 0.4004, 0.3)
"""

from __future__ import annotations

from credo.metrics.agreement import agreement, total_variation, w2
from credo.metrics.calibration import (
    Reliability,
    adaptive_ece,
    classwise_ece,
    ece,
    ece_floor,
    reliability,
    reliability_of_confidence,
)
from credo.metrics.chains import effective_sample_size, r_hat
from credo.metrics.forgetting import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from credo.metrics.ood import aupr, auroc, fpr95
from credo.metrics.scoring import (
    accuracy,
    brier,
    confidence,
    coverage,
    crps,
    crps_gaussian,
    crps_mixture,
    gaussian_nll,
    gibbs_nll,
    mean_iou,
    nll,
    rmse,
)
from credo.metrics.selective import (
    ReferralCosts,
    RetentionCurve,
    accuracy_vs_confidence,
    referral,
    referral_costs,
    retention,
)

__all__ = [
    "ReferralCosts",
    "Reliability",
    "RetentionCurve",
    "accuracy",
    "accuracy_vs_confidence",
    "adaptive_ece",
    "agreement",
    "aupr",
    "auroc",
    "average_accuracy",
    "backward_transfer",
    "brier",
    "classwise_ece",
    "confidence",
    "coverage",
    "crps",
    "crps_gaussian",
    "crps_mixture",
    "ece",
    "ece_floor",
    "effective_sample_size",
    "forgetting",
    "forward_transfer",
    "fpr95",
    "gaussian_nll",
    "gibbs_nll",
    "mean_iou",
    "nll",
    "r_hat",
    "referral",
    "referral_costs",
    "reliability",
    "reliability_of_confidence",
    "retention",
    "rmse",
    "total_variation",
    "w2",
]
