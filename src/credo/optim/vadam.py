r"""Vadam: Adam with a distribution, from the squared minibatch gradient.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = ∇ℓ̄(θ)
    g ← β₁g + (1 − β₁)(ḡ + δm)
    h ← β₂h + (1 − β₂)ḡ∘ḡ
    m ← m − ξ ĝ/(√ĥ + δ + γ),               ĝ = g/(1 − β₁ᵗ),  ĥ = h/(1 − β₂ᵗ)

Without noise and prior it is torch's Adam with eps = γ. The draws use h as it is, the step the
debiased ĥ. ``hess_init`` h₀ starts at (initial precision − prior precision)/N.

It is the cheapest and the crudest: the square of a minibatch's *mean* gradient stands for the
curvature, which is too small by up to the batch size (a hundredth of the mean of squares where
noise dominates), so the draws are wider than the posterior; and the root in the mean's step is
Adam's, not the rule's. Its resting scale is the formula above at h = E[ḡ²].

Symbols and arguments: `credo.optim.base`; γ is ``damping``, ``debias`` the division by 1 − βᵗ.
Reference: Khan et al., 2018 (arXiv:1806.04854).

    >>> import torch, credo.optim
    >>> net = torch.nn.Linear(3, 1)
    >>> opt = credo.optim.Vadam(net, lr=1e-3, num_data=100)
    >>> def closure():
    ...     loss = net(torch.ones(4, 3)).square().mean()
    ...     loss.backward()
    ...     return loss
    >>> opt.step(closure).shape
    torch.Size([])
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from credo.noise import Draws
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params
from credo.types import Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def adam_step_(
    group: Group,
    mean: Vector,
    momentum: Vector,
    h: Vector,
    gradient: Vector,
    delta: float,
    scratch: Vector,
) -> None:
    """The update of g, h and m above, in place; ``gradient`` is used up."""
    beta1, beta2 = group["betas"]
    h.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    if delta:
        gradient.add_(mean, alpha=delta)
    momentum.lerp_(gradient, 1.0 - beta1)
    grown_g = grown_h = 1.0
    if group["debias"]:
        grown_g = 1.0 - beta1 ** group["step"]
        grown_h = math.sqrt(1.0 - beta2 ** group["step"])
    root = torch.sqrt(h, out=scratch)
    # Numerator and denominator both times √(1 − β₂ᵗ), which saves a pass.
    if offset := (delta + group["damping"]) * grown_h:
        root.add_(offset)
    mean.addcdiv_(momentum, root, value=-group["lr"] * grown_h / grown_g)


class Vadam(NaturalOptimizer):
    """Variational Adam; the symbols are in the module's docstring."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        num_data: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        prior_precision: float = 30.0,
        hess_init: float = 0.0,
        damping: float = 1e-8,
        debias: bool = True,
        temperature: float = 1.0,
        augmentation: float = 1.0,
        kl_warmup: int = 0,
        samples: int = 1,
        draws: Draws = "table",
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        shared_noise: bool = False,
    ) -> None:
        options: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            "prior_precision": prior_precision,
            "hess_init": hess_init,
            "damping": damping,
            "debias": debias,
            "temperature": temperature,
            "augmentation": augmentation,
            "kl_warmup": kl_warmup,
            "samples": samples,
            "draws": draws,
            "seed": seed,
        }
        super().__init__(params, options, process_group, shared_noise)

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
        gradient, scratch = self._gradient[where], self._scratch[where]
        adam_step_(group, mean, momentum, h, gradient, delta, scratch)
