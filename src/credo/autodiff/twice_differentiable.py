r"""Layers whose gradient is itself cheap to differentiate, for gradients of squared gradients.

Torch can differentiate any backward pass, but does it for convolutions by other convolutions with
kernels as large as the image, and for batch normalisation by some forty elementwise passes. Inside
`twice_differentiable` these and softplus have second derivatives of their own, exact and in the
cheapest kernels there are; nothing else changes. For y = conv(x, w) with the cotangent g of y, and
u, v those of the gradients of x and w:

    ∇_g = conv(u, w) + conv(x, v),    ∇_x = convᵀ(g, v),    ∇_w = the weight gradient of (g, u)

and for batch normalisation see `_BatchNormBackward`. Third derivatives are refused by torch.

    >>> import torch
    >>> x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> layer = torch.nn.Conv2d(1, 1, 3)
    >>> with twice_differentiable():
    ...     loss = layer(x).square().sum()
    >>> (g,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    >>> g.square().sum().backward()
    >>> layer.weight.grad.shape
    torch.Size([1, 1, 3, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_convolution = torch.ops.aten.convolution.default
_convolution_backward = torch.ops.aten.convolution_backward.default
_batch_norm = torch.ops.aten.native_batch_norm.default
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_softplus_backward = torch.ops.aten.softplus_backward.default

Context: TypeAlias = Any
"""Torch's `FunctionCtx`, which doesn't declare what is saved on it."""

Geometry: TypeAlias = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation and groups of a convolution."""


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its formula: torch's fused kernels can't be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Make what the network does inside cheap to differentiate twice, attention included."""
    with plain_attention(), _CheapSecondDerivatives():
        yield


class _CheapSecondDerivatives(TorchFunctionMode):
    """While active, `F.conv*`, `F.batch_norm` and `F.softplus` go to the functions below."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        route = _ROUTES.get(func)
        if route is None:
            return func(*args, **(kwargs or {}))
        return route(func, *args, **(kwargs or {}))


def _conv(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    spatial = weight.dim() - 2
    batched = input.dim() == weight.dim()
    if isinstance(padding, str) or not batched or torch.is_autocast_enabled(input.device.type):
        return func(input, weight, bias, stride, padding, dilation, groups)
    numbers = [_per_dimension(value, spatial) for value in (stride, padding, dilation)]
    return _Convolution.apply(input, weight, bias, (*numbers, groups))  # type: ignore[no-untyped-call]


def _norm(
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    one_dtype = weight is not None and weight.dtype == input.dtype
    if not (training and one_dtype) or weight is None or bias is None:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _BatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps)  # type: ignore[no-untyped-call]


def _soft(
    func: Callable[..., Tensor], input: Tensor, beta: float = 1, threshold: float = 20
) -> Tensor:
    if beta != 1:
        return func(input, beta, threshold)
    return _Softplus.apply(input)  # type: ignore[no-untyped-call]


_ROUTES: dict[Any, Callable[..., Tensor]] = {
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv3d: _conv,
    F.batch_norm: _norm,
    F.softplus: _soft,
}


class _Convolution(Function):
    """conv(x, w) + b."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.geometry, ctx.has_bias = geometry, bias is not None
        ctx.save_for_backward(x, weight)
        return _conv_forward(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        return *_ConvolutionBackward.apply(grad, x, weight, ctx.geometry, wanted), None  # type: ignore[no-untyped-call]


class _ConvolutionBackward(Function):
    """The gradients of conv(x, w) + b, given that of its value."""

    @staticmethod
    def forward(
        ctx: Context,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        geometry: Geometry,
        wanted: tuple[bool, bool, bool],
    ) -> Any:
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, x, weight)
        return _conv_backward(grad, x, weight, geometry, wanted)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, by_x: Tensor | None, by_weight: Tensor | None, by_bias: Tensor | None
    ) -> Any:
        grad, x, weight = ctx.saved_tensors
        to_grad = to_x = to_weight = None
        if by_x is not None:
            to_grad = _conv_forward(by_x, weight, None, ctx.geometry)
            to_weight = _conv_backward(grad, by_x, weight, ctx.geometry, (False, True, False))[1]
        if by_weight is not None:
            changed = _conv_forward(x, by_weight, by_bias, ctx.geometry)
            to_grad = changed if to_grad is None else to_grad.add_(changed)
            if ctx.needs_input_grad[1]:
                to_x = _conv_backward(grad, x, by_weight, ctx.geometry, (True, False, False))[0]
        elif by_bias is not None:
            bias = by_bias.view(-1, *(1 for _ in grad.shape[2:])).expand_as(grad)
            to_grad = bias if to_grad is None else to_grad + bias
        return to_grad, to_x, to_weight, None, None


class _BatchNorm(Function):
    """γ·x̂ + β, x̂ = (x − m)·r, with the batch's own mean m and r = (variance + eps)^(−½)."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        out, mean, inverse = _batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        gradients = _BatchNormBackward.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return *gradients, None, None, None, None


class _BatchNormBackward(Function):
    r"""γr(g − A − x̂B), Σ g·x̂ and Σ g, with A = mean g and B = mean g·x̂ of each channel.

    For cotangents u, a, b of the three and C = mean u, D = mean u·x̂, E = mean u·g,
    K = E − CA − DB over M numbers:

        ∇_g = γr(u − C − x̂D) + a·x̂ + b
        ∇_γ = M·r·K
        ∇_x = r(z − mean z − x̂(mean z·x̂ + γrK)),      z = a·g − γr(B·u + D·g)
    """

    @staticmethod
    def forward(
        ctx: Context, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        by_x, by_weight, by_bias = _norm_backward(grad, x, weight, mean, inverse)
        ctx.save_for_backward(grad, x, weight, mean, inverse, by_weight, by_bias)
        return by_x, by_weight, by_bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, u: Tensor | None, a: Tensor | None, b: Tensor | None) -> Any:
        g, x, weight, mean, r, total_gx, total_g = ctx.saved_tensors
        count = x.numel() / x.shape[1]
        u = torch.zeros_like(x) if u is None else u
        to_g, total_ux, total_u = _norm_backward(u, x, weight, mean, r)
        A, B, C, D = (total / count for total in (total_g, total_gx, total_u, total_ux))
        channels = (1, -1, *(1 for _ in x.shape[2:]))
        others = (0, *range(2, x.dim()))
        K = (u * g).sum(others) / count - C * A - D * B
        scaled = weight * r
        mean_z, mean_zx = -scaled * (B * C + D * A), -2 * scaled * D * B
        by_g = -scaled * D
        if a is not None:
            mean_z, mean_zx, by_g = mean_z + a * A, mean_zx + a * B, by_g + a
            to_g = to_g.addcmul_(x, (a * r).view(channels)).sub_((a * r * mean).view(channels))
        if b is not None:
            to_g = to_g.add_(b.view(channels))
        by_x = -r * r * (mean_zx + scaled * K)
        constant = -r * mean_z - by_x * mean
        to_x = u.mul((-r * scaled * B).view(channels))
        to_x.addcmul_(g, (r * by_g).view(channels)).addcmul_(x, by_x.view(channels))
        to_x.add_(constant.view(channels))
        return to_g, to_x, count * r * K, None, None


class _Softplus(Function):
    """ln(1 + eˣ)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        return _SoftplusBackward.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _SoftplusBackward(Function):
    """g·s with the sigmoid s of x, whose own derivative is s(1 − s)."""

    @staticmethod
    def forward(ctx: Context, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return _softplus_backward(grad, x, 1, 20)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, u: Tensor) -> Any:
        grad, x = ctx.saved_tensors
        s = x.sigmoid()
        to_grad = u * s
        to_x = to_grad * grad
        return to_grad, to_x.addcmul_(to_x, s, value=-1)


def _conv_forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    return _convolution(x, weight, bias, stride, padding, dilation, False, [0], groups)


def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    return _convolution_backward(
        grad, x, weight, [weight.shape[0]], stride, padding, dilation, False, [0], groups, wanted
    )


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm_backward(
        grad, x, weight, None, None, mean, inverse, True, 0.0, [True, True, True]
    )


def _per_dimension(value: Any, dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else list(value)
