r"""The Jacobian of a network's outputs at one parameter, and what is asked of it.

A `Block` is one parameter with all of its taps (`credo.autodiff.jacobian_layers`). Where an example
has one position (a dense layer on vectors), J_bᵀc = g ⊗ a and nothing here forms it; elsewhere it
is formed for a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from credo.autodiff.jacobian_layers import LinearTap, MatrixTap, Tap, products
from credo.autodiff.squares_replay import Recorded
from credo.autodiff.squares_sinks import Sink
from credo.types import Vector

CHUNK_NUMBERS = 2**20
"""How many entries of per-example gradients are held at once: 4 MB in float32, about a cache."""


@dataclass(frozen=True)
class KronFactors:
    """A Kronecker-factored estimate ``left`` ⊗ ``right`` of Σ_b J_bᵀΛ_bJ_b for one block.

    The block's weights, at ``place`` in the selection's vector, are an a×b matrix, row-major;
    ``left`` is (a, a) and ``right`` (b, b). Over batches ``left`` adds up and ``right`` averages,
    weighted by the number of examples.
    """

    name: str
    place: slice
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class DiagonalFactors:
    """The diagonal of Σ_b J_bᵀΛ_bJ_b for a block that has no factors; over batches it adds up."""

    name: str
    place: slice
    diagonal: Vector


@dataclass(frozen=True)
class KronCovariance:
    """The covariance (L ⊗ R) diag(v) (L ⊗ R)ᵀ of a block of a×b weights, row-major.

    ``left`` L is (a, a), ``right`` R is (b, b), None for the identity; ``variance`` v is (a, b).
    """

    left: Tensor | None
    right: Tensor | None
    variance: Tensor

    @property
    def size(self) -> int:
        """a·b."""
        return self.variance.numel()


@dataclass(eq=False)
class Cotangents:
    """Cotangents of the outputs, and the gradients at every tap that follow from them."""

    roots: Tensor
    at: dict[Tap, Tensor]
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def directions(self) -> int:
        """R."""
        return len(self.roots)

    @property
    def examples(self) -> int:
        """B."""
        return self.roots.shape[1]


@dataclass(frozen=True)
class Part:
    """The rows of a parameter that a tap uses, as its weight or as its bias."""

    tap: Tap
    rows: range
    is_bias: bool

    def pull(self, cotangents: Cotangents, examples: slice) -> Tensor:
        """(R, b, *shape of the rows)."""
        g = cotangents.at[self.tap]
        return self.tap.bias(g, examples) if self.is_bias else self.tap.weight(g, examples)


class Block:
    """One parameter's columns of J, as the sum over its parts."""

    def __init__(self, sink: Sink, place: slice, parts: Sequence[Part]) -> None:
        self.name, self.place = sink.segment.name, place
        self.shape, self.size = sink.parameter.shape, sink.parameter.numel()
        self.parts = parts

    @property
    def held(self) -> int:
        """How many numbers it keeps for one example and one cotangent, whatever the chunk."""
        return 0

    @property
    def outer(self) -> LinearTap | None:
        """The tap, if J_bᵀc is one g ⊗ a or one g: whole, used once, at one position."""
        if len(self.parts) != 1 or len(self.parts[0].rows) < self.shape[0]:
            return None
        tap = self.parts[0].tap
        return tap if isinstance(tap, LinearTap) and tap.positions == 1 else None

    def pull(self, cotangents: Cotangents, examples: slice) -> Tensor:
        """J_bᵀc of some examples, (R, b, size)."""
        total: Tensor | None = None
        for part in self.parts:
            found = part.pull(cotangents, examples)
            if len(part.rows) < self.shape[0]:
                found = self._in_place(found, part.rows)
            found = found.reshape(*found.shape[:2], self.size)
            total = found if total is None else total + found
        if total is None:
            count = len(range(cotangents.examples)[examples])
            return cotangents.roots.new_zeros(cotangents.directions, count, self.size)
        return total

    def _in_place(self, found: Tensor, rows: range) -> Tensor:
        whole = found.new_zeros(*found.shape[:2], *self.shape)
        whole[:, :, rows.start : rows.stop] = found.view(
            *found.shape[:2], len(rows), *self.shape[1:]
        )
        return whole

    def outer_squares(self, summed: Tensor) -> Vector:
        """`squares` from Σ_r g², (B, out), at the `outer` tap: for a bias its sum."""
        return summed.sum(0)

    def squares(self, cotangents: Cotangents) -> Vector:
        """Σ_b Σ_r (J_bᵀc_rb)², (size,)."""
        total = cotangents.roots.new_zeros(self.size)
        for chunk in self._chunks(cotangents):
            total += self.pull(cotangents, chunk).square().sum((0, 1))
        return total

    def covariance(self, cotangents: Cotangents, variance: Vector) -> Tensor:
        """Σ_p (J_bᵀc_r)_p v_p (J_bᵀc_s)_p, (B, R, R)."""
        pieces = []
        for chunk in self._chunks(cotangents):
            pulled = self.pull(cotangents, chunk).movedim(1, 0)
            pieces.append((pulled * variance) @ pulled.mT)
        return torch.cat(pieces)

    def times(self, cotangents: Cotangents, columns: Tensor) -> Tensor:
        """(J_bᵀc_r)·columns, (B, R, k) for columns (size, k)."""
        pieces = []
        for chunk in self._chunks(cotangents):
            pieces.append(self.pull(cotangents, chunk).movedim(1, 0) @ columns)
        return torch.cat(pieces)

    def factors(self, cotangents: Cotangents) -> list[KronFactors | DiagonalFactors]:
        """The curvature Σ_b Σ_r (J_bᵀc_rb)(J_bᵀc_rb)ᵀ in factors, or its diagonal."""
        part = self.parts[0] if len(self.parts) == 1 else None
        whole = part is not None and part.is_bias and len(part.rows) == self.size
        if part is not None and whole and isinstance(part.tap, MatrixTap):
            left = feature_gram(cotangents, part.tap)
            return [KronFactors(self.name, self.place, left, left.new_ones(1, 1))]
        return [DiagonalFactors(self.name, self.place, self.squares(cotangents))]

    def kron_covariance(
        self, cotangents: Cotangents, tiles: Sequence[KronCovariance]
    ) -> Tensor | None:
        """`covariance` for tiles that fit the block's own matrices; None if they don't."""
        return None

    def _chunks(self, cotangents: Cotangents, numbers: int | None = None) -> Iterator[slice]:
        numbers = cotangents.directions * self.size if numbers is None else numbers
        return chunks(cotangents.examples, numbers)


class MatrixBlock(Block):
    """The weight of a layer called once: everything from the two sides."""

    def __init__(self, sink: Sink, place: slice, part: Part, tap: MatrixTap) -> None:
        super().__init__(sink, place, (part,))
        self._tap = tap

    def outer_squares(self, summed: Tensor) -> Vector:
        """(Σ_r g²)ᵀ(a²)."""
        a = self._tap.inputs.flatten(0, -2).to(summed.dtype)
        return (summed.mT @ a.square()).flatten()

    def squares(self, cotangents: Cotangents) -> Vector:
        """For one position `outer_squares`."""
        if self.outer is None:
            return super().squares(cotangents)
        summed = cotangents.at[self._tap].square().sum(0)
        return self.outer_squares(summed.flatten(0, -2))

    def covariance(self, cotangents: Cotangents, variance: Vector) -> Tensor:
        """For one position Σ_o g_ro g_so Σ_i a_i² v_oi."""
        if self.outer is None:
            return super().covariance(cotangents, variance)
        return _outer_covariance(*self._all_sides(cotangents), variance)

    def times(self, cotangents: Cotangents, columns: Tensor) -> Tensor:
        """For one position Σ_o g_ro Σ_i a_i u_oi."""
        if self.outer is None:
            return super().times(cotangents, columns)
        left, right = self._all_sides(cotangents)
        rows, pieces = left.flatten(2).movedim(1, 0), []
        # One column at a time: all at once would hold as many activations as there are columns.
        for column in columns.mT:
            matrices = column.view(left.shape[2], left.shape[3], right.shape[3])
            inner = torch.einsum("bgi,goi->bgo", right[0], matrices).flatten(1)
            pieces.append((rows @ inner.unsqueeze(-1)).squeeze(-1))
        return torch.stack(pieces, dim=-1)

    def factors(self, cotangents: Cotangents) -> list[KronFactors | DiagonalFactors]:
        """Σ_{r,b,t} left leftᵀ and the mean over b and t of right rightᵀ, for each group.

        Positions count as examples of their own ("expand" of Eschenhagen et al., 2023,
        arXiv:2311.00636; for convolutions the KFC of Grosse & Martens, 2016, arXiv:1602.01407).
        """
        g = cotangents.at[self._tap]
        lefts = [] if self._tap.left_is_input else list(self._diagonal_grams(cotangents))
        rights: list[Tensor] = []
        for chunk in self._chunks(cotangents, self._side_numbers(cotangents)):
            left, right = self._tap.sides(g, chunk)
            rights = _added(rights, right)
            if self._tap.left_is_input:
                lefts = _added(lefts, left)
        total = cotangents.examples * self._tap.positions
        step = self.size // len(lefts)
        starts = range(self.place.start, self.place.stop, step)
        return [
            KronFactors(self.name, slice(start, start + step), left, right / total)
            for start, left, right in zip(starts, lefts, rights, strict=True)
        ]

    def kron_covariance(
        self, cotangents: Cotangents, tiles: Sequence[KronCovariance]
    ) -> Tensor | None:
        """The sides turned into the tiles' bases, one tile for each group."""
        left, right = self._tap.sides(cotangents.at[self._tap], slice(0, 1))
        shape = torch.Size((left.shape[-1], right.shape[-1]))
        if len(tiles) != left.shape[2] or any(tile.variance.shape != shape for tile in tiles):
            return None
        variance = torch.stack([tile.variance for tile in tiles]).flatten()
        turns = [_stacked([t.left for t in tiles]), _stacked([t.right for t in tiles])]
        outer, g = self.outer is not None, cotangents.at[self._tap]
        pieces = []
        numbers = 1 if outer else cotangents.directions * self.size
        for chunk in self._chunks(cotangents, numbers):
            sides = [
                side if turn is None else torch.einsum("rbgto,gop->rbgtp", side, turn)
                for side, turn in zip(self._tap.sides(g, chunk), turns, strict=True)
            ]
            if outer:
                pieces.append(_outer_covariance(sides[0][..., 0, :], sides[1][..., 0, :], variance))
            else:
                pulled = products(*sides).flatten(2).movedim(1, 0)
                pieces.append((pulled * variance) @ pulled.mT)
        return torch.cat(pieces)

    def _diagonal_grams(self, cotangents: Cotangents) -> Iterator[Tensor]:
        """Σ g gᵀ of each group."""
        whole = feature_gram(cotangents, self._tap)
        width = self._tap.sides(cotangents.at[self._tap], slice(0, 1))[0].shape[-1]
        for start in range(0, len(whole), width):
            yield whole[start : start + width, start : start + width].clone()

    def _all_sides(self, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        """Without the dimension of positions, of which there is one."""
        left, right = self._tap.sides(cotangents.at[self._tap], slice(None))
        return left[..., 0, :], right[..., 0, :]

    def _side_numbers(self, cotangents: Cotangents) -> int:
        left, right = self._tap.sides(cotangents.at[self._tap], slice(0, 1))
        return left.numel() + right.numel()


class ReplayedBlock(Block):
    """A parameter that no tap reaches: every example runs alone through the network."""

    def __init__(self, sink: Sink, place: slice, replay: Replay) -> None:
        super().__init__(sink, place, ())
        self._sink, self._replay = sink, replay

    @property
    def held(self) -> int:
        """All of it."""
        return self.size

    def pull(self, cotangents: Cotangents, examples: slice) -> Tensor:
        """From the one replay that all such parameters share."""
        found: Tensor = self._replay.rows(cotangents)[self._sink][:, examples]
        return found


@dataclass(eq=False)
class Replay:
    """A recorded call of the network, and the parameters that need it again."""

    call: Recorded
    sinks: list[Sink]

    def rows(self, cotangents: Cotangents) -> dict[Sink, Tensor]:
        """J_bᵀc of every parameter, (R, B, size)."""
        if self not in cotangents.memo:
            roots = cotangents.roots
            shape = roots.shape[:2]
            found = {s: roots.new_zeros(*shape, s.parameter.numel()) for s in self.sinks}
            parameters = [sink.parameter for sink in self.sinks]
            for r, root in enumerate(roots):
                for b in range(shape[1]):
                    with torch.enable_grad():
                        grads = self.call.gradients(b, parameters, {0: root})
                    for sink, grad in zip(self.sinks, grads, strict=True):
                        if grad is not None:
                            found[sink][r, b] = grad.flatten()
            cotangents.memo[self] = found
        result: dict[Sink, Tensor] = cotangents.memo[self]
        return result


def feature_gram(cotangents: Cotangents, tap: MatrixTap) -> Tensor:
    """Σ_{r,b,t} g gᵀ, (out, out); computed once for a layer's weight and bias."""
    key = ("gram", tap)
    if key not in cotangents.memo:
        rows = tap.features(cotangents.at[tap], slice(None)).flatten(0, 2)
        cotangents.memo[key] = gram(rows)
    found: Tensor = cotangents.memo[key]
    return found


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows, (n, n), of which the half below the diagonal is copied.

    Four slabs are what is fastest on a CPU: three quarters of the whole product's time.
    """
    width = rows.shape[1]
    if width < 64:
        return rows.mT @ rows
    found, step = rows.new_empty(width, width), -(-width // 4)
    for start in range(0, width, step):
        stop = min(start + step, width)
        found[start:stop, start:] = rows[:, start:stop].mT @ rows[:, start:]
        found[stop:, start:stop] = found[start:stop, stop:].mT
    return found


def chunks(count: int, numbers: int) -> Iterator[slice]:
    """Slices of examples, of which each takes ``numbers`` numbers."""
    step = max(1, CHUNK_NUMBERS // max(1, numbers))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _added(totals: list[Tensor], side: Tensor) -> list[Tensor]:
    """Each group's total plus its Σ_{r,b,t} side sideᵀ."""
    found = [gram(rows) for rows in side.movedim(2, 0).flatten(1, 3)]
    return [t + f for t, f in zip(totals, found, strict=True)] if totals else found


def _outer_covariance(left: Tensor, right: Tensor, variance: Vector) -> Tensor:
    """(B, R, R) from left (R, B, groups, a), right (1, B, groups, c) and variance (groups·a·c,)."""
    variance = variance.view(left.shape[2], left.shape[3], right.shape[3])
    spread = torch.einsum("bgi,goi->bgo", right[0].square(), variance).flatten(1)
    rows = left.flatten(2).movedim(1, 0)
    return (rows * spread.unsqueeze(1)) @ rows.mT


def _stacked(matrices: Sequence[Tensor | None]) -> Tensor | None:
    """One matrix for each group; None if all are the identity."""
    given = [matrix for matrix in matrices if matrix is not None]
    if not given:
        return None
    one = torch.eye(len(given[0]), dtype=given[0].dtype, device=given[0].device)
    return torch.stack([one if matrix is None else matrix for matrix in matrices])
