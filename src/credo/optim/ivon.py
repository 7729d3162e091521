r"""IVON: variational learning at the price of Adam, with curvature read off gradient times noise.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ĥ = ḡ(θ)∘(θ − m)/σ²  (E ĥ = E_q[∇²ℓ̄], Stein's identity)
    g ← β₁g + (1 − β₁)ḡ
    h ← h + x + x²/(2(h + δ)),              x = (1 − β₂)(ĥ − h)
    m ← m − ξ(h₀ + δ)·clip((g/(1 − β₁ᵗ) + δm)/(h + δ + γ), ±c)

At its defaults the settings know the network (`credo.optim.by_layer`: prior, temperature and h₀ by
layer), the factor h₀ + δ is left out, and natural gradients are cut at c = 0.01. So a weight whose
curvature is not known yet moves by at most ξc = 1e-3 in a step, as with Adam, where the published
start is plain SGD until h has left h₀; the steps become Newton's as the gradients vanish.
``hess_init=1.0`` is the published optimizer: temperature 1, weight decay 1e-4, the factor above and
no clipping.

The second-order term keeps h + δ at least at half of what it was, whatever ĥ: with a = h + δ it is
(a² + (a + x)²)/(2a) ≥ a/2. The prior's pull δm stays out of the momentum, and only the gradient is
debiased, because h does not start at zero.

====== ===================== ===================================================================
symbol argument              meaning
====== ===================== ===================================================================
ξ      ``lr``                share of a natural-gradient step; about SGD's rate, where
                             ``rescale_lr`` multiplies it by h₀ + δ
β₁, β₂ ``betas``             shares that the gradient's and the curvature's averages keep
h₀     ``hess_init``         first curvature
δ      ``weight_decay``      prior_precision/N, see `credo.optim.base` for N and the rest
c      ``clip_radius``       largest natural gradient: a step is at most ξc, or ξ(h₀ + δ)c
====== ===================== ===================================================================

Deterministic groups have no noise to read curvature off: they are trained by Adam at the rate ξc,
or, as published, by SGD with momentum at the rate ξ: their h stays at h₀.

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

import math
from typing import Unpack

import torch

from credo.checks import Decay, NotNegative, Positive, Radius, checked
from credo.optim.base import NaturalOptimizer
from credo.optim.by_layer import CLIP_RADIUS
from credo.optim.groups import Group, Params, Shared, prior_options
from credo.optim.layout import Shift, add_pull, part_of
from credo.optim.vadam import adam_step_
from credo.types import Vector

ADAM_BETA = 0.999
"""Share that the squares of point parameters keep, where Adam trains them."""


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

    What all natural-gradient optimizers share (``temperature``, ``augmentation``, ``kl_warmup``,
    ``samples``, ``debias``, ``draws``, ``seed``, ``accumulation``, ``process_group``,
    ``shared_noise``, ``module``) is explained at `NaturalOptimizer`.

    Args:
        params: The network itself (its norm layers become a deterministic group without a prior),
            its parameters, or groups of them with options of their own.
        lr: Step size ξ.
        num_data: Number of training examples; it says how much the data weigh against the prior,
            and is required.
        betas: Shares that the running averages of gradient and curvature keep.
        prior_precision: 1/variance of the prior around zero; None takes half of each layer's
            fan-in.
        weight_decay: The same as a share, prior_precision/(num_data·augmentation); give one of the
            two.
        hess_init: The curvature h₀ to start from: the first noise is 1/√(N(h₀ + δ)). None makes
            that a tenth of the layer's scale; a number is the published start, with the published
            settings for all that is not given.
        damping: Added to the mean's denominator only; the noise stays the posterior's.
        clip_radius: Where natural gradients are cut; infinity doesn't. None is 0.01, or infinity
            if ``hess_init`` is given.
        rescale_lr: Multiply ``lr`` by h₀ + δ, which makes it comparable to SGD's; None does so if
            ``hess_init`` is given.
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
        hess_init: Positive | None = None,
        damping: NotNegative = 0.0,
        clip_radius: Radius | None = None,
        rescale_lr: bool | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        published = hess_init is not None
        own: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            **prior_options(
                prior_precision, weight_decay, {"weight_decay": 1e-4} if published else None
            ),
            "hess_init": hess_init,
            "damping": damping,
            "clip_radius": clip_radius or (math.inf if published else CLIP_RADIUS),
            "rescale_lr": published if rescale_lr is None else rescale_lr,
        }
        super().__init__(params, {**own, **self._options()}, **shared)
        self._products = self._layout.room_for_draw(0).vector
        self._share = 1.0

    def _options(self) -> Group:
        """What a subclass adds to the options."""
        return {}

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """Add ḡ∘√N(θ − m); all blocks of a step have the same σ, by whose square it is divided."""
        of_random = gradient[: self._num_random]
        if self._samples:
            self._products.addcmul_(self._eps, of_random)
        else:
            self._products = torch.mul(self._eps, of_random, out=draw)

    def _sums(self) -> list[tuple[Vector, int]]:
        return [(self._gradient, 1), (self._products, 1)]

    def _average(self, samples: float, unit: float) -> None:
        self._share = 1.0 / (samples * unit)

    def _can_merge(self, group: Group) -> bool:
        # Else h₀ is in the rate, which is one number.
        return not group["rescale_lr"]

    def _update(self, group: Group, mean: Vector, where: slice, delta: Shift) -> None:
        if group["deterministic"] and not group["hess_init"]:
            momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
            rate = group["lr"] * group["clip_radius"]
            adam = {**group, "lr": rate, "betas": (group["betas"][0], ADAM_BETA), "damping": 1e-8}
            adam_step_(adam, mean, momentum, h, self._gradient[where], delta)
            return
        self._learn(group, where, delta)
        self._move(group, mean, where, delta)

    def _learn(self, group: Group, where: slice, delta: Shift) -> None:
        """Move the curvature and the momentum."""
        beta1, beta2 = group["betas"]
        momentum = part_of(self._memory["momentum"], where)
        if not group["deterministic"]:
            h = part_of(self._memory["curvature"], where)
            # ĥ = N·a·ḡ∘(θ − m) with a = h + δ, so x/a = (1 − β₂)√N(ḡ∘√N(θ − m) − h/(√N·a)): no
            # pass for σ, and none for ĥ.
            n = math.sqrt(self._n) * self._share
            a = self._precision(where, delta)
            change = part_of(self._products, where).addcdiv_(h, a, value=-1.0 / n)
            absorb_relative_(h, a, change, (1.0 - beta2) * n)
        momentum.lerp_(part_of(self._gradient, where), 1.0 - beta1)

    def _move(self, group: Group, mean: Vector, where: slice, delta: Shift) -> Vector:
        """Take the step; what was subtracted from the mean, in units of `_rate`, is returned."""
        weight = 1.0 - group["betas"][0] ** group["step"] if group["debias"] else 1.0
        # The gradient is no longer needed, so its memory holds the direction.
        momentum, direction = (
            part_of(v, where) for v in (self._memory["momentum"], self._gradient)
        )
        add_pull(momentum, mean, delta, weight, out=direction)
        direction.div_(self._denominator(group, where, delta))
        if not math.isinf(group["clip_radius"]):
            bound = group["clip_radius"] * weight
            direction.clamp_(-bound, bound)
        mean.sub_(direction, alpha=self._rate(group, delta))
        return direction

    def _rate(self, group: Group, delta: Shift) -> float:
        """The step size, times what makes up for the momentum's start at zero."""
        rate: float = group["lr"] * ((group["hess_init"] + delta) if group["rescale_lr"] else 1.0)
        return rate / (1.0 - group["betas"][0] ** group["step"] if group["debias"] else 1.0)
