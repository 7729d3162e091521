"""The Gaussian with independent weights: mean-field variational inference's family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError, FileFormatError
from credo.families.base import check_count, check_floating, check_points
from credo.families.gaussian import Gaussian
from credo.noise import NoiseSource
from credo.types import Json, Vector


@dataclass(frozen=True, eq=False)
class DiagGaussian(Gaussian):
    """N(mean, diag(scale²)): ``scale`` is a standard deviation.

    One of ``mean`` and ``scale`` is (P,); the other may be 0-dim and is then expanded without
    taking memory, and so may a vector that is already expanded:
    ``DiagGaussian(zero.expand(P), one.expand(P))`` is a standard normal at the cost of two numbers.
    Shapes, dtypes and devices are checked here; values are not, because a look at P numbers would
    cost a pass over memory (and a wait, on an accelerator). A scale that is not positive shows as
    NaN or infinity in ``log_prob`` and ``entropy``.

    Args:
        mean: m, (P,) or a number.
        scale: The standard deviations, (P,) or a number; positive.

    >>> q = DiagGaussian(torch.tensor([0.0, 1.0]), torch.tensor(2.0))
    >>> q.variance
    tensor([4., 4.])
    >>> q.log_prob(q.mean)
    tensor(-3.2242)
    """

    mean: Vector
    scale: Vector

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, scale=self.scale)
        shapes = {t.shape for t in (self.mean, self.scale) if t.dim() > 0}
        if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
            raise DataError(
                "mean and scale must both be vectors (P,), or one of them (P,) and the other a "
                f"number; got {tuple(self.mean.shape)} and {tuple(self.scale.shape)}. Two numbers "
                "don't tell P: expand one, torch.zeros(()).expand(P)"
            )
        for name in ("mean", "scale"):
            if getattr(self, name).dim() == 0:
                object.__setattr__(self, name, getattr(self, name).expand(shape))

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], meta: Json) -> Self:
        """The inverse of ``pack``; a negative scale is a `FileFormatError` too."""
        family = super().unpack(tensors, meta)
        if bool((family.scale < 0).any()):
            raise FileFormatError("the stored DiagGaussian has negative standard deviations")
        return family

    @property
    def variance(self) -> Vector:
        """scale²."""
        return self.scale.square()

    @property
    def precision(self) -> Vector:
        """1/scale², the diagonal of S."""
        return self.scale.reciprocal().square()

    def log_prob(self, w: Vector) -> Tensor:
        """−½ Σ ((w − mean)/scale)² − Σ ln scale − ½ P ln 2π."""
        check_points(w, self.size)
        squared_distance = ((w - self.mean) / self.scale).square().sum(-1)
        log_volume = self.scale.log().sum() + 0.5 * self.size * math.log(2 * math.pi)
        return -0.5 * squared_distance - log_volume

    def grad_log_prob(self, w: Vector) -> Tensor:
        """(mean − w)/scale²."""
        check_points(w, self.size)
        # Divided twice because scale² may underflow where scale doesn't.
        return (self.mean - w) / self.scale / self.scale

    def entropy(self) -> Tensor:
        """Σ ln scale + ½ P ln 2πe."""
        return self.scale.log().sum() + 0.5 * self.size * math.log(2 * math.pi * math.e)

    def kl(self, other: Self) -> Tensor:
        """The sum of `kl_terms`, 0-dim.

        The general formula of exponential families says the same, but cancels where the means are
        many standard deviations from zero.
        """
        return self.kl_terms(other).sum()

    def kl_terms(self, other: Self) -> Vector:
        """Each weight's ½[σ²/s² − 1 − ln(σ²/s²)] + ½(μ − m)²/s², m and s those of ``other``.

        Args:
            other: Another `DiagGaussian` over as many weights.
        """
        self.check_same_family(other)
        # With l = ln(σ/s) the bracket is expm1(2l) − 2l: exact also where the two are nearly
        # equal, where as written it would be nothing but rounding error.
        log_ratio = (self.scale / other.scale).log()
        distance = (self.mean - other.mean) / other.scale
        return 0.5 * torch.expm1(2 * log_ratio) - log_ratio + 0.5 * distance.square()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """mean + scale·ε, differentiable in mean and scale: (n, P)."""
        check_count(n)
        eps = torch.randn(
            n, self.size, generator=generator, dtype=self.mean.dtype, device=self.mean.device
        )
        return torch.addcmul(self.mean, self.scale, eps)

    def draw_(self, out: Tensor, eps: Tensor) -> Tensor:
        """Write mean + scale·eps into ``out`` and return it: one pass, no memory, no graph.

        ``out`` and ``eps`` are (..., P) and may be the same tensor.

        Args:
            out: Where the draws go, (..., P).
            eps: Standard normals, (..., P).

        >>> q = DiagGaussian(torch.tensor([0.0, 1.0]), torch.tensor(2.0))
        >>> q.draw_(torch.empty(2), eps=torch.tensor([1.0, -1.0]))
        tensor([ 2., -1.])
        """
        with torch.no_grad():
            return torch.addcmul(self.mean, self.scale, eps, out=out)

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``."""
        check_count(n)
        eps = torch.empty_like(out)
        for index in range(n):
            yield self.draw_(out, noise.draw(eps, index))

    def with_mean(self, mean: Vector) -> Self:
        """The same scale around another mean."""
        return type(self)(mean, self.scale)

    def solve(self, vector: Vector) -> Vector:
        """σ²v: (..., P) → (..., P)."""
        check_points(vector, self.size)
        return vector * self.scale * self.scale
