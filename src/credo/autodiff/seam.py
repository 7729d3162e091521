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

A mode sees ``F.multi_head_attention_forward`` as one call and nothing inside, so `attend` says the
same thing again with its projections taken through the handler.

A weight that reaches the output by any other way (an embedding, a fused recurrent kernel,
``W.t()`` in a tied autoencoder, a norm layer's gain) has no seam. `survey` watches one forward pass
and says which parameters go through the seam exactly once, and why the others do not.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from credo.network.flat import FlatParams
from credo.network.selection import Selection
from credo.network.state import buffers_kept
from credo.types import Segment

SPATIAL_DIMS: dict[Callable[..., Any], int] = {
    F.linear: 0,
    F.conv1d: 1,
    F.conv2d: 2,
    F.conv3d: 3,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 2,
    F.conv_transpose3d: 3,
}
"""The functions of the seam, and over how many dimensions each slides its weight."""

ATTENTION = F.multi_head_attention_forward
ATTENTION_SIGNATURE = inspect.signature(ATTENTION)


@dataclass(slots=True)
class Affine:
    """One call  out = W ∗ inputs + b  of a seam function or of a projection inside attention.

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
        """Sort out the arguments of a call of a seam function."""
        if len(args) < 3:
            kwargs = dict(kwargs)
            args += tuple(
                kwargs.pop(name, None) for name in ("input", "weight", "bias")[len(args) :]
            )
        inputs, weight, bias = args[:3]
        return cls(function, inputs, weight, bias, args[3:], kwargs)


class Seam(TorchFunctionMode):
    """While entered, calls whose weight's ``id`` is in ``watched`` are answered by ``handler``."""

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

    def _project(self, call: Affine) -> Tensor:
        if id(call.weight) in self._watched:
            return self._handler(call)
        return call.apply(call.inputs, call.weight, call.bias)


def attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments of ``F.multi_head_attention_forward`` by name."""
    bound = ATTENTION_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def unsupported_attention(given: SimpleNamespace) -> str | None:
    """Which argument `attend` does not know, if any."""
    for name in ("bias_k", "bias_v", "static_k", "static_v"):
        if getattr(given, name) is not None:
            return name
    if given.add_zero_attn:
        return "add_zero_attn"
    if given.is_causal and given.attn_mask is None:
        return "is_causal without attn_mask"
    return None


def projections(given: SimpleNamespace) -> list[tuple[Tensor, Tensor | None]]:
    """The weights that attention multiplies with, each with its bias; q, k and v share one."""
    if given.use_separate_proj_weight:
        weights = [given.q_proj_weight, given.k_proj_weight, given.v_proj_weight]
    else:
        weights = [given.in_proj_weight]
    pairs = [(weight, given.in_proj_bias) for weight in weights]
    return [*pairs, (given.out_proj_weight, given.out_proj_bias)]


def attend(
    given: SimpleNamespace, project: Callable[[Affine], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` with its four affine maps taken through ``project``.

    softmax(q kᵀ/√d + masks) v per head, with q, k, v of shape (length, examples, features). Every
    mask is additive here; the hint ``is_causal`` comes with its mask, so it can be ignored.
    """
    unbatched = given.query.dim() == 2
    query, key, value = given.query, given.key, given.value
    if unbatched:
        same_key, same_value = key is query, value is key
        query = query.unsqueeze(1)
        key = query if same_key else key.unsqueeze(1)
        value = key if same_value else value.unsqueeze(1)
    length, examples, width = query.shape

    def heads(projected: Tensor) -> Tensor:
        """(length, examples, heads · d) → (examples, heads, length, d)."""
        split = projected.view(projected.shape[0], examples, given.num_heads, -1)
        return split.permute(1, 2, 0, 3)

    q, k, v = (heads(t) for t in _in_projections(given, query, key, value, project))
    mask = _additive_mask(given, examples, q.dtype)
    dropout = given.dropout_p if given.training else 0.0
    weights = None
    if given.need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        if dropout > 0.0:
            weights = F.dropout(weights, dropout)
        mixed = weights @ v
        weights = weights.mean(dim=1) if given.average_attn_weights else weights
        weights = weights.squeeze(0) if unbatched else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    joined = mixed.permute(2, 0, 1, 3).reshape(length, examples, width)
    out = project(
        Affine(F.linear, joined, given.out_proj_weight, given.out_proj_bias, example_dim=1)
    )
    return out.squeeze(1) if unbatched else out, weights


def _in_projections(
    given: SimpleNamespace,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    project: Callable[[Affine], Tensor],
) -> tuple[Tensor, ...]:
    width, bias = query.shape[-1], given.in_proj_bias
    packed, rows = given.in_proj_weight, [slice(i * width, (i + 1) * width) for i in range(3)]
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
        return tuple(
            project(Affine(F.linear, x, weight, bias, bias_rows=part, example_dim=1))
            for x, weight, part in zip((query, key, value), weights, rows, strict=True)
        )
    if query is key and key is value:
        return project(Affine(F.linear, query, packed, bias, example_dim=1)).chunk(3, dim=-1)
    return tuple(
        project(Affine(F.linear, x, packed, bias, weight_rows=part, bias_rows=part, example_dim=1))
        for x, part in zip((query, key, value), rows, strict=True)
    )


def _additive_mask(given: SimpleNamespace, examples: int, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one tensor that broadcasts to scores (examples, heads, length, source)."""
    total = None
    for mask, is_padding in ((given.attn_mask, False), (given.key_padding_mask, True)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
        if is_padding:
            mask = mask.view(examples, 1, 1, -1)
        elif mask.dim() == 3:
            mask = mask.view(examples, given.num_heads, *mask.shape[1:])
        mask = mask.to(dtype)
        total = mask if total is None else total + mask
    return total


@dataclass(frozen=True)
class Survey:
    """Which segments go through the seam, once per forward pass, and why the others do not."""

    through: tuple[Segment, ...]
    elsewhere: dict[Segment, str]


def survey(flat: FlatParams, selection: Selection, forward: Callable[[], Any]) -> Survey:
    """Run ``forward`` once and see how it uses every selected parameter.

    The run leaves no trace: the module's buffers and torch's generators are put back. A bias is
    through the seam if the weight it is added to is.
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
