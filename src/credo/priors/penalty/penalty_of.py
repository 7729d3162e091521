"""The penalty that a prior amounts to: the inverse of `credo.priors.from_penalty`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import Delta, DiagGaussian
from credo.priors.laplace import FlatLaplace
from credo.priors.penalty.heat_flow import normal_entropy
from credo.priors.penalty.tabulated import RadialTabulated
from credo.priors.scales import ScaleRule
from credo.types import FlatDistribution, Prior, Segment

Penalty: TypeAlias = Callable[..., Any]

_NODES = torch.linspace(-8.4, 8.4, 481, dtype=torch.float64)
"""Even nodes: as accurate as Gauss–Hermite's for smooth densities, and not blind between its nodes
to features much narrower than σ."""

_WEIGHTS = torch.exp(-0.5 * _NODES.square()) / torch.exp(-0.5 * _NODES.square()).sum()

_MAX_NUMBERS = 2**21


def penalty_of(prior: Prior, family: Any = "gaussian") -> Penalty:
    """r(mu, sigma) = KL(N(mu, sigma²)‖prior) of one weight; for "dirac" r(mu) = −ln α(mu).

    Closed forms for Normal and Laplace, quadrature otherwise. Tensors give tensors that can be
    differentiated, numbers and arrays give arrays, in float64; mu and sigma broadcast.

    Args:
        prior: A prior with one scale for all weights.
        family: "gaussian", whose scale is trained too, or "dirac", a point estimate.

    >>> from credo.priors import Normal
    >>> r = penalty_of(Normal(scale=0.5))
    >>> float(r(1.0, 0.5)), float(r(0.0, 0.5))                # μ²/2σ0²
    (2.0, 0.0)
    """
    flat = _over_one_weight(prior)
    if family == "dirac" or family is Delta or isinstance(family, Delta):
        return _dirac_penalty(flat)
    if family != "gaussian" and family is not DiagGaussian and type(family) is not DiagGaussian:
        raise UnsupportedError(
            f'penalties are known of "gaussian" (DiagGaussian) and "dirac" (Delta), not {family!r}'
        )
    if isinstance(flat, DiagGaussian):
        return _gaussian_penalty(lambda mu, s: _normal_kl(mu, s, flat.mean[0], flat.scale[0]))
    if isinstance(flat, FlatLaplace):
        return _gaussian_penalty(lambda mu, s: _laplace_kl(mu, s, flat.decay[0]))
    return _gaussian_penalty(lambda mu, s: _quadrature_kl(mu, s, flat))


def _over_one_weight(prior: Prior) -> FlatDistribution:
    if isinstance(getattr(prior, "scale", None), ScaleRule):
        raise DataError(
            f"{prior} has another scale in every layer, so its penalty is not one function; give "
            "the scale of the layer as a number"
        )
    if isinstance(prior, RadialTabulated):
        raise UnsupportedError(
            f"{type(prior).__name__} is a density of groups of {prior.dim} weights, and penalties "
            "are made of one weight's"
        )
    weight = Segment("weight", (1,), 0, 1, fan_in=1, fan_out=1, layer="", layer_type="")
    return prior.on([weight], torch.zeros(1, dtype=torch.float64))


def _gaussian_penalty(r: Callable[[Tensor, Tensor], Tensor]) -> Penalty:
    def penalty(mu: Any, sigma: Any) -> Any:
        mean, scale = (torch.as_tensor(value, dtype=torch.float64) for value in (mu, sigma))
        if not bool((scale > 0).all()):
            raise DataError(f"sigma must be positive, but it is {sigma}")
        value = r(*torch.broadcast_tensors(mean, scale))
        return value if isinstance(mu, Tensor) or isinstance(sigma, Tensor) else value.numpy()

    return penalty


def _dirac_penalty(flat: FlatDistribution) -> Penalty:
    def penalty(mu: Any) -> Any:
        value = -_log_density(flat, torch.as_tensor(mu, dtype=torch.float64))
        return value if isinstance(mu, Tensor) else value.numpy()

    return penalty


def _log_density(flat: FlatDistribution, points: Tensor) -> Tensor:
    """Elementwise."""
    return flat.log_prob(points.reshape(-1, 1)).reshape(points.shape)


def _normal_kl(mu: Tensor, sigma: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    log_ratio = (sigma / scale).log()
    return 0.5 * torch.expm1(2 * log_ratio) - log_ratio + 0.5 * ((mu - mean) / scale).square()


def _laplace_kl(mu: Tensor, sigma: Tensor, decay: Tensor) -> Tensor:
    z = mu / sigma
    mean_abs = sigma * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())
    mean_abs = mean_abs + mu * torch.erf(z / math.sqrt(2))
    return mean_abs / decay + (2 * decay).log() - normal_entropy(1.0) - sigma.log()


def _quadrature_kl(mu: Tensor, sigma: Tensor, flat: FlatDistribution) -> Tensor:
    rows = max(1, _MAX_NUMBERS // len(_NODES))
    pieces = zip(mu.reshape(-1).split(rows), sigma.reshape(-1).split(rows), strict=True)
    expected = [
        _log_density(flat, torch.addcmul(m[:, None], s[:, None], _NODES)) @ _WEIGHTS
        for m, s in pieces
    ]
    return -torch.cat(expected).reshape(mu.shape) - normal_entropy(1.0) - sigma.log()
