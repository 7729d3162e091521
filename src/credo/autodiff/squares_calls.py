"""Which calls of a forward pass use a watched parameter, and by which rule each is squared.

`Watch` is a mode that sees every torch function. Calls of dense, convolutional, embedding and
norm layers become `Rule`s; attention is taken apart by `credo.autodiff.seam.attend`; any other call
that makes a differentiable tensor of a watched parameter is reported as a use outside the rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointError

from credo.autodiff.seam import (
    ATTENTION,
    SPATIAL_DIMS,
    Affine,
    attend,
    attention_arguments,
    projections,
    tensors_in,
    unsupported_attention,
)
from credo.autodiff.squares_routes import Convolution, Embedding, Ledger, Linear, Rule, ScaleShift
from credo.autodiff.squares_sinks import Part, Sink
from credo.errors import UnsupportedError

TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
OPTION_NAMES = ("stride", "padding", "dilation", "groups")
TRANSPOSED_OPTION_NAMES = ("stride", "padding", "output_padding", "groups", "dilation")

FEATURE_NORMS: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.layer_norm, F.rms_norm)
}
CHANNEL_NORMS: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function)
    for function in (F.group_norm, F.batch_norm, F.instance_norm)
}
BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
EMBEDDING_SIGNATURE = inspect.signature(F.embedding)


@dataclass(slots=True)
class Use:
    """A call that has a rule, with its tensors."""

    rule: Rule
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None

    def plain(self) -> Tensor:
        """The call's result by ordinary autograd."""
        return self.rule.forward(self.inputs, self.weight, self.bias)


class Observer(Ledger, Protocol):
    """Who decides what happens to the uses of watched parameters."""

    @property
    def sinks(self) -> Mapping[int, Sink]:
        """By the parameter's ``id``."""
        ...

    def is_idle(self) -> bool:
        """Whether calls pass untouched."""
        ...

    def use(self, use: Use) -> Tensor:
        """Answer a call that has a rule."""
        ...

    def outside(self, sink: Sink, reason: str) -> None:
        """The parameter is used in a way that has none."""
        ...


class Watch(TorchFunctionMode):
    """While entered, ``observer`` answers every use of its sinks' parameters."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            return _refusing_checkpoints(func, args, kwargs)
        if self._observer.is_idle():
            return func(*args, **kwargs)
        sinks = self._observer.sinks
        present = _watched(args, sinks)
        if kwargs:
            present += _watched(kwargs.values(), sinks)
        if not present:
            return func(*args, **kwargs)
        if func is ATTENTION:
            given = attention_arguments(args, kwargs)
            unsupported = unsupported_attention(given)
            if unsupported is None and _only_projections(given, args, kwargs, sinks):
                return attend(given, self._project)
            reason = f"used by attention with {unsupported or 'a parameter as input'}"
        else:
            use = self._use(func, args, kwargs)
            if use is not None and len(use.rule.parts) == len(present):
                return self._observer.use(use)
            reason = f"used by {resolve_name(func) or func.__name__}"
        result = func(*args, **kwargs)
        for sink in present:
            # A getter or an in-place method may hand back the parameter itself: no use of it.
            made = (t for t in tensors_in(result) if t is not sink.parameter)
            if any(t.requires_grad for t in made):
                self._observer.outside(sink, reason)
        return result

    def _project(self, call: Affine) -> Tensor:
        use = self._affine(call)
        if use is None or not use.rule.parts:
            return call.apply(call.inputs, call.weight, call.bias)
        return self._observer.use(use)

    def _use(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Use | None:
        if func in SPATIAL_DIMS:
            return self._affine(Affine.parse(func, args, kwargs))
        if func is F.embedding:
            return self._embedding(EMBEDDING_SIGNATURE.bind(*args, **kwargs))
        signature = FEATURE_NORMS.get(func) or CHANNEL_NORMS.get(func)
        return None if signature is None else self._norm(func, signature.bind(*args, **kwargs))

    def _parts(self, *tensors: Tensor | None) -> list[Part | None]:
        sinks = self._observer.sinks
        return [Part(sinks[id(t)]) if id(t) in sinks else None for t in tensors]

    def _affine(self, call: Affine) -> Use | None:
        x, weight, bias = call.inputs, call.weight, call.bias
        if x.dim() < SPATIAL_DIMS[call.function] + 2:
            return None
        sinks = self._observer.sinks
        whole = ((weight, call.weight_rows), (bias, call.bias_rows))
        parts = [Part(sinks[id(t)], rows) if id(t) in sinks else None for t, rows in whole]
        weight = weight if call.weight_rows is None else weight[call.weight_rows]
        if bias is not None and call.bias_rows is not None:
            bias = bias[call.bias_rows]
        if call.function is F.linear:
            rule: Rule = Linear(self._observer, parts[0], parts[1], call.example_dim)
        else:
            rule, x = self._convolution(call, parts, x, weight)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            # Cast here and not in the node: a cast in there, without gradients, would be cached.
            dtype = torch.get_autocast_dtype(device)
            x, weight = _cast(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        return Use(rule, x, weight, bias)

    def _convolution(
        self, call: Affine, parts: list[Part | None], x: Tensor, weight: Tensor
    ) -> tuple[Rule, Tensor]:
        transposed = call.function in TRANSPOSED
        names = TRANSPOSED_OPTION_NAMES if transposed else OPTION_NAMES
        given = dict(zip(names, call.options, strict=False)) | call.keywords
        dims = SPATIAL_DIMS[call.function]
        dilation = _each(given.get("dilation", 1), dims)
        padding = given.get("padding", 0)
        if padding == "same":
            spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = [span // 2 for span in spans]
            x = F.pad(x, [n for span in reversed(spans) for n in (0, span % 2)])
        elif padding == "valid":
            padding = 0
        outer = _each(given.get("output_padding", 0), dims) if transposed else None
        rule = Convolution(
            self._observer, *parts, stride=_each(given.get("stride", 1), dims),
            padding=_each(padding, dims), dilation=dilation, groups=given.get("groups", 1),
            output_padding=outer,
        )  # fmt: skip
        return rule, x

    def _embedding(self, bound: inspect.BoundArguments) -> Use | None:
        bound.apply_defaults()
        given = bound.arguments
        if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"]:
            return None
        parts = self._parts(given["weight"], None)
        rule = Embedding(self._observer, *parts, padding_idx=given["padding_idx"])
        return Use(rule, given["input"], given["weight"], None)

    def _norm(self, func: Callable[..., Any], bound: inspect.BoundArguments) -> Use | None:
        bound.apply_defaults()
        given = bound.arguments
        weight, bias = given["weight"], given.get("bias")
        if weight is None:
            return None
        parts = self._parts(weight, bias)
        if func is F.batch_norm and given["training"] and torch.is_grad_enabled():
            names = ", ".join(part.sink.segment.name for part in parts if part is not None)
            raise UnsupportedError(
                f"{names}: batch normalisation in training mode mixes the examples, so its gain "
                "and shift have no per-example gradients. Leave norm layers out of the selection "
                "(they are by default), call .eval() on them, or use GroupNorm."
            )
        given["weight"] = None
        if "bias" in given:
            given["bias"] = None
        normalised = func(*bound.args, **bound.kwargs)
        last = normalised.dim()
        axes = range(last - weight.dim(), last) if func in FEATURE_NORMS else (1,)
        rule = ScaleShift(self._observer, *parts, axes=tuple(axes))
        return Use(rule, normalised, weight, bias)


def _refusing_checkpoints(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return func(*args, **kwargs)
    except CheckpointError as error:
        raise UnsupportedError(
            "activation checkpointing calls layers again in the backward pass, where they are not "
            "watched. Switch it off, or use a method without per-example gradients (IVON)."
        ) from error


def _watched(values: Iterable[Any], sinks: Mapping[int, Sink]) -> list[Sink]:
    """The sinks of all parameters in there.

    Every torch function of the network passes here, so the usual arguments, which are not nested,
    cost one look-up each.
    """
    found = []
    for value in values:
        if id(value) in sinks:
            found.append(sinks[id(value)])
        elif isinstance(value, list | tuple | dict):
            found += [sinks[id(t)] for t in tensors_in(value) if id(t) in sinks]
    return found


def _only_projections(
    given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sinks: Mapping[int, Sink]
) -> bool:
    """Whether every watched parameter of an attention call is a weight or bias of a projection."""
    known = {id(t) for pair in projections(given) for t in pair}
    return all(id(t) in known for t in tensors_in((args, kwargs)) if id(t) in sinks)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does, which leaves float64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    """One number per dimension, from one for all or a tuple."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers
