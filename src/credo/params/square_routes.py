"""How one layer's backward pass yields Σ_i g_i∘g_i beside the ordinary gradient Σ_i g_i.

A `Rule` is one call of a layer: it says the forward map again, and in the backward pass returns the
gradients of input, weight and bias while it adds the squares of the per-example gradients to the
`Sink` of each parameter. With activations a and output gradients g:

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

A parameter that is used several times (`Sink.shared`) needs the sum over its uses before squaring:
each use leaves a function from examples to gradients, and `Sink.finish` adds and squares them,
again in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.errors import UnsupportedError
from credo.types import Segment

CHUNK_NUMBERS = 2**20
"""How many per-example numbers are held at once: 4 MB in float32, about a cache."""

Examples = Callable[[slice], Tensor]
"""Examples i…j → their gradients of a parameter's part, (j − i, *shape)."""

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of input, weight and bias."""


class Ledger(Protocol):
    """Who is told that a backward pass has reached a layer."""

    def begin(self, examples: int) -> float | None:
        """What squares are to be multiplied by; None if nobody is harvesting."""
        ...


class Sink:
    """Where the squares of one parameter are added up, and how this pass uses it."""

    def __init__(self, segment: Segment, parameter: nn.Parameter, squares: Tensor) -> None:
        self.segment, self.parameter, self.squares = segment, parameter, squares
        self.fresh = True
        self.outside: str | None = None
        self.example_dim: int | None = None
        self.arm()

    def arm(self) -> None:
        """Forget what earlier forward passes did."""
        self.met = self.shared = False
        self.end_pass()

    def end_pass(self) -> None:
        """Forget what this backward pass did."""
        self._uses: list[range] = []
        self._added: list[range] = []
        self._deferred: list[tuple[range, Examples]] = []
        self._numbers = 1

    def meet(self, rows: range) -> None:
        """A forward pass uses these rows."""
        self.met = True
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
        if overwrite and self.fresh and len(rows) == len(self.squares):
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
        for chunk in _chunks(count, max(self._numbers, self.squares.numel())):
            total = squares.new_zeros(chunk.stop - chunk.start, *squares.shape)
            for rows, examples in self._deferred:
                total[:, rows.start : rows.stop] += examples(chunk)
            _add_squares(squares, total, factor)


class Part:
    """The rows of a parameter that one call works with."""

    def __init__(self, sink: Sink, rows: slice | None = None) -> None:
        self.sink = sink
        self.rows = range(len(sink.squares))[rows or slice(None)]

    def settle(
        self, factor: float | None, examples: Examples, count: int, numbers: int
    ) -> Tensor | None:
        """Add the squares; the sum of the gradients, unless somebody else must compute it."""
        if factor is None or self.sink.outside is not None:
            return None
        if self.sink.shared:
            self.sink.defer(self.rows, examples, numbers)
            return None
        squares, _ = self.sink.open(self.rows)
        gradient: Tensor | None = None
        for chunk in _chunks(count, numbers):
            found = examples(chunk).to(squares.dtype)
            total = found.sum(0)
            gradient = total if gradient is None else gradient.add_(total)
            _add_squares(squares, found, factor)
        return gradient

    def settle_whole(self, factor: float | None, found: Tensor) -> None:
        """The same for gradients (examples, *shape) that are there already, and few."""
        if factor is None or self.sink.outside is not None:
            return
        if self.sink.shared:
            self.sink.defer(self.rows, lambda chunk: found[chunk], found[0].numel())
            return
        squares, _ = self.sink.open(self.rows)
        squares.add_(found.to(squares.dtype).square().sum(0), alpha=factor)


class Rule:
    """One call of a layer with its parameters' parts; see the module's table."""

    def __init__(
        self, ledger: Ledger, weight: Part | None, bias: Part | None, example_dim: int = 0
    ) -> None:
        self.ledger, self.weight, self.bias = ledger, weight, bias
        self.example_dim = example_dim
        self.in_backward = False

    @property
    def parts(self) -> list[Part]:
        """Those that are watched."""
        return [part for part in (self.weight, self.bias) if part is not None]

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Whether examples may lie along this dimension of the inputs."""
        return example_dim == 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's own map."""
        raise NotImplementedError

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """Gradients of what ``needs`` one; squares go to the sinks, times ``factor``."""
        raise NotImplementedError


class Node(torch.autograd.Function):
    """A rule in the autograd graph: ``Node.apply(rule, x, weight, bias)``."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Keep what the layer itself would keep."""
        ctx.rule = rule
        ctx.save_for_backward(x, weight)
        return rule.forward(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Tell the ledger, then let the rule work."""
        rule: Rule = ctx.rule
        if rule.in_backward:
            raise UnsupportedError(
                "re-entrant checkpointing runs a backward pass inside the backward pass, in which "
                "examples would be counted twice. Use checkpoint(..., use_reentrant=False)."
            )
        x, weight = ctx.saved_tensors
        factor = rule.ledger.begin(x.shape[rule.example_dim])
        with torch.autocast(g.device.type, enabled=False):
            return None, *rule.backward(g, x, weight, ctx.needs_input_grad[1:], factor)


class Linear(Rule):
    """out = a Wᵀ + b with a (…, in); examples along any dimension but the last."""

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Sequence-first tensors included."""
        return example_dim < inputs.dim() - 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        return F.linear(x, weight, bias)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """One more matrix product than the layer's own."""
        by_input = g @ weight if needs[0] else None
        count = x.shape[self.example_dim]
        a = x.movedim(self.example_dim, 0).reshape(count, -1, x.shape[-1])
        g = g.movedim(self.example_dim, 0).reshape(count, -1, g.shape[-1])
        by_weight = self._by_weight(g, a, weight, factor) if needs[1] else None
        by_bias = None
        if needs[2]:
            found = g.sum(1)
            if self.bias is not None:
                self.bias.settle_whole(factor, found)
            by_bias = found.sum(0)
        return by_input, by_weight, by_bias

    def _by_weight(self, g: Tensor, a: Tensor, weight: Tensor, factor: float | None) -> Tensor:
        count, positions = a.shape[:2]
        part = self.weight
        if part is not None:
            once = positions == 1 and not part.sink.shared
            if once and factor is not None and part.sink.outside is None:
                squares, beta = part.sink.open(part.rows, overwrite=True)
                g2, a2 = (t[:, 0].to(squares.dtype).square() for t in (g, a))
                torch.addmm(squares, g2.t(), a2, beta=beta, alpha=factor, out=squares)
            else:
                numbers = weight.numel() + positions * sum(weight.shape)
                total = part.settle(
                    factor, lambda rows: g[rows].transpose(1, 2) @ a[rows], count, numbers
                )
                if total is not None:
                    return total.to(weight.dtype)
        return g.reshape(-1, g.shape[-1]).t() @ a.reshape(-1, a.shape[-1])


class Convolution(Rule):
    """conv{1,2,3}d and conv_transpose{1,2,3}d; numbers per dimension in ``geometry``."""

    def __init__(
        self,
        *where: Any,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        output_padding: list[int] | None,
    ) -> None:
        super().__init__(*where)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.output_padding = output_padding

    @property
    def _settings(self) -> tuple[Any, ...]:
        transposed = self.output_padding is not None
        outer = self.output_padding or [0] * len(self.stride)
        return (self.stride, self.padding, self.dilation, transposed, outer)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        return torch.convolution(x, weight, bias, *self._settings, self.groups)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """The weight's gradient is the sum of the examples', where those are computed."""
        by_weight = by_bias = None
        if needs[1] and self.weight is not None:
            image, response = (x, g) if self.output_padding is None else (g, x)
            examples, numbers = self._examples(image, response, weight)
            total = self.weight.settle(factor, examples, len(x), numbers)
            by_weight = None if total is None else total.to(weight.dtype)
        if needs[2]:
            found = g.flatten(2).sum(2)
            if self.bias is not None:
                self.bias.settle_whole(factor, found)
            by_bias = found.sum(0)
        wanted = [needs[0], needs[1] and by_weight is None, False]
        by_input = None
        if any(wanted):
            by_input, whole, _ = torch.ops.aten.convolution_backward(
                g, x, weight, None, *self._settings, self.groups, wanted
            )
            by_weight = whole if wanted[1] else by_weight
        return by_input, by_weight, by_bias

    def _examples(self, image: Tensor, response: Tensor, weight: Tensor) -> tuple[Examples, int]:
        """Gradients of the map image → response, by the faster of two routes.

        Sixteen channels are what the CPU library's convolution is made for (ResNet-20's first
        stage: 17 ms against 28); elsewhere windows are at least as fast, and three times as fast
        for grey images.
        """
        channels, filters = image.shape[1], response.shape[1]
        if self.groups == 1 and channels == 16 and filters % 16 == 0:
            return self._by_groups(image, response, weight.shape)
        return self._by_windows(image, response, weight.shape)

    def _by_groups(
        self, image: Tensor, response: Tensor, shape: torch.Size
    ) -> tuple[Examples, int]:
        """Examples become groups of one convolution, whose weight gradient keeps them apart."""

        def examples(rows: slice) -> Tensor:
            a, g = image[rows], response[rows]
            count = len(a)
            stacked = a.new_empty(()).expand(count * shape[0], *shape[1:])
            found: Tensor = torch.ops.aten.convolution_backward(
                g.reshape(1, -1, *g.shape[2:]), a.reshape(1, -1, *a.shape[2:]), stacked, None,
                self.stride, self.padding, self.dilation, False, [0] * len(self.stride),
                count * self.groups, [False, True, False],
            )[1]  # fmt: skip
            return found.view(count, *shape)

        return examples, shape.numel()

    def _by_windows(
        self, image: Tensor, response: Tensor, shape: torch.Size
    ) -> tuple[Examples, int]:
        """A batched product of response and the image's windows, copied out of a strided view.

        The view puts positions last, so that long runs are copied: several times faster than
        F.unfold, and for any number of dimensions.
        """
        kernel, places = shape[2:], response.shape[2:]
        margin = [width for width in reversed(self.padding) for _ in range(2)]

        def examples(rows: slice) -> Tensor:
            a, g = image[rows], response[rows]
            a = F.pad(a, margin) if any(margin) else a
            count, channels = a.shape[:2]
            steps = a.stride()
            along_kernel = [d * s for d, s in zip(self.dilation, steps[2:], strict=True)]
            along_places = [d * s for d, s in zip(self.stride, steps[2:], strict=True)]
            windows = a.as_strided(
                (count, channels, *kernel, *places), (*steps[:2], *along_kernel, *along_places)
            ).reshape(count, self.groups, -1, math.prod(places))
            g = g.reshape(count, self.groups, -1, math.prod(places))
            return (g @ windows.transpose(-2, -1)).view(count, *shape)

        in_window = image.shape[1] * math.prod(kernel) * math.prod(places)
        return examples, shape.numel() + in_window


class Embedding(Rule):
    """Rows of a table; ``x`` are the indices, with examples along any dimension."""

    def __init__(self, *where: Any, padding_idx: int | None) -> None:
        super().__init__(*where)
        self.padding_idx = padding_idx

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Sequence-first indices included."""
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        return F.embedding(x, weight, self.padding_idx)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """Words that occur several times in an example are added up first."""
        words, width = weight.shape
        count = x.shape[self.example_dim]
        padding = -1 if self.padding_idx is None else self.padding_idx % words
        by_weight = torch.ops.aten.embedding_dense_backward(g, x, words, padding, False)
        part = self.weight
        if factor is None or part is None or part.sink.outside is not None:
            return None, by_weight, None

        index = x.movedim(self.example_dim, 0).reshape(count, -1)
        g = g.movedim(self.example_dim, 0).reshape(*index.shape, width)
        g = g.to(part.sink.squares.dtype)
        if padding >= 0:
            g = g.masked_fill((index == padding).unsqueeze(-1), 0.0)
        if part.sink.shared:

            def examples(rows: slice) -> Tensor:
                here = index[rows]
                key = here + words * torch.arange(len(here), device=here.device).unsqueeze(1)
                found = g.new_zeros(len(here) * words, width)
                found.index_add_(0, key.flatten(), g[rows].flatten(0, 1))
                return found.view(-1, words, width)

            part.sink.defer(part.rows, examples, weight.numel())
            return None, by_weight, None
        key = index + words * torch.arange(count, device=index.device).unsqueeze(1)
        pairs, place = key.flatten().unique(return_inverse=True)
        summed = g.new_zeros(len(pairs), width).index_add_(0, place, g.flatten(0, 1))
        squares, _ = part.sink.open(part.rows)
        squares.index_add_(0, pairs % words, summed.square_(), alpha=factor)
        return None, by_weight, None


class ScaleShift(Rule):
    """out = â∘w + b after a norm without gain; ``axes`` are the dimensions that w has."""

    def __init__(self, *where: Any, axes: Sequence[int]) -> None:
        super().__init__(*where)
        self.axes = axes

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Any dimension that the gain has not."""
        return example_dim not in self.axes

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In the dtype of the normalised input, as norm layers do."""
        out = x * self._spread(weight, x)
        return (out if bias is None else out + self._spread(bias, x)).to(x.dtype)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """Everything elementwise."""
        by_input = (g * self._spread(weight, x)).to(x.dtype) if needs[0] else None
        totals: list[Tensor | None] = []
        for need, part, product in ((needs[1], self.weight, x), (needs[2], self.bias, None)):
            if not need:
                totals.append(None)
                continue
            found = self._per_example(g if product is None else g * product)
            if part is not None:
                part.settle_whole(factor, found.view(len(found), *weight.shape))
            totals.append(found.sum(0).view(weight.shape))
        return by_input, totals[0], totals[1]

    def _spread(self, parameter: Tensor, like: Tensor) -> Tensor:
        shape = [n if axis in self.axes else 1 for axis, n in enumerate(like.shape)]
        return parameter.view(shape)

    def _per_example(self, product: Tensor) -> Tensor:
        keep = {self.example_dim, *self.axes}
        product = product.movedim(self.example_dim, 0)
        moved = {axis + (axis < self.example_dim) for axis in keep - {self.example_dim}} | {0}
        others = [axis for axis in range(product.dim()) if axis not in moved]
        return product.sum(others) if others else product


def _any_overlap(taken: list[range], rows: range) -> bool:
    return any(r.start < rows.stop and rows.start < r.stop for r in taken)


def _chunks(count: int, numbers: int) -> Iterator[slice]:
    step = max(1, CHUNK_NUMBERS // max(1, numbers))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _add_squares(squares: Tensor, found: Tensor, factor: float) -> None:
    """``found`` (examples, *shape) is overwritten."""
    if len(found) == 1:
        squares.addcmul_(found[0], found[0], value=factor)
    else:
        squares.add_(found.square_().sum(0), alpha=factor)
