r"""A squared-gradient penalty with one weight for all parameters: implicit regularisation, shown.

    minimise  mean NLL(w) + c·‖∇ mean NLL(w)‖² − (temperature/n)·log p(w)

Gradient descent with a finite rate ε follows, to second order, the gradient flow of this loss with
c = ε/4. Variational Laplace's penalty looks alike, but learns a weight σ_λ² for each parameter and
squares gradients of labels drawn from the network; here they are those of the data (empirical
Fisher information), and the result is a point. This is the comparison.

symbols: c ``weight``, w all weights (norm layers included), n ``num_data``, p the model's prior.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Linear(1, 1)
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> method = GradientPenalty(weight=1e-4, lr=0.1)
    >>> posterior = credo.fit(model, method, (x, 3 * x), epochs=150, progress=False)
    >>> round(net.weight.item(), 1)
    3.0

References: Barrett and Dherin 2020; Smith et al. 2021; document 002 §3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from torch import Generator

from credo.checks import positive
from credo.errors import DataError
from credo.map import MAP, MAPState
from credo.method import Info, refuse_nonfinite
from credo.model import Model
from credo.network import Selection
from credo.types import Batch, Json, Vector
from credo.variational.squared_gradient import PenalisedStep, Route, SquaredGradient


@dataclass
class GradientPenaltyState(MAPState):
    """`MAP`'s state, and memory for the penalty."""

    penalty: SquaredGradient = field(kw_only=True)
    scale: Vector = field(kw_only=True)
    grad_scale: Vector = field(kw_only=True)


@dataclass(frozen=True)
class GradientPenalty(MAP):
    """`MAP` with ``weight`` times the squared gradient of the batch's mean NLL in the loss."""

    weight: float = 1e-3
    route: Route = "difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("weight", self.weight)
        if self.route not in ("difference", "exact"):
            raise DataError(f'route={self.route!r} must be "difference" or "exact"')

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> GradientPenaltyState:
        """Start from the network's current weights."""
        base = super().init(model, num_data, generator)
        return GradientPenaltyState(
            **{f.name: getattr(base, f.name) for f in fields(base)},
            penalty=SquaredGradient("empirical", self.route, "a penalty on the squared gradient"),
            scale=torch.zeros_like(base.gradient),
            grad_scale=torch.zeros_like(base.gradient),
        )

    def update(self, state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """One optimizer step on one minibatch."""
        assert isinstance(state, GradientPenaltyState)
        size = len(batch[1])
        state.clock.begin(state.num_data, size)
        # (S/2) Σ σ²ḡ² is c‖ḡ‖² where every σ is √(2c/S).
        state.scale.fill_(math.sqrt(2 * self.weight / size))
        nothing = Selection.of(())
        step = PenalisedStep(
            model=state.model,
            flat=state.flat,
            random=state.everything,
            fixed=nothing,
            mean=state.flat.vector,
            scale=state.scale,
            batch=batch,
            generator=Generator(),
            grad_mean=state.gradient,
            grad_scale=state.grad_scale,
            grad_point=nothing.read(state.gradient),
        )
        penalised = state.penalty.gradients(step)
        refuse_nonfinite(penalised.nll + penalised.penalty, state.flat, state.clock)
        self._descend(state)
        return state, Info(penalised.nll, {"penalty": penalised.penalty})

    def config(self) -> Json:
        """The settings, for the run folder."""
        return {
            **super().config(),
            "type": "GradientPenalty",
            "weight": self.weight,
            "route": self.route,
        }
