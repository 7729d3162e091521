"""The forward pass of which Jacobians are taken: its calls, and what it must be like."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from credo.autodiff.jacobian_blocks import Block, MatrixBlock, Part, Replay, ReplayedBlock
from credo.autodiff.jacobian_layers import MatrixTap, Tap, tap
from credo.autodiff.squares_calls import Use, Watch
from credo.autodiff.squares_replay import Recorded
from credo.autodiff.squares_sinks import Sink
from credo.errors import DataError, UnsupportedError
from credo.network.flat import FlatParams
from credo.network.selection import Selection
from credo.types import Inputs

_TOLD: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The parameters that each network's user was warned of."""


class Taps:
    """An observer (`credo.autodiff.squares_calls.Observer`) that notes every call with a rule."""

    def __init__(self, flat: FlatParams, selection: Selection) -> None:
        found = [(s, flat.parameter_at[s.start]) for s in selection.segments]
        # Nothing is squared here; the sinks' accumulators only tell a parameter's shape.
        self.sinks = {id(p): Sink(s, p, p.detach()) for s, p in found}
        self.taps: list[Tap] = []
        self._parts: defaultdict[Sink, list[Part]] = defaultdict(list)
        self._dims: Mapping[Sink, int | None] = {}
        self._examples: int | None = None

    def watch(
        self, forward: Callable[[], Any], dims: Mapping[Sink, int | None], examples: int | None
    ) -> Any:
        """Run ``forward`` and note its calls; ``dims`` says where each parameter sees examples."""
        self._dims, self._examples = dims, examples
        with Watch(self):
            return forward()

    def settle(self, outputs: Tensor) -> list[Sink]:
        """The parameters that have to be replayed: also those that reached the outputs unseen."""
        if not outputs.requires_grad:
            self.taps.clear()
            self._parts.clear()
        unseen = [
            sink for sink in self.sinks.values() if sink.outside is None and sink not in self._parts
        ]
        if unseen and outputs.requires_grad:
            found = torch.autograd.grad(
                outputs.sum(), [s.parameter for s in unseen], retain_graph=True, allow_unused=True
            )
            for sink, grad in zip(unseen, found, strict=True):
                if grad is not None:
                    sink.outside = "used where calls can't be seen"
        return [sink for sink in self.sinks.values() if sink.outside is not None]

    def blocks(self, selection: Selection, call: Recorded, slow: list[Sink]) -> Iterator[Block]:
        """One for each segment, in order."""
        places, replay = selection.slices(), Replay(call, slow)
        for sink in self.sinks.values():
            place, parts = places[sink.segment.name], self._parts[sink]
            if sink.outside is not None:
                yield ReplayedBlock(sink, place, replay)
            elif len(parts) == 1 and _is_whole_matrix(parts[0], sink):
                matrix = parts[0].tap
                assert isinstance(matrix, MatrixTap)
                yield MatrixBlock(sink, place, parts[0], matrix)
            else:
                yield Block(sink, place, parts)

    # What the mode asks.

    def is_idle(self) -> bool:
        """Where no gradient is asked for."""
        return not torch.is_grad_enabled()

    def begin(self, examples: int) -> float | None:
        """No rule runs its own backward pass."""
        return None

    def use(self, use: Use) -> Tensor:
        """Note the call; it is answered as the layer would."""
        rule, output = use.rule, use.plain()
        for part in rule.parts:
            dim = self._dims.get(part.sink, rule.example_dim)
            if dim is None or not rule.allows(dim, use.inputs):
                self.outside(part.sink, "used with another number of rows than there are examples")
            elif use.inputs.shape[dim] != self._examples:
                self.outside(part.sink, f"used with {use.inputs.shape[dim]} rows")
            else:
                rule.example_dim = dim
        if not output.requires_grad or all(part.sink.outside is not None for part in rule.parts):
            return output
        noted = tap(rule, use.inputs, use.weight, output)
        self.taps.append(noted)
        for part in rule.parts:
            self._parts[part.sink].append(Part(noted, part.rows, part is rule.bias))
        return output

    def outside(self, sink: Sink, reason: str) -> None:
        """This parameter is used in a way that has no rule."""
        sink.outside = sink.outside or reason


def _is_whole_matrix(part: Part, sink: Sink) -> bool:
    whole = len(part.rows) == len(sink.parameter)
    return isinstance(part.tap, MatrixTap) and whole and not part.is_bias


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With which the network is called."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Without gradients for parameters that nobody asked about: what precedes needs no graph."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def refuse_batch_statistics(net: nn.Module) -> None:
    """Raise `UnsupportedError` where batch normalisation would mix the examples."""
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        ):
            raise UnsupportedError(
                f"{name or 'the network'} normalises with the statistics of the batch, so no "
                "example has outputs, or a Jacobian, of its own. Call net.eval(), or use GroupNorm."
            )


def check_outputs(outputs: Any, call: Recorded) -> None:
    """Raise `DataError` unless they are a tensor with the examples first."""
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the network returned {type(outputs).__name__}, not a tensor; wrap it in a module "
            "whose forward returns the outputs that the likelihood needs"
        )
    if outputs.dim() == 0 or len(outputs) != call.examples:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} don't have the {call.examples} examples of "
            "the inputs along their first dimension"
        )


def tell(net: nn.Module, slow: Sequence[Sink]) -> None:
    """Warn, once per network, of parameters that have to be replayed."""
    told = _TOLD.setdefault(net, set())
    new = [sink for sink in slow if sink.segment.name not in told]
    if new:
        told.update(sink.segment.name for sink in new)
        listed = "; ".join(f"{sink.segment.name}: {sink.outside}" for sink in new)
        warnings.warn(
            "Jacobians of these parameters are found by running each example alone through the "
            f"network, which is slow: {listed}.",
            UserWarning,
            stacklevel=3,
        )
