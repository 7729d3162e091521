"""A function of weights and data recorded once as a list of tensor operations, then replayed.

What a small network costs is calling it: modules, autograd and vmap together take some five times
as long as the arithmetic (2-8-1 network, four chains: 1.8 ms and 0.3 ms). The recording has values
and gradients in one list of operations without any of them. It holds for the shapes and the control
flow of its first call, which is why only a method that sees the same data again and again may use
it; its first result is compared with the function's own, and a function that can't be recorded is
not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

Slope: TypeAlias = tuple[Tensor, Tensor]


@final
@dataclass
class Recorder:
    """Values and gradients of one function for several weight vectors at once.

    Args:
        function: Of weights (P,) and data tensors to a number.
    """

    function: Callable[..., Tensor]
    most: int = 0
    recordings: dict[Any, Any] = field(default_factory=dict)
    refused: bool = False

    def __call__(self, weights: Tensor, data: tuple[Tensor, ...], check: Slope | None = None
                 ) -> Slope | None:  # fmt: skip
        """Values (chains,) and gradients (chains, P); None if that can't be recorded.

        Args:
            weights: (chains, P), on the CPU.
            data: What else the function takes.
            check: The result as the function itself gives it, needed before the first recording.
        """
        if self.refused:
            return None
        chains = len(weights)
        self.most = max(self.most, chains)
        # Chains drop out one by one; a recording for every number of them would be many.
        size = min(self.most, 1 << (chains - 1).bit_length())
        if size > chains:
            weights = torch.cat([weights, weights[:1].expand(size - chains, -1)])
        key = (size, *((tuple(t.shape), t.dtype) for t in data))
        with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            if key not in self.recordings:
                self.recordings[key] = self._record(weights, data)
            replay = self.recordings[key]
            if replay is None:
                return None
            gradients, values = replay(weights, *data)
        found = values[:chains], gradients[:chains]
        if check is not None and not _agree(found, check):
            self.refused = True
            return None
        return found

    def _record(self, weights: Tensor, data: tuple[Tensor, ...]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx  # a second of importing

        function = vmap(grad_and_value(self.function), in_dims=(0, *(None for _ in data)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = make_fx(function)(weights, *data)
                graph.graph.eliminate_dead_code()
                graph.recompile()
                return torch.jit.trace(graph, (weights, *data), check_trace=False)
        except (
            Exception
        ):  # what torch can't record it says in many ways; the function itself remains
            self.refused = True
            return None


def _agree(found: Slope, check: Slope) -> bool:
    tolerance = torch.finfo(found[1].dtype).eps ** 0.5
    return all(
        torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        for ours, theirs in zip(found, check, strict=True)
    )
