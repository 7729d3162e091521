r"""What the label of one example would be worth: a number for each of B, from predictions alone.

=============  ==========================================  ======================================
function       score of x                                  asks for
=============  ==========================================  ======================================
`entropy`      H[p̄],  p̄ = (1/S) Σ_s p_s                    labels nobody could guess
`bald`         H[p̄] − (1/S) Σ_s H[p_s] = I(y; θ)           labels on which the samples disagree
`variance`     Σ_d Var_s E[y_d | f_s]                      the same in squares; also regression
`relevance`    tr Λ(x),  Λ = diag(p̄) − p̄p̄ᵀ                 examples near a boundary (Khan, 2019)
`leverage`     tr(Λ J Σ Jᵀ)                                examples that would move the weights
=============  ==========================================  ======================================

p_s are the probabilities of sample s; J = ∂f/∂θ at the posterior's mean, Σ its covariance, Λ the
likelihood's curvature there. `entropy` and `relevance` do not tell ambiguity, which no label ends,
from ignorance; the others do. Outputs with several labels or positions add up.

    >>> import torch
    >>> from credo.likelihoods import Categorical
    >>> from credo.posterior.predictive import Predictive
    >>> samples = torch.tensor([[[9.0, -9.0], [0.0, 0.0]], [[-9.0, 9.0], [0.0, 0.0]]])
    >>> pred = Predictive(samples, Categorical())        # one disputed, one ambiguous example
    >>> entropy(pred), bald(pred).round(decimals=4)
    (tensor([0.6931, 0.6931]), tensor([0.6931, 0.0000]))

Correction: Khan (2019) writes the relevance as ∇²_ff ℓ(y, f); for softmax, logistic and squared
losses it does not depend on y, which is why a pool without labels can be ranked by it.

References: Houlsby, Huszár, Ghahramani & Lengyel, "Bayesian active learning for classification and
preference learning", 2011 (arXiv:1112.5745); Gal, Islam & Ghahramani, "Deep Bayesian active
learning with image data", 2017 (arXiv:1703.02910); Khan, "Deep learning with Bayesian principles",
2019; MacKay, "Information-based objective functions for active data selection", 1992.
"""

from __future__ import annotations

from torch import Tensor

from credo.likelihoods.base import per_example_sum
from credo.likelihoods.curvature import hessian_trace_at
from credo.posterior.outputs import OutputGaussian
from credo.posterior.predictive import Predictive
from credo.types import Likelihood


def entropy(pred: Predictive) -> Tensor:
    """H[p̄], (B,).

    Args:
        pred: The predictive distribution of the candidates.
    """
    return per_example_sum(pred.entropy)


def bald(pred: Predictive) -> Tensor:
    """The mutual information between label and weights, (B,).

    Args:
        pred: The predictive distribution of the candidates.
    """
    return per_example_sum(pred.mutual_information)


def variance(pred: Predictive) -> Tensor:
    """The variance of what the samples predict, (B,); noise, which no label ends, is left out.

    Args:
        pred: The predictive distribution of the candidates.
    """
    return per_example_sum(pred.epistemic_std.square())


def relevance(pred: Predictive) -> Tensor:
    """tr Λ = Σ_c p̄_c(1 − p̄_c) of the mean prediction, (B,).

    Args:
        pred: The predictive distribution of the candidates.
    """
    return hessian_trace_at(pred.likelihood, pred.probs)


def leverage(outputs: OutputGaussian, likelihood: Likelihood) -> Tensor:
    """tr(Λ J Σ Jᵀ), (B,), of the outputs' Gaussian N(f, JΣJᵀ).

    Args:
        outputs: The Gaussian N(f, JΣJᵀ) of the linearised network's outputs.
        likelihood: Of the model.
    """
    return per_example_sum(likelihood.hessian(outputs.mean) * outputs.covariance)
