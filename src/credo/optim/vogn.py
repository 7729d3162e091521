r"""VOGN: variational online Gauss–Newton, with the mean of squared per-example gradients.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = mean_i g_i(θ),   ĥ = mean_i g_i(θ)∘g_i(θ)
    h ← β₂h + (1 − β₂)ĥ
    g ← β₁g + (1 − β₁)(ḡ + δm)
    m ← m − ξ g/((1 − β₁ᵗ)(h + δ + γ))

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

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Unpack

import torch
from torch import nn

from credo.autodiff.squares import Squares
from credo.checks import Decay, NotNegative, Positive, checked
from credo.collectives import unwrap
from credo.errors import DataError, UnsupportedError
from credo.network.selection import Selection
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params, Shared
from credo.optim.layout import Layout
from credo.optim.vadam import adam_step_
from credo.types import Vector


@checked
class VOGN(NaturalOptimizer):
    """Variational online Gauss–Newton (Osawa et al., 2019).

    The equations are in the module's docstring. One backward pass in each block: for micro-batches
    take several blocks, not ``loss / k``, by which squares would shrink twice. Deterministic groups
    are trained by Adam, with ``damping`` as its eps: in a batch norm no gain or shift has
    per-example gradients.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ of the mean.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero.
        hess_init: The curvature h₀ to start from.
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        loss_reduction: How the loss joins examples, "mean" or "sum".
        module: The network, where ``params`` is not it: squares need its layers.
        **shared: What all natural-gradient optimizers take with the same defaults: ``temperature``,
            ``augmentation``, ``kl_warmup``, ``samples``, ``debias``, ``draws``, ``seed``,
            ``process_group``, ``shared_noise``; explained at `NaturalOptimizer`.
    """

    _unscales = False

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 1e-3,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        prior_precision: NotNegative = 1.0,
        hess_init: NotNegative = 0.01,
        damping: NotNegative = 1e-8,
        loss_reduction: Literal["mean", "sum"] = "mean",
        module: nn.Module | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        network = params if isinstance(params, nn.Module) else module
        if not isinstance(network, nn.Module):
            raise DataError(
                "VOGN squares the gradients of single examples, for which it watches the network's "
                f"layers: pass the network itself, or module=net beside the parameters (module is "
                f"{module!r})"
            )
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            "prior_precision": prior_precision,
            "hess_init": hess_init,
            "damping": damping,
        }
        network = unwrap(network)
        super().__init__(params, own, module=network, **shared)
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
            return nullcontext()
        self._squares.reset()
        return self._squares.armed()

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """The mean of squares over the block's examples; a summed loss becomes a mean."""
        if self._squares is None:
            return
        target = self._eps if self._samples else self._mean_squares
        self._squares.mean(target)
        if self._samples:
            self._mean_squares.add_(target)
        if self._loss_reduction == "sum":
            gradient.div_(self._squares.count)
        self._examples = self._squares.count + (self._examples if self._samples else 0)

    def _sums(self) -> list[tuple[Vector, int]]:
        return [(self._gradient, 1), (self._mean_squares, 2)]

    def _weight(self, samples: int) -> float:
        """Its number of examples, where they are counted."""
        return float(self._examples if self._num_random else samples)

    def _average(self, samples: float, unit: float) -> None:
        if samples * unit != 1.0:
            self._mean_squares.div_(samples * unit**2)

    def _collected(self) -> dict[str, Vector]:
        return {"sum of squared gradients": self._mean_squares}

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
        gradient = self._gradient[where]
        if group["deterministic"]:
            adam_step_(group, mean, momentum, h, gradient, delta)
            return
        beta1, beta2 = group["betas"]
        h.lerp_(self._mean_squares[where], 1.0 - beta2)
        momentum.lerp_(gradient.add_(mean, alpha=delta), 1.0 - beta1)
        weight = 1.0 - beta1 ** group["step"] if group["debias"] else 1.0
        denominator = self._denominator(group, where, delta)
        mean.addcdiv_(momentum, denominator, value=-group["lr"] / weight)


class _Bound:
    """The network with the optimizer's order of weights, which `Squares` watches."""

    def __init__(self, layout: Layout, module: nn.Module) -> None:
        self._layout, self.module, self.vector = layout, module, layout.like
        pairs = zip(layout.segments, layout.parameters, strict=True)
        self.parameter_at = {segment.start: parameter for segment, parameter in pairs}

    def check(self) -> None:
        self._layout.check()
