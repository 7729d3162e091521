r"""RAdam: Adam whose rate is held back while the average of squares rests on few gradients.

    m ← β₁m + (1 − β₁)g,      v ← β₂v + (1 − β₂)g∘g
    ρ∞ = 2/(1 − β₂) − 1,      ρ = ρ∞ − 2tβ₂ᵗ/(1 − β₂ᵗ)
    ρ ≥ 5:   w ← w − α r m̂/√v̂,      r² = (ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)
    else:    ``early="skip"`` no step (the authors' default), ``"momentum"`` w ← w − α m̂ (torch's)

with m̂ = m/(1 − β₁ᵗ) and √v̂ = (√v + ε)/√(1 − β₂ᵗ). β₂ = 0.999 gives ρ₅ = 4.996 and ρ₆ = 5.994: the
sixth step is the first rectified one.

The choice for the first five steps matters. α m̂ does not know the gradient's size: with α = 0.1,
or with gradients of a hundred, five such steps can throw a network (or ρ of a Gaussian's scale) to
where it does not come back from. `torch.optim.RAdam` takes them; ``early="momentum"`` equals it.

====== ========== ==================================================================================
symbol argument   meaning
====== ========== ==================================================================================
α      ``lr``     rate
β₁, β₂ ``betas``  shares that the averages of gradient and square keep
ε      ``eps``    added to √v, before its bias correction (as both codes do)
====== ========== ==================================================================================

Reference: Liu et al., 2020 (arXiv:1908.03265); Book, 2020 (runs that fall back to chance).

    >>> import torch, credo.optim
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> opt = credo.optim.RAdam([w], lr=0.1)
    >>> for _ in range(6):
    ...     w.grad = torch.tensor([1.0, 100.0])
    ...     opt.step()                                  # five are skipped
    >>> w.detach()
    tensor([0.9974, 0.9974])
    >>> round(rectification(5, 0.999), 3), round(rectification(6, 0.999), 3)
    (0.0, 0.026)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from credo.checks import Decay, NotNegative
from credo.optim.descent import Descent, Mover
from credo.optim.groups import Group


def rectification(step: int, beta2: float) -> float:
    """r at a step, counted from 1; 0 where ρ is below 5 and r is not defined well."""
    longest = 2.0 / (1.0 - beta2) - 1.0
    kept = beta2**step
    length = longest - 2.0 * step * kept / (1.0 - kept)
    if length < 5.0:
        return 0.0
    above = (length - 4.0) * (length - 2.0) * longest
    return math.sqrt(above / ((longest - 4.0) * (longest - 2.0) * length))


class RAdam(Descent):
    """Rectified Adam; see the module's docstring.

    Args:
        params: Parameters, or groups of them, as every optimizer of torch takes them.
        lr: Step size.
        betas: Shares that the averages of gradient and square keep.
        eps: Added to the root of the average square.
        weight_decay: Multiple of the weights that is added to the gradient.
        early: What to do while the average square can't be trusted: "skip" the step as its authors
            do, or take a step of "momentum" as torch does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 1e-3,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
        early: Literal["skip", "momentum"] = "skip",
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "early": early,
        }
        super().__init__(params, options)

    def _advance(self, work: list[tuple[Group, list[Mover]]]) -> None:
        names = ("exp_avg", "exp_avg_sq")
        for group, step, moved, slopes, (m, v) in self._counted(work, names):
            beta1, beta2 = group["betas"]
            factor = rectification(step, beta2)
            if factor:
                eps = group["eps"] / math.sqrt(1.0 - beta2**step)
                fused_adam_(moved, slopes, [m, v], step, group["lr"] * factor, group["betas"], eps)
                continue
            torch._foreach_lerp_(m, slopes, 1.0 - beta1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, slopes, slopes, value=1.0 - beta2)
            if group["early"] == "momentum":
                torch._foreach_add_(moved, m, alpha=-group["lr"] / (1.0 - beta1**step))


def fused_adam_(
    values: list[Tensor],
    gradients: list[Tensor],
    memory: list[list[Tensor]],
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One pass of torch's kernel for Adam; ``memory``: m, v and, for AMSGrad, the largest v.

    After infinitely many steps averages lack nothing: ``step=math.inf`` leaves out 1 − βᵗ.
    """
    count = torch.tensor(float(step), device=values[0].device)
    torch._fused_adam_(
        values,
        gradients,
        memory[0],
        memory[1],
        memory[2] if len(memory) == 3 else [],
        [count] * len(values),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=len(memory) == 3,
        maximize=False,
    )
    # The kernel leaves out the counters by which autograd sees that a tensor is another one.
    torch.autograd.graph.increment_version(values)
