"""One call of a network, kept so that single examples of it can be run again.

Two things need that: finding out along which dimension a layer sees the examples (`example_dims`
runs two, then three of them and looks which size changed), and the per-example gradients of
parameters that no rule reaches (`Recorded.gradients`, one example at a time).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credo.autodiff.seam import tensors_in
from credo.autodiff.squares_calls import Use, Watch
from credo.autodiff.squares_sinks import Sink
from credo.errors import UnsupportedError
from credo.network.state import buffers_kept

LOOSE_DTYPES = (torch.float16, torch.bfloat16)


class Recorded:
    """The arguments of ``module(*args, **kwargs)``, batch first, and what came out."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        first = next(_sliceable((args, kwargs)), None)
        self.examples = None if first is None else len(first)
        self._device = "cpu" if first is None else first.device.type
        self._autocast = torch.is_autocast_enabled(self._device)
        self._autocast_dtype = torch.get_autocast_dtype(self._device)
        self._values: list[Tensor] = []

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """The numbers of the differentiable outputs: they tell whether a replay is one."""
        self._values = [t.detach().clone() for t in outputs]

    def run(self, indices: Sequence[int]) -> Any:
        """The network's result for some of the examples, in the autocast state of the call."""
        index = torch.tensor(indices)
        with torch.autocast(self._device, self._autocast_dtype, enabled=self._autocast):
            args = _cut(self._args, index, self.examples)
            return self._module(*args, **_cut(self._kwargs, index, self.examples))

    def gradients(
        self, index: int, parameters: Sequence[nn.Parameter], by_output: Mapping[int, Tensor]
    ) -> tuple[Tensor | None, ...]:
        """∂/∂parameters of Σ by_output∘output, of one example that runs alone."""
        try:
            result = self.run([index])
        except Exception as error:
            raise _refused(f"it can't run on one ({error})") from error
        alone = [t for t in tensors_in(result) if t.requires_grad]
        if len(alone) != len(self._values):
            raise _refused("the number of its differentiable outputs changes")
        reached, slopes = [], []
        for place, slope in by_output.items():
            output, value = alone[place], self._values[place]
            if value.dim() == 0 or len(value) != self.examples or len(output) != 1:
                raise _refused(
                    f"an output of shape {tuple(value.shape)} does not have the "
                    f"{self.examples} examples along its first dimension"
                )
            tolerance = 0.05 if value.dtype in LOOSE_DTYPES or self._autocast else 1e-3
            expected = value[index]
            off = (output[0].detach() - expected).abs().max() > tolerance * value.abs().max()
            if output[0].shape != expected.shape or bool(off):
                raise _refused(
                    "its output for an example run alone is not the one in the batch: dropout or "
                    "another source of randomness is active, or examples are mixed (batch "
                    "normalisation in training mode)"
                )
            reached.append(output)
            slopes.append(slope[index : index + 1])
        return torch.autograd.grad(reached, parameters, slopes, allow_unused=True)


def replay(
    calls: Mapping[Recorded, Mapping[int, Tensor]],
    module: nn.Module,
    sinks: Sequence[Sink],
    factor: float,
) -> None:
    """Add the squares of the gradients of single examples, each summed over the calls.

    ``calls`` holds the gradients of those outputs that the backward pass reached, by place.
    """
    parameters = [sink.parameter for sink in sinks]
    accumulators = [sink.open(range(len(sink.squares)))[0] for sink in sinks]
    device = parameters[0].device
    with (
        torch.enable_grad(),
        buffers_kept(module),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        for index in range(next(iter(calls)).examples or 0):
            found = [call.gradients(index, parameters, slopes) for call, slopes in calls.items()]
            for squares, parts in zip(accumulators, zip(*found, strict=True), strict=True):
                given = [part.to(squares.dtype) for part in parts if part is not None]
                if given:
                    total = sum(given[1:], start=given[0])
                    squares.addcmul_(total, total, value=factor)


class _Shapes:
    """An observer that only notes the shape of the inputs at every use."""

    def __init__(self, sinks: Mapping[int, Sink]) -> None:
        self.sinks = sinks
        self.seen: defaultdict[Sink, list[torch.Size]] = defaultdict(list)

    def begin(self, examples: int) -> float | None:
        return None

    def is_idle(self) -> bool:
        return False

    def use(self, use: Use) -> Tensor:
        for part in use.rule.parts:
            self.seen[part.sink].append(use.inputs.shape)
        return use.plain()

    def outside(self, sink: Sink, reason: str) -> None:
        """Noted when the real pass comes by."""


def example_dims(
    call: Recorded, module: nn.Module, sinks: Mapping[int, Sink]
) -> dict[Sink, int | None]:
    """Along which dimension every use of a parameter sees the examples; None if there is none.

    Sizes alone would not do: a table of 128 positions looks like a batch of 128 examples.
    A network that can't run on two examples gives no answer.
    """
    seen: list[defaultdict[Sink, list[torch.Size]]] = []
    device = next(iter(sinks.values())).parameter.device
    for count in (2, 3):
        shapes = _Shapes(sinks)
        with (
            buffers_kept(module),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            try:
                with Watch(shapes):
                    call.run([i % (call.examples or 1) for i in range(count)])
            except Exception:
                return {}
        seen.append(shapes.seen)
    return {sink: _changed(seen[0][sink], seen[1].get(sink, [])) for sink in seen[0]}


def _changed(two: list[torch.Size], three: list[torch.Size]) -> int | None:
    found = set()
    for small, large in zip(two, three, strict=False):
        if len(small) != len(large):
            return None
        dims = [d for d, pair in enumerate(zip(small, large, strict=True)) if pair[0] != pair[1]]
        if len(dims) != 1 or (small[dims[0]], large[dims[0]]) != (2, 3):
            return None
        found.add(dims[0])
    return found.pop() if len(found) == 1 and len(two) == len(three) else None


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "per-example gradients of the parameters outside linear, convolutional, embedding and norm "
        f"layers come from running each example alone through the network, but {reason}. Call "
        ".eval() on such layers, take those parameters out of the selection, or use a method "
        "without per-example gradients (IVON)."
    )


def _sliceable(value: Any) -> Any:
    """The tensors that `_cut` reaches: not those inside packed sequences and other classes."""
    if isinstance(value, Tensor) and value.dim() > 0:
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _sliceable(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sliceable(item)


def _cut(value: Any, index: Tensor, examples: int | None) -> Any:
    """Some examples of every tensor that has ``examples`` of them; all else as it is."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or len(value) != examples:
            return value
        return value.detach().index_select(0, index.to(value.device))
    if type(value) in (tuple, list):
        return type(value)(_cut(item, index, examples) for item in value)
    if isinstance(value, dict):
        return {key: _cut(item, index, examples) for key, item in value.items()}
    return value
