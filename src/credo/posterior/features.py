r"""What JΣJ'ᵀ needs of J, for a block of inputs: less than J itself wherever a layer is dense.

    J_bᵀc = g ⊗ a        ⟹        cᵀJΣJ'ᵀc' = Σ_o g_o g'_o Σ_i v_oi a_i a'_i,   Σ = diag(v)

symbols: a what a dense layer reads, (B, in); g the gradient at what it writes, for each of R
cotangents c of the outputs, (B, R, out). So a dense layer keeps R·out + in numbers for an input and
not R·out·in, and a kernel of all R outputs costs the same product as one output's, because
Σ_i v_oi a_i a'_i is shared by them. If v is one number the sums separate. Layers with positions
(convolutions) keep rows of J, times a root of Σ.

What each family keeps is said in `credo.posterior.covariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians, aligned
from credo.autodiff.layer_calls import chunks
from credo.autodiff.layer_jacobians import Block, Cotangents, KronCovariance, MatrixBlock
from credo.types import Vector

Outputs: TypeAlias = Literal["joint", "each", "sum"]
"""Of R outputs: every pair, (n, R, m, R); each with itself, (R, n, m); the sum of these, (n, m)."""

PAIR_NUMBERS = 2**22
"""How many numbers the products of pairs of inputs may hold at once: 16 MB in float32."""


@dataclass(frozen=True, eq=False)
class Outer:
    """A dense layer.

    Args:
        left: g, (B, R, out).
        right: a, (B, in).
        variance: v, (out, in), or None where it is 1 everywhere.
    """

    left: Tensor
    right: Tensor
    variance: Tensor | None

    def kernel(self, other: Outer, outputs: Outputs) -> Tensor:
        """Its part of the kernel between its inputs and the other's."""
        if self.variance is None:
            near = self.right @ other.right.mT
            if outputs == "joint":
                return rows_kernel(self.left, other.left, outputs) * near[:, None, :, None]
            return rows_kernel(self.left, other.left, outputs) * near
        if outputs == "joint":
            return self._joint(other, self.variance)
        count, size = len(self.left), len(other.left)
        lead = self.left.shape[1:2] if outputs == "each" else ()
        total = self.left.new_zeros(*lead, count, size)
        g, turned = self.left.movedim(2, 0), other.left.movedim(2, 0)
        for row, mine, theirs in zip(self.variance, g, turned, strict=True):
            near = (self.right * row) @ other.right.mT
            if outputs == "each":
                total += near * (mine.mT.unsqueeze(-1) * theirs.mT.unsqueeze(-2))
            else:
                total.addcmul_(near, mine @ theirs.mT)
        return total

    def _joint(self, other: Outer, variance: Tensor) -> Tensor:
        """Σ_o g_ro T_o g'_so with T_o = Σ_i v_oi a_i a'_i, a few inputs at a time."""
        count, outs = self.left.shape[1:]
        kernel = self.left.new_empty(len(self.left), count, *other.left.shape[:2])
        step = max(1, PAIR_NUMBERS // (len(other.left) * count * outs))
        for start in range(0, len(self.left), step):
            cut = slice(start, start + step)
            scaled = self.right[cut].unsqueeze(1) * variance  # (b, out, in)
            near = scaled @ other.right.mT  # (b, out, m)
            # (b, R, m, out) @ (m, out, R) over the other's inputs
            part = self.left[cut].unsqueeze(2) * near.mT.unsqueeze(1)
            kernel[cut] = torch.einsum("brmo,mso->brms", part, other.left)
        return kernel

    def cut(self, rows: slice) -> Outer:
        """Some of the inputs."""
        return Outer(self.left[rows], self.right[rows], self.variance)

    @property
    def numbers(self) -> int:
        """Held for all inputs."""
        return self.left.numel() + self.right.numel()


@dataclass(frozen=True, eq=False)
class Rows:
    """J times a root of Σ, (B, R, p); its products are added, or taken off with ``sign`` −1."""

    rows: Tensor
    sign: int = 1

    def kernel(self, other: Rows, outputs: Outputs) -> Tensor:
        """Its part of the kernel between its inputs and the other's."""
        return self.sign * rows_kernel(self.rows, other.rows, outputs)

    def cut(self, rows: slice) -> Rows:
        """Some of the inputs."""
        return Rows(self.rows[rows], self.sign)

    @property
    def numbers(self) -> int:
        """Held for all inputs."""
        return self.rows.numel()


@dataclass(frozen=True, eq=False)
class Solved:
    """J and JΣ, (B, R, P), of a Σ whose root is not known."""

    rows: Tensor
    spread: Tensor

    def kernel(self, other: Solved, outputs: Outputs) -> Tensor:
        """Its part of the kernel between its inputs and the other's."""
        return rows_kernel(self.spread, other.rows, outputs)

    def cut(self, rows: slice) -> Solved:
        """Some of the inputs."""
        return Solved(self.rows[rows], self.spread[rows])

    @property
    def numbers(self) -> int:
        """Held for all inputs."""
        return self.rows.numel() + self.spread.numel()


Part: TypeAlias = Outer | Rows | Solved


@dataclass(frozen=True, eq=False)
class Features:
    """All parts of J, for the inputs of one block."""

    parts: Sequence[Part]
    count: int

    @classmethod
    def concatenate(cls, blocks: Sequence[Features]) -> Features:
        """The inputs of all blocks, in their order."""
        if len(blocks) == 1:
            return blocks[0]
        parts = [_joined(parts) for parts in zip(*(b.parts for b in blocks), strict=True)]
        return cls(parts, sum(block.count for block in blocks))

    def kernel(self, other: Features, outputs: Outputs) -> Tensor:
        """JΣJ'ᵀ between these inputs and the other ones."""
        total: Tensor | None = None
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            part = mine.kernel(theirs, outputs)  # type: ignore[arg-type]
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def cut(self, rows: slice) -> Features:
        """Some of the inputs."""
        return Features([part.cut(rows) for part in self.parts], len(range(self.count)[rows]))

    @property
    def numbers(self) -> int:
        """Held for one input."""
        return sum(part.numbers for part in self.parts) // max(1, self.count)


def rows_kernel(rows: Tensor, others: Tensor, outputs: Outputs) -> Tensor:
    """Σ_p rows·others for (n, R, p) and (m, R, p)."""
    if outputs == "joint":
        flat = rows.flatten(0, 1) @ others.flatten(0, 1).mT
        return flat.view(*rows.shape[:2], *others.shape[:2])
    if outputs == "each":
        return rows.movedim(1, 0) @ others.movedim(1, 0).mT
    return rows.flatten(1) @ others.flatten(1).mT


def _joined(parts: Sequence[Part]) -> Part:
    first = parts[0]
    if isinstance(first, Outer):
        outer = [part for part in parts if isinstance(part, Outer)]
        left, right = torch.cat([p.left for p in outer]), torch.cat([p.right for p in outer])
        return Outer(left, right, first.variance)
    if isinstance(first, Rows):
        return Rows(torch.cat([part.rows for part in parts if isinstance(part, Rows)]), first.sign)
    solved = [part for part in parts if isinstance(part, Solved)]
    return Solved(torch.cat([p.rows for p in solved]), torch.cat([p.spread for p in solved]))


# --- from Jacobians -------------------------------------------------------------------------------


def output_rows(jacobians: Jacobians, directions: Tensor | None) -> Tensor:
    """cᵀJ, (B, R, P), for cotangents c (R, B, ...), or None for all outputs."""
    if directions is None:
        return jacobians.rows()
    return jacobians.pull(directions).movedim(0, 1)


def diagonal_features(
    jacobians: Jacobians, directions: Tensor | None, variance: Vector
) -> Features:
    """Of Σ = diag(v): g, a and v of dense layers, rows times √v of others."""
    cotangents = jacobians.cotangents(directions)
    parts: list[Part] = []
    for block in jacobians.blocks:
        mine = variance[block.place]
        if block.outer is not None and isinstance(block, MatrixBlock):
            g, a = _sides(block, cotangents)
            parts.append(_outer(g, a, mine.view(g.shape[-1], a.shape[-1])))
        else:
            parts.append(Rows(_rows([block], cotangents, partial(torch.mul, mine.sqrt()))))
    return Features(parts, jacobians.num_examples)


def tiled_features(
    jacobians: Jacobians, directions: Tensor | None, tiles: Sequence[KronCovariance]
) -> Features:
    """Of a Σ that is made of tiles: the same in the tiles' bases."""
    cotangents = jacobians.cotangents(directions)
    parts: list[Part] = []
    for blocks, group in aligned(jacobians.blocks, tiles):
        block, tile = blocks[0], group[0]
        if len(blocks) == len(group) == 1 and isinstance(block, MatrixBlock) and block.outer:
            g, a = _sides(block, cotangents)
            if tile.variance.shape == (g.shape[-1], a.shape[-1]):
                g = g if tile.left is None else g @ tile.left
                a = a if tile.right is None else a @ tile.right
                parts.append(_outer(g, a, tile.variance))
                continue
        parts.append(Rows(_rows(blocks, cotangents, partial(_turned, tiles=group))))
    return Features(parts, jacobians.num_examples)


def _outer(g: Tensor, a: Tensor, variance: Tensor) -> Outer:
    """One number for all goes into g: the sums then separate."""
    first = variance.flatten()[0]
    if bool((variance == first).all()):
        return Outer(g * first.sqrt(), a, None)
    return Outer(g.contiguous(), a.contiguous(), variance)


def _sides(block: MatrixBlock, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
    """g (B, R, out) and a (B, in) of a dense layer at one position."""
    tap = block.outer
    assert tap is not None
    left, right = tap.sides(cotangents.at[tap], slice(None))
    return left[:, :, 0, 0].movedim(0, 1), right[0, :, 0, 0]


def _rows(
    blocks: Sequence[Block], cotangents: Cotangents, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """Rows of some parameters, (B, R, p), changed a few inputs at a time."""
    size = sum(block.size for block in blocks)
    rows = cotangents.roots.new_empty(cotangents.examples, cotangents.directions, size)
    for chunk in chunks(cotangents.examples, cotangents.directions * size):
        pulled = torch.cat([block.pull(cotangents, chunk) for block in blocks], dim=-1)
        rows[chunk] = change(pulled).movedim(0, 1)
    return rows


def _turned(rows: Tensor, tiles: Sequence[KronCovariance]) -> Tensor:
    """Rows in the bases of the tiles, times the roots of their variances."""
    pieces = []
    for tile, part in zip(tiles, rows.split([t.size for t in tiles], dim=-1), strict=True):
        turned = part.unflatten(-1, tile.variance.shape)
        turned = turned if tile.left is None else tile.left.mT @ turned
        turned = turned if tile.right is None else turned @ tile.right
        pieces.append((turned * tile.variance.sqrt()).flatten(-2))
    return torch.cat(pieces, dim=-1)
