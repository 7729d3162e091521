"""The one seam through which a network's affine maps can be replaced without rewriting it.

Whatever the module looks like, its dense and convolutional layers end in ``F.linear``,
``F.conv{1,2,3}d`` or ``F.conv_transpose{1,2,3}d``, called with the `nn.Parameter` itself. `Seam`
watches those calls (a `TorchFunctionMode`) and hands those whose weight is *identical* to a watched
parameter to a handler, as an `Affine`:

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> def doubled(call):
    ...     return 2 * call.apply(call.inputs, call.weight, call.bias)
    >>> x = torch.randn(5, 2)
    >>> with Seam({id(net[2].weight)}, doubled):
    ...     out = net(x)
    >>> bool(torch.allclose(out, 2 * net(x)))
    True

The projections inside attention go through the handler too (`credo.autodiff.attention`).

A weight that reaches the output by any other way (an embedding, a fused recurrent kernel,
``W.t()`` in a tied autoencoder, a norm layer's gain) has no seam. `survey` watches one forward pass
and says which parameters go through the seam exactly once, and why the others do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from credo.autodiff.attention import (
    ATTENTION,
    attend,
    attention_arguments,
    projections,
    unsupported_attention,
)
from credo.autodiff.layer_calls import SPATIAL_DIMS, Affine, tensors_in
from credo.network.flat import FlatParams
from credo.network.selection import Selection
from credo.network.state import buffers_kept
from credo.types import Segment


class Seam(TorchFunctionMode):
    """While entered, calls whose weight's ``id`` is in ``watched`` are answered by ``handler``.

    Args:
        watched: The ``id`` of every weight that is watched.
        handler: Answers their calls.
    """

    def __init__(self, watched: Collection[int], handler: Callable[[Affine], Tensor]) -> None:
        super().__init__()
        self._watched = watched
        self._handler = handler

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in SPATIAL_DIMS:
            call = Affine.parse(func, args, kwargs)
            if id(call.weight) in self._watched:
                return self._handler(call)
        elif func is ATTENTION:
            given = attention_arguments(args, kwargs)
            watched = any(id(weight) in self._watched for weight, _ in projections(given))
            if watched and unsupported_attention(given) is None:
                return attend(given, self._project)
        return func(*args, **kwargs)

    def _project(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: slice | None = None,
        bias_rows: slice | None = None,
    ) -> Tensor:
        call = Affine.projection(inputs, weight, bias, weight_rows, bias_rows)
        if id(weight) in self._watched:
            return self._handler(call)
        return call.apply(inputs, weight, bias)


@dataclass(frozen=True)
class Survey:
    """Which segments go through the seam, once per forward pass, and why the others do not."""

    through: tuple[Segment, ...]
    elsewhere: dict[Segment, str]


def survey(flat: FlatParams, selection: Selection, forward: Callable[[], Any]) -> Survey:
    """Run ``forward`` once and see how it uses every selected parameter.

    The run leaves no trace: the module's buffers and torch's generators are put back. A bias is
    through the seam if the weight it is added to is.

    Args:
        flat: The network's parameters as one vector.
        selection: The parameters in question.
        forward: A forward pass.
    """
    recorder = _Recorder({id(flat.parameter_at[s.start]) for s in selection.segments})
    device = flat.vector.device
    with (
        buffers_kept(flat.module),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        recorder,
    ):
        forward()
    reasons = {s: recorder.why_not(id(flat.parameter_at[s.start])) for s in selection.segments}
    return Survey(
        through=tuple(s for s, reason in reasons.items() if reason is None),
        elsewhere={s: reason for s, reason in reasons.items() if reason is not None},
    )


@dataclass(frozen=True)
class _Use:
    """How a parameter took part: a reason against the seam, or the weights that it is added to."""

    reason: str | None = None
    weights: tuple[int, ...] = ()


class _Recorder(TorchFunctionMode):
    """Notes every use of the watched parameters that yields a tensor: reading a size is none."""

    def __init__(self, watched: Collection[int]) -> None:
        super().__init__()
        self._watched = watched
        self._uses: defaultdict[int, list[_Use]] = defaultdict(list)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        present = [id(t) for t in tensors_in((args, kwargs)) if id(t) in self._watched]
        if present and any(True for _ in tensors_in(result)):
            for parameter in present:
                use = self._roles(func, args, kwargs).get(parameter)
                other = _Use(reason=f"used by {resolve_name(func) or func.__name__}")
                self._uses[parameter].append(use or other)
        return result

    def _roles(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, _Use]:
        """The uses that this call makes of the parameters that are its weights and biases."""
        if func in SPATIAL_DIMS:
            call = Affine.parse(func, args, kwargs)
            pairs = [(call.weight, call.bias)]
            if call.inputs is call.weight or call.inputs is call.bias:
                return {}
        elif func is ATTENTION:
            given = attention_arguments(args, kwargs)
            unsupported = unsupported_attention(given)
            if unsupported is not None:
                reason = f"used by attention with {unsupported}"
                return {id(t): _Use(reason) for t in tensors_in((args, kwargs))}
            pairs = projections(given)
        else:
            return {}
        if not torch.is_grad_enabled():
            reason = "called without gradients, as checkpointing does"
            return {id(t): _Use(reason) for pair in pairs for t in pair}
        roles: dict[int, _Use] = {}
        for weight, bias in pairs:
            roles[id(weight)] = _Use()
            if bias is not None:
                joined = roles.get(id(bias), _Use()).weights
                roles[id(bias)] = _Use(weights=(*joined, id(weight)))
        return roles

    def why_not(self, parameter: int) -> str | None:
        """Why this parameter can't go through the seam; None if it can."""
        uses = self._uses.get(parameter, [])
        if not uses:
            return "not seen in the forward pass"
        for use in uses:
            if use.reason is not None:
                return use.reason
        if len(uses) > 1:
            return f"used {len(uses)} times in one forward pass"
        for weight in uses[0].weights:
            if self.why_not(weight) is not None:
                return "the bias of a layer whose weight is outside the seam"
        return None
