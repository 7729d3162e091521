r"""The members of an ensemble trained as one: a step of all of them in one pass.

    W ← W − lr · Adam(∇_W Σ_k NLL(w_k) − (temperature/n)·∇ log p(w_k)),     W (M, T), row k member k

Members do not know of each other: the gradient of the sum by row k is member k's own, and an
optimizer that treats every number by itself makes the step that it would make of each row alone. So
the result is that of training in turn, up to rounding. What it saves is calls: small networks spend
their time on them, and M members make as many as one.

`Stack.settle` gives every member its weights, noise and optimizer's state, so that states are
packed, resumed and read as if they had been trained one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from credo.ensembles.stacked_loss import StackedLoss
from credo.ensembles.stacked_network import StackedNetwork
from credo.errors import NonFiniteError, UnsupportedError
from credo.map import MAP, MAPState, PriorPull
from credo.method import Method, refuse_nonfinite, temperature_of
from credo.model import Model
from credo.network.batches import BatchStack
from credo.optim import by_name as optimizers
from credo.packing import pack_optimizer, unpack_optimizer
from credo.penalties import FlatPenalty
from credo.types import Batch, Json

ELEMENTWISE = frozenset(optimizers.BY_NAME) - {"yellowfin"}
"""Optimizers by name that treat every number by itself; YellowFin reads the gradient's norm."""


def why_not(method: Method[Any]) -> str | None:
    """What keeps members of this method from being trained as one."""
    if type(method) is not MAP:
        return f"its method is {type(method).__name__}; credo.MAP and credo.MLE can be"
    optimizer = method.optimizer
    if not isinstance(optimizer, str):
        return (
            "its optimizer is not given by name, so that nobody knows whether it treats every "
            "weight by itself"
        )
    if optimizer.lower() not in ELEMENTWISE:
        return f"its optimizer, {optimizer}, does not treat every weight by itself"
    return None


MOST_WORK = 10_000_000
"""Weights times examples of a minibatch, up to which members are trained as one by default.

Time of five members as one, in units of that in turn, of `credo.fit` as a whole, on one thread of a
CPU (``python -m bench.ensembles grid``; medians of three rounds, own orders and a common one):

============== ===== =============== ==== ======
network        batch weights × batch own  common
============== ===== =============== ==== ======
10-50-1        32    19 thousand     0.31 0.29
10-50-50-1     32    101 thousand    0.31 0.31
10-50-1        512   308 thousand    0.47 0.49
64-200-10      32    480 thousand    0.39 0.41
784-100-10     32    2.5 million     0.61 0.62
64-200-10      256   3.8 million     0.70 0.65
100-1000-10    32    3.6 million     0.60 0.68
784-400-400-10 32    15 million      0.83 1.06
784-100-10     256   20 million      0.98 1.06
============== ===== =============== ==== ======
"""

MEASURED = ("Linear", "LayerNorm")
"""Layers that the figures are of; networks with others are trained in turn by default."""


def is_faster(model: Model, batch_size: int) -> bool:
    """Whether members of this model take less time as one than in turn, by what was measured."""
    segments = model.segments
    weights = sum(segment.size for segment in segments)
    return weights * batch_size <= MOST_WORK and all(s.layer_type in MEASURED for s in segments)


@final
class Diverged(Exception):
    """Some members' loss is not a number; nothing was changed.

    Args:
        errors: What there is to say of each, by its place in the stack.
    """

    def __init__(self, errors: Mapping[int, NonFiniteError]) -> None:
        super().__init__(", ".join(map(str, errors)))
        self.errors = errors


@final
class Stack:
    """Members' states, for as long as they are trained as one.

    Args:
        method: That of every member.
        states: The members'; they are up to date when `settle` was called.
        batch: A minibatch to try the networks on: one for all, or one for each.

    Raises:
        UnsupportedError: They can't be trained so; the text says why.
    """

    def __init__(self, method: MAP, states: Sequence[MAPState], batch: Batch | BatchStack) -> None:
        self._method, self._states = method, states
        models = [state.model for state in states]
        with torch.no_grad():
            self.weights = torch.stack([state.flat.vector for state in states])
            columns = zip(*(state.noise for state in states), strict=True)
            self._noise = [torch.stack([p.detach() for p in column]) for column in columns]
        self._gradient = torch.zeros_like(self.weights)
        self.weights.grad = self._gradient
        common = not isinstance(batch, BatchStack)
        inputs = batch.inputs if isinstance(batch, BatchStack) else batch[0]
        self.network = StackedNetwork(models, self.weights, self._gradient, inputs, common)
        self._loss = StackedLoss(models, self._noise)
        self._leaves = [*self.network.leaves, *self._loss.leaves]
        self._count = torch.tensor(float(len(states)), dtype=self.weights.dtype,
                                   device=self.weights.device)  # fmt: skip
        group = {"params": [self.weights, *self._noise], "lr": method.lr, "name": "mean"}
        self._optimizer = optimizers.build(method.optimizer, [group])
        unpack_optimizer(
            self._optimizer, *_join([pack_optimizer(state.optimizer) for state in states])
        )
        self._pulls = self._make_pulls()
        self._settled = True

    def step(self, batch: Batch | BatchStack) -> float:
        """One step of every member; the mean of their mean NLLs.

        Raises:
            Diverged: Before anything is changed, if a loss is not a number.
            UnsupportedError: The networks can't run as one on this batch.
        """
        common = not isinstance(batch, BatchStack)
        inputs, targets = (batch.inputs, batch.targets) if isinstance(batch, BatchStack) else batch
        first = self._states[0]
        first.clock.begin(first.num_data, targets.shape[0 if common else 1])
        outputs = self.network.outputs(inputs, common)
        loss = self._loss.mean(outputs, targets, common)
        value = loss.item()
        if not math.isfinite(value):
            value = self._look_for_divergence(outputs, targets, common)
        # A parameter that the loss does not reach has gradient 0, as when it is trained by itself.
        found = torch.autograd.grad(
            loss, self._leaves, self._count.to(loss.dtype), materialize_grads=True
        )
        views = self.network.gradients
        torch._foreach_copy_(views, found[: len(views)])
        for stacked, gradient in zip(
            self._noise, self._loss.gradients(found[len(views) :]), strict=True
        ):
            stacked.grad = gradient
        weight = temperature_of(self._method.temperature, first) / first.num_data
        if weight:
            for pull in self._pulls:
                pull.add_(weight)
        # A schedule sets the rates of the members' own optimizers, the same for all.
        rate = first.optimizer.param_groups[0]["lr"]
        self._optimizer.param_groups[0]["lr"] = rate
        self._settled = False
        self._optimizer.step()
        first.clock.tick()
        return value

    def __len__(self) -> int:
        return len(self._states)

    def settle(self) -> None:
        """Bring every member's state up to date."""
        if self._settled:
            return
        self._settled = True
        tensors, meta = pack_optimizer(self._optimizer)
        for k, state in enumerate(self._states):
            state.clock = replace(self._states[0].clock) if k else state.clock
            with state.flat.writing() as vector:
                vector.copy_(self.weights[k])
            with torch.no_grad():
                state.gradient.copy_(self._gradient[k])
                for parameter, values in zip(state.noise, self._noise, strict=True):
                    parameter.copy_(values[k])
            own = pack_optimizer(state.optimizer)[1]["groups"]
            unpack_optimizer(
                state.optimizer, _row(tensors, k), {"state": dict(meta["state"]), "groups": own}
            )

    def _make_pulls(self) -> list[PriorPull]:
        prior, random = self._states[0].prior, self._states[0].random
        if isinstance(prior, FlatPenalty):  # it knows single vectors only
            rows = zip(self.weights.unbind(), self._gradient.unbind(), strict=True)
            return [PriorPull(prior, random, w, gradient) for w, gradient in rows]
        return [PriorPull(prior, random, self.weights, self._gradient)]

    def _look_for_divergence(self, outputs: Tensor, targets: Tensor, common: bool) -> float:
        """Name the members whose loss is not a number; the mean, if only it overflowed."""
        self.settle()
        errors, losses = {}, []
        for k, state in enumerate(self._states):
            nll = self._loss.of_member(k, outputs, targets, common)
            losses.append(nll / len(self._states))
            try:
                refuse_nonfinite(nll, state.flat, state.clock)
            except NonFiniteError as error:
                errors[k] = error
        if errors:
            raise Diverged(errors)
        return sum(losses)


def _join(packed: Sequence[tuple[dict[str, Tensor], Json]]) -> tuple[dict[str, Tensor], Json]:
    """The states of the members' optimizers as that of one over the stacked vectors.

    What belongs to every weight is stacked; what is one number for a whole vector, such as the
    number of steps, is the same for all members.
    """
    first, meta = packed[0]
    if any(tensors.keys() != first.keys() for tensors, _ in packed):
        raise UnsupportedError("some of its members have made steps and others have not")
    joined = {}
    for name, tensor in first.items():
        # Of the weights, whose vector is never without dimensions, unlike a noise's scale.
        by_weight = first[f"0.{name.split('.', 1)[1]}"].dim() > 0
        each = [tensors[name] for tensors, _ in packed]
        if not by_weight and any(not torch.equal(tensor, other) for other in each):
            raise UnsupportedError("its members have made different numbers of steps")
        joined[name] = torch.stack(each) if by_weight else tensor.clone()
    return joined, meta


def _row(tensors: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Member k's part of the stacked optimizer's state, as a copy."""
    return {
        name: (tensor[k] if tensors[f"0.{name.split('.', 1)[1]}"].dim() > 1 else tensor).clone()
        for name, tensor in tensors.items()
    }
