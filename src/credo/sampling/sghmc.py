r"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum.

    v ← (1 − α)v − ε·G⊙∇Û(w) + √(2αε)·√G⊙ξ,      w ← w + v

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
α      ``friction``       share of the velocity that a step takes away
ε      ``lr``             ε = lr·η/n: without noise this is gradient descent on MAP's loss
                          with momentum 1 − α and rate ``lr``
Û, G,  as in `SGLD`       the potential of a minibatch, the preconditioner, the temperature,
η, ξ                      standard normal noise
====== ================== ==============================================================

The default rate is less than SGLD's, because with friction 0.1 a step is worth ten of them.

Momentum carries chains along the valleys that Langevin dynamics has to walk at random: a step is
worth about 1/α of `SGLD`'s. The bias is as small: with exact gradients a posterior of precision A
is sampled with covariance A⁻¹(I − εA/(2(2 − α)))⁻¹ where G = 1, which at α = 1 is SGLD's own. The
noise of minibatches comes on top and is not estimated (the authors' β̂ = 0).

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=0.5))
    >>> method = credo.SGHMC(lr=0.05, precondition=False, warmup=20)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=220, batch_size=32, progress=False)
    >>> len(posterior.q), round(float(posterior.mean[0]))
    (160, 3)

References: Chen, Fox & Guestrin 2014; Ma, Chen & Fox 2015.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, final

import torch
from torch import Generator, Tensor

from credo.checks import Positive, Range, checked
from credo.model import Model
from credo.packing import STORED
from credo.sampling.langevin import LangevinMethod, LangevinState


@final
@dataclass
class SGHMCState(LangevinState):
    """Where the chains are, and how fast they move."""

    velocity: Tensor = field(kw_only=True, metadata=STORED)


@final
@checked
@dataclass(frozen=True)
class SGHMC(LangevinMethod[SGHMCState]):
    """Hamiltonian dynamics with friction and minibatches (Chen et al., 2014).

    Args:
        temperature: A number or `credo.Balanced`.
        lr: The rate of a gradient step on MAP's loss, as of SGD with momentum 1 − friction.
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
        friction: Share of the velocity that a step takes away; 1 is `SGLD`.
    """

    lr: Positive = 3e-4
    friction: Annotated[float, Range(0, 1, open_low=True)] = 0.1

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> SGHMCState:
        """The chains around the network's current weights, at rest."""
        start = self._start(model, num_data, generator)
        return SGHMCState(**start, velocity=torch.zeros_like(start["positions"]))

    def _move(self, state: SGHMCState, noise: Tensor | None, rate: float, share: float) -> None:
        state.velocity.mul_(1 - self.friction).sub_(state.gradient, alpha=rate)
        if noise is not None:
            state.velocity.add_(noise, alpha=math.sqrt(2 * self.friction * rate * share))
        state.positions.add_(state.velocity)
