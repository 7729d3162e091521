r"""AdaBound and AMSBound: Adam at first, stochastic gradient descent with momentum at last.

    m ← β₁m + (1 − β₁)g,      v ← β₂v + (1 − β₂)g∘g            (AMSBound: v̂ ← max(v̂, v) for v below)
    w ← w − clip( α√(1 − β₂ᵗ)/(1 − β₁ᵗ) / (√v + ε),  lower(t), upper(t) ) ∘ m
    lower(t) = α*(1 − 1/(γt + 1)),      upper(t) = α*(1 + 1/(γt))

The bounds start at (almost) 0 and ∞ and close in on α*: after some 1/γ steps every weight has the
rate α*, and the step is that of ``SGD(lr=α*·(1 − β₁), momentum=β₁)``. With γ → 0 it stays Adam
(AMSBound: Adam with AMSGrad as torch has it), with γ → ∞ it is SGD from the start.

====== =============== =============================================================================
symbol argument        meaning
====== =============== =============================================================================
α      ``lr``          Adam's rate at the beginning
α*     ``final_lr``    the rate at the end
γ      ``gamma``       how fast the bounds close in
β₁, β₂ ``betas``       shares that the averages of gradient and square keep
ε      ``eps``         against division by zero, which the upper bound already prevents: may be 0
====== =============== =============================================================================

Where a scheduler changes α, α* changes by the same factor, relative to the rate that the group
began with (``base_lr`` in the group, stored with the state: a resumed run does not take a decayed
rate for its first). A scheduler that touched α alone would do nothing once the bounds have closed.

Corrections. Book (2020) counts AdaBound among optimizers that "only rely on first moment
information": what it clips is a rate made of the second moment. Its bounds have 1 − β₂ for γ, which
are equal at the defaults. The paper divides the clipped rate by √t as well; the authors' code, with
which its results were made, does not, and neither does this.

Reference: Luo et al., 2019 (arXiv:1902.09843); compared by Book, 2020.

    >>> import torch, credo.optim
    >>> net = torch.nn.Linear(3, 1)
    >>> opt = credo.optim.AdaBound(net.parameters(), lr=1e-3, final_lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     net(torch.ones(4, 3)).square().mean().backward()
    ...     opt.step()
    >>> [round(bound, 6) for bound in bounds(final_lr=0.1, gamma=1e-3, step=1)]
    [0.0001, 100.1]
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from credo.checks import Decay, NotNegative, Positive, Range
from credo.optim.descent import (
    Descent,
    Mover,
    rate_factor,
)
from credo.optim.groups import Group

BLOCK = 2**20
"""Elements that the kernel path takes at once: a scratch of four megabytes, not a whole copy."""

HEADROOM = {torch.float32: (60, 120), torch.float64: (400, 900)}
"""Bits by which `_step_by_kernel` scales squares: at least, and as many as leave room on top."""


def bounds(final_lr: float, gamma: float, step: int) -> tuple[float, float]:
    """The least and the largest rate at a step, counted from 1."""
    lower = final_lr * (1.0 - 1.0 / (gamma * step + 1.0))
    upper = final_lr * (1.0 + 1.0 / (gamma * step)) if gamma else math.inf
    return lower, upper


class AdaBound(Descent):
    """Adam whose rates are clipped to bounds that close; see the module's docstring.

    Args:
        params: Parameters, or groups of them, as every optimizer of torch takes them.
        lr: Step size of Adam, from which rates start.
        betas: Shares that the averages of gradient and square keep.
        eps: Added to the root of the average square.
        weight_decay: Multiple of the weights that is added to the gradient.
        final_lr: Where both bounds end: the rate of SGD at last.
        gamma: How fast they close; 0 is Adam, infinity SGD.
    """

    _names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 1e-3,
        *,
        final_lr: Positive = 0.1,
        gamma: Annotated[float, Range(0, infinite=True)] = 1e-3,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        options = {
            "lr": lr,
            "final_lr": final_lr,
            "gamma": gamma,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options)

    def _advance(self, work: list[tuple[Group, list[Mover]]]) -> None:
        for group, step, moved, slopes, memory in self._counted(work, self._names):
            beta1, beta2 = group["betas"]
            final_lr = group["final_lr"] * rate_factor(group)
            lower, upper = bounds(final_lr, group["gamma"], step)
            rate = group["lr"] * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
            # A rate between bounds is a denominator between bounds.
            least = rate / upper if upper else 0.0
            most = rate / lower if lower else math.inf
            # Then m² < v·(1 − β₁)²/((1 − β₁²/β₂)(1 − β₂)), as the kernel needs it to be.
            if rate and beta2 > beta1**2 and _has_kernel(moved[0]):
                _average_by_kernel(moved, slopes, memory, beta1, beta2)
                for w, m, v in zip(moved, memory[0], memory[-1], strict=True):
                    _step_by_kernel(w, m, v, rate, group["eps"], least, most)
                # It leaves out the counters by which autograd sees that a tensor is another one.
                torch.autograd.graph.increment_version(moved)
                continue
            torch._foreach_lerp_(memory[0], slopes, 1.0 - beta1)
            torch._foreach_mul_(memory[1], beta2)
            torch._foreach_addcmul_(memory[1], slopes, slopes, value=1.0 - beta2)
            if len(memory) == 3:
                torch._foreach_maximum_(memory[2], memory[1])
            if rate:
                _step_by_parts(moved, memory[0], memory[-1], rate, group["eps"], least, most)


class AMSBound(AdaBound):
    """`AdaBound` with the largest average of squares so far in the place of the present one."""

    _names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _step_by_parts(
    values: list[Tensor],
    momenta: list[Tensor],
    squares: list[Tensor],
    rate: float,
    eps: float,
    least: float,
    most: float,
) -> None:
    """w ← w − rate·m/clip(√v + ε, least, most)."""
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, eps)
    torch._foreach_clamp_min_(denominators, least)
    torch._foreach_clamp_max_(denominators, most)
    torch._foreach_addcdiv_(values, momenta, denominators, value=-rate)


def _has_kernel(value: Tensor) -> bool:
    return value.device.type == "cpu" and value.dtype in HEADROOM


def _average_by_kernel(
    values: list[Tensor],
    slopes: list[Tensor],
    memory: list[list[Tensor]],
    beta1: float,
    beta2: float,
) -> None:
    """m and v, and the largest v if it is kept, by torch's kernel for Adam at a rate of 0."""
    torch._fused_adam_(
        values,
        slopes,
        memory[0],
        memory[1],
        memory[2] if len(memory) == 3 else [],
        [torch.ones(())] * len(values),
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=1.0,
        amsgrad=len(memory) == 3,
        maximize=False,
    )


def _step_by_kernel(
    value: Tensor,
    momentum: Tensor,
    square: Tensor,
    rate: float,
    eps: float,
    least: float,
    most: float,
) -> None:
    """The same, with torch's kernel for Adagrad doing root, division and difference in one pass.

    That kernel computes w − αg/(√(s + g²) + ε). Here g is m, and s is v between the squares of the
    bounds, c times as large, as are α² and ε²: c is so large that m² is below rounding. Torch's
    root alone takes longer than this kernel does, on processors that MKL does not favour.
    """
    w, m, v = value.view(-1), momentum.view(-1), square.view(-1)
    root = 2.0 ** (_bits(most, w.dtype) // 2)
    scale = root * root
    eps = min(eps, most)  # most − eps is a root, hence not negative
    low, high = (_square(bound - eps, scale, w.dtype) for bound in (max(least, eps), most))
    once = torch.ones(())
    scratch = torch.empty(min(BLOCK, w.numel()), dtype=w.dtype)
    for start in range(0, w.numel(), BLOCK):
        block = slice(start, start + BLOCK)
        target = w[block]
        s = torch.mul(v[block], scale, out=scratch[: target.numel()]).clamp_(low, high)
        torch._fused_adagrad_(
            [target],
            [m[block]],
            [s],
            [once],
            lr=rate * root,
            lr_decay=0.0,
            weight_decay=0.0,
            eps=eps * root,
            maximize=False,
        )


def _bits(most: float, dtype: torch.dtype) -> int:
    """log₂ c: what takes most² to the top of the type's range, within limits."""
    fewest, top = HEADROOM[dtype]
    if not 0 < most < math.inf:
        return fewest
    return min(max(top - 2 * math.ceil(math.log2(most)), fewest), top)


def _square(root: float, scale: float, dtype: torch.dtype) -> float:
    """scale·root² or, where numbers of this type end, infinity."""
    square = root * root * scale
    return square if square <= torch.finfo(dtype).max else math.inf
