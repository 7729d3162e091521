"""``F.multi_head_attention_forward`` said again, with its projections taken apart.

A `TorchFunctionMode` sees attention as one call and nothing inside. `attend` computes the same
with its affine maps taken through a function, so that layers' inputs and weights can be seen.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

ATTENTION = F.multi_head_attention_forward
ATTENTION_SIGNATURE = inspect.signature(ATTENTION)


class Project(Protocol):
    """An affine map inside attention, of inputs (length, examples, features)."""

    def __call__(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_rows: slice | None = None,
        bias_rows: slice | None = None,
    ) -> Tensor:
        """inputs Wᵀ + b, of whose packed parameters only the named rows take part."""
        ...


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


def attend(given: SimpleNamespace, project: Project) -> tuple[Tensor, Tensor | None]:
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
    out = project(joined, given.out_proj_weight, given.out_proj_bias)
    return out.squeeze(1) if unbatched else out, weights


def _in_projections(
    given: SimpleNamespace,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    project: Project,
) -> tuple[Tensor, ...]:
    width, bias = query.shape[-1], given.in_proj_bias
    packed, rows = given.in_proj_weight, [slice(i * width, (i + 1) * width) for i in range(3)]
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
        return tuple(
            project(x, weight, bias, bias_rows=part)
            for x, weight, part in zip((query, key, value), weights, rows, strict=True)
        )
    if query is key and key is value:
        return project(query, packed, bias).chunk(3, dim=-1)
    return tuple(
        project(x, packed, bias, weight_rows=part, bias_rows=part)
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
