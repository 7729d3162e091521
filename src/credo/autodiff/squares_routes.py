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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.autodiff.squares_sinks import Examples, Part

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of input, weight and bias."""


class Ledger(Protocol):
    """Who is told that a backward pass has reached a layer."""

    def begin(self, examples: int) -> float | None:
        """What squares are to be multiplied by; None if nobody is harvesting."""
        ...


class Rule:
    """One call of a layer with its parameters' parts; see the module's table."""

    def __init__(
        self, ledger: Ledger, weight: Part | None, bias: Part | None, example_dim: int = 0
    ) -> None:
        self.ledger, self.weight, self.bias = ledger, weight, bias
        self.example_dim = example_dim

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
        x, weight = ctx.saved_tensors
        factor = rule.ledger.begin(x.shape[rule.example_dim])
        device, needs = g.device.type, ctx.needs_input_grad[1:]
        if not torch.is_autocast_enabled(device):
            return None, *rule.backward(g, x, weight, needs, factor)
        with torch.autocast(device, enabled=False):
            return None, *rule.backward(g, x, weight, needs, factor)


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
        if x.dim() == 2:
            a, g = x.unsqueeze(1), g.unsqueeze(1)
        else:
            count = x.shape[self.example_dim]
            a = x.movedim(self.example_dim, 0).reshape(count, -1, x.shape[-1])
            g = g.movedim(self.example_dim, 0).reshape(count, -1, g.shape[-1])
        by_weight = self._by_weight(g, a, weight, factor) if needs[1] else None
        by_bias = None
        if needs[2]:
            found = g[:, 0] if g.shape[1] == 1 else g.sum(1)
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
        stride, padding, dilation, transposed, outer = self._settings
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, transposed, outer, self.groups
        )

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool], factor: float | None
    ) -> Grads:
        """The weight's gradient is the sum of the examples', where those are computed."""
        by_weight = by_bias = None
        if needs[1] and self.weight is not None:
            image, response = (x, g) if self.output_padding is None else (g, x)
            examples, numbers = self._examples(image, response, weight.shape)
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

    def _examples(self, image: Tensor, response: Tensor, shape: torch.Size) -> tuple[Examples, int]:
        """Gradients of the map image → response, by the faster of two routes.

        Sixteen channels are what the CPU library's convolution is made for (ResNet-20's first
        stage: 17 ms against 28); elsewhere windows are at least as fast, and three times as fast
        for grey images.
        """
        channels, filters = image.shape[1], response.shape[1]
        if self.groups == 1 and channels == 16 and filters % 16 == 0:
            return self._by_groups(image, response, shape)
        return self._by_windows(image, response, shape)

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
