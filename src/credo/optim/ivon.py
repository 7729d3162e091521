r"""IVON: variational learning at the price of Adam, with curvature read off gradient times noise.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ĥ = ḡ(θ)∘(θ − m)/σ²  (E ĥ = E_q[∇²ℓ̄], Stein's identity)
    g ← β₁g + (1 − β₁)ḡ
    h ← h + x + x²/(2(h + δ)),              x = (1 − β₂)(ĥ − h)
    m ← m − ξ(h₀ + δ)·clip((g/(1 − β₁ᵗ) + δm)/(h + δ + γ), ±c)

The second-order term keeps h + δ at least at half of what it was, whatever ĥ: with a = h + δ it is
(a² + (a + x)²)/(2a) ≥ a/2. The prior's pull δm stays out of the momentum, and only the gradient is
debiased, because h does not start at zero.

====== ===================== ===================================================================
symbol argument              meaning
====== ===================== ===================================================================
ξ      ``lr``                about that of SGD, where ``rescale_lr`` multiplies it by h₀ + δ
β₁, β₂ ``betas``             shares that the gradient's and the curvature's averages keep
h₀     ``hess_init``         first curvature
δ      ``weight_decay``      prior_precision/N, see `credo.optim.base` for N and the rest
c      ``clip_radius``       largest step in units of ξ(h₀ + δ)
====== ===================== ===================================================================

Deterministic groups have no noise to read curvature off: their h stays at h₀, which makes them SGD
with momentum at the same rate.

Reference: Shen et al., 2024 (arXiv:2402.17641); the positive step is Lin et al., 2020. For a noisy
ĥ the second-order term raises h by about the share 1 − β₂, which the paper's β₂ makes negligible.

    >>> import torch, credo.optim
    >>> net = torch.nn.Linear(3, 2)
    >>> opt = credo.optim.IVON(net.parameters(), lr=0.1, num_data=100)
    >>> x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    >>> with opt.sampled():
    ...     torch.nn.functional.cross_entropy(net(x), y).backward()
    >>> opt.step(); opt.zero_grad()
    >>> opt.posterior(net, credo.likelihoods.Categorical()).q.scale.shape
    torch.Size([8])
"""

from __future__ import annotations

from typing import Unpack

import torch

from credo.checks import Decay, NotNegative, Positive, checked
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params, Shared, refuse_both
from credo.types import Vector


def absorb_relative_(h: Vector, a: Vector, change: Vector, rate: float) -> None:
    """h ← h + a(u + u²/2) with u = rate·change, where a = h + δ; ``change`` is used up.

    That is the step of the module's docstring for u = x/a.
    """
    change.addcmul_(change, change, value=0.5 * rate)
    h.addcmul_(a, change, value=rate)


def absorb_curvature_(
    h: Vector, surplus: Vector, delta: float, rate: float, scratch: Vector
) -> None:
    """h ← h + x + x²/(2(h + δ)) with x = −rate·surplus and surplus = h − ĥ, which is used up."""
    a = torch.add(h, delta, out=scratch)
    absorb_relative_(h, a, surplus.div_(a), -rate)


@checked
class IVON(NaturalOptimizer):
    """The improved variational online Newton method (Shen et al., 2024).

    The equations are in the module's docstring.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ, about that of SGD.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero; or give ``weight_decay``, not both.
        weight_decay: The same as a share: prior_precision/N, N = num_data·augmentation/temperature
            at temperature 1. 1e-4 if neither is given.
        hess_init: The curvature h₀ to start from: the first noise is 1/√(N(h₀ + δ)).
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        clip_radius: Largest step of a weight in units of ξ(h₀ + δ); None doesn't clip.
        rescale_lr: Multiply ``lr`` by h₀ + δ, which makes it comparable to SGD's.
        **shared: What all natural-gradient optimizers take with the same defaults: ``temperature``,
            ``augmentation``, ``kl_warmup``, ``samples``, ``debias``, ``draws``, ``seed``,
            ``process_group``, ``shared_noise``; explained at `NaturalOptimizer`.
    """

    _keeps_first_draw = True

    def __init__(
        self,
        params: Params,
        lr: NotNegative = 0.1,
        num_data: Positive | None = None,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.99999),
        prior_precision: NotNegative | None = None,
        weight_decay: NotNegative | None = None,
        hess_init: Positive = 1.0,
        damping: NotNegative = 0.0,
        clip_radius: Positive | None = None,
        rescale_lr: bool = True,
        **shared: Unpack[Shared],
    ) -> None:
        if prior_precision is not None and weight_decay is not None:
            refuse_both(prior_precision, weight_decay)
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            "hess_init": hess_init,
            "damping": damping,
            "clip_radius": clip_radius,
            "rescale_lr": rescale_lr,
        }
        if prior_precision is None:
            own["weight_decay"] = 1e-4 if weight_decay is None else weight_decay
        else:
            own["prior_precision"] = prior_precision
        super().__init__(params, own, **shared)
        self._products = self._layout.room_for_draw(0).vector
        self._share = 1.0

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """Add ḡ∘(θ − m); all blocks of a step have the same σ, by whose square it is divided."""
        for run in self._layout.random_runs:
            draw[run.where].sub_(run.mean)
        of_random = gradient[: self._num_random]
        if self._samples:
            self._products.addcmul_(draw, of_random)
        else:
            self._products = draw.mul_(of_random)

    def _sums(self) -> list[tuple[Vector, int]]:
        return [(self._gradient, 1), (self._products, 1)]

    def _average(self, samples: float, unit: float) -> None:
        self._share = 1.0 / (samples * unit)

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        beta1, beta2 = group["betas"]
        momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
        if not group["deterministic"]:
            # ĥ = N·a·ḡ∘(θ − m) with a = h + δ, so x/a = (1 − β₂)N(ḡ∘(θ − m) − h/(Na)): no pass
            # for σ, and none for ĥ.
            n = group["prior_precision"] / delta * self._share
            a = self._precision(where, delta)
            change = self._products[where].addcdiv_(h, a, value=-1.0 / n)
            absorb_relative_(h, a, change, (1.0 - beta2) * n)
        momentum.lerp_(self._gradient[where], 1.0 - beta1)
        weight = 1.0 - beta1 ** group["step"] if group["debias"] else 1.0
        rate = group["lr"] * ((group["hess_init"] + delta) if group["rescale_lr"] else 1.0)
        denominator = self._denominator(group, where, delta)
        if group["clip_radius"] is None:
            # The prior's pull first, while ``mean`` is what it was.
            mean.addcdiv_(mean, denominator, value=-rate * delta)
            mean.addcdiv_(momentum, denominator, value=-rate / weight)
        else:
            # The gradient is no longer needed, so its memory holds the direction.
            direction = torch.add(momentum, mean, alpha=delta * weight, out=self._gradient[where])
            bound = group["clip_radius"] * weight
            mean.sub_(direction.div_(denominator).clamp_(-bound, bound), alpha=rate / weight)
