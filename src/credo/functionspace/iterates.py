r"""A step of VON or online Gauss–Newton as inference in a Gaussian process.

    S⁺ = (1 − ρ)S + ρ(Σ_i J_iᵀΛ_iJ_i + δI)        S⁺μ⁺ = (1 − ρ)Sμ + ρ Σ_i (J_iᵀΛ_iJ_iw − J_iᵀr_i)

is the posterior of a linear model with the targets ỹ = Jw − Λ⁻¹r, noise (ρΛ)⁻¹, and the prior

    V⁻¹ = (1 − ρ)S + ρδI        v = V(1 − ρ)Sμ

======  ==================  ==========================================================
symbol  argument            shape
======  ==================  ==========================================================
S, μ    ``q``               the iterate before, a dense or diagonal Gaussian over (P,)
w       ``weights``         (P,), where J, Λ, r are taken: μ, or a draw from q
ρ       ``rate``            in (0, 1]
δ       ``prior_precision``
n       ``num_data``        a minibatch of S examples counts n/S-fold
======  ==================  ==========================================================

A dense S keeps all of the new curvature, so both routes agree; VOGN keeps its diagonal, and its own
process is `to_gp` of its posterior. The scale-matrix iteration of Khan's tutorial ("Deep learning
with Bayesian principles", 2019) lacks ρ and n/S on the new term, and its gradient δw.

Reference: Khan, Immer, Abedi & Korzepa, 2019 (arXiv:1906.01930), theorem on VOGN's iterations.
"""

from __future__ import annotations

from typing import Annotated

import torch

from credo.checks import Count, Positive, Range, checked
from credo.errors import UnsupportedError
from credo.families import Delta, DiagGaussian, FullGaussian, Gaussian
from credo.functionspace.pseudo_data import PseudoData
from credo.model import Model
from credo.posterior.posterior import Posterior
from credo.types import Batch, Vector


@checked
def iterate_as_gp(
    model: Model,
    q: FullGaussian | DiagGaussian,
    batch: Batch,
    rate: Annotated[float, Range(0, 1, open_low=True)],
    prior_precision: Positive,
    weights: Vector | None = None,
    num_data: Count | None = None,
) -> PseudoData:
    """The regression problem whose posterior is the next iterate.

    >>> import torch, credo
    >>> net = torch.nn.Linear(1, 1)
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0))
    >>> q = FullGaussian(torch.zeros(2), torch.eye(2))
    >>> step = iterate_as_gp(model, q, (torch.ones(1, 1), torch.ones(1, 1)), 1.0, 1.0)
    >>> step.at(torch.ones(1, 1)).mean        # ridge regression: 2/(1 + 2)
    tensor([[0.6667]])

    Args:
        model: The network, its likelihood and prior.
        q: The iterate before, N(μ, S⁻¹).
        batch: (inputs, targets) of the step.
        rate: ρ, the step's rate.
        prior_precision: δ, that of the prior.
        weights: Where J, Λ and r are taken: a draw from q; None for its mean.
        num_data: n, for which the batch stands; None for itself.
    """
    precision = _precision(q)
    one = torch.eye(q.size, dtype=precision.dtype, device=precision.device)
    kept = (1 - rate) * precision
    before = FullGaussian(torch.zeros_like(q.mean), kept + rate * prior_precision * one)
    prior = before.with_mean(before.solve(kept @ q.mean))
    share = 1.0 if num_data is None else num_data / len(batch[1])
    point = q.mean if weights is None else weights
    at_weights = Posterior.at_network(model, Delta(point))
    return PseudoData(at_weights, batch, prior, weight=rate * share)


def _precision(q: Gaussian) -> torch.Tensor:
    if isinstance(q, FullGaussian):
        return q.precision
    if isinstance(q, DiagGaussian):
        return torch.diag(1 / q.variance)
    raise UnsupportedError(
        f"an iterate is a dense or diagonal Gaussian here, not a {type(q).__name__}"
    )
