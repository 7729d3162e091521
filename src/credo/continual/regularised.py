r"""Training on a new task while something holds on to the old ones.

    minimise  a·mean NLL(θ; new task) + R(θ)        by `credo.fit`, with Adam or any other optimizer

symbols: R a `Regulariser`, a its ``loss_weight`` (1). R has a closed gradient on the flat vector
(EWC, SI: `Regulariser.add_gradient`), or is made of network outputs (replay, functional
regularisation: `Regulariser.term`, which joins the graph of the loss before the backward pass), or
watches the steps (SI: `Regulariser.stepped`).

`RegularisedMAP` is `credo.MAP` plus R, with the norm of the whole gradient clipped if ``clip`` says
so. Without R it takes MAP's steps, bit for bit.

    >>> import torch, credo
    >>> model = credo.Model(torch.nn.Linear(1, 1), credo.likelihoods.Gaussian(scale=1.0))
    >>> x = torch.linspace(-1, 1, 8)[:, None]
    >>> _ = credo.fit(model, RegularisedMAP(lr=0.1), (x, 3 * x), epochs=150, progress=False)
    >>> round(model.net.weight.item(), 1)
    3.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Generator, Tensor

from credo.checks import Positive, checked
from credo.map import MAPState, PointMethod
from credo.method import Info
from credo.model import Model
from credo.storage import under
from credo.temperature import Temperature
from credo.types import Batch, Json


class Regulariser:
    """R, and what it does during the training of one task; this one is R = 0.

    ``state`` has the network (``state.model``, ``state.flat``), the gathered gradient of the loss
    (``state.gradient``, over all of ``state.flat``) and ``state.clock``.
    """

    loss_weight: float = 1.0

    def begin(self, state: MAPState) -> None:
        """Before the first step, at the weights that training starts from.

        Args:
            state: Of the training.
        """

    def term(self, state: MAPState) -> Tensor | None:
        """A scalar to be added to the loss before its backward pass.

        Args:
            state: Of the training.
        """
        return None

    def add_gradient(self, state: MAPState) -> None:
        """Add ∇R to ``state.gradient``, which holds the gradient of the loss and ``term``.

        Args:
            state: Of the training.
        """

    def stepped(self, state: MAPState) -> None:
        """After a step.

        Args:
            state: Of the training.
        """

    def value(self, state: MAPState) -> float:
        """R at the present weights, logged once per epoch.

        Args:
            state: Of the training.
        """
        return 0.0

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """What changes while the task is trained; what was there before is the learner's."""
        return {}, {}

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``, after ``begin``.

        Args:
            tensors: Those of ``pack``.
            meta: The JSON of ``pack``.
        """

    def config(self) -> Json:
        """Its settings, for the run folder."""
        return {"type": type(self).__name__}


@final
@checked
@dataclass(frozen=True)
class RegularisedMAP(PointMethod):
    """`MAP` with a regulariser; by default without a prior.

    Args:
        temperature: Weight of the prior.
        optimizer: Its name, or a function that makes one.
        lr: The optimizer's rate.
        regulariser: R.
        clip: The largest norm that a gradient may have, prior aside; None leaves all as they are.
    """

    temperature: Temperature = 0.0
    regulariser: Regulariser = field(default_factory=Regulariser)
    clip: Positive | None = None

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> MAPState:
        """Start from the network's current weights.

        Args:
            model: What is trained.
            num_data: Examples of the task.
            generator: Not needed.
        """
        state = super().init(model, num_data, generator)
        self.regulariser.begin(state)
        return state

    def update(self, state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """One optimizer step on one minibatch.

        Args:
            state: Of the training.
            batch: Inputs and targets.
        """
        state, info = super().update(state, batch)
        with torch.no_grad():
            self.regulariser.stepped(state)
        return state, info

    def _gradient(self, state: MAPState, batch: Batch) -> float:
        nll = state.model.mean_nll(batch)
        weight = self.regulariser.loss_weight
        loss = nll if weight == 1.0 else weight * nll
        term = self.regulariser.term(state)
        if term is not None:
            loss = loss + term
        self._backward(state, loss)
        with torch.no_grad():
            self.regulariser.add_gradient(state)
            if self.clip is not None:
                state.gradient.mul_((self.clip / state.gradient.norm()).clamp(max=1.0))
        return nll.item()

    def summary(self, state: MAPState, nll: float = math.nan) -> dict[str, Any]:
        """MAP's, and R.

        Args:
            state: Of the training.
            nll: The epoch's mean NLL.
        """
        return {**super().summary(state, nll), "regulariser": self.regulariser.value(state)}

    def pack(self, state: MAPState) -> tuple[dict[str, Tensor], Json]:
        """MAP's, and what the regulariser has gathered: it is a setting that learns.

        Args:
            state: Of the training.
        """
        tensors, meta = super().pack(state)
        more, facts = self.regulariser.pack()
        return {**tensors, **{f"regulariser.{k}": v for k, v in more.items()}}, {
            **meta, "regulariser": facts
        }  # fmt: skip

    def unpack(self, state: MAPState, tensors: Mapping[str, Tensor], meta: Json) -> MAPState:
        """The inverse of ``pack``.

        Args:
            state: A fresh one of the same model.
            tensors: Those of ``pack``.
            meta: The JSON of ``pack``.
        """
        state = super().unpack(state, tensors, meta)
        self.regulariser.unpack(under("regulariser.", tensors), meta["regulariser"])
        return state
