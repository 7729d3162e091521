"""The members of an ensemble: networks with starts of their own, and what is kept of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from credo.collectives import Ranks
from credo.ensembles.stacked import Stack
from credo.errors import DataError, UnsupportedError
from credo.method import State
from credo.model import Model
from credo.network import segments_of
from credo.packing import STORED

Factory = Callable[[], nn.Module]
"""Builds a network with a new random start."""

RESETS = ("reset_parameters", "_reset_parameters")
"""How torch's layers call what draws their first weights; attention has the second one."""


def another(model: Model, factory: Factory | None, seed: int) -> Model:
    """The same model on a network of its own, with first weights drawn from ``seed``.

    Without a factory the network is copied and every layer draws its first weights anew by its own
    ``reset_parameters``; frozen parameters stay as they are.

    Raises:
        UnsupportedError: A layer can't draw its weights anew, and there is no factory.
        DataError: The factory builds another architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _reset_copy(model.net) if factory is None else _built(model.net, factory)
    return model.replace(net=net, likelihood=copy.deepcopy(model.likelihood))


def _built(net: nn.Module, factory: Factory) -> nn.Module:
    built = factory()
    if not isinstance(built, nn.Module):
        raise DataError(
            f"the factory of an ensemble must build networks, but it gave a {type(built).__name__}"
        )
    here, there = ({s.name: s.shape for s in segments_of(each)} for each in (net, built))
    if here != there:
        odd = [name for name in [*here, *there] if here.get(name) != there.get(name)]
        raise DataError(
            f"the factory builds another architecture than the model has: {odd[0]} has shape "
            f"{there.get(odd[0], 'none')} there and {here.get(odd[0], 'none')} in the model"
        )
    _refuse_other_layers(net, built)
    like = next(parameter for parameter in net.parameters() if parameter.requires_grad)
    return built.to(like.device, like.dtype)


def _refuse_other_layers(net: nn.Module, built: nn.Module) -> None:
    """All members predict on copies of one network, so that another activation would be lost."""
    here, there = (
        {name: f"{type(m).__name__}({m.extra_repr()})" for name, m in each.named_modules()}
        for each in (net, built)
    )
    odd = [name for name in [*here, *there] if here.get(name) != there.get(name)]
    if odd:
        raise DataError(
            f"the factory builds another architecture than the model has: {odd[0] or 'itself'} is "
            f"{there.get(odd[0], 'missing')} there and {here.get(odd[0], 'missing')} in the model"
        )


def _reset_copy(net: nn.Module) -> nn.Module:
    for name, layer in net.named_modules():
        trained = any(p is not None and p.requires_grad for p in layer._parameters.values())
        if trained and _reset_of(layer) is None:
            raise UnsupportedError(
                f"the layer {name or 'itself'} ({type(layer).__name__}) has weights but no "
                "reset_parameters, so that a member of an ensemble can't get a start of its own. "
                "Write one, or say how to build the network: "
                "credo.Ensemble(method, factory=lambda: MyNetwork())"
            )
    try:
        copied: nn.Module = copy.deepcopy(net)
    except Exception as error:  # any class may refuse to be copied, in its own way
        raise UnsupportedError(
            f"{type(net).__name__} can't be copied for the members of an ensemble ({error}): say "
            "how to build it, credo.Ensemble(method, factory=lambda: MyNetwork())"
        ) from error
    frozen = [(p, p.detach().clone()) for p in copied.parameters() if not p.requires_grad]
    for layer in copied.modules():
        reset = _reset_of(layer)
        if reset is not None:
            reset()
    with torch.no_grad():
        for parameter, value in frozen:
            parameter.copy_(value)
    return copied


def _reset_of(layer: nn.Module) -> Callable[[], None] | None:
    for name in RESETS:
        found = getattr(layer, name, None)
        if callable(found):
            return found
    return None


@final
class MembersOptimizer(Optimizer):
    """The groups of all members' optimizers, for schedules; it takes no steps."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._each = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Asked for anew: a restored optimizer has new groups."""
        return [group for optimizer in self._each for group in optimizer.param_groups]


@final
@dataclass
class EnsembleState(State):
    """Every member's model and state.

    ``lost`` are the numbers of those that diverged; ``ranks`` train members k, k + size, ….
    ``stack`` has what is newer than the members' states while they are trained together: whoever
    reads a member calls `settle` before. ``in_turn`` says that they are not, None that nobody has
    asked yet.
    """

    models: list[Model]
    members: list[Any]
    ranks: Ranks
    lost: list[int] = field(default_factory=list, metadata=STORED)
    stack: Stack | None = None
    in_turn: bool | None = None

    @property
    def kept(self) -> list[int]:
        """The members that did not diverge."""
        return [k for k in range(len(self.members)) if k not in self.lost]

    @property
    def own(self) -> list[int]:
        """Those of them that this rank trains."""
        return [k for k in self.kept if self.owner(k) == self.ranks.rank]

    def owner(self, k: int) -> int:
        """The place of the rank that trains member k."""
        return k % self.ranks.size

    def settle(self) -> None:
        """Bring the members' states up to date."""
        if self.stack is not None:
            self.stack.settle()


def copy_network(source: Model, target: Model) -> None:
    """Give one network the weights and buffers of another of its architecture."""
    with target.bind().writing() as vector:
        vector.copy_(source.bind().vector)
    with torch.no_grad():
        for name, buffer in target.buffers().items():
            buffer.copy_(source.buffers()[name])
