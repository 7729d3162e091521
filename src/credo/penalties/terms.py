"""The sum Σ_ℓ c_ℓ·r(θ_ℓ) over weight tensors and its gradient, both in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credo.priors.group import GroupLayout

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Terms:
    """Coefficients, one per tensor, of ‖θ‖₁, ‖θ‖₂² and Σ_g‖θ_g‖₂; an empty tuple is no such term.

    ``layouts`` says what a tensor's groups are.
    """

    absolute: tuple[float, ...] = ()
    square: tuple[float, ...] = ()
    norm: tuple[float, ...] = ()
    layouts: tuple[GroupLayout, ...] = ()

    def value(self, weights: Tensors) -> Tensor:
        """The sum, 0-dim."""
        parts = []
        if self.absolute:
            parts.append(_weighed(torch._foreach_norm(weights, 1), self.absolute))
        if self.square:
            norms = torch._foreach_norm(weights, 2)
            parts.append(_weighed([n.square() for n in norms], self.square))
        if self.norm:
            parts.append(_weighed([norms.sum() for norms in self._norms(weights)], self.norm))
        return torch.stack(parts).sum()

    def gradients(self, weights: Tensors) -> list[Tensor]:
        """∂/∂θ_ℓ for every tensor; at a kink the subgradient 0."""
        gradients: list[Tensor] = []
        if self.absolute:
            gradients = list(torch._foreach_sign(weights))
            torch._foreach_mul_(gradients, self.absolute)
        if self.square:
            pulls = torch._foreach_mul(weights, [2 * c for c in self.square])
            if gradients:
                torch._foreach_add_(gradients, pulls)
            else:
                gradients = list(pulls)
        if self.norm:
            gradients = [
                layout.directions(layout.see(w.reshape(-1))).mul_(c).view(w.shape)
                for layout, c, w in zip(self.layouts, self.norm, weights, strict=True)
            ]
        return gradients

    def _norms(self, weights: Tensors) -> list[Tensor]:
        return [
            layout.norms(layout.see(w.reshape(-1)))
            for layout, w in zip(self.layouts, weights, strict=True)
        ]


def differentiable(terms: Terms, weights: Tensors) -> Tensor:
    """The sum as a node of autograd's graph, 0-dim; differentiable once."""
    if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        total: Tensor = _ClosedForm.apply(terms, *weights)  # type: ignore[no-untyped-call]
        return total
    return terms.value([w.detach() for w in weights])


class _ClosedForm(torch.autograd.Function):
    """One node for all tensors; autograd's own would be several for each of them."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, *weights: Tensor) -> Tensor:
        # At once, because a later backward must not see weights that were written in between.
        ctx.gradients = terms.gradients(weights)
        return terms.value(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.gradients, grad_output)


def _weighed(values: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    stacked = torch.stack(list(values))
    return stacked @ stacked.new_tensor(coefficients)
