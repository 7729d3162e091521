"""The calls of a network's forward pass that use a watched parameter, layer by layer.

`Watch` is a mode that sees every torch function. Calls of dense, convolutional, embedding and norm
layers become `LayerCall`s; attention is taken apart by `credo.autodiff.attention.attend`; any other
call that makes a differentiable tensor of a watched parameter is reported as a use that no layer
explains. An `Observer` decides what happens then: `credo.autodiff.squares` puts nodes into the
graph that square the gradients of single examples, `credo.autodiff.jacobians` notes what passes.

A `NetworkCall` is the call of the whole network, kept so that single examples of it can be run
again. Two things need that: finding out along which dimension a layer sees the examples
(`example_dims` runs two, then three of them and looks which size changed), and the per-example
gradients of parameters that no layer explains (`NetworkCall.gradients`, one example at a time).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointError

from credo.autodiff.attention import (
    ATTENTION,
    attend,
    attention_arguments,
    projections,
    unsupported_attention,
)
from credo.errors import UnsupportedError
from credo.network.state import buffers_kept
from credo.types import Segment

CHUNK_NUMBERS = 2**20
"""How many per-example numbers are held at once: 4 MB in float32, about a cache."""

LOOSE_DTYPES = (torch.float16, torch.bfloat16)

SPATIAL_DIMS: dict[Callable[..., Any], int] = {
    F.linear: 0,
    F.conv1d: 1,
    F.conv2d: 2,
    F.conv3d: 3,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 2,
    F.conv_transpose3d: 3,
}
"""The functions of affine layers, and over how many dimensions each slides its weight."""

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
BACKWARD = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))
NESTED = (list, tuple, dict)
EMBEDDING_SIGNATURE = inspect.signature(F.embedding)


class Watched:
    """A parameter whose uses are watched; ``excluded`` says why layer calls don't explain them."""

    def __init__(self, segment: Segment, parameter: nn.Parameter) -> None:
        self.segment, self.parameter = segment, parameter
        self.rows = range(parameter.shape[0] if parameter.dim() else 1)
        self.excluded: str | None = None
        self.example_dim: int | None = None


class Part:
    """The rows of a watched parameter that one call works with."""

    def __init__(self, watched: Watched, rows: slice | None = None) -> None:
        self.watched = watched
        self.rows = watched.rows if rows is None else watched.rows[rows]


# --- layers ---------------------------------------------------------------------------------------


class Layer:
    """A layer as one call uses it: the map, its parameters' parts, where the examples are."""

    def __init__(self, weight: Part | None, bias: Part | None, example_dim: int = 0) -> None:
        self.weight, self.bias = weight, bias
        self.example_dim = example_dim

    @property
    def parts(self) -> list[Part]:
        """Those that are watched."""
        return [part for part in (self.weight, self.bias) if part is not None]

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Whether examples may lie along this dimension of the inputs."""
        return example_dim == 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's own map."""
        raise NotImplementedError


class Linear(Layer):
    """out = a Wᵀ + b with a (…, in); examples along any dimension but the last."""

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Sequence-first tensors included."""
        return example_dim < inputs.dim() - 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        return F.linear(x, weight, bias)


class Convolution(Layer):
    """conv{1,2,3}d and conv_transpose{1,2,3}d; numbers per dimension in ``geometry``."""

    def __init__(
        self,
        *where: Any,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        output_padding: list[int] | None,
    ) -> None:
        super().__init__(*where)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.output_padding = output_padding

    @property
    def settings(self) -> tuple[Any, ...]:
        """Stride, padding, dilation, whether it is transposed, and its output's padding."""
        transposed = self.output_padding is not None
        outer = self.output_padding or [0] * len(self.stride)
        return (self.stride, self.padding, self.dilation, transposed, outer)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        stride, padding, dilation, transposed, outer = self.settings
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, transposed, outer, self.groups
        )


class Embedding(Layer):
    """Rows of a table; ``x`` are the indices, with examples along any dimension."""

    def __init__(self, *where: Any, padding_idx: int | None) -> None:
        super().__init__(*where)
        self.padding_idx = padding_idx

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Sequence-first indices included."""
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the layer does."""
        return F.embedding(x, weight, self.padding_idx)


class ScaleShift(Layer):
    """out = â∘w + b after a norm without gain; ``axes`` are the dimensions that w has."""

    def __init__(self, *where: Any, axes: Sequence[int]) -> None:
        super().__init__(*where)
        self.axes = axes

    def allows(self, example_dim: int, inputs: Tensor) -> bool:
        """Any dimension that the gain has not."""
        return example_dim not in self.axes

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In the dtype of the normalised input, as norm layers do."""
        out = x * self.spread(weight, x)
        return (out if bias is None else out + self.spread(bias, x)).to(x.dtype)

    def spread(self, parameter: Tensor, like: Tensor) -> Tensor:
        """The gain or shift in a shape that broadcasts."""
        shape = [n if axis in self.axes else 1 for axis, n in enumerate(like.shape)]
        return parameter.view(shape)


@dataclass(slots=True)
class Affine:
    """One call  out = W ∗ inputs + b  of an affine layer or of a projection inside attention.

    ``weight`` and ``bias`` are what the network passed, `nn.Parameter` objects as a rule; of a
    packed parameter only the named rows take part. ``inputs`` are (…, features) for a linear map,
    (examples, features, space…) for a convolution; ``example_dim`` says where the examples are.
    """

    function: Callable[..., Tensor]
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    options: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    weight_rows: slice | None = None
    bias_rows: slice | None = None
    example_dim: int = 0

    def apply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same map with other numbers; rows are chosen here."""
        if self.weight_rows is not None:
            weight = weight[self.weight_rows]
        if self.bias_rows is not None and bias is not None:
            bias = bias[self.bias_rows]
        return self.function(inputs, weight, bias, *self.options, **self.keywords)

    def per_feature(self, tensor: Tensor) -> list[int]:
        """The shape, broadcastable to inputs or output, with one entry per example and feature."""
        spatial = SPATIAL_DIMS[self.function]
        shape = [1] * tensor.dim()
        shape[-1 - spatial] = tensor.shape[-1 - spatial]
        if tensor.dim() > spatial + 1:
            shape[self.example_dim] = tensor.shape[self.example_dim]
        return shape

    @classmethod
    def parse(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Affine:
        """Sort out the arguments of a call of one of `SPATIAL_DIMS`."""
        if len(args) < 3:
            kwargs = dict(kwargs)
            args += tuple(
                kwargs.pop(name, None) for name in ("input", "weight", "bias")[len(args) :]
            )
        inputs, weight, bias = args[:3]
        return cls(function, inputs, weight, bias, args[3:], kwargs)

    @classmethod
    def projection(
        cls,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: slice | None = None,
        bias_rows: slice | None = None,
    ) -> Affine:
        """One of those inside attention (`credo.autodiff.attention.Project`)."""
        return cls(F.linear, inputs, weight, bias, (), {}, weight_rows, bias_rows, example_dim=1)


@dataclass(slots=True)
class LayerCall:
    """A layer with the tensors it is called with."""

    layer: Layer
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None

    def plain(self) -> Tensor:
        """The call's result by ordinary autograd."""
        return self.layer.forward(self.inputs, self.weight, self.bias)


# --- who watches ----------------------------------------------------------------------------------


class Observer(Protocol):
    """Who decides what happens to the uses of watched parameters."""

    @property
    def watched(self) -> Mapping[int, Watched]:
        """By the parameter's ``id``."""
        ...

    def is_idle(self) -> bool:
        """Whether calls pass untouched."""
        ...

    def answer(self, call: LayerCall) -> Tensor:
        """The output of a layer's call."""
        ...

    def exclude(self, watched: Watched, reason: str) -> None:
        """The parameter is used in a way that no layer explains."""
        ...


class Watch(TorchFunctionMode):
    """While entered, ``observer`` answers every use of its parameters."""

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
        watched = self._observer.watched
        present = _watched(args, watched)
        if kwargs:
            present += _watched(kwargs.values(), watched)
        if not present or self._observer.is_idle():
            return func(*args, **kwargs)
        if func is ATTENTION:
            given = attention_arguments(args, kwargs)
            unsupported = unsupported_attention(given)
            if unsupported is None and _only_projections(given, args, kwargs, watched):
                return attend(given, self._project)
            reason = f"used by attention with {unsupported or 'a parameter as input'}"
        else:
            call = self._call(func, args, kwargs)
            if call is not None and len(call.layer.parts) == len(present):
                return self._observer.answer(call)
            reason = f"used by {resolve_name(func) or func.__name__}"
        result = func(*args, **kwargs)
        for one in present:
            # A getter or an in-place method may hand back the parameter itself: no use of it.
            made = (t for t in tensors_in(result) if t is not one.parameter)
            if any(t.requires_grad for t in made):
                self._observer.exclude(one, reason)
        return result

    def _project(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: slice | None = None,
        bias_rows: slice | None = None,
    ) -> Tensor:
        affine = Affine.projection(inputs, weight, bias, weight_rows, bias_rows)
        call = self._affine(affine)
        if call is None or not call.layer.parts:
            return affine.apply(inputs, weight, bias)
        return self._observer.answer(call)

    def _call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerCall | None:
        if func is F.linear and len(args) == 3 and not kwargs:
            return self._dense(*args)
        if func in SPATIAL_DIMS:
            return self._affine(Affine.parse(func, args, kwargs))
        if func is F.embedding:
            return self._embedding(EMBEDDING_SIGNATURE.bind(*args, **kwargs))
        signature = FEATURE_NORMS.get(func) or CHANNEL_NORMS.get(func)
        return None if signature is None else self._norm(func, signature.bind(*args, **kwargs))

    def _parts(self, *tensors: Tensor | None) -> list[Part | None]:
        watched = self._observer.watched
        return [Part(watched[id(t)]) if id(t) in watched else None for t in tensors]

    def _dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> LayerCall | None:
        """`_affine` for what most layers are, in half of its time."""
        if x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
            return self._affine(Affine(F.linear, x, weight, bias))
        parts = self._parts(weight, bias)
        return LayerCall(Linear(parts[0], parts[1]), x, weight, bias)

    def _affine(self, call: Affine) -> LayerCall | None:
        x, weight, bias = call.inputs, call.weight, call.bias
        if x.dim() < SPATIAL_DIMS[call.function] + 2:
            return None
        watched = self._observer.watched
        whole = ((weight, call.weight_rows), (bias, call.bias_rows))
        parts = [Part(watched[id(t)], rows) if id(t) in watched else None for t, rows in whole]
        weight = weight if call.weight_rows is None else weight[call.weight_rows]
        if bias is not None and call.bias_rows is not None:
            bias = bias[call.bias_rows]
        if call.function is F.linear:
            layer: Layer = Linear(parts[0], parts[1], call.example_dim)
        else:
            layer, x = _convolution(call, parts, x, weight)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            # Cast here and not in the node: a cast in there, without gradients, would be cached.
            dtype = torch.get_autocast_dtype(device)
            x, weight = _cast(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        return LayerCall(layer, x, weight, bias)

    def _embedding(self, bound: inspect.BoundArguments) -> LayerCall | None:
        bound.apply_defaults()
        given = bound.arguments
        if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"]:
            return None
        parts = self._parts(given["weight"], None)
        layer = Embedding(*parts, padding_idx=given["padding_idx"])
        return LayerCall(layer, given["input"], given["weight"], None)

    def _norm(self, func: Callable[..., Any], bound: inspect.BoundArguments) -> LayerCall | None:
        bound.apply_defaults()
        given = bound.arguments
        weight, bias = given["weight"], given.get("bias")
        if weight is None:
            return None
        parts = self._parts(weight, bias)
        if func is F.batch_norm and given["training"] and torch.is_grad_enabled():
            names = ", ".join(part.watched.segment.name for part in parts if part is not None)
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
        layer = ScaleShift(*parts, axes=tuple(axes))
        return LayerCall(layer, normalised, weight, bias)


def _convolution(
    call: Affine, parts: list[Part | None], x: Tensor, weight: Tensor
) -> tuple[Layer, Tensor]:
    """The layer, and its input padded where the layer pads unevenly."""
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
    layer = Convolution(
        *parts, stride=_each(given.get("stride", 1), dims),
        padding=_each(padding, dims), dilation=dilation, groups=given.get("groups", 1),
        output_padding=outer,
    )  # fmt: skip
    return layer, x


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


def _watched(values: Iterable[Any], watched: Mapping[int, Watched]) -> list[Watched]:
    """The watched parameters in there.

    Every torch function of the network passes here, so the usual arguments, which are not nested,
    cost one look-up each.
    """
    present = []
    for value in values:
        if id(value) in watched:
            present.append(watched[id(value)])
        elif isinstance(value, NESTED):
            present += [watched[id(t)] for t in tensors_in(value) if id(t) in watched]
    return present


def _only_projections(
    given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Mapping[int, Watched]
) -> bool:
    """Whether every watched parameter of an attention call is a weight or bias of a projection."""
    known = {id(t) for pair in projections(given) for t in pair}
    return all(id(t) in known for t in tensors_in((args, kwargs)) if id(t) in watched)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does, which leaves float64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    """One number per dimension, from one for all or a tuple."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_of(value.values())
    elif isinstance(value, list | tuple):
        yield from _tensors_of(value)


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors_in(value)


def chunks(count: int, numbers: int) -> Iterator[slice]:
    """Slices of examples, of which each takes ``numbers`` numbers."""
    step = max(1, CHUNK_NUMBERS // max(1, numbers))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


# --- the network's own call -----------------------------------------------------------------------


class NetworkCall:
    """The arguments of ``module(*args, **kwargs)``, batch first, and what came out."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        plain = bool(args) and isinstance(args[0], Tensor) and args[0].dim() > 0
        first = args[0] if plain else next(_sliceable((args, kwargs)), None)
        self.examples = None if first is None else first.shape[0]
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


class _Shapes:
    """An observer that only notes the shape of the inputs at every use."""

    def __init__(self, watched: Mapping[int, Watched]) -> None:
        self.watched = watched
        self.seen: defaultdict[Watched, list[torch.Size]] = defaultdict(list)

    def is_idle(self) -> bool:
        return False

    def answer(self, call: LayerCall) -> Tensor:
        for part in call.layer.parts:
            self.seen[part.watched].append(call.inputs.shape)
        return call.plain()

    def exclude(self, watched: Watched, reason: str) -> None:
        """Noted when the real pass comes by."""


def example_dims(
    call: NetworkCall, module: nn.Module, watched: Mapping[int, Watched]
) -> dict[Watched, int | None]:
    """Along which dimension every use of a parameter sees the examples; None if there is none.

    Sizes alone would not do: a table of 128 positions looks like a batch of 128 examples.
    A network that can't run on two examples gives no answer.
    """
    seen: list[defaultdict[Watched, list[torch.Size]]] = []
    device = next(iter(watched.values())).parameter.device
    for count in (2, 3):
        shapes = _Shapes(watched)
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
    return {one: _changed(seen[0][one], seen[1].get(one, [])) for one in seen[0]}


def _changed(two: list[torch.Size], three: list[torch.Size]) -> int | None:
    changed = set()
    for small, large in zip(two, three, strict=False):
        if len(small) != len(large):
            return None
        dims = [d for d, pair in enumerate(zip(small, large, strict=True)) if pair[0] != pair[1]]
        if len(dims) != 1 or (small[dims[0]], large[dims[0]]) != (2, 3):
            return None
        changed.add(dims[0])
    return changed.pop() if len(changed) == 1 and len(two) == len(three) else None


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
