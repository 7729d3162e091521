"""Which layer of a network runs last: by its structure where that proves it, else by running it.

The order in which layers were declared is not the order in which they run.

    >>> import torch
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head, self.body = torch.nn.Linear(4, 1), torch.nn.Linear(2, 4)
    ...     def forward(self, x):
    ...         return self.head(self.body(x).tanh())
    >>> last_layer(Net(), torch.zeros(1, 2))
    'head'
    >>> last_layer(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh()))
    '0'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from credo.errors import DataError
from credo.network.state import buffers_kept, evaluating
from credo.types import Inputs

NORM_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
"""Layers that only scale and shift: deterministic by default, and never the last one."""


@dataclass(frozen=True)
class LastLayer:
    """Its dotted path, or why there is none."""

    path: str | None
    why_not: str = ""

    def name(self) -> str:
        """The path; `DataError` with the remedy where there is none."""
        if self.path is None:
            raise DataError(
                f'"last_layer" is not clear for this network: {self.why_not}. Name the layer '
                'instead, as in random="head" or subset="head"'
            )
        return self.path


UNKNOWN = LastLayer(
    None,
    "which layer runs last is known only after a forward pass; credo.fit makes one, and so does "
    "model.observe(inputs)",
)


def last_layer(net: nn.Module, inputs: Inputs | None = None) -> str:
    """The dotted path of the layer with parameters that runs last, norm layers left out.

    Args:
        net: The network.
        inputs: A few examples to run it on; not needed for an ``nn.Sequential``.

    Raises:
        DataError: If it can't be known, is frozen, or is used more than once.
    """
    proved = by_structure(net)
    if proved is not None:
        return proved.name()
    if inputs is None:
        return UNKNOWN.name()
    with torch.no_grad(), evaluating(net), buffers_kept(net), Execution(net) as execution:
        if isinstance(inputs, Tensor):
            net(inputs)
        elif isinstance(inputs, Mapping):
            net(**inputs)
        else:
            net(*inputs)
    return execution.last_layer().name()


def by_structure(net: nn.Module) -> LastLayer | None:
    """The last layer where no forward pass is needed to know it: nested ``nn.Sequential``."""
    layer, path = net, ""
    while True:
        children = [(name, child) for name, child in layer.named_children() if _matters(child)]
        if not children:
            break
        if type(layer) is not nn.Sequential:
            return None
        name, layer = children[-1]
        path = f"{path}.{name}" if path else name
    if not _matters(layer):
        return None
    uses = Counter(id(p) for m in _visits(net) for p in m._parameters.values() if p is not None)
    if any(uses[id(parameter)] > 1 for parameter in layer.parameters()):
        return LastLayer(None, f"{path or 'the last layer'} or its weight is used more than once")
    return _unless_frozen(path, layer)


class Execution(TorchFunctionMode):
    """While entered, notes in which order the layers' parameters are computed with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net
        self._layers: dict[int, str] = {}
        self._norms: set[int] = set()
        for path, module in net.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._layers.setdefault(id(parameter), whole_layer(path))
                    if isinstance(module, NORM_LAYERS):
                        self._norms.add(id(parameter))
        self._calls: list[list[int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A size or a dtype that is looked at is no computation.
        if next(_tensors(result), None) is not None:
            used = [id(t) for t in _tensors((args, kwargs or {})) if id(t) in self._layers]
            used = [key for key in used if key not in self._norms]
            if used:
                self._calls.append(used)
        return result

    def last_layer(self) -> LastLayer:
        """The layer of the last call with parameters."""
        if not self._calls:
            return LastLayer(None, "no layer's parameters took part in the forward pass")
        last = sorted({self._layers[key] for key in self._calls[-1]})
        if len(last) > 1:
            return LastLayer(None, f"{', '.join(map(repr, last))} run in one call")
        (path,) = last
        own = Counter(k for call in self._calls for k in set(call) if self._layers[k] == path)
        if own.most_common(1)[0][1] > 1:
            return LastLayer(None, f"{path!r}, which runs last, is used more than once")
        return _unless_frozen(path, self._net.get_submodule(path))


def whole_layer(path: str) -> str:
    """The path of the layer that a parameter belongs to; parametrised weights are inside of it."""
    return path.partition("parametrizations")[0].rstrip(".")


def _unless_frozen(path: str, layer: nn.Module) -> LastLayer:
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return LastLayer(path)
    return LastLayer(None, f"{path!r}, which runs last, is frozen; unfreeze it")


def _matters(module: nn.Module) -> bool:
    """Whether it has parameters besides those of norm layers."""
    return any(
        parameter is not None and not isinstance(part, NORM_LAYERS)
        for part in module.modules()
        for parameter in part._parameters.values()
    )


def _visits(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all below it, as often as they stand there."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _visits(child)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
