r"""MC dropout: a network trained with dropout, which is left on to predict.

    p(y | x) = (1/S) Σ_s p(y | f(x; w ∘ mask_s))

Every mask is a thinned network; their spread is read as uncertainty (Gal & Ghahramani, 2016). It
costs one training and S forward passes. The network's own dropout layers are used as they are. A
network without any gets them by ``p``, after every activation, on a copy that shares its weights:
training moves the network itself.

The probability is a setting like the width: 0.1 for networks that are barely large enough, up to
0.5 for wide ones; held-out NLL tells. For regression the noise is that of the likelihood.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> posterior = credo.fit(model, credo.MCDropout(p=0.1), (x, x**2), epochs=50, progress=False)
    >>> posterior.predict(x, samples=8).epistemic_std.shape
    torch.Size([64, 1])

``credo.Ensemble(credo.MCDropout(p=0.1))`` is ensemble MC dropout (Filos et al., 2019).

References: Gal & Ghahramani, "Dropout as a Bayesian approximation", 2016 (arXiv:1506.02142); Filos
et al., "A systematic comparison of Bayesian deep learning robustness in diabetic retinopathy
tasks", 2019 (arXiv:1912.10481).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

from torch import Generator
from torch.optim import Optimizer

from credo.checks import Probability, checked
from credo.errors import UnsupportedError
from credo.map import MAP, MAPState
from credo.method import Info, State, TemperedMethod
from credo.model import Model
from credo.network.dropout import dropout_layers, with_dropout
from credo.packing import STORED
from credo.posterior.dropout import DropoutPosterior
from credo.posterior.posterior import Posterior
from credo.temperature import Temperature
from credo.types import Batch


@final
@dataclass
class MCDropoutState(State):
    """``training`` is that of `MAP`, whose clock this one shares."""

    training: MAPState = field(metadata=STORED)


@final
@checked
@dataclass(frozen=True)
class MCDropout(TemperedMethod[MCDropoutState]):
    """Training with dropout that predictions leave on.

    Args:
        p: The probability of dropping, of the network's dropout layers or, where there are none, of
            layers put after every activation. None takes the network's layers as they are.
        train: How the weights are trained.
    """

    p: Probability | None = None
    train: MAP = field(default_factory=MAP)

    spreads: ClassVar[bool] = True

    @property
    def temperature(self) -> Temperature:  # type: ignore[override]
        """That of training."""
        return self.train.temperature

    def at(self, temperature: Temperature) -> Self:
        """The same with training at another temperature."""
        return replace(self, train=self.train.at(temperature))

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> MCDropoutState:
        """Start from the network's current weights."""
        if self.p is not None:
            model = model.replace(net=with_dropout(model.net, self.p))
        elif not dropout_layers(model.net):
            raise UnsupportedError(
                f"{type(model.net).__name__} has no dropout layer with a probability above 0, and "
                "without one all samples are the same: credo.MCDropout(p=0.1) puts one after every "
                "activation, on a copy that shares the network's weights"
            )
        training = self.train.init(model, num_data, generator)
        return MCDropoutState(training=training, clock=training.clock)

    def update(self, state: MCDropoutState, batch: Batch) -> tuple[MCDropoutState, Info]:
        """One step of training, with dropout."""
        state.training.model.net.train()
        state.training, info = self.train.update(state.training, batch)
        return state, info

    def posterior(self, state: MCDropoutState) -> Posterior:
        """The trained weights, with dropout left on."""
        return DropoutPosterior.of(self.train.posterior(state.training), self.p)

    def summary(self, state: MCDropoutState, nll: float = math.nan) -> dict[str, Any]:
        """That of training."""
        return self.train.summary(state.training, nll)

    @property
    def looks_at_start(self) -> bool:
        """Yes."""
        return True

    def optimizer_of(self, state: MCDropoutState) -> Optimizer:
        """That of training."""
        return state.training.optimizer
