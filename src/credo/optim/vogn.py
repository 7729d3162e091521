r"""VOGN: variational online Gauss–Newton, with the mean of squared per-example gradients.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = mean_i g_i(θ),   ĥ = mean_i g_i(θ)∘g_i(θ)
    h ← β₂h + (1 − β₂)ĥ
    g ← β₁g + (1 − β₁)(ḡ + δm)
    m ← m − (ξ/c)·clip(g/((1 − β₁ᵗ)(h + δ + γ)), ±c)

At its defaults the settings know the network (`credo.optim.by_layer`: prior, temperature and h₀ by
layer), and natural gradients are cut at c = 0.01, so that ξ is the largest step of a weight, as
Adam's rate about is. With c = ∞, published, the step is ξg/((1 − β₁ᵗ)(h + δ + γ)), and where there
is no curvature yet one of them can throw a weight far out: squares are as small as 1e-6 in a wide
layer. ``hess_init=0.01`` is the published optimizer: that, temperature 1 and prior precision 1.

Squares are never negative and cost little more than the gradient itself (`credo.autodiff.squares`).
They stand for the Hessian where the model is right (both have the mean of the Fisher information);
elsewhere q's variance is off by their ratio, however long one trains: `VON` is the exact one.

====== ==================== ====================================================================
symbol argument             meaning
====== ==================== ====================================================================
ξ      ``lr``               step size; a published heavy-ball rate, which leaves out the factor
                            1 − β₁ above, is this one times 1 − β₁
β₂     ``betas[1]``         share of the *old* curvature; the published ema_decay is 1 − β₂
h₀     ``hess_init``        first curvature
c      ``clip_radius``      largest natural gradient
       ``loss_reduction``   how the loss joins examples: "mean" or "sum"
       ``module``           the network, where ``params`` is not it: squares need its layers
====== ==================== ====================================================================

The rest is in `credo.optim.base`. Corrections to the published pseudo-code: the prior counts δ once
in each place, so that the tempered posterior is exact (it has 668.17 where 671.67 is right in the
scalar test), and damping does not widen or narrow the draws. Each example's gradient is summed over
all places where a weight is used before it is squared, biases of convolutions included.

Reference: Osawa et al., 2019 (arXiv:1906.02506); Khan et al., 2018 (arXiv:1806.04854).

    >>> import torch, credo.optim
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> opt = credo.optim.VOGN(net, lr=1e-3, num_data=100)
    >>> x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    >>> with opt.sampled():
    ...     torch.nn.functional.cross_entropy(net(x), y).backward()
    >>> opt.step(); opt.zero_grad()
    >>> opt.posterior(net, credo.likelihoods.Categorical()).q.scale.shape
    torch.Size([26])
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Literal, Unpack

import torch
from torch import nn

from credo.autodiff.squares import Squares
from credo.checks import Decay, NotNegative, Positive, Radius, checked
from credo.collectives import unwrap
from credo.errors import DataError, UnsupportedError
from credo.network.selection import Selection
from credo.optim.base import NaturalOptimizer
from credo.optim.by_layer import CLIP_RADIUS
from credo.optim.groups import Group, Params, Shared, prior_options
from credo.optim.layout import Layout, Shift, add_pull, part_of
from credo.optim.ranks import NOTHING
from credo.optim.vadam import adam_step_
from credo.types import Vector


@checked
class VOGN(NaturalOptimizer):
    """Variational online Gauss–Newton (Osawa et al., 2019).

    The equations are in the module's docstring. One backward pass in each block: for micro-batches
    take a block each; or divide every loss by their number and say ``accumulation="sum"``, by which
    squares are known to have shrunk twice, over blocks or over passes. Deterministic groups
    are trained by Adam, with ``damping`` as its eps: in a batch norm no gain or shift has
    per-example gradients.

    What all natural-gradient optimizers share (``temperature``, ``augmentation``, ``kl_warmup``,
    ``samples``, ``debias``, ``draws``, ``seed``, ``accumulation``, ``process_group``,
    ``shared_noise``, ``module``) is explained at `NaturalOptimizer`.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ: the largest step of a weight.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero; None takes half of each layer's
            fan-in.
        weight_decay: The same as a share, prior_precision/(num_data·augmentation); give one of the
            two.
        hess_init: The curvature h₀ to start from. None makes the first noise a tenth of the layer's
            scale; a number is the published start, with the published settings for all that is
            not given.
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        clip_radius: Where natural gradients are cut; infinity doesn't. None is 0.01, or infinity
            if ``hess_init`` is given.
        loss_reduction: How the loss joins examples, "mean" or "sum".
    """

    _unscales = False

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 1e-3,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        prior_precision: NotNegative | None = None,
        weight_decay: NotNegative | None = None,
        hess_init: NotNegative | None = None,
        damping: NotNegative = 1e-8,
        clip_radius: Radius | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **shared: Unpack[Shared],
    ) -> None:
        network = params if isinstance(params, nn.Module) else shared.get("module")
        if not isinstance(network, nn.Module):
            raise DataError(
                "VOGN squares the gradients of single examples, for which it watches the network's "
                f"layers: pass the network itself, or module=net beside the parameters (module is "
                f"{network!r})"
            )
        published = hess_init is not None
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            **prior_options(
                prior_precision, weight_decay, {"prior_precision": 1.0} if published else None
            ),
            "hess_init": hess_init,
            "damping": damping,
            "clip_radius": clip_radius or (math.inf if published else CLIP_RADIUS),
        }
        network = unwrap(network)
        shared["module"] = network
        super().__init__(params, own, **shared)
        for run, group in self._parts():
            if group["deterministic"]:
                self._memory["curvature"][run.where] = 0.0
        self._mean_squares = torch.empty_like(self._eps)
        random = Selection.of(s for s in self._layout.segments if s.stop <= self._num_random)
        if not random.size and loss_reduction != "mean":
            raise UnsupportedError(
                "without random weights VOGN does not count examples, so it can't make a mean of "
                'a summed loss: take loss_reduction="mean"'
            )
        self._squares = (
            Squares(_Bound(self._layout, network), random, loss_reduction) if random.size else None
        )
        self._examples = 0
        self._loss_reduction = loss_reduction

    def _before_forward(self) -> AbstractContextManager[None]:
        if self._squares is None:
            return NOTHING
        self._squares.reset()
        return self._squares.armed()

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """The mean of squares over the block's examples; a summed loss becomes a mean."""
        if self._squares is None:
            return
        target = self._eps if self._samples else self._mean_squares
        if self._loss_reduction == "sum":
            self._squares.mean(target)
            gradient.div_(self._squares.count)
        else:
            self._squares.mean(target, grad_scale=1.0 / self._passes())
        if self._samples:
            self._mean_squares.add_(target)
        self._examples = self._squares.count + (self._examples if self._samples else 0)

    def _passes(self) -> int:
        """By how many backward passes of the block its losses were divided."""
        assert self._squares is not None
        passes = self._squares.passes
        if passes > 1 and self.accumulation != "sum":
            raise UnsupportedError(
                f"{passes} backward passes in one sampled() block: VOGN squares the gradients of "
                "single examples and has to know whether these were micro-batches, whose losses "
                'were divided by their number. If so, build it with accumulation="sum"; else '
                "take a block for each batch, or add the losses and call backward once"
            )
        return passes

    def _share_shown(self) -> float:
        """Of a summed loss ``.grad`` has the last block's number of examples in it."""
        summed = self._squares is not None and self._loss_reduction == "sum"
        return super()._share_shown() * (self._squares.count if summed and self._squares else 1)

    def _sums(self) -> list[tuple[Vector, int]]:
        return [(self._gradient, 1), (self._mean_squares, 2)]

    def _weight(self, samples: int) -> float:
        """Its number of examples, where they are counted."""
        return float(self._examples if self._num_random else samples)

    def _average(self, samples: float, unit: float) -> None:
        if samples * unit**2 != 1.0:
            self._mean_squares.div_(samples * unit**2)

    def _collected(self) -> dict[str, Vector]:
        return {"sum of squared gradients": self._mean_squares}

    def _can_merge(self, group: Group) -> bool:
        return True

    def _update(self, group: Group, mean: Vector, where: slice, delta: Shift) -> None:
        memory = (self._memory["momentum"], self._memory["curvature"], self._gradient)
        momentum, h, gradient = (part_of(vector, where) for vector in memory)
        if group["deterministic"]:
            adam_step_(group, mean, momentum, h, gradient, delta)
            return
        beta1, beta2 = group["betas"]
        h.lerp_(part_of(self._mean_squares, where), 1.0 - beta2)
        momentum.lerp_(add_pull(gradient, mean, delta, out=gradient), 1.0 - beta1)
        weight = 1.0 - beta1 ** group["step"] if group["debias"] else 1.0
        denominator = self._denominator(group, where, delta)
        radius = group["clip_radius"] * weight
        if math.isinf(radius):
            mean.addcdiv_(momentum, denominator, value=-group["lr"] / weight)
        else:
            direction = torch.div(momentum, denominator, out=gradient).clamp_(-radius, radius)
            mean.sub_(direction, alpha=group["lr"] / radius)


class _Bound:
    """The network with the optimizer's order of weights, which `Squares` watches."""

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        self.module, self.vector = module, layout.like
        pairs = zip(layout.segments, layout.parameters, strict=True)
        self.parameter_at = {segment.start: parameter for segment, parameter in pairs}

    def check(self) -> None:
        """Nothing: a block has just looked, when it made room for the draw."""
