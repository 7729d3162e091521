r"""Vadam: Adam with a distribution, from the squared minibatch gradient.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ḡ = ∇ℓ̄(θ)
    g ← β₁g + (1 − β₁)(ḡ + δm)
    h ← β₂h + (1 − β₂)ḡ∘ḡ
    m ← m − ξ ĝ/(√ĥ + δ + γ),               ĝ = g/(1 − β₁ᵗ),  ĥ = h/(1 − β₂ᵗ)

Without noise and prior it is torch's Adam with eps = γ. The draws use h as it is, the step the
debiased ĥ.

It is the cheapest and the crudest: the square of a minibatch's *mean* gradient stands for the
curvature, which is too small by up to the batch size (a hundredth of the mean of squares where
noise dominates), so the draws are wider than the posterior; and the root in the mean's step is
Adam's, not the rule's. Left to itself it rests at σ² = 1/(N(E[ḡ²] + δ)), which is nearly the
prior's in every weight: a network does not survive that. So at its defaults h starts at zero and
the draws add a floor, σ² = 1/(N(h + h₀ + δ)), which keeps them below a twentieth of the layer's
scale (`credo.optim.by_layer`). ``hess_init`` as a number is the published optimizer: h starts
there, at (initial precision − prior precision)/N, without a floor, at temperature 1.

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

from typing import Unpack

import torch
from torch import Tensor

from credo.checks import Decay, NotNegative, Positive, checked
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params, Shared, prior_options
from credo.optim.layout import Shift, add_pull, part_of
from credo.types import Vector

SMALL_BETA = 1e-3
"""Below it β₁ is not divided by."""


def adam_step_(
    group: Group, mean: Vector, momentum: Vector, h: Vector, gradient: Vector, delta: Shift
) -> None:
    """The update of g, h and m above, in place, by the kernel of torch's Adam: one pass.

    The prior's pull belongs into g but not into h, for which that kernel has no place. So it is
    put into the old g, divided by the β₁ that the kernel will multiply it by. Where β₁ is
    zero, or δ differs between weights, several passes do it.
    """
    beta1, beta2 = group["betas"]
    eps = delta + group["damping"]
    if beta1 < SMALL_BETA or isinstance(delta, Tensor):
        h.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        momentum.lerp_(add_pull(gradient, mean, delta, out=gradient), 1.0 - beta1)
        weight_g, weight_h = (
            1.0 - beta ** group["step"] if group["debias"] else 1.0 for beta in group["betas"]
        )
        mean.addcdiv_(momentum, (h / weight_h).sqrt_().add_(eps), value=-group["lr"] / weight_g)
        return
    if delta:
        momentum.add_(mean, alpha=delta * (1.0 - beta1) / beta1)
    # After infinitely many steps averages lack nothing: 1 − βᵗ = 1.
    steps = torch.tensor(float(group["step"]) if group["debias"] else torch.inf, device=mean.device)
    # Without torch.optim's dispatch to it, which takes longer than a small network's step.
    torch._fused_adam_(
        [mean],
        [gradient],
        [momentum],
        [h],
        [],
        [steps],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    # The kernel leaves out the counters, by which the optimizer sees that h is another one.
    torch.autograd.graph.increment_version([momentum, h])


@checked
class Vadam(NaturalOptimizer):
    """Variational Adam (Khan et al., 2018); the equations are in the module's docstring.

    What all natural-gradient optimizers share (``temperature``, ``augmentation``, ``kl_warmup``,
    ``samples``, ``debias``, ``draws``, ``seed``, ``accumulation``, ``process_group``,
    ``shared_noise``, ``module``) is explained at `NaturalOptimizer`.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ, as Adam's.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero; None takes half of each layer's
            fan-in.
        weight_decay: The same as a share, prior_precision/(num_data·augmentation); give one of the
            two.
        hess_init: The curvature h to start from, as published. None starts at zero, with a floor
            under the draws' that bounds them by a twentieth of the layer's scale.
        damping: Adam's eps, added to the mean's denominator only.
    """

    _first_noise = 0.05

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 2e-3,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        prior_precision: NotNegative | None = None,
        weight_decay: NotNegative | None = None,
        hess_init: NotNegative | None = None,
        damping: NotNegative = 1e-8,
        **shared: Unpack[Shared],
    ) -> None:
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            **prior_options(
                prior_precision,
                weight_decay,
                {"prior_precision": 1.0} if hess_init is not None else None,
            ),
            "hess_init": hess_init,
            "damping": damping,
        }
        super().__init__(params, own, **shared)
        self._is_floored = hess_init is None
        if self._is_floored:
            self._memory["curvature"].zero_()

    def _shift(self, group: Group, n: float) -> float:
        """δ, and the floor h₀ where the user gave no start."""
        floor = group["hess_init"] if self._is_floored else 0.0
        return super()._shift(group, n) + float(floor)

    def _can_merge(self, group: Group) -> bool:
        return True

    def _update(self, group: Group, mean: Vector, where: slice, delta: Shift) -> None:
        memory = (self._memory["momentum"], self._memory["curvature"], self._gradient)
        momentum, h, gradient = (part_of(vector, where) for vector in memory)
        adam_step_(group, mean, momentum, h, gradient, delta)
