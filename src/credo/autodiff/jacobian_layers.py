r"""The Jacobian of a network's outputs at one layer, from what passes the layer.

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
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from credo.autodiff.squares_routes import Convolution, Embedding, Linear, Rule, ScaleShift
from credo.errors import UnsupportedError


class Tap(ABC):
    """One call of a layer: its input, and the place in the graph where its output was made."""

    def __init__(self, rule: Rule, inputs: Tensor, output: Tensor) -> None:
        self._inputs, self._version = inputs.detach(), inputs._version
        self.example_dim, self.shape = rule.example_dim, output.shape
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

    def __init__(self, rule: Convolution, inputs: Tensor, output: Tensor, kernel: torch.Size):
        super().__init__(rule, inputs, output)
        self._rule, self._kernel = rule, kernel
        self.left_is_input = rule.output_padding is not None

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
        return response.unflatten(2, (self._rule.groups, -1)).flatten(4).mT

    def _windows(self, image: Tensor, places: torch.Size) -> Tensor:
        """What the kernel sees at every place, from a strided view: for any number of dims."""
        rule, lead = self._rule, image.shape[:2]
        margin = [width for width in reversed(rule.padding) for _ in range(2)]
        image = F.pad(image.flatten(0, 1), margin) if any(margin) else image.flatten(0, 1)
        image = image.contiguous()
        steps = image.stride()
        along_kernel = [d * s for d, s in zip(rule.dilation, steps[2:], strict=True)]
        along_places = [d * s for d, s in zip(rule.stride, steps[2:], strict=True)]
        view = image.as_strided(
            (*image.shape[:2], *self._kernel, *places),
            (*steps[:2], *along_kernel, *along_places),
        )
        return view.reshape(*lead, rule.groups, -1, math.prod(places)).mT


class EmbeddingTap(Tap):
    """Rows of a table; the input holds indices."""

    def __init__(self, rule: Embedding, inputs: Tensor, output: Tensor, words: int) -> None:
        super().__init__(rule, inputs, output)
        self._words = words
        self._padding = None if rule.padding_idx is None else rule.padding_idx % words

    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """Words that occur several times in an example are added up."""
        index = self.inputs.movedim(self.example_dim, 0)[examples].flatten(1)
        g = g.movedim(1 + self.example_dim, 1)[:, examples]
        g = g.reshape(len(g), *index.shape, g.shape[-1])
        if self._padding is not None:
            g = g.masked_fill((index == self._padding).unsqueeze(-1), 0.0)
        key = index + self._words * torch.arange(len(index), device=index.device).unsqueeze(1)
        found = g.new_zeros(len(g), len(index) * self._words, g.shape[-1])
        found.index_add_(1, key.flatten(), g.flatten(1, 2))
        return found.view(len(g), len(index), -1)

    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """An embedding has none."""
        raise NotImplementedError


class NormTap(Tap):
    """z = â∘w + b after a norm without gain."""

    def __init__(self, rule: ScaleShift, inputs: Tensor, output: Tensor) -> None:
        super().__init__(rule, inputs, output)
        self._others = [
            1 + dim for dim in range(output.dim()) if dim not in (rule.example_dim, *rule.axes)
        ]

    def weight(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t g∘â."""
        return self.bias(g * self.inputs, examples)

    def bias(self, g: Tensor, examples: slice) -> Tensor:
        """Σ_t g."""
        # The examples come before the gain's dimensions, so the rest is in order.
        summed = g.sum(self._others) if self._others else g
        return summed[:, examples]


def tap(rule: Rule, inputs: Tensor, weight: Tensor, output: Tensor) -> Tap:
    """The tap of a call that has a rule."""
    if isinstance(rule, Linear):
        return LinearTap(rule, inputs, output)
    if isinstance(rule, Convolution):
        return ConvolutionTap(rule, inputs, output, weight.shape[2:])
    if isinstance(rule, Embedding):
        return EmbeddingTap(rule, inputs, output, len(weight))
    assert isinstance(rule, ScaleShift)
    return NormTap(rule, inputs, output)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_t left ⊗ right, (R, b, groups, a, c)."""
    return torch.einsum("rbgto,rbgti->rbgoi", left, right)
