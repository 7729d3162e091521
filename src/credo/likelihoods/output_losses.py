r"""How a loss bends at the network's outputs: r = ∂ℓ/∂f and Λ = ∂²ℓ/∂f², for any smooth loss.

=============================  ===========================  ====================================
likelihood                     r                            Λ
=============================  ===========================  ====================================
Gaussian                       (f − y)/scale²               I/scale²
Bernoulli                      σ(f) − y                     σ(f)(1 − σ(f))
Categorical                    p − e_y                      diag(p) − ppᵀ
`FromLoss`, twice              by differentiating           by differentiating twice, at the
differentiable                                              target
=============================  ===========================  ====================================

The first three need no label for Λ, so unlabelled examples have one too.

    >>> import torch
    >>> from credo.likelihoods import Categorical
    >>> trace_of_curvature(Categorical(), torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    tensor([0.5000, 0.2100])
"""

from __future__ import annotations

import torch
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.likelihoods import Bernoulli, Categorical, FromLoss
from credo.likelihoods.output_roots import output_roots
from credo.types import Likelihood

SLACK = 1e-6
"""By which share of its largest eigenvalue rounding may make a positive Λ negative."""


def output_gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """r = ∂ℓ/∂f in the outputs' shape; ℓ is the negative log-likelihood of one example."""
    return output_roots("empirical", likelihood, outputs.detach(), targets)[0]


def output_hessian(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None
) -> Tensor:
    """Λ, (B, K, K), K numbers of each example: in closed form, or for a loss by autodiff.

    >>> from credo.likelihoods import FromLoss
    >>> quartic = FromLoss(lambda f, y: (f - y).pow(4).flatten(1).sum(1) / 12)
    >>> output_hessian(quartic, torch.tensor([[2.0, 1.0]]), torch.zeros(1, 2))
    tensor([[[4., 0.], [0., 1.]]])
    """
    outputs = outputs.detach()
    size = outputs[0].numel()
    if not isinstance(likelihood, FromLoss):
        found = likelihood.hessian(outputs)
        if found.shape != (len(outputs), size, size):
            raise UnsupportedError(
                f"outputs with positions, {tuple(outputs.shape)}, have one Λ for each of them and "
                "no single matrix here; take the trace (credo.functionspace.relevance)"
            )
        return found
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


def roots_of_curvature(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """c with Σ_r c_r c_rᵀ = Λ, (R, *outputs.shape): what curvature passes use, for any loss.

    A Λ that is not positive semi-definite is refused: there is no Gaussian it belongs to.
    """
    if not isinstance(likelihood, FromLoss):
        return output_roots("ggn", likelihood, outputs.detach(), targets)
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
    """How many roots, likeliest classes first, leave less than this share of tr Λ out: (B,).

    After the column of class k what is left of Λ is that of the other classes alone, with a trace
    of t − Σ_{j>k} p_j²/t where t = Σ_{j>k} p_j. A network that is sure needs one or two.

    >>> roots_needed(Categorical(), torch.tensor([[9.0, 8.0, -9.0], [0.0, 0.0, 0.0]]), 0.01)
    tensor([1, 2])
    """
    p = likelihood.probs(outputs.detach()).sort(1, descending=True).values
    tail = p[:, 1:].flip(1).cumsum(1).flip(1).clamp(min=torch.finfo(p.dtype).tiny)
    squares = p[:, 1:].square().flip(1).cumsum(1).flip(1)
    left = tail - squares / tail  # after one root, after two, …
    enough = left <= tolerance * trace_of_curvature(likelihood, outputs).unsqueeze(1)
    enough[:, -1] = True
    return 1 + enough.int().argmax(1)


def leading_roots(likelihood: Categorical, outputs: Tensor, targets: Tensor, count: int) -> Tensor:
    """The first ``count`` roots of Λ when the likeliest classes come first, (count, B, C)."""
    order = outputs.detach().argsort(1, descending=True)
    ordered = outputs.detach().gather(1, order)
    roots = output_roots("ggn", likelihood, ordered, targets)[:count]
    return torch.zeros_like(roots).scatter(2, order.expand_as(roots), roots)


def trace_of_curvature(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None
) -> Tensor:
    """tr Λ of every example, (B,): its relevance. Pixels add up; ignored ones do not count.

    For a softmax 1 − Σ_c p_c², and σ(1 − σ) for each logit of a Bernoulli, without cancellation
    where they saturate, so that examples the network is sure of still have an order.
    """
    outputs = outputs.detach()
    if isinstance(likelihood, Categorical):
        probs = likelihood.probs(outputs)
        top = probs.argmax(1, keepdim=True)
        others = probs.scatter(1, top, 0.0)
        # p_top(1 − p_top) with 1 − p_top as the sum of the others.
        rest = others.sum(1)
        traces = probs.gather(1, top).squeeze(1) * rest + (others * (1 - others)).sum(1)
        if likelihood.ignore_index is not None and targets is not None:
            traces = traces * (targets != likelihood.ignore_index)
        return traces.reshape(len(outputs), -1).sum(1)
    if isinstance(likelihood, Bernoulli):
        return (outputs.sigmoid() * (-outputs).sigmoid()).reshape(len(outputs), -1).sum(1)
    hessian = output_hessian(likelihood, outputs, targets)
    return hessian.diagonal(dim1=-2, dim2=-1).sum(-1)
