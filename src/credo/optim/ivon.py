r"""IVON: variational learning at the price of Adam, with curvature read off gradient times noise.

    θ = m + σε,   σ² = 1/(N(h + δ)),        ĥ = ḡ(θ)∘ε/σ         (E ĥ = E_q[∇²ℓ̄], Stein's identity)
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

from typing import TYPE_CHECKING

import torch

from credo.checks import positive
from credo.noise import Draws
from credo.optim.base import NaturalOptimizer
from credo.optim.groups import Group, Params, refuse_both
from credo.types import Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def absorb_curvature_(
    h: Vector, surplus: Vector, delta: float, rate: float, scratch: Vector
) -> None:
    """h ← h + x + x²/(2(h + δ)) with x = −rate·surplus and surplus = h − ĥ, which is used up."""
    bound = torch.add(h, delta, out=scratch)
    h.sub_(surplus, alpha=rate)
    h.addcdiv_(surplus.square_(), bound, value=0.5 * rate * rate)


class IVON(NaturalOptimizer):
    """The improved variational online Newton method; the symbols are in the module's docstring.

    Give ``prior_precision`` or ``weight_decay`` (1e-4 if neither), not both.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        num_data: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.99999),
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        hess_init: float = 1.0,
        damping: float = 0.0,
        clip_radius: float | None = None,
        rescale_lr: bool = True,
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
        if prior_precision is not None and weight_decay is not None:
            refuse_both(prior_precision, weight_decay)
        options: Group = {
            "lr": lr,
            "num_data": num_data,
            "betas": betas,
            "hess_init": hess_init,
            "damping": damping,
            "clip_radius": clip_radius,
            "rescale_lr": rescale_lr,
            "debias": debias,
            "temperature": temperature,
            "augmentation": augmentation,
            "kl_warmup": kl_warmup,
            "samples": samples,
            "draws": draws,
            "seed": seed,
        }
        if prior_precision is None:
            options["weight_decay"] = 1e-4 if weight_decay is None else weight_decay
        else:
            options["prior_precision"] = prior_precision
        super().__init__(params, options, process_group, shared_noise)
        self._products = torch.empty_like(self._eps)
        self._share = 1.0

    def _check(self, group: Group) -> None:
        positive("hess_init", group["hess_init"])
        if group["clip_radius"] is not None:
            positive("clip_radius", group["clip_radius"])

    def _harvest(self, gradient: Vector) -> None:
        """Add ḡ∘ε; all blocks of a step have the same σ, by which it is divided later."""
        random = gradient[: self._num_random]
        if self._samples:
            self._products.addcmul_(self._noise_now, random)
        else:
            torch.mul(self._noise_now, random, out=self._products)

    def _sums(self) -> list[tuple[Vector, int]]:
        return [(self._gradient, 1), (self._products, 1)]

    def _average(self, samples: float, unit: float) -> None:
        self._share = 1.0 / (samples * unit)

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        beta1, beta2 = group["betas"]
        momentum, h = self._memory["momentum"][where], self._memory["curvature"][where]
        scratch = self._scratch[where]
        if not group["deterministic"]:
            products, scale = self._products[where], self._scale[where]
            surplus = torch.addcdiv(h, products, scale, value=-self._share, out=products)
            absorb_curvature_(h, surplus, delta, 1.0 - beta2, scratch)
        momentum.lerp_(self._gradient[where], 1.0 - beta1)
        grown = 1.0 - beta1 ** group["step"] if group["debias"] else 1.0
        rate = group["lr"] * ((group["hess_init"] + delta) if group["rescale_lr"] else 1.0)
        # The gradient is no longer needed, so its memory holds the direction.
        direction = torch.add(momentum, mean, alpha=delta * grown, out=self._gradient[where])
        denominator = torch.add(h, delta + group["damping"], out=scratch)
        if group["clip_radius"] is None:
            mean.addcdiv_(direction, denominator, value=-rate / grown)
        else:
            bound = group["clip_radius"] * grown
            mean.sub_(direction.div_(denominator).clamp_(-bound, bound), alpha=rate / grown)
