"""How one layer's backward pass yields Σ_i g_i∘g_i beside the ordinary gradient Σ_i g_i.

A `SquaringNode` is one call of a layer in the autograd graph: its backward pass returns the
gradients of input, weight and bias, and adds the squares of the per-example gradients to the
`Accumulator` of each parameter. With activations a and output gradients g:

===========  =====================================================================================
linear       (g∘g)ᵀ(a∘a) for one position per example, so no g_i is ever formed; for several
             positions g_i = Σ_t g_itᵀ a_it, in chunks of examples
convolution  g_i = Σ_p g_ip ⊗ window_p(a_i), in chunks, as one batched product with the windows or
             as a convolution with one group per example; a transposed convolution is the same
             with a and g exchanged
embedding    g_i = Σ_t g_it at row index_it
norm's gain  g_i = Σ g_i∘â_i over all dimensions the gain does not have
===========  =====================================================================================

Positions are always summed *before* squaring, biases included. Where the g_i are formed their sum
is the layer's gradient, which is then not computed a second time.

A layer hands over its examples' gradients as a function of a slice of examples, so that only a
chunk of them exists at a time. A parameter that is used several times in a pass
(`Accumulator.shared`) needs the sum over its uses before squaring: the functions of all uses are
kept, and `Accumulator.finish` adds and squares, again in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.autodiff.layer_calls import (
    Convolution,
    Embedding,
    Layer,
    Linear,
    Part,
    ScaleShift,
    Watched,
    chunks,
)
from credo.errors import UnsupportedError
from credo.types import Segment

Examples = Callable[[slice], Tensor]
"""Examples i…j → their gradients of a parameter's part, (j − i, *shape)."""

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of input, weight and bias."""


SMALL = 2**16
"""Numbers of a dense layer, its input included, for which calls are what costs."""

_NOT_INPUT = (False, True, True)

_ONCE = torch._C._functions.DelayedError(
    b"trying to differentiate twice a function that was marked with @once_differentiable", 1
)
"""The identity, whose own gradient is that error: as for a `SquaringNode`."""


class Accumulator(Watched):
    """Where the squares of one parameter are added up, and how this pass uses it."""

    def __init__(self, segment: Segment, parameter: nn.Parameter, squares: Tensor) -> None:
        super().__init__(segment, parameter)
        self.squares, self.fresh, self.length = squares, True, len(squares)
        self.arm()

    def arm(self) -> None:
        """Forget what earlier forward passes did."""
        self.used = self.shared = False
        self.end_pass()

    def end_pass(self) -> None:
        """Forget what this backward pass did."""
        self._uses: list[range] = []
        self._added: list[range] = []
        self._deferred: list[tuple[range, Examples]] = []
        self._numbers = 1

    def note_use(self, rows: range) -> None:
        """A forward pass uses these rows."""
        self.used = True
        self.shared = self.shared or _any_overlap(self._uses, rows)
        self._uses.append(rows)

    def open(self, rows: range, overwrite: bool = False) -> tuple[Tensor, float]:
        """The accumulators of these rows, and 0 or 1: what to multiply their content by."""
        if _any_overlap(self._added, rows):
            raise UnsupportedError(
                f"{self.segment.name} was reached twice in one backward pass, once by a graph kept "
                "from an earlier pass (retain_graph=True): its per-example gradients can't be told "
                "apart any more. Run the forward pass again instead."
            )
        self._added.append(rows)
        if overwrite and self.fresh and len(rows) == self.length:
            self.fresh = False
            return self.squares, 0.0
        if self.fresh:
            self.squares.zero_()
            self.fresh = False
        return self.squares[rows.start : rows.stop], 1.0

    def defer(self, rows: range, examples: Examples, numbers: int) -> None:
        """One of several uses; ``numbers`` is what one example of it holds while computed."""
        self._deferred.append((rows, examples))
        self._numbers = max(self._numbers, numbers)

    def finish(self, count: int, factor: float) -> None:
        """Square the sum over all uses."""
        if not self._deferred:
            return
        squares, _ = self.open(range(len(self.squares)))
        for chunk in chunks(count, max(self._numbers, self.squares.numel())):
            total = squares.new_zeros(chunk.stop - chunk.start, *squares.shape)
            for rows, examples in self._deferred:
                total[:, rows.start : rows.stop] += examples(chunk)
            _add_squares(squares, total, factor)


def accumulator(part: Part) -> Accumulator:
    """That of the part's parameter: what `Squares` watches are accumulators."""
    assert isinstance(part.watched, Accumulator)
    return part.watched


def settle(
    part: Part, factor: float | None, examples: Examples, count: int, numbers: int
) -> Tensor | None:
    """Add the squares; the sum of the gradients, unless somebody else must compute it."""
    sums = accumulator(part)
    if factor is None or sums.excluded is not None:
        return None
    if sums.shared:
        sums.defer(part.rows, examples, numbers)
        return None
    squares, _ = sums.open(part.rows)
    gradient: Tensor | None = None
    for chunk in chunks(count, numbers):
        gradients = examples(chunk).to(squares.dtype)
        total = gradients.sum(0)
        gradient = total if gradient is None else gradient.add_(total)
        _add_squares(squares, gradients, factor)
    return gradient


def settle_whole(part: Part, factor: float | None, gradients: Tensor) -> None:
    """The same for gradients (examples, *shape) that are there already, and few."""
    sums = accumulator(part)
    if factor is None or sums.excluded is not None:
        return
    if sums.shared:
        sums.defer(part.rows, lambda chunk: gradients[chunk], gradients[0].numel())
        return
    squares, keep = sums.open(part.rows, overwrite=True)
    total = gradients.to(squares.dtype).square().sum(0)
    if keep:
        squares.add_(total, alpha=factor)
    else:
        torch.mul(total, factor, out=squares)


def _any_overlap(taken: list[range], rows: range) -> bool:
    return any(r.start < rows.stop and rows.start < r.stop for r in taken)


def _add_squares(squares: Tensor, gradients: Tensor, factor: float) -> None:
    """``gradients`` (examples, *shape) are overwritten."""
    if len(gradients) == 1:
        squares.addcmul_(gradients[0], gradients[0], value=factor)
    else:
        squares.add_(gradients.square_().sum(0), alpha=factor)


# --- nodes ----------------------------------------------------------------------------------------


class Harvest(Protocol):
    """Who is told that a backward pass has reached a layer."""

    def begin(self, examples: int) -> float | None:
        """What squares are to be multiplied by; None if nobody is harvesting."""
        ...


class SquaringNode(torch.autograd.Function):
    """A layer in the autograd graph: ``SquaringNode.put(harvest, layer, x, weight, bias)``."""

    @classmethod
    def put(cls, *args: Any) -> Tensor:
        """``apply`` without its preparations for functorch, which take as long as a small layer."""
        base: Any = cls
        if not torch._C._are_functorch_transforms_active():
            base = super(torch.autograd.Function, cls)
        result: Tensor = base.apply(*args)
        return result

    @staticmethod
    def forward(
        ctx: Any, harvest: Harvest, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Keep what the layer itself would keep."""
        ctx.harvest, ctx.layer = harvest, layer
        ctx.save_for_backward(x, weight)
        return layer.forward(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Say that it was reached, then square."""
        layer: Layer = ctx.layer
        x, weight = ctx.saved_tensors
        factor = ctx.harvest.begin(x.shape[layer.example_dim])
        device, needs = g.device.type, ctx.needs_input_grad[2:]
        if not torch.is_autocast_enabled(device):
            return None, None, *squaring_backward(layer, g, x, weight, needs, factor)
        with torch.autocast(device, enabled=False):
            return None, None, *squaring_backward(layer, g, x, weight, needs, factor)


def put_dense(
    harvest: Harvest, layer: Linear, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A small dense layer as torch has it, with a hook that squares: faster than a `SquaringNode`.

    The hook holds ``x`` until the graph is gone, where a node lets it go in the backward pass.
    """
    out = F.linear(x, weight, bias)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(partial(_reach_dense, harvest, layer, x, weight))
    return out


def is_small(x: Tensor, weight: Tensor) -> bool:
    """Whether a dense layer may be `put_dense`: one position per example, and nobody else's graph.

    Checkpoints have to meet nodes, which refuse them; functorch does not know hooks.
    """
    return (
        x.dim() == 2
        and x.numel() + weight.numel() <= SMALL
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch._C._are_functorch_transforms_active()
    )


def _reach_dense(
    harvest: Harvest, layer: Linear, x: Tensor, weight: Tensor, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor] | None:
    g = gradients[0]
    factor = None if g is None else harvest.begin(x.shape[0])
    if g is None or factor is None:
        return None
    differentiable = torch.is_grad_enabled()
    if differentiable or torch.is_autocast_enabled(g.device.type):
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            squaring_backward(layer, g, x, weight, _NOT_INPUT, factor)
    elif _is_alone(layer.weight) and _is_alone(layer.bias):
        _square_rows(layer, g, x, _NOT_INPUT, factor)
    else:
        squaring_backward(layer, g, x, weight, _NOT_INPUT, factor)
    # A second derivative would pass here again, and its squares are nobody's.
    return (_ONCE(g.detach().requires_grad_()),) if differentiable else None


@singledispatch
def squaring_backward(
    layer: Layer, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
) -> Grads:
    """Gradients of what ``needs`` one; squares are accumulated, times ``factor``."""
    raise NotImplementedError(type(layer).__name__)


@squaring_backward.register
def _(
    layer: Linear, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
) -> Grads:
    # One more matrix product than the layer's own.
    by_input = g @ weight if needs[0] else None
    if x.dim() == 2:
        if factor is not None and _is_alone(layer.weight) and _is_alone(layer.bias):
            _square_rows(layer, g, x, needs, factor)
            return by_input, g.t() @ x if needs[1] else None, g.sum(0) if needs[2] else None
        a, g = x.unsqueeze(1), g.unsqueeze(1)
    else:
        count = x.shape[layer.example_dim]
        a = x.movedim(layer.example_dim, 0).reshape(count, -1, x.shape[-1])
        g = g.movedim(layer.example_dim, 0).reshape(count, -1, g.shape[-1])
    by_weight = _linear_by_weight(layer, g, a, weight, factor) if needs[1] else None
    by_bias = None
    if needs[2]:
        summed = g[:, 0] if g.shape[1] == 1 else g.sum(1)
        if layer.bias is not None:
            settle_whole(layer.bias, factor, summed)
        by_bias = summed.sum(0)
    return by_input, by_weight, by_bias


def _is_alone(part: Part | None) -> bool:
    """Whether squares can be added at once, if there are any to add."""
    return part is None or not (accumulator(part).shared or part.watched.excluded is not None)


def _square_rows(layer: Linear, g: Tensor, a: Tensor, needs: Sequence[bool], factor: float) -> None:
    """One position per example, one use: the usual case, in the fewest calls."""
    g2: Tensor | None = None
    if layer.weight is not None and needs[1]:
        squares, beta = accumulator(layer.weight).open(layer.weight.rows, overwrite=True)
        g2 = g.to(squares.dtype).square()
        a2 = a.to(squares.dtype).square()
        torch.addmm(squares, g2.t(), a2, beta=beta, alpha=factor, out=squares)
    if layer.bias is not None and needs[2]:
        squares, beta = accumulator(layer.bias).open(layer.bias.rows, overwrite=True)
        total = (g.to(squares.dtype).square() if g2 is None else g2).sum(0)
        if beta:
            squares.add_(total, alpha=factor)
        else:
            torch.mul(total, factor, out=squares)


def _linear_by_weight(
    layer: Linear, g: Tensor, a: Tensor, weight: Tensor, factor: float | None
) -> Tensor:
    count, positions = a.shape[:2]
    part = layer.weight
    if part is not None:
        sums = accumulator(part)
        once = positions == 1 and not sums.shared
        if once and factor is not None and sums.excluded is None:
            squares, beta = sums.open(part.rows, overwrite=True)
            g2, a2 = (t[:, 0].to(squares.dtype).square() for t in (g, a))
            torch.addmm(squares, g2.t(), a2, beta=beta, alpha=factor, out=squares)
        else:
            numbers = weight.numel() + positions * sum(weight.shape)
            total = settle(
                part, factor, lambda rows: g[rows].transpose(1, 2) @ a[rows], count, numbers
            )
            if total is not None:
                return total.to(weight.dtype)
    return g.reshape(-1, g.shape[-1]).t() @ a.reshape(-1, a.shape[-1])


@squaring_backward.register
def _(
    layer: Convolution,
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    factor: float | None,
) -> Grads:
    # The weight's gradient is the sum of the examples', where those are computed.
    by_weight = by_bias = None
    if needs[1] and layer.weight is not None:
        image, response = (x, g) if layer.output_padding is None else (g, x)
        examples, numbers = filter_gradients(layer, image, response, weight.shape)
        total = settle(layer.weight, factor, examples, len(x), numbers)
        by_weight = None if total is None else total.to(weight.dtype)
    if needs[2]:
        summed = g.flatten(2).sum(2)
        if layer.bias is not None:
            settle_whole(layer.bias, factor, summed)
        by_bias = summed.sum(0)
    wanted = [needs[0], needs[1] and by_weight is None, False]
    by_input = None
    if any(wanted):
        by_input, whole, _ = torch.ops.aten.convolution_backward(
            g, x, weight, None, *layer.settings, layer.groups, wanted
        )
        by_weight = whole if wanted[1] else by_weight
    return by_input, by_weight, by_bias


def filter_gradients(
    layer: Convolution, image: Tensor, response: Tensor, shape: torch.Size
) -> tuple[Examples, int]:
    """Gradients of the map image → response, by the faster of two routes.

    Sixteen channels are what the CPU library's convolution is made for (ResNet-20's first
    stage: 17 ms against 28); elsewhere windows are at least as fast, and three times as fast
    for grey images.
    """
    channels, filters = image.shape[1], response.shape[1]
    if layer.groups == 1 and channels == 16 and filters % 16 == 0:
        return by_groups(layer, image, response, shape)
    return by_windows(layer, image, response, shape)


def by_groups(
    layer: Convolution, image: Tensor, response: Tensor, shape: torch.Size
) -> tuple[Examples, int]:
    """Examples become groups of one convolution, whose weight gradient keeps them apart."""

    def examples(rows: slice) -> Tensor:
        a, g = image[rows], response[rows]
        count = len(a)
        stacked = a.new_empty(()).expand(count * shape[0], *shape[1:])
        filters: Tensor = torch.ops.aten.convolution_backward(
            g.reshape(1, -1, *g.shape[2:]), a.reshape(1, -1, *a.shape[2:]), stacked, None,
            layer.stride, layer.padding, layer.dilation, False, [0] * len(layer.stride),
            count * layer.groups, [False, True, False],
        )[1]  # fmt: skip
        return filters.view(count, *shape)

    return examples, shape.numel()


def by_windows(
    layer: Convolution, image: Tensor, response: Tensor, shape: torch.Size
) -> tuple[Examples, int]:
    """A batched product of response and the image's windows, copied out of a strided view.

    The view puts positions last, so that long runs are copied: several times faster than
    F.unfold, and for any number of dimensions.
    """
    kernel, places = shape[2:], response.shape[2:]
    margin = [width for width in reversed(layer.padding) for _ in range(2)]

    def examples(rows: slice) -> Tensor:
        a, g = image[rows], response[rows]
        a = F.pad(a, margin) if any(margin) else a
        count, channels = a.shape[:2]
        steps = a.stride()
        along_kernel = [d * s for d, s in zip(layer.dilation, steps[2:], strict=True)]
        along_places = [d * s for d, s in zip(layer.stride, steps[2:], strict=True)]
        windows = a.as_strided(
            (count, channels, *kernel, *places), (*steps[:2], *along_kernel, *along_places)
        ).reshape(count, layer.groups, -1, math.prod(places))
        g = g.reshape(count, layer.groups, -1, math.prod(places))
        return (g @ windows.transpose(-2, -1)).view(count, *shape)

    in_window = image.shape[1] * math.prod(kernel) * math.prod(places)
    return examples, shape.numel() + in_window


@squaring_backward.register
def _(
    layer: Embedding,
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    factor: float | None,
) -> Grads:
    # Words that occur several times in an example are added up first.
    words, width = weight.shape
    count = x.shape[layer.example_dim]
    padding = -1 if layer.padding_idx is None else layer.padding_idx % words
    by_weight = torch.ops.aten.embedding_dense_backward(g, x, words, padding, False)
    part = layer.weight
    if factor is None or part is None or part.watched.excluded is not None:
        return None, by_weight, None
    sums = accumulator(part)

    index = x.movedim(layer.example_dim, 0).reshape(count, -1)
    g = g.movedim(layer.example_dim, 0).reshape(*index.shape, width)
    g = g.to(sums.squares.dtype)
    if padding >= 0:
        g = g.masked_fill((index == padding).unsqueeze(-1), 0.0)
    if sums.shared:

        def examples(rows: slice) -> Tensor:
            here = index[rows]
            key = here + words * torch.arange(len(here), device=here.device).unsqueeze(1)
            table = g.new_zeros(len(here) * words, width)
            table.index_add_(0, key.flatten(), g[rows].flatten(0, 1))
            return table.view(-1, words, width)

        sums.defer(part.rows, examples, weight.numel())
        return None, by_weight, None
    key = index + words * torch.arange(count, device=index.device).unsqueeze(1)
    pairs, place = key.flatten().unique(return_inverse=True)
    summed = g.new_zeros(len(pairs), width).index_add_(0, place, g.flatten(0, 1))
    squares, _ = sums.open(part.rows)
    squares.index_add_(0, pairs % words, summed.square_(), alpha=factor)
    return None, by_weight, None


@squaring_backward.register
def _(
    layer: ScaleShift,
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    factor: float | None,
) -> Grads:
    by_input = (g * layer.spread(weight, x)).to(x.dtype) if needs[0] else None
    totals: list[Tensor | None] = []
    for need, part, product in ((needs[1], layer.weight, x), (needs[2], layer.bias, None)):
        if not need:
            totals.append(None)
            continue
        gradients = _summed_per_example(layer, g if product is None else g * product)
        if part is not None:
            settle_whole(part, factor, gradients.view(len(gradients), *weight.shape))
        totals.append(gradients.sum(0).view(weight.shape))
    return by_input, totals[0], totals[1]


def _summed_per_example(layer: ScaleShift, product: Tensor) -> Tensor:
    keep = {layer.example_dim, *layer.axes}
    product = product.movedim(layer.example_dim, 0)
    moved = {axis + (axis < layer.example_dim) for axis in keep - {layer.example_dim}} | {0}
    others = [axis for axis in range(product.dim()) if axis not in moved]
    return product.sum(others) if others else product
