r"""Where the learning rule looks at the loss: points θ and weights with Σ_s w_s f(θ_s) ≈ E_q f(θ).

================= ==============================================================================
`AtMean`          one point, the mean: the delta method, by which Bayes becomes optimisation
`MonteCarlo`      draws from q; ``estimator="score"`` asks the loss for values only
`GaussHermite`    a grid for few weights, exact for polynomials of degree 2·order − 1
================= ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Generator, Tensor

from credo.checks import Count, checked
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, FullGaussian, Gaussian
from credo.rule.quadrature import gauss_hermite
from credo.types import Vector

_MAX_GRID = 2**18


class Expectation(Protocol):
    """A way to approximate E_q by finitely many points."""

    @property
    def at_mean_only(self) -> bool:
        """Whether the mean is the only point, so that θ − m tells nothing."""
        ...

    @property
    def values_only(self) -> bool:
        """Whether the loss is not to be differentiated."""
        ...

    @property
    def is_grid(self) -> bool:
        """Whether the points are many and the weights few, so that all are evaluated at once."""
        ...

    def points(self, q: Gaussian, generator: Generator) -> Iterator[tuple[float, Vector]]:
        """Weights, which sum to one, and points (P,).

        Args:
            q: The Gaussian whose expectation is meant.
            generator: Where draws come from.
        """
        ...


@dataclass(frozen=True)
class AtMean:
    """E_q f ≈ f(m): exact for linear f, and what turns Bayesian learning into optimisation."""

    at_mean_only = True
    values_only = False
    is_grid = False

    def points(self, q: Gaussian, generator: Generator) -> Iterator[tuple[float, Vector]]:
        """The mean."""
        yield 1.0, q.mean


@checked
@dataclass(frozen=True)
class MonteCarlo:
    """The average over ``samples`` draws from q.

    ``estimator="reparam"`` differentiates the loss at the draws. ``"score"`` uses its values alone:

        E[∇ℓ] = E[(ℓ − b)·S(θ − m)],      E[∇²ℓ] = E[(ℓ − b)·(S(θ − m)(θ − m)ᵀS − S)]

    with the baseline b = ℓ(m); unbiased for any loss, even one with jumps, at a variance that grows
    with the number of weights. ``antithetic`` draws in pairs m ± δ, which removes odd terms.

    Args:
        samples: How many draws.
        estimator: Whether gradients of the loss are used, or its values alone.
        antithetic: Whether to draw in pairs m ± δ.
    """

    samples: Count = 1
    estimator: Literal["reparam", "score"] = "reparam"
    antithetic: bool = False

    at_mean_only = False
    is_grid = False

    def __post_init__(self) -> None:
        if self.antithetic and self.samples % 2:
            raise DataError(f"antithetic draws come in pairs, but samples={self.samples} is odd")

    @property
    def values_only(self) -> bool:
        """Whether the loss is not to be differentiated."""
        return self.estimator == "score"

    def points(self, q: Gaussian, generator: Generator) -> Iterator[tuple[float, Vector]]:
        """Draws of equal weight."""
        count = self.samples // 2 if self.antithetic else self.samples
        draws = q.sample(count, generator)
        if self.antithetic:
            draws = torch.cat([draws, 2 * q.mean - draws])
        for draw in draws:
            yield 1.0 / self.samples, draw


@dataclass(frozen=True)
class GaussHermite:
    """A product grid of ``order`` nodes along each axis of q: order^P points, for few weights.

    Args:
        order: The number of points along each weight.
    """

    order: int = 16

    at_mean_only = False
    values_only = False
    is_grid = True

    def points(self, q: Gaussian, generator: Generator) -> Iterator[tuple[float, Vector]]:
        """m + Cx for the nodes x of the standard normal, where CCᵀ is q's covariance."""
        if self.order**q.size > _MAX_GRID:
            raise UnsupportedError(
                f"a Gauss–Hermite grid of order {self.order} over {q.size} weights would have "
                f"{self.order}^{q.size} points; use MonteCarlo(samples=…) instead"
            )
        nodes, weights = gauss_hermite(self.order, like=q.mean)
        grid = torch.cartesian_prod(*[nodes] * q.size).reshape(-1, q.size)
        shares = torch.cartesian_prod(*[weights] * q.size).reshape(-1, q.size).prod(-1)
        yield from zip(shares.tolist(), q.mean + grid @ _spread(q).mT, strict=True)


def _spread(q: Gaussian) -> Tensor:
    """C with CCᵀ = S⁻¹, (P, P)."""
    if isinstance(q, DiagGaussian):
        return torch.diag(q.scale)
    identity = torch.eye(q.size, dtype=q.mean.dtype, device=q.mean.device)
    if isinstance(q, FullGaussian):
        return torch.linalg.solve_triangular(
            torch.linalg.cholesky(q.precision).mT, identity, upper=True
        )
    return torch.linalg.cholesky(q.solve(identity))
