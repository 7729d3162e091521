"""Expectations under a normal distribution by Gauss–Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from credo.checks import Count, checked


@lru_cache(maxsize=32)
def _standard_rule(order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return tuple(nodes.tolist()), tuple((weights / math.sqrt(2 * math.pi)).tolist())


@checked
def gauss_hermite(order: Count, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes x and weights w with Σ_k w_k f(x_k) = E f(ε), ε ~ N(0, 1).

    Exact for polynomials of degree up to 2·order − 1. The weights sum to one: they belong to the
    standard normal density, not to exp(−x²). Both are ``(order,)`` with the dtype and device of
    ``like``.

    >>> nodes, weights = gauss_hermite(3, torch.zeros((), dtype=torch.float64))
    >>> round(float(weights @ nodes**4), 12)
    3.0
    """
    nodes, weights = _standard_rule(order)
    return like.new_tensor(nodes), like.new_tensor(weights)


def expectation(
    fn: Callable[[Tensor], Tensor], mean: Tensor, scale: Tensor, order: int = 32
) -> Tensor:
    """E f(θ) for θ ~ N(mean, scale²), elementwise over any shape.

    ``mean`` and ``scale`` (a standard deviation) broadcast to a common shape (...). ``fn`` is
    called once with points ``(order, ...)`` and may append dimensions; the result drops the first
    one. The error vanishes exponentially in ``order`` where f is analytic, slowly at kinks.

    >>> mean, scale = torch.tensor([0.0, 1.0]), torch.tensor(2.0)
    >>> expectation(torch.square, mean, scale)        # mean² + scale²
    tensor([4.0000, 5.0000])
    """
    nodes, weights = gauss_hermite(order, like=mean)
    dims = max(mean.dim(), scale.dim())
    points = mean + scale * nodes.reshape(-1, *(1,) * dims)
    return torch.tensordot(weights, fn(points), dims=([0], [0]))
