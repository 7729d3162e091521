"""Gradients of single examples, and the sum of their squares, without a loop over examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credo.types import Vector

_MAX_NUMBERS = 2**24
"""How many gradient entries are held at once: 64 MB in float32."""

ExampleLoss = Callable[..., Tensor]
"""θ (P,) and one example's tensors, without a batch dimension → that example's loss, 0-dim."""


def gradients(loss: ExampleLoss, theta: Vector, examples: tuple[Tensor, ...]) -> Tensor:
    """∇ℓ_i(θ) of every example, (B, P).

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> gradients(lambda theta, x: theta @ x, torch.zeros(2), (x,))
    tensor([[1., 2.],
            [3., 4.]])
    """
    per_example = torch.func.vmap(
        torch.func.grad(loss), (None, *(0 for _ in examples)), randomness="different"
    )
    return per_example(theta, *examples)


def squares(
    loss: ExampleLoss, theta: Vector, examples: tuple[Tensor, ...]
) -> tuple[Vector, Vector]:
    """Σ_i ∇ℓ_i and Σ_i ∇ℓ_i∘∇ℓ_i, both (P,), in bounded memory."""
    total, squared = torch.zeros_like(theta), torch.zeros_like(theta)
    chunk = max(1, _MAX_NUMBERS // theta.numel())
    for parts in zip(*(tensor.split(chunk) for tensor in examples), strict=True):
        found = gradients(loss, theta, parts)
        total += found.sum(0)
        squared += found.square().sum(0)
    return total, squared
