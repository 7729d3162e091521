r"""AMSGrad as it was published: the largest average of squares, and no bias correction.

    m ← β₁m + (1 − β₁)g,      v ← β₂v + (1 − β₂)g∘g,      v̂ ← max(v̂, v)
    w ← w − α m/(√v̂ + ε)

`torch.optim.Adam(amsgrad=True)` divides m by 1 − β₁ᵗ and v̂ by 1 − β₂ᵗ. The two agree after many
steps; in the beginning torch's are smaller, by (1 − β₁ᵗ)/√(1 − β₂ᵗ): the first step here is
(1 − β₁)/√(1 − β₂) = 3.2 times α, there α.

Correction to Book, 2020, appendix C: it is β₁, not β₂, for which the theory asks a schedule
(β₁/t or β₁λᵗ); its authors' experiments keep both constant, and so does this.

====== ========== ==================================================================================
symbol argument   meaning
====== ========== ==================================================================================
α      ``lr``     rate
β₁, β₂ ``betas``  shares that the averages of gradient and square keep
ε      ``eps``    against division by zero
====== ========== ==================================================================================

Reference: Reddi et al., 2018 (arXiv:1904.09237).

    >>> import torch, credo.optim
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> opt = credo.optim.AMSGrad([w], lr=0.1)
    >>> w.grad = torch.tensor([1.0, 100.0])
    >>> opt.step()
    >>> w.detach()
    tensor([0.6838, 0.6838])
"""

from __future__ import annotations

import math

from torch.optim.optimizer import ParamsT

from credo.checks import Decay, NotNegative
from credo.optim.descent import Descent, Mover
from credo.optim.groups import Group
from credo.optim.rectified_adam import fused_adam_


class AMSGrad(Descent):
    """AMSGrad without bias correction.

    Args:
        params: Parameters, or groups of them, as every optimizer of torch takes them.
        lr: Step size.
        betas: Shares that the averages of gradient and square keep.
        eps: Added to the root of the average square.
        weight_decay: Multiple of the weights that is added to the gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 1e-3,
        *,
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    def _advance(self, work: list[tuple[Group, list[Mover]]]) -> None:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        for group, _, moved, slopes, memory in self._counted(work, names):
            fused_adam_(moved, slopes, memory, math.inf, group["lr"], group["betas"], group["eps"])
