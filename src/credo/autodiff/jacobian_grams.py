"""The whole of Σ_b J_bᵀΛ_bJ_b for one dense layer, such as a network's last, without its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.autodiff.jacobian_blocks import Block, Cotangents, MatrixBlock
from credo.autodiff.jacobian_layers import LinearTap


def one_dense_layer(blocks: Sequence[Block]) -> LinearTap | None:
    """The tap, if these blocks are one dense layer's weight, or its weight and then its bias."""
    tap = blocks[0].outer if blocks and isinstance(blocks[0], MatrixBlock) else None
    rest = blocks[1:]
    alone = len(rest) <= 1 and all(b.outer is tap and b.parts[0].is_bias for b in rest)
    return tap if alone else None


def layer_gram(tap: LinearTap, cotangents: Cotangents, biased: bool) -> Tensor:
    """Σ_b Λ_b ⊗ a_b a_bᵀ with Λ_b = Σ_r g_rb g_rbᵀ, over a weight row-major and then its bias."""
    left, right = tap.sides(cotangents.at[tap], slice(None))
    g, a = left[:, :, 0, 0].movedim(1, 0), right[0, :, 0, 0]
    if biased:
        a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
    middle = g.mT @ g  # (B, out, out)
    outputs, width = middle.shape[1], a.shape[1]
    found = a.new_empty(outputs, width, outputs, width)
    for j in range(outputs):
        # A block is symmetric, and so is their array.
        weighted = (middle[:, j, j:].unsqueeze(-1) * a.unsqueeze(1)).flatten(1)
        found[j, :, j:] = (a.mT @ weighted).view(width, outputs - j, width)
        found[j + 1 :, :, j] = found[j, :, j + 1 :].permute(1, 0, 2)
    if not biased:
        return found.view(outputs * width, outputs * width)
    # The ones' column is the bias: behind the weight, not beside each of its rows.
    order = torch.arange(outputs * width, device=a.device).view(outputs, width)
    order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    return found.view(outputs * width, outputs * width)[order][:, order]
