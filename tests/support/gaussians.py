"""One Gaussian of each structure and their mixtures, and what tests of them share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from credo.families.base import Family
from credo.families.diag_gaussian import DiagGaussian
from credo.families.fixed_gaussian import FixedGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian import Gaussian
from credo.families.gaussian_mixture import GaussianMixture
from credo.rule.families import Parameters

F64 = torch.float64
P = 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def definite(size: int = P, seed: int = 0) -> Tensor:
    root = numbers(size, size, seed=seed)
    return root @ root.mT + torch.eye(size, dtype=F64)


def full(seed: int = 0, dtype: torch.dtype = F64) -> FullGaussian:
    return FullGaussian(numbers(P, seed=seed + 10).to(dtype), definite(seed=seed).to(dtype))


def diagonal(seed: int = 0, dtype: torch.dtype = F64) -> DiagGaussian:
    mean, scale = numbers(P, seed=seed + 10), numbers(P, seed=seed).mul(0.5).exp()
    return DiagGaussian(mean.to(dtype), scale.to(dtype))


def fixed(precision: Tensor, dtype: torch.dtype = F64) -> FixedGaussian:
    return FixedGaussian(numbers(P, seed=3).to(dtype), precision.to(dtype))


GAUSSIANS: dict[str, Callable[[torch.dtype], Gaussian]] = {
    "diagonal": lambda dtype: diagonal(dtype=dtype),
    "full": lambda dtype: full(dtype=dtype),
    "fixed number": lambda dtype: fixed(torch.tensor(2.0), dtype),
    "fixed diagonal": lambda dtype: fixed(numbers(P).exp(), dtype),
    "fixed dense": lambda dtype: fixed(definite(), dtype),
}
MIXTURES: dict[str, Callable[[torch.dtype], GaussianMixture]] = {
    "diagonal mixture": lambda dtype: GaussianMixture(
        torch.tensor([0.5, -1.0], dtype=dtype), tuple(diagonal(k, dtype) for k in range(3))
    ),
    "full mixture": lambda dtype: GaussianMixture(
        torch.tensor([0.5, -1.0], dtype=dtype), tuple(full(k, dtype) for k in range(3))
    ),
    "mixture of one": lambda dtype: GaussianMixture(torch.zeros(0, dtype=dtype), (full(0, dtype),)),
}
FAMILIES: dict[str, Callable[[torch.dtype], Family]] = {**GAUSSIANS, **MIXTURES}


def matrix(q: Gaussian) -> Tensor:
    """The precision as a dense matrix."""
    precision: Tensor = q.precision  # type: ignore[attr-defined]
    return precision if precision.dim() == 2 else torch.diag(precision)


def close(actual: Tensor | Parameters, expected: Tensor | Parameters, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)


def leaves(parameters: Parameters) -> Parameters:
    return tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)
