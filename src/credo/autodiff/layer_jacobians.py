r"""The Jacobian of a network's outputs at one layer, from what passes it, and at one parameter.

A `Tap` is one call of a layer. It keeps the layer's input a; with the gradient g = ∂(c·f)/∂z at the
layer's output z, for cotangents c of the outputs f, the gradient at its parameters follows without
another backward pass:

===========  =====================================================================================
layer        J_bᵀc of example b, t its positions
===========  =====================================================================================
linear       Σ_t g_bt ⊗ a_bt
convolution  Σ_t g_bt ⊗ window_t(a_b), within each group of channels; transposed: a_bt ⊗
             window_t(g_b)
embedding    Σ_t g_bt at row index_bt
norm's gain  Σ_t g_bt ∘ â_bt
bias         Σ_t g_bt
===========  =====================================================================================

A `Block` is one parameter with all of its taps. Where an example has one position (a dense layer on
vectors), J_bᵀc = g ⊗ a and nothing here forms it; elsewhere it is formed for a few examples at a
time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from credo.autodiff.layer_calls import (
    Convolution,
    Embedding,
    Layer,
    LayerCall,
    Linear,
    NetworkCall,
    ScaleShift,
    Watched,
    chunks,
)
from credo.errors import UnsupportedError
from credo.types import Vector


class Tap(ABC):
    """One call of a layer: its input, and the place in the graph where its output was made."""

    def __init__(self, layer: Layer, inputs: Tensor, output: Tensor) -> None:
        self._inputs, self._version = inputs.detach(), inputs._version
        self.example_dim, self.shape = layer.example_dim, output.shape
        # An edge and not the tensor: an activation may overwrite that in place.
        self.edge: GradientEdge = get_gradient_edge(output)

    @property
    def inputs(self) -> Tensor:
        """a, as the layer saw it."""
        if self._inputs._version != self._version:
            raise UnsupportedError(
                "the input of a layer was overwritten in place after the layer had read it: its "
                "Jacobian is lost. Write x = x + … instead of x += … there."
            )
        return self._inputs

    @property
    def count(self) -> int:
        """B."""
        return self.shape[self.example_dim]

    @property
    def numbers(self) -> int:
        """How many numbers of its output belong to one example."""
        return self.shape.numel() // max(1, self.count)

    @abstractmethod
    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """(R, *output) → gradients of the weight, (R, b, *shape)."""

    @abstractmethod
    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """(R, *output) → gradients of the bias, (R, b, *shape)."""


class MatrixTap(Tap):
    """A layer whose weight's gradient is Σ_t left_t ⊗ right_t, in each of its groups."""

    left_is_input = False
    """Whether the left side comes from the layer's input, and the right one from g."""

    @abstractmethod
    def sides(self, g: Tensor, examples: slice) -> tuple[Tensor, Tensor]:
        """left (R, b, groups, T, a) and right (R, b, groups, T, c).

        R is 1 on the side that the layer's input gives.
        """

    @abstractmethod
    def features(self, g: Tensor, examples: slice) -> Tensor:
        """g as (R, b, T, features)."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """T."""

    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t left ⊗ right, with the matrix flattened: (R, b, size)."""
        return products(*self.sides(g, examples)).flatten(2)

    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t g."""
        return self.features(g, examples).sum(2)


class LinearTap(MatrixTap):
    """z = aWᵀ + b with a (…, in), examples along any dimension but the last."""

    @property
    def positions(self) -> int:
        """The product of the dimensions that are neither examples nor features."""
        return self.numbers // self.shape[-1]

    def sides(self, g: Tensor, examples: slice) -> tuple[Tensor, Tensor]:
        """g and a."""
        a = self.inputs.movedim(self.example_dim, 0)[examples]
        a = a.reshape(1, len(a), 1, -1, a.shape[-1]).to(g.dtype)
        return self.features(g, examples).unsqueeze(2), a

    def features(self, g: Tensor, examples: slice) -> Tensor:
        """Positions in one dimension."""
        g = g.movedim(1 + self.example_dim, 1)[:, examples]
        return g.reshape(len(g), g.shape[1], -1, g.shape[-1])


class ConvolutionTap(MatrixTap):
    """conv{1,2,3}d and conv_transpose{1,2,3}d, examples along the first dimension."""

    def __init__(self, layer: Convolution, inputs: Tensor, output: Tensor, kernel: torch.Size):
        super().__init__(layer, inputs, output)
        self._layer, self._kernel = layer, kernel
        self.left_is_input = layer.output_padding is not None

    @property
    def positions(self) -> int:
        """Where the kernel is put down: the output's pixels; of a transposed one the input's."""
        return math.prod((self._inputs.shape if self.left_is_input else self.shape)[2:])

    def sides(self, g: Tensor, examples: slice) -> tuple[Tensor, Tensor]:
        """g and the windows of a; of a transposed convolution a and the windows of g."""
        a, g = self.inputs[examples].to(g.dtype).unsqueeze(0), g[:, examples]
        response, image = (a, g) if self.left_is_input else (g, a)
        return self._channels(response), self._windows(image, response.shape[3:])

    def features(self, g: Tensor, examples: slice) -> Tensor:
        """Channels last."""
        return g[:, examples].flatten(3).mT

    def _channels(self, response: Tensor) -> Tensor:
        return response.unflatten(2, (self._layer.groups, -1)).flatten(4).mT

    def _windows(self, image: Tensor, places: torch.Size) -> Tensor:
        """What the kernel sees at every place, from a strided view: for any number of dims."""
        layer, lead = self._layer, image.shape[:2]
        margin = [width for width in reversed(layer.padding) for _ in range(2)]
        image = F.pad(image.flatten(0, 1), margin) if any(margin) else image.flatten(0, 1)
        image = image.contiguous()
        steps = image.stride()
        along_kernel = [d * s for d, s in zip(layer.dilation, steps[2:], strict=True)]
        along_places = [d * s for d, s in zip(layer.stride, steps[2:], strict=True)]
        view = image.as_strided(
            (*image.shape[:2], *self._kernel, *places),
            (*steps[:2], *along_kernel, *along_places),
        )
        return view.reshape(*lead, layer.groups, -1, math.prod(places)).mT


class EmbeddingTap(Tap):
    """Rows of a table; the input holds indices."""

    def __init__(self, layer: Embedding, inputs: Tensor, output: Tensor, words: int) -> None:
        super().__init__(layer, inputs, output)
        self._words = words
        self._padding = None if layer.padding_idx is None else layer.padding_idx % words

    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """Words that occur several times in an example are added up."""
        index = self.inputs.movedim(self.example_dim, 0)[examples].flatten(1)
        g = g.movedim(1 + self.example_dim, 1)[:, examples]
        g = g.reshape(len(g), *index.shape, g.shape[-1])
        if self._padding is not None:
            g = g.masked_fill((index == self._padding).unsqueeze(-1), 0.0)
        key = index + self._words * torch.arange(len(index), device=index.device).unsqueeze(1)
        rows = g.new_zeros(len(g), len(index) * self._words, g.shape[-1])
        rows.index_add_(1, key.flatten(), g.flatten(1, 2))
        return rows.view(len(g), len(index), -1)

    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """An embedding has none."""
        raise NotImplementedError


class NormTap(Tap):
    """z = â∘w + b after a norm without gain."""

    def __init__(self, layer: ScaleShift, inputs: Tensor, output: Tensor) -> None:
        super().__init__(layer, inputs, output)
        self._others = [
            1 + dim for dim in range(output.dim()) if dim not in (layer.example_dim, *layer.axes)
        ]

    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t g∘â."""
        return self.bias(g * self.inputs, examples)

    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t g."""
        # The examples come before the gain's dimensions, so the rest is in order.
        summed = g.sum(self._others) if self._others else g
        return summed[:, examples]


def tap_of(call: LayerCall, output: Tensor) -> Tap:
    """The tap of a layer's call."""
    layer, inputs, weight = call.layer, call.inputs, call.weight
    if isinstance(layer, Linear):
        return LinearTap(layer, inputs, output)
    if isinstance(layer, Convolution):
        return ConvolutionTap(layer, inputs, output, weight.shape[2:])
    if isinstance(layer, Embedding):
        return EmbeddingTap(layer, inputs, output, len(weight))
    assert isinstance(layer, ScaleShift)
    return NormTap(layer, inputs, output)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_t left ⊗ right, (R, b, groups, a, c)."""
    return torch.einsum("rbgto,rbgti->rbgoi", left, right)


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
class Role:
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

    def __init__(self, watched: Watched, place: slice, parts: Sequence[Role]) -> None:
        self.name, self.place = watched.segment.name, place
        self.shape, self.size = watched.parameter.shape, watched.parameter.numel()
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
            pulled = part.pull(cotangents, examples)
            if len(part.rows) < self.shape[0]:
                pulled = self._in_place(pulled, part.rows)
            pulled = pulled.reshape(*pulled.shape[:2], self.size)
            total = pulled if total is None else total + pulled
        if total is None:
            count = len(range(cotangents.examples)[examples])
            return cotangents.roots.new_zeros(cotangents.directions, count, self.size)
        return total

    def _in_place(self, pulled: Tensor, rows: range) -> Tensor:
        whole = pulled.new_zeros(*pulled.shape[:2], *self.shape)
        whole[:, :, rows.start : rows.stop] = pulled.view(
            *pulled.shape[:2], len(rows), *self.shape[1:]
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

    def __init__(self, watched: Watched, place: slice, part: Role, tap: MatrixTap) -> None:
        super().__init__(watched, place, (part,))
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


class SlowBlock(Block):
    """A parameter that no tap reaches: every example runs alone through the network."""

    def __init__(self, watched: Watched, place: slice, rows: SlowRows) -> None:
        super().__init__(watched, place, ())
        self._watched, self._rows = watched, rows

    @property
    def held(self) -> int:
        """All of it."""
        return self.size

    def pull(self, cotangents: Cotangents, examples: slice) -> Tensor:
        """From the one replay that all such parameters share."""
        return self._rows.of(cotangents)[self._watched][:, examples]


@dataclass(eq=False)
class SlowRows:
    """A call of the network, and the parameters for which its examples run again, alone."""

    call: NetworkCall
    slow: list[Watched]

    def of(self, cotangents: Cotangents) -> dict[Watched, Tensor]:
        """J_bᵀc of every parameter, (R, B, size)."""
        if self not in cotangents.memo:
            roots = cotangents.roots
            shape = roots.shape[:2]
            rows = {s: roots.new_zeros(*shape, s.parameter.numel()) for s in self.slow}
            parameters = [watched.parameter for watched in self.slow]
            for r, root in enumerate(roots):
                for b in range(shape[1]):
                    with torch.enable_grad():
                        grads = self.call.gradients(b, parameters, {0: root})
                    for watched, grad in zip(self.slow, grads, strict=True):
                        if grad is not None:
                            rows[watched][r, b] = grad.flatten()
            cotangents.memo[self] = rows
        result: dict[Watched, Tensor] = cotangents.memo[self]
        return result


def feature_gram(cotangents: Cotangents, tap: MatrixTap) -> Tensor:
    """Σ_{r,b,t} g gᵀ, (out, out); computed once for a layer's weight and bias."""
    key = ("gram", tap)
    if key not in cotangents.memo:
        rows = tap.features(cotangents.at[tap], slice(None)).flatten(0, 2)
        cotangents.memo[key] = gram(rows)
    matrix: Tensor = cotangents.memo[key]
    return matrix


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows, (n, n), of which the half below the diagonal is copied.

    Four slabs are what is fastest on a CPU: three quarters of the whole product's time.
    """
    width = rows.shape[1]
    if width < 64:
        return rows.mT @ rows
    product, step = rows.new_empty(width, width), -(-width // 4)
    for start in range(0, width, step):
        stop = min(start + step, width)
        product[start:stop, start:] = rows[:, start:stop].mT @ rows[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].mT
    return product


def _added(totals: list[Tensor], side: Tensor) -> list[Tensor]:
    """Each group's total plus its Σ_{r,b,t} side sideᵀ."""
    more = [gram(rows) for rows in side.movedim(2, 0).flatten(1, 3)]
    return [t + m for t, m in zip(totals, more, strict=True)] if totals else more


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
    matrix = a.new_empty(outputs, width, outputs, width)
    for j in range(outputs):
        # A block is symmetric, and so is their array.
        weighted = (middle[:, j, j:].unsqueeze(-1) * a.unsqueeze(1)).flatten(1)
        matrix[j, :, j:] = (a.mT @ weighted).view(width, outputs - j, width)
        matrix[j + 1 :, :, j] = matrix[j, :, j + 1 :].permute(1, 0, 2)
    if not biased:
        return matrix.view(outputs * width, outputs * width)
    # The ones' column is the bias: behind the weight, not beside each of its rows.
    order = torch.arange(outputs * width, device=a.device).view(outputs, width)
    order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    return matrix.view(outputs * width, outputs * width)[order][:, order]
