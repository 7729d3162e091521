r"""The prior behind group lasso: whole groups of weights are small together, or not at all.

    p(w) = Π_g e^(−λ‖w_g‖₂)/Z_n(λ),    Z_n(λ) = 2π^{n/2}·Γ(n)/(Γ(n/2)·λⁿ)

symbols: w_g the n weights of a group, λ its rate. The direction of w_g is uniform and its length
‖w_g‖ ~ Gamma(n, rate λ), so that a weight has the variance E‖w_g‖²/n = (n + 1)/λ²; a standard
deviation ``scale`` means **λ = √(n + 1)/scale**. Groups of one make it the Laplace prior.

Reference: P. Wolinski, G. Charpiat and Y. Ollivier, "Interpreting a penalty as the influence of a
Bayesian prior", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Generator, Tensor

from credo.checks import checked
from credo.errors import UnsupportedError
from credo.families.base import check_count, check_points
from credo.priors.scales import FanIn, FlatPrior, PriorRule, Scale, flat_scales, segment_scales
from credo.types import Segment, Vector

Side = Literal["incoming", "outgoing"]
"""The weights into a unit, or those out of an input."""


@dataclass(frozen=True)
class GroupLayout:
    """A tensor's weights in groups of ``size``: seen in ``shape``, a group runs over ``dims``."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, segment: Segment, side: Side) -> Self:
        """All weights into one unit, or all those out of one input; a vector's stand alone.

        A unit's incoming weights are as many as its fan-in, an input's outgoing ones as many as its
        fan-out: for a convolution with kernels of k weights, C_in·k and C_out·k, or with groups of
        channels that fraction of them.

        >>> linear = Segment("w", (3, 4), 0, 12, fan_in=4, fan_out=3, layer="", layer_type="Linear")
        >>> GroupLayout.of(linear, "outgoing").size
        3
        """
        if len(segment.shape) < 2:
            return cls((segment.size, 1), (-1,), 1)
        rows, columns, cells = *segment.shape[:2], math.prod(segment.shape[2:])
        rows_are = _what_rows_are(segment)
        if (rows_are == "units") == (side == "incoming"):
            return cls((rows, columns * cells), (-1,), columns * cells)
        # Rows split into blocks of channels that see each other; a group is in one block.
        size = segment.fan_out if side == "outgoing" else segment.fan_in
        blocks = rows * cells // max(1, size)
        return cls((blocks, rows // max(1, blocks), columns, cells), (-3, -1), size)

    def see(self, weights: Tensor) -> Tensor:
        """Flat weights (..., count) of the segment in the layout's shape."""
        return weights.unflatten(-1, self.shape)

    def norms(self, seen: Tensor) -> Tensor:
        """‖w_g‖ of every group, with dimensions of one where its weights were."""
        return torch.linalg.vector_norm(seen, dim=self.dims, keepdim=True)

    def directions(self, seen: Tensor) -> Tensor:
        """w_g/‖w_g‖, the gradient of Σ_g‖w_g‖; at w_g = 0 the subgradient 0."""
        return seen / self.norms(seen).clamp_min(torch.finfo(seen.dtype).tiny)


def _what_rows_are(segment: Segment) -> Literal["units", "inputs"]:
    """Whether the first axis counts outputs, as in most layers, or inputs (embeddings, …)."""
    row = math.prod(segment.shape[1:])
    if segment.fan_in == row and not segment.layer_type.startswith("ConvTranspose"):
        return "units"
    if segment.fan_out == row:
        return "inputs"
    raise UnsupportedError(
        f"{segment.name} of a {segment.layer_type} has shape {segment.shape}, fan-in "
        f"{segment.fan_in} and fan-out {segment.fan_out}: which of its weights belong to one unit "
        "is not known. Leave it out, or take a penalty or prior without groups"
    )


@checked
@dataclass(frozen=True)
class GroupLasso(PriorRule):
    """Density ∝ e^(−λ‖w_g‖₂) for every group of weights, with λ = √(n + 1)/scale.

    ``scale`` is the standard deviation of each weight, a number or a rule of
    `credo.priors.scales`; `fan_in` is the choice of Wolinski, Charpiat & Ollivier (2020).
    ``groups="incoming"`` groups the weights into a unit, ‖W‖_{2,1}, and ``"outgoing"`` those out of
    an input, ‖Wᵀ‖_{2,1}. Biases and other vectors are groups of one.

    Args:
        scale: The standard deviation of a weight: a number, or a rule of `credo.priors.scales`.
        groups: "incoming" for the weights into a unit, "outgoing" for those out of an input.

    >>> layer = Segment("w", (2, 3), 0, 6, fan_in=3, fan_out=2, layer="", layer_type="Linear")
    >>> prior = GroupLasso.fan_in().on([layer], like=torch.zeros(6))
    >>> prior.rates                               # √((n + 1)·fan_in), n = 3
    (3.464...,)
    >>> prior.grad_log_prob(torch.tensor([3.0, 4.0, 12.0, 0.0, 0.0, 0.0]))[:3]
    tensor([-0.7994, -1.0659, -3.1976])
    """

    scale: Scale = 1.0
    groups: Side = "incoming"

    @classmethod
    def fan_in(cls, gain: float = 1.0, groups: Side = "incoming") -> Self:
        """Variance gain²/fan_in.

        Args:
            gain: The standard deviation, times √fan_in.
            groups: "incoming" for the weights into a unit, "outgoing" for those out of an input.
        """
        return cls(FanIn(gain), groups)

    def on(self, segments: Sequence[Segment], like: Vector) -> FlatGroupLasso:
        """The density over these segments, one after the other."""
        scale = flat_scales(self.scale, segments, like)
        layouts = tuple(GroupLayout.of(segment, self.groups) for segment in segments)
        rates = tuple(
            math.sqrt(layout.size + 1) / std
            for layout, std in zip(layouts, segment_scales(self.scale, segments), strict=True)
        )
        return FlatGroupLasso(layouts, rates, scale)


@dataclass(frozen=True, eq=False)
class FlatGroupLasso(FlatPrior):
    """Groups of weights, segment by segment: how each is laid out, its rate λ, and all scales.

    Args:
        layouts: Each segment's groups.
        rates: Each segment's λ.
        scale: Standard deviations of all weights, (P,).
    """

    layouts: tuple[GroupLayout, ...]
    rates: tuple[float, ...]
    scale: Vector

    @property
    def log_normaliser(self) -> float:
        """Σ_g ln Z_n(λ)."""
        total = 0.0
        for layout, rate in zip(self.layouts, self.rates, strict=True):
            n = layout.size
            one = (
                math.log(2) + n / 2 * math.log(math.pi) + math.lgamma(n)
                - math.lgamma(n / 2) - n * math.log(rate)
            )  # fmt: skip
            total += math.prod(layout.shape) / n * one
        return total

    def log_prob(self, w: Vector) -> Tensor:
        """−Σ_g (λ‖w_g‖ + ln Z): (..., P) → (...)."""
        total = w.new_full((), -self.log_normaliser)
        for layout, rate, seen in self._seen(w):
            total = total - rate * layout.norms(seen).flatten(-len(layout.shape)).sum(-1)
        return total

    def grad_log_prob(self, w: Vector) -> Tensor:
        """−λ·w_g/‖w_g‖; at the kink w_g = 0 the subgradient 0."""
        pulls = [
            layout.directions(seen).mul_(-rate).flatten(-len(layout.shape))
            for layout, rate, seen in self._seen(w)
        ]
        return torch.cat(pulls, -1)

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """A uniform direction and a Gamma-distributed length for every group: (n, P)."""
        check_count(n)
        draws = self.scale.new_empty(n, self.size).normal_(generator=generator)
        parts = []
        for layout, rate, seen in self._seen(draws):
            directions = layout.directions(seen)
            shapes = torch.full_like(layout.norms(seen), layout.size)
            lengths = torch._standard_gamma(shapes, generator=generator) / rate
            parts.append((directions * lengths).flatten(-len(layout.shape)))
        return torch.cat(parts, -1)

    def _seen(self, w: Vector) -> list[tuple[GroupLayout, float, Tensor]]:
        check_points(w, self.size)
        pieces = w.split([math.prod(layout.shape) for layout in self.layouts], -1)
        return [
            (layout, rate, layout.see(piece))
            for layout, rate, piece in zip(self.layouts, self.rates, pieces, strict=True)
        ]
