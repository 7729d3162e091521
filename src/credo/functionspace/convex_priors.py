r"""The Gaussian that a smooth convex penalty is at one point: the GP's prior beyond L2.

    δR(w) ≈ δR(w*) + δ∇R(w*)ᵀ(w − w*) + ½(w − w*)ᵀ δ∇²R(w*) (w − w*)

    ⟹  prior N(w* − (∇²R)⁻¹∇R, (δ∇²R)⁻¹), so Σ⁻¹ = Σ_i J_iᵀΛ_iJ_i + δ∇²R(w*)

======  ===============================  =========================================================
symbol  argument                         shape
======  ===============================  =========================================================
δR      ``penalty``                      (P,) → (), twice differentiable and convex at ``weights``
w*      ``weights``                      (P,)
======  ===============================  =========================================================

For R = ½‖w‖² this is N(0, 1/δ) wherever it is taken.

    >>> import torch
    >>> q = local_prior(lambda w: w.pow(4).sum(), torch.tensor([1.0, 2.0]))
    >>> q.variance
    tensor([0.0833, 0.0208])
    >>> q.mean                                    # w − (4w³)/(12w²)
    tensor([0.6667, 1.3333])

Reference: Khan, Immer, Abedi & Korzepa, 2019 (arXiv:1906.01930), who take L2; the rest follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, FullGaussian, Gaussian
from credo.types import FlatDistribution, Vector

Penalty: TypeAlias = Callable[[Tensor], Tensor]

MAX_DENSE = 4096
"""Up to how many weights a penalty that couples them is expanded."""


def prior_at(prior: FlatDistribution, weights: Vector) -> Gaussian:
    """The prior itself where it is Gaussian, otherwise `local_prior` of −log p.

    Args:
        prior: Any distribution over the weights.
        weights: Where, (P,).
    """
    if isinstance(prior, Gaussian):
        return prior
    return local_prior(lambda w: -prior.log_prob(w), weights)


def local_prior(penalty: Penalty, weights: Vector) -> Gaussian:
    """The Gaussian with the penalty's slope and curvature at ``weights``: diagonal if it can be.

    Args:
        penalty: (P,) → (), twice differentiable and convex at ``weights``.
        weights: Where, (P,).
    """
    with torch.enable_grad():
        w = weights.detach().clone().requires_grad_()
        value = penalty(w)
        if value.dim():
            raise DataError(f"the penalty must return one number, not {tuple(value.shape)}")
        (slope,) = torch.autograd.grad(value, w, create_graph=True)
        if not slope.requires_grad:
            raise UnsupportedError(_FLAT)
        curvature = _product(slope, w, torch.ones_like(w))
        # A diagonal Hessian gives Hz = h∘z for any z.
        signs = torch.ones_like(w)
        signs[::2] = -1
        separate = torch.allclose(_product(slope, w, signs), curvature * signs)
        if separate:
            if not bool((curvature > 0).all()):
                raise UnsupportedError(_FLAT)
            return DiagGaussian(
                (w - slope / curvature).detach(), curvature.detach().rsqrt().contiguous()
            )
        if w.numel() > MAX_DENSE:
            raise UnsupportedError(
                f"the penalty couples the {w.numel()} weights, and its Hessian is formed for up to "
                f"{MAX_DENSE}: make fewer of them random, or take a penalty of each weight alone"
            )
        hessian = torch.stack([_product(slope, w, e) for e in torch.eye(len(w)).to(w)])
    try:
        flat = FullGaussian(torch.zeros_like(weights), hessian.detach())
    except DataError as error:
        raise UnsupportedError(_FLAT) from error
    return flat.with_mean((w - flat.solve(slope)).detach())


def _product(slope: Tensor, w: Tensor, vector: Tensor) -> Tensor:
    """∇²R·vector."""
    (product,) = torch.autograd.grad(slope, w, vector, retain_graph=True, allow_unused=True)
    return torch.zeros_like(w) if product is None else product.detach()


_FLAT = (
    "the prior's −log density has no positive curvature at these weights (an L1 penalty has none, "
    "a spike and slab may have less), so there is no Gaussian with its curvature there. Take a "
    "prior that is twice differentiable and strictly convex"
)
