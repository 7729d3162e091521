"""tr(ΛJΣJᵀ) of every example for a diagonal Σ: sums of squares alone, one root after the other.

    tr(ΛJΣJᵀ) = Σ_r Σ_p v_p (J_bᵀc_rb)_p²        Σ_r c_r c_rᵀ = Λ,   Σ = diag(v)

For a dense layer (J_bᵀc)_oi² = g_o² a_i², so Σ_r g² is all that its roots leave behind. A
convolution makes its windows once for all roots.
"""

from __future__ import annotations

from torch import Tensor

from credo.autodiff.jacobian_blocks import MatrixBlock
from credo.autodiff.jacobian_layers import MatrixTap, Tap
from credo.autodiff.jacobians import Jacobians
from credo.types import Vector


def diagonal_trace(jacobians: Jacobians, roots: Tensor, variance: Vector) -> Tensor:
    """tr(ΛJ diag(v) Jᵀ), (B,), for the roots (R, B, ...) of Λ."""
    blocks = [(block, variance[block.place]) for block in jacobians.blocks]
    total = roots.new_zeros(roots.shape[1])
    summed: dict[Tap, Tensor] = {}
    windows: dict[Tap, Tensor] = {}
    for root in roots.split(1):
        cotangents = jacobians.cotangents(root)
        for tap in {block.outer for block, _ in blocks if block.outer is not None}:
            g = cotangents.at[tap][0].flatten(0, -2)
            if tap in summed:
                summed[tap].addcmul_(g, g)
            else:
                summed[tap] = g.square()
        for block, v in blocks:
            if block.outer is not None:
                continue
            tap_of = block.parts[0].tap if isinstance(block, MatrixBlock) else None
            if isinstance(tap_of, MatrixTap) and not tap_of.left_is_input:
                left = tap_of.sides(cotangents.at[tap_of], slice(0, 1))[0]
                if tap_of not in windows:
                    windows[tap_of] = tap_of.sides(cotangents.at[tap_of], slice(None))[1][0]
                g = tap_of.features(cotangents.at[tap_of], slice(None))[0]  # (B, T, groups·out)
                g = g.mT.unflatten(1, left.shape[2:5:2])  # (B, groups, out, T)
                pulled = (g @ windows[tap_of]).flatten(1)
            else:
                pulled = block.pull(cotangents, slice(None))[0]
            total += pulled.square_() @ v
    for block, v in blocks:
        if block.outer is None:
            continue
        spread = v
        if isinstance(block, MatrixBlock):
            a = block.outer.inputs.flatten(0, -2).to(roots.dtype)
            spread = a.square() @ v.view(-1, a.shape[1]).mT
        total += (summed[block.outer] * spread).sum(1)
    return total
