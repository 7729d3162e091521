r"""The predictive of the network made linear in its weights around q's mean.

    f(x; θ) ≈ f(x; m) + J(x)(θ − m),   θ ~ N(m, Σ)     ⟹     f(x) ~ N(f(x; m), J(x) Σ J(x)ᵀ)

One forward pass, and one backward pass per output, give the distribution of the outputs themselves:
no weights are sampled. For curvatures made of JᵀΛJ (Gauss–Newton, Fisher) it is the model of which
Laplace's approximation is the posterior, and predicts better than sampled weights do.

===========  ================================  ===================================================
likelihood   ``link``                          p(y | x)
===========  ================================  ===================================================
Gaussian     None                              N(y; f, JΣJᵀ + scale²), exactly
Categorical  "probit"                          softmax(f_c / √(1 + π/8 · (JΣJᵀ)_cc))
Bernoulli    "probit"                          σ(f / √(1 + π/8 · JΣJᵀ))
any          "samples"; None where no formula  (1/S) Σ_s p(y | f_s), f_s drawn from the Gaussian
===========  ================================  ===================================================

MacKay's probit formula for one logit is within 0.018 of the exact probability for any mean and
variance. That for several logits is a heuristic: it uses the variances alone.

Outputs with positions, (B, C, H, W), have one covariance (C, C) per position: what joins different
positions is left out, so quantities of one pixel are right and ``log_prob`` of a whole image treats
its pixels as independent given the input.

References: MacKay, "The evidence framework applied to classification networks", 1992; Khan, Immer,
Abedi & Korzepa, "Approximate inference turns deep networks into Gaussian processes", 2019
(arXiv:1906.01930); Immer, Korzepa & Bauer, "Improving predictions of Bayesian neural nets via local
linearization", 2021 (arXiv:2008.08400).
"""

from __future__ import annotations

from credo.linearised.closed_form import NormalPredictive, ProbitPredictive
from credo.linearised.covariance import output_covariance
from credo.linearised.link import Link, check_link, predictive
from credo.linearised.outputs import Linearisation, OutputGaussian

__all__ = [
    "Linearisation",
    "Link",
    "NormalPredictive",
    "OutputGaussian",
    "ProbitPredictive",
    "check_link",
    "output_covariance",
    "predictive",
]
