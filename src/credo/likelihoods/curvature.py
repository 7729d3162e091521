r"""How a loss bends at the network's outputs f: the slope r, the Hessian Λ, its roots and trace.

    r = ∂ℓ/∂f        Λ = ∂²ℓ/∂f²        ℓ = −log p(y | f) of one example

=============================  ===========================  ====================================
likelihood                     r                            Λ
=============================  ===========================  ====================================
Gaussian                       (f − y)/scale²               I/scale²
Bernoulli                      σ(f) − y                     σ(f)(1 − σ(f))
Categorical                    p − e_y                      diag(p) − ppᵀ
`FromLoss`, twice              by differentiating           by differentiating twice, at the
differentiable                                              target
=============================  ===========================  ====================================

The first three need no label for Λ, so unlabelled examples have one too. Weights see Λ through its
roots c, which are cotangents of the outputs:

    Σ_r c_r c_rᵀ = Λ        so that        Σ_r (Jᵀc_r)(Jᵀc_r)ᵀ = JᵀΛJ,    J = ∂f/∂θ

============= ================================================= ====================================
``kind``      Λ of one example                                  roots R
============= ================================================= ====================================
"ggn"         ∂²ℓ/∂f², or its mean over y                       at most K, its number of outputs
"fisher"      the same in expectation: c = ∂ℓ/∂f at ỹ           ``samples`` labels ỹ ~ p(· | f)
"empirical"   c = ∂ℓ/∂f at the true label                       1
============= ================================================= ====================================

The last is not a curvature at all except where the model is right (Kunstner, Hennig & Balles,
"Limitations of the empirical Fisher approximation", 2019, arXiv:1905.12558), and cheap.

    >>> import torch
    >>> from credo.likelihoods import Categorical
    >>> output_hessian_trace(Categorical(), torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    tensor([0.5000, 0.2100])
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import DataError, UnsupportedError
from credo.likelihoods.base import per_example_sum
from credo.likelihoods.bernoulli import Bernoulli
from credo.likelihoods.categorical import Categorical
from credo.likelihoods.from_loss import FromLoss
from credo.likelihoods.labels import draw_labels
from credo.types import Likelihood

FisherKind: TypeAlias = Literal["ggn", "fisher", "empirical"]

SLACK = 1e-6
"""By which share of its largest eigenvalue rounding may make a positive Λ negative."""


def output_gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """r = ∂ℓ/∂f.

    Args:
        likelihood: p(y | f).
        outputs: The network's outputs f, examples first.
        targets: The targets y.

    Returns:
        One slope for each output, in the outputs' shape.
    """
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(-likelihood.log_prob(leaf, targets).sum(), leaf)
    return gradient


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None
) -> Tensor:
    """Λ of every example: in closed form, or for a loss by autodiff.

    >>> from credo.likelihoods import FromLoss
    >>> quartic = FromLoss(lambda f, y: (f - y).pow(4).flatten(1).sum(1) / 12)
    >>> output_hessian(quartic, torch.tensor([[2.0, 1.0]]), torch.zeros(1, 2))
    tensor([[[4., 0.], [0., 1.]]])

    Args:
        likelihood: p(y | f).
        outputs: The network's outputs f, (B,) or (B, K).
        targets: The targets y; only the Hessian of a `FromLoss` depends on them.

    Returns:
        (B, K, K), K numbers of each example.
    """
    outputs = outputs.detach()
    size = outputs[0].numel()
    if not isinstance(likelihood, FromLoss):
        hessian = likelihood.hessian(outputs)
        if hessian.shape != (len(outputs), size, size):
            raise UnsupportedError(
                f"outputs with positions, {tuple(outputs.shape)}, have one Λ for each of them and "
                "no single matrix here; take the trace (credo.functionspace.relevance)"
            )
        return hessian
    if targets is None:
        raise DataError(f"the curvature of {likelihood.name} depends on the targets: give them")
    with torch.enable_grad():
        leaf = outputs.clone().requires_grad_()
        losses = -likelihood.log_prob(leaf, targets).sum()
        (first,) = torch.autograd.grad(losses, leaf, create_graph=True)
        if not first.requires_grad:  # linear in f: nothing bends
            return outputs.new_zeros(len(outputs), size, size)
        rows = [
            torch.autograd.grad(first.flatten(1)[:, k].sum(), leaf, retain_graph=True)[0]
            for k in range(size)
        ]
    return torch.stack([row.flatten(1) for row in rows], dim=1)


def output_hessian_trace(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None
) -> Tensor:
    """tr Λ of every example: its relevance. Pixels add up; ignored ones do not count.

    For a softmax 1 − Σ_c p_c², and σ(1 − σ) for each logit of a Bernoulli, without cancellation
    where they saturate, so that examples the network is sure of still have an order.

    Args:
        likelihood: p(y | f).
        outputs: The network's outputs f, examples first.
        targets: The targets y, where the likelihood ignores some or is a `FromLoss`.

    Returns:
        (B,).
    """
    outputs = outputs.detach()
    if isinstance(likelihood, Categorical):
        traces = _softmax_traces(likelihood.probs(outputs))
        if likelihood.ignore_index is not None and targets is not None:
            traces = traces * (targets != likelihood.ignore_index)
        return traces.reshape(len(outputs), -1).sum(1)
    if isinstance(likelihood, Bernoulli):
        return (outputs.sigmoid() * (-outputs).sigmoid()).reshape(len(outputs), -1).sum(1)
    hessian = output_hessian(likelihood, outputs, targets)
    return hessian.diagonal(dim1=-2, dim2=-1).sum(-1)


def hessian_trace_at(likelihood: Likelihood, probs: Tensor) -> Tensor:
    """`output_hessian_trace` where only the labels' probabilities are known, as of a mixture.

    Args:
        likelihood: p(y | f), of labels.
        probs: Probabilities in the shape of the outputs.

    Returns:
        (B,).
    """
    if isinstance(likelihood, Categorical):
        return per_example_sum(_softmax_traces(probs))
    return per_example_sum(probs * (1 - probs))


def _softmax_traces(probs: Tensor) -> Tensor:
    """Σ_c p_c(1 − p_c) over the second dimension."""
    top = probs.argmax(1, keepdim=True)
    others = probs.scatter(1, top, 0.0)
    # p_top(1 − p_top) with 1 − p_top as the sum of the others.
    rest = others.sum(1)
    return probs.gather(1, top).squeeze(1) * rest + (others * (1 - others)).sum(1)


# --- roots ----------------------------------------------------------------------------------------


def curvature_roots(
    kind: FisherKind,
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor | None,
    generator: Generator | None = None,
    samples: int = 1,
    max_memory: float = math.inf,
) -> Tensor:
    """The roots of every example's Λ, or of what stands for it; see the module's second table.

    >>> from credo.likelihoods import Gaussian
    >>> f, y = torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])
    >>> curvature_roots("ggn", Gaussian(scale=0.5), f, y).flatten(), curvature_roots(
    ...     "empirical", Gaussian(scale=0.5), f, y
    ... ).flatten()
    (tensor([2., 2.]), tensor([-4., -8.]))

    Args:
        kind: "ggn", "fisher" or "empirical".
        likelihood: p(y | f).
        outputs: The network's outputs f, examples first.
        targets: The targets y; those that the likelihood ignores give nothing. For "ggn" they may
            be unknown, None.
        generator: Draws the labels of "fisher".
        samples: How many labels "fisher" draws for each example.
        max_memory: Bounds the bytes of the roots.

    Returns:
        (R, *outputs.shape).
    """
    if kind == "ggn":
        _refuse_beyond(max_memory, outputs)
        if isinstance(likelihood, Categorical):
            counted = None
            if targets is not None and likelihood.ignore_index is not None:
                counted = targets != likelihood.ignore_index
            return _softmax_roots(likelihood.probs(outputs), counted)
        return _symmetric_roots(likelihood.hessian(outputs), outputs)
    if targets is None:
        raise DataError(f'curvature="{kind}" is taken at labels: give the targets')
    if kind == "empirical":
        return output_gradient(likelihood, outputs, targets).unsqueeze(0)
    drawn = (draw_labels(likelihood, outputs, targets, generator)() for _ in range(samples))
    scores = torch.stack([output_gradient(likelihood, outputs, y.detach()) for y in drawn])
    return scores / math.sqrt(samples)


def number_of_roots(kind: FisherKind, outputs: Tensor, samples: int = 1) -> int:
    """R, or a little more, before they are made.

    Args:
        kind: "ggn", "fisher" or "empirical".
        outputs: The network's outputs f, examples first.
        samples: How many labels "fisher" draws for each example.
    """
    return {"ggn": outputs[0].numel(), "fisher": samples, "empirical": 1}[kind]


def output_hessian_roots(likelihood: Likelihood, outputs: Tensor, targets: Tensor | None) -> Tensor:
    """The roots of Λ for any loss: those of "ggn", and for a `FromLoss` those of its own Hessian.

    A Λ that is not positive semi-definite is refused: there is no Gaussian it belongs to.

    Args:
        likelihood: p(y | f).
        outputs: The network's outputs f, examples first.
        targets: The targets y, None where they are unknown.

    Returns:
        (R, *outputs.shape).
    """
    if not isinstance(likelihood, FromLoss):
        return curvature_roots("ggn", likelihood, outputs.detach(), targets)
    values, vectors = torch.linalg.eigh(output_hessian(likelihood, outputs, targets))
    if bool((values < -SLACK * values.abs().amax(-1, keepdim=True)).any()):
        raise UnsupportedError(
            f"the loss {likelihood.name} is not convex in the network's outputs at these examples "
            f"(smallest eigenvalue {float(values.min()):.3g}), so it is no Gaussian's there. Take "
            "a convex loss, or leave those examples out"
        )
    roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return roots.permute(2, 0, 1).reshape(-1, *outputs.shape)


def roots_needed(likelihood: Categorical, outputs: Tensor, tolerance: float) -> Tensor:
    """How many roots, likeliest classes first, leave less than this share of tr Λ out.

    After the column of class k what is left of Λ is that of the other classes alone, with a trace
    of t − Σ_{j>k} p_j²/t where t = Σ_{j>k} p_j. A network that is sure needs one or two.

    >>> roots_needed(Categorical(), torch.tensor([[9.0, 8.0, -9.0], [0.0, 0.0, 0.0]]), 0.01)
    tensor([1, 2])

    Args:
        likelihood: The softmax.
        outputs: The network's outputs f, (B, C).
        tolerance: The share of tr Λ that may be left out.

    Returns:
        (B,).
    """
    p = likelihood.probs(outputs.detach()).sort(1, descending=True).values
    tail = p[:, 1:].flip(1).cumsum(1).flip(1).clamp(min=torch.finfo(p.dtype).tiny)
    squares = p[:, 1:].square().flip(1).cumsum(1).flip(1)
    left = tail - squares / tail  # after one root, after two, …
    enough = left <= tolerance * output_hessian_trace(likelihood, outputs).unsqueeze(1)
    enough[:, -1] = True
    return 1 + enough.int().argmax(1)


def leading_roots(likelihood: Categorical, outputs: Tensor, targets: Tensor, count: int) -> Tensor:
    """The first roots of Λ when the likeliest classes come first.

    Args:
        likelihood: The softmax.
        outputs: The network's outputs f, (B, C).
        targets: The labels.
        count: How many roots.

    Returns:
        (count, B, C).
    """
    order = outputs.detach().argsort(1, descending=True)
    ordered = outputs.detach().gather(1, order)
    roots = curvature_roots("ggn", likelihood, ordered, targets)[:count]
    return torch.zeros_like(roots).scatter(2, order.expand_as(roots), roots)


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


def _symmetric_roots(hessian: Tensor, outputs: Tensor) -> Tensor:
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
