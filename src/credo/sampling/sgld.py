r"""Stochastic gradient Langevin dynamics: draws of the tempered posterior from minibatches.

    w ← w − ½ε·G⊙∇Û(w) + √ε·√G⊙ξ,      Û(w) = (n/η)·(mean NLL of the batch) − log p(w)

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
η      ``temperature``    a number or `credo.Balanced`; draws are of L^{1/η}·p
ε      ``lr``             ε = 2·lr·η/n: ``lr`` is the rate of a gradient step on MAP's loss
G      ``precondition``   1 without; with it 1/√v, v the mean squared gradient in warm-up
ξ                         standard normal, a function of seed, step and chain
====== ================== ==============================================================

No step is ever refused, so the draws are biased: with exact gradients (a ``batch_size`` of all
data: Langevin Monte Carlo, γ = ε/2 in Huix et al. 2022) a posterior of precision A is sampled with
the covariance A⁻¹(I − εA/4)⁻¹ where G = 1, and the noise of minibatches, of covariance C in ∇Û,
adds ¼ε²C to the noise's εI. Less ``lr`` is less bias and slower chains. Where all data fit at once,
`credo.sampling.MALA` and `credo.HMC` have none.

What adapts is G, as in pSGLD: during ``warmup`` epochs v follows the squared gradients as in
RMSprop; then it stays. pSGLD lets it change for ever and neglects the term Γ = ½ε·∂G/∂w of its
drift; here Γ is zero once draws are kept. A falling rate is `credo.fit`'s ``schedule``; draws then
weigh as much as the step they were made with, as in Welling & Teh.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.5))
    >>> method = credo.SGLD(lr=0.1, precondition=False, warmup=20)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=220, batch_size=32, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]))
    (160, 3)

References: Welling & Teh 2011; Li et al. 2016 (pSGLD); Huix et al. 2022 (Langevin Monte Carlo).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Generator, Tensor

from credo.checks import checked
from credo.model import Model
from credo.sampling.langevin import LangevinMethod, LangevinState


@final
@dataclass
class SGLDState(LangevinState):
    """Where the chains are."""


@final
@checked
@dataclass(frozen=True)
class SGLD(LangevinMethod[SGLDState]):
    """Langevin dynamics with minibatches (Welling & Teh, 2011).

    Args:
        temperature: A number or `credo.Balanced`.
        lr: The rate of a gradient step on MAP's loss; it sets the step size.
        precondition: Whether each weight's step follows its mean squared gradient in warm-up.
        chains: How many.
        warmup: Epochs before draws are kept; None is a quarter of them, or what ``cycles`` explore.
        thin: One in so many steps is kept after that.
        keep: At most so many draws of each chain: when there are more, every second is dropped; of
            each cycle as many.
        spread: Chains start at the network's weights plus noise of so many prior scales.
        cycles: How often the rate falls to zero, for draws from several modes; None is a rate that
            `credo.fit`'s ``schedule`` says.
        explore: The share of a cycle that is descent without noise, before draws are kept.
    """

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> SGLDState:
        """The chains around the network's current weights."""
        return SGLDState(**self._start(model, num_data, generator))

    def _move(self, state: SGLDState, noise: Tensor | None, rate: float, share: float) -> None:
        state.positions.sub_(state.gradient, alpha=rate)
        if noise is not None:
            state.positions.add_(noise, alpha=math.sqrt(2 * rate * share))
