r"""Cotangents c of a network's outputs f whose outer products make the data's curvature.

    Σ_r c_r c_rᵀ = Λ        so that        Σ_r (Jᵀc_r)(Jᵀc_r)ᵀ = JᵀΛJ,    J = ∂f/∂θ

============= ================================================= ====================================
``kind``      Λ of one example                                  roots R
============= ================================================= ====================================
"ggn"         −∂² log p(y | f)/∂f², or its mean over y          at most K, its number of outputs
"fisher"      the same in expectation: c = −∂ log p(ỹ | f)/∂f   ``samples`` labels ỹ ~ p(· | f)
"empirical"   c = −∂ log p(y | f)/∂f at the true label          1
============= ================================================= ====================================

The last is not a curvature at all except where the model is right (Kunstner, Hennig & Balles,
"Limitations of the empirical Fisher approximation", 2019, arXiv:1905.12558), and cheap.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import UnsupportedError
from credo.likelihoods import Categorical
from credo.types import Likelihood

Kind: TypeAlias = Literal["ggn", "fisher", "empirical"]


def output_roots(
    kind: Kind,
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor,
    generator: Generator | None = None,
    samples: int = 1,
    max_memory: float = math.inf,
) -> Tensor:
    """The roots of every example, (R, B, *outputs.shape[1:]).

    Labels that the likelihood ignores give nothing. ``max_memory`` bounds the bytes of the roots.

    >>> from credo.likelihoods import Gaussian
    >>> f, y = torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
    >>> output_roots("ggn", Gaussian(scale=0.5), f, y).flatten(), output_roots(
    ...     "empirical", Gaussian(scale=0.5), f, y
    ... ).flatten()
    (tensor([2., 2.]), tensor([-4., -8.]))
    """
    if kind == "empirical":
        return _score(likelihood, outputs, targets).unsqueeze(0)
    if kind == "fisher":
        drawn = (_drawn(likelihood, outputs, targets, generator) for _ in range(samples))
        scores = torch.stack([_score(likelihood, outputs, labels) for labels in drawn])
        return scores / math.sqrt(samples)
    _refuse_beyond(max_memory, outputs)
    counted = _counted(likelihood, outputs, targets)
    if isinstance(likelihood, Categorical):
        return _softmax_roots(likelihood.probs(outputs), counted)
    return _hessian_roots(likelihood.hessian(outputs), outputs)


def number_of_roots(kind: Kind, outputs: Tensor, samples: int = 1) -> int:
    """R, or a little more, before they are made."""
    return {"ggn": outputs[0].numel(), "fisher": samples, "empirical": 1}[kind]


def _score(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(-likelihood.log_prob(leaf, targets).sum(), leaf)
    return gradient


def _drawn(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, generator: Generator | None
) -> Tensor:
    labels = likelihood.sample(outputs, generator)
    ignored = getattr(likelihood, "ignore_index", None)
    return labels if ignored is None else labels.masked_fill(targets == ignored, ignored)


def _counted(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Which distributions have a label, (B, *spatial); None for all."""
    ignored = getattr(likelihood, "ignore_index", None)
    return None if ignored is None else targets != ignored


def _softmax_roots(probs: Tensor, counted: Tensor | None) -> Tensor:
    """The Cholesky factor of diag(p) − ppᵀ, pixel by pixel; its last column is zero and left out.

    With t_k = Σ_{j>k} p_j and s_k = √(p_k/(p_k + t_k)), column k is s_k√t_k at k and −p_j s_k/√t_k
    at j > k: one root less than the symmetric diag(√p) − p√pᵀ has.
    """
    p = probs.flatten(2) if probs.dim() > 2 else probs.unsqueeze(-1)  # (B, C, pixels)
    classes, pixels = p.shape[1:]
    kept, tail = p[:, :-1], p[:, 1:].flip(1).cumsum(1).flip(1)
    tail = tail.clamp(min=torch.finfo(p.dtype).tiny)
    share = (kept / (kept + tail)).sqrt()
    below = torch.ones(classes, classes, dtype=p.dtype, device=p.device).tril(-1)[:, :-1]
    # (B, C, C − 1, pixels): a probability over the root of a tail that holds it is at most 1.
    columns = -below[..., None] * (p.unsqueeze(2) / tail.sqrt().unsqueeze(1)) * share.unsqueeze(1)
    columns[:, :-1].diagonal(dim1=1, dim2=2).add_((share * tail.sqrt()).mT)
    columns = columns.movedim(2, 0)
    if counted is not None:
        columns = columns * counted.reshape(len(probs), 1, pixels)
    # A pixel's labels are independent of the others', so each pixel has roots of its own.
    apart = torch.eye(pixels, dtype=probs.dtype, device=probs.device).view(pixels, 1, 1, 1, pixels)
    return (columns.unsqueeze(0) * apart).reshape((classes - 1) * pixels, *probs.shape)


def _hessian_roots(hessian: Tensor, outputs: Tensor) -> Tensor:
    """Λ^½ of any positive semi-definite Λ, (B, K, K)."""
    size = outputs[0].numel()
    if hessian.shape != (len(outputs), size, size):
        raise UnsupportedError(
            f'curvature="ggn" takes a Hessian (B, K, K) = {(len(outputs), size, size)} of the '
            f'likelihood, this one has shape {tuple(hessian.shape)}; use curvature="fisher"'
        )
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    if bool((torch.diag_embed(diagonal) == hessian).all()):
        roots = torch.diag_embed(diagonal.sqrt())
    else:
        values, vectors = torch.linalg.eigh(hessian)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return roots.permute(2, 0, 1).reshape(size, *outputs.shape)


def _refuse_beyond(max_memory: float, outputs: Tensor) -> None:
    size = outputs[0].numel()
    needed = len(outputs) * size**2 * outputs.element_size()
    if needed > max_memory:
        raise UnsupportedError(
            f'curvature="ggn" needs the square roots of one {size} × {size} matrix for each '
            f"example, {needed / 1e9:.3g} GB for {len(outputs)} of them, and max_memory is "
            f'{max_memory / 1e9:.3g} GB; curvature="fisher" is the same in expectation and needs '
            "one backward pass for each of mc_samples"
        )
