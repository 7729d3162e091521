"""The Gaussian whose precision is of low rank plus a diagonal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, check_points
from credo.families.exponential import refuse_unless
from credo.families.full_gaussian import positive_cholesky
from credo.families.structured_gaussian import StructuredGaussian
from credo.types import Vector

FactoredCurvature: TypeAlias = tuple[Tensor, Tensor | None]
"""(F, h) with H = FFᵀ + diag(h), never formed: F is (P, k), h is (P,) or None for zero."""


@dataclass(frozen=True, eq=False)
class LowRankGaussian(StructuredGaussian):
    r"""N(m, S⁻¹) with S = UUᵀ + diag(d).

        S⁻¹ = D⁻¹ − D⁻¹U C⁻¹ UᵀD⁻¹        ln|S| = ln|C| + Σ ln d        C = I + UᵀD⁻¹U = LLᵀ

    U is ``factor`` (P, r) with 1 ≤ r ≤ P, d is ``diagonal`` (P,), positive. Everything is
    O(P r²) in time and O(P r) in memory; L (r, r) is computed once in the life of a precision.

    A draw needs P normals and no eigenvectors: with V = D⁻½U,

        R = D⁻½(I − V L⁻ᵀ(L + I)⁻¹Vᵀ)    has    RRᵀ = D⁻½(I + VVᵀ)⁻¹D⁻½ = S⁻¹

    >>> q = LowRankGaussian(torch.zeros(2), torch.tensor([[1.0], [1.0]]), torch.ones(2))
    >>> q.dense_precision()
    tensor([[2., 1.],
            [1., 2.]])
    >>> q.variance
    tensor([0.6667, 0.6667])
    >>> F = torch.tensor([[2.0], [0.0]])
    >>> q.absorb((F, None), keep=0.0, gain=1.0)
    Traceback (most recent call last):
        ...
    credo.errors.DataError: LowRankGaussian: diagonal must be positive, but entry [0] is 0

    Reference: Mishkin, Kunstner, Nielsen, Schmidt & Khan, "SLANG: Fast structured covariance
    approximations for Bayesian deep learning with natural gradient", 2018 (arXiv:1811.04504).
    """

    mean: Vector
    factor: Tensor
    diagonal: Vector

    _fields: ClassVar[str] = "mean, factor, diagonal"

    def __post_init__(self) -> None:
        check_floating(mean=self.mean, factor=self.factor, diagonal=self.diagonal)
        if self.mean.dim() != 1 or self.diagonal.shape != self.mean.shape:
            raise DataError(
                "LowRankGaussian: mean and diagonal must be (P,), got "
                f"{tuple(self.mean.shape)} and {tuple(self.diagonal.shape)}"
            )
        self._check_rows("factor", self.factor)
        if not 1 <= self.rank <= self.size:
            raise DataError(
                f"LowRankGaussian: factor must be (P, r) with 1 ≤ r ≤ P = {self.size}, got "
                f"{tuple(self.factor.shape)}"
            )
        refuse_unless(self.diagonal > 0, self.diagonal, "LowRankGaussian", "diagonal", "positive")
        _ = self._root

    @cached_property
    def _root(self) -> Tensor:
        """L of C = I + UᵀD⁻¹U = LLᵀ, (r, r)."""
        inner = self.factor.mT @ (self.factor / self.diagonal.unsqueeze(-1))
        return positive_cholesky(
            inner + self._identity(self.rank), "LowRankGaussian: I + factorᵀ diagonal⁻¹ factor"
        )

    @property
    def rank(self) -> int:
        """r, the number of columns of the factor."""
        return self.factor.shape[-1]

    @property
    def variance(self) -> Vector:
        """The diagonal of S⁻¹: (1 − ‖L⁻¹v‖²)/d with v a weight's row of V."""
        scaled = self.factor / self.diagonal.sqrt().unsqueeze(-1)
        share = torch.linalg.solve_triangular(self._root, scaled.mT, upper=False).square().sum(0)
        # Where the share is 1 but for rounding, the variance given all other weights, 1/S_ii,
        # is the better bound.
        least = 1 / (1 + scaled.square().sum(-1))
        return torch.maximum(1 - share, least) / self.diagonal

    def multiply(self, vector: Vector) -> Vector:
        """UUᵀv + dv: (..., P) → (..., P)."""
        check_points(vector, self.size)
        return vector * self.diagonal + (vector @ self.factor) @ self.factor.mT

    def solve(self, vector: Vector) -> Vector:
        """S⁻¹v by Woodbury's identity: (..., P) → (..., P)."""
        check_points(vector, self.size)
        scaled = vector / self.diagonal
        inside = torch.cholesky_solve((scaled @ self.factor).unsqueeze(-1), self._root).squeeze(-1)
        return scaled - inside @ self.factor.mT / self.diagonal

    def log_det(self) -> Tensor:
        """2 Σ ln L_ii + Σ ln d."""
        return 2 * self._root.diagonal().log().sum() + self.diagonal.log().sum()

    def dense_precision(self) -> Tensor:
        """UUᵀ + diag(d)."""
        self._refuse_beyond_dense()
        return self.factor @ self.factor.mT + torch.diag(self.diagonal)

    def dense_covariance(self) -> Tensor:
        """D⁻¹ − D⁻¹U C⁻¹ UᵀD⁻¹."""
        self._refuse_beyond_dense()
        scaled = self.factor / self.diagonal.unsqueeze(-1)
        half = torch.linalg.solve_triangular(self._root, scaled.mT, upper=False)
        return torch.diag(1 / self.diagonal) - half.mT @ half

    def absorb(self, curvature: Tensor | FactoredCurvature, keep: float, gain: float) -> Self:
        """The same mean with keep·S + gain·H, the diagonal of the precision exact.

        ========== =============================================================================
        H          what happens
        ========== =============================================================================
        (P,)       exact: only d and the size of U change
        (F, h)     `absorb_factor`, O(P (r + k)²)
        (P, P)     the nearest U and d by least squares, see ``_nearest``; O(P³)
        ========== =============================================================================

        All three are exact wherever r columns suffice for the mixture. Refused are a dense mixture
        that is not positive definite, and in the other two cases a d that is not positive, which
        the structure needs; with keep > 0 and H positive semi-definite neither occurs.
        """
        if keep < 0:
            raise DataError(
                f"LowRankGaussian: keep must not be negative, but it is {keep!r}: factor·factorᵀ "
                "can't be subtracted. A smaller rate (rate·temperature ≤ 1) will do"
            )
        if isinstance(curvature, tuple):
            return self.absorb_factor(*curvature, keep=keep, gain=gain)
        self._check_dense_or_diagonal(curvature)
        if curvature.dim() == 1:
            mixed = keep * self.diagonal + gain * curvature
            return type(self)(self.mean, math.sqrt(keep) * self.factor, mixed)
        precision = keep * self.dense_precision() + gain * curvature
        return type(self)(self.mean, *self._nearest(precision, keep * self.diagonal))

    def absorb_factor(
        self, factor: Tensor, diagonal: Vector | None = None, *, keep: float, gain: float
    ) -> Self:
        """The same mean with keep·S + gain·H for H = FFᵀ + diag(h), without a dense matrix.

        SLANG's projection: the r leading eigenpairs of keep·UUᵀ + gain·FFᵀ become the new U, and
        the diagonal of what they leave out goes to d. F is ``factor`` (P, k), h ``diagonal`` (P,).
        """
        self._check_rows("the curvature's factor", factor)
        mixed = keep * self.diagonal
        if diagonal is not None:
            self._check_dense_or_diagonal(diagonal)
            mixed = mixed + gain * diagonal
        weights = torch.cat(
            [factor.new_full((self.rank,), keep), factor.new_full((factor.shape[1],), gain)]
        )
        both = torch.cat([self.factor, factor], dim=1)
        leading, left_out = _leading(both, torch.diag(weights), self.rank)
        return type(self)(self.mean, leading, mixed + left_out)

    def absorb_positive(
        self, curvature: Tensor | FactoredCurvature, rate: float, temperature: float = 1.0
    ) -> Self:
        r"""The same mean with S + ρG + ½ρ²GS⁻¹G projected, valid for any symmetric H and any rate.

        G = H − temperature·S, and with κ = 1 − ρ·temperature the new precision is
        ½(1 + κ²)S + κρH + ½ρ²HS⁻¹H. For H = FFᵀ + diag(h), or its diagonal alone, it is a diagonal
        plus a matrix of rank 2(r + k), of which the r leading eigenpairs stay, as in
        ``absorb_factor``; for a dense H it is projected as in ``absorb``. The diagonal of the
        precision is exact, and at least half the old one. Should the eigenpairs leave less than a
        quarter of the old d to some weight's new d, which takes a very negative H, the new U is
        shrunk until that is left.
        """
        kept = 1 - rate * temperature
        fade, mixed, square = 0.5 * (1 + kept**2), kept * rate, 0.5 * rate**2
        if isinstance(curvature, Tensor):
            self._check_dense_or_diagonal(curvature)
            if curvature.dim() == 2:
                squared = curvature @ self.solve(curvature.mT).mT
                precision = fade * self.dense_precision() + mixed * curvature + square * squared
                precision = 0.5 * (precision + precision.mT)
                return type(self)(self.mean, *self._nearest(precision, fade * self.diagonal))
        factor, along = curvature if isinstance(curvature, tuple) else (None, curvature)
        factor = self.factor[:, :0] if factor is None else factor
        along = torch.zeros_like(self.mean) if along is None else along
        self._check_rows("the curvature's factor", factor)
        self._check_dense_or_diagonal(along)
        # HS⁻¹H = F(FᵀS⁻¹F)Fᵀ + F(hS⁻¹F)ᵀ + (hS⁻¹F)Fᵀ − (hD⁻¹U)C⁻¹(hD⁻¹U)ᵀ + diag(h²/d)
        solved = self.solve(factor.mT).mT
        over = along.unsqueeze(-1)
        columns = (self.factor, factor, over * solved, over * self.factor / self._diagonal_column)
        k = factor.shape[1]
        between = square * self._identity(k)
        core = torch.block_diag(
            fade * self._identity(self.rank),
            mixed * self._identity(k) + square * factor.mT @ solved,
            0 * between,
            -square * torch.cholesky_inverse(self._root),
        )
        first, second = slice(self.rank, self.rank + k), slice(self.rank + k, self.rank + 2 * k)
        core[first, second] = core[second, first] = between
        leading, left_out = _leading(torch.cat(columns, dim=1), core, self.rank)
        diagonal = fade * self.diagonal + mixed * along + square * along.square() / self.diagonal
        return type(self)(self.mean, *_shrunk(leading, diagonal + left_out, 0.25 * self.diagonal))

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _diagonal_column(self) -> Tensor:
        return self.diagonal.unsqueeze(-1)

    def _identity(self, size: int) -> Tensor:
        return torch.eye(size, dtype=self.mean.dtype, device=self.mean.device)

    def _check_rows(self, name: str, factor: Tensor) -> None:
        if factor.dim() != 2 or factor.shape[0] != self.size:
            raise DataError(
                f"LowRankGaussian: {name} must have {self.size} rows, one for each weight, got "
                f"shape {tuple(factor.shape)}"
            )
        if not bool(torch.isfinite(factor).all()):
            raise DataError(f"LowRankGaussian: {name} has values that are not finite")

    def _colour(self, eps: Tensor) -> Tensor:
        """D⁻½(I − V L⁻ᵀ(L + I)⁻¹Vᵀ)ε."""
        check_points(eps, self.size)
        root, scale = self._root, self.diagonal.rsqrt()
        inside = ((eps * scale) @ self.factor).unsqueeze(-1)
        inside = torch.linalg.solve_triangular(
            root + self._identity(self.rank), inside, upper=False
        )
        inside = torch.linalg.solve_triangular(root.mT, inside, upper=True).squeeze(-1)
        return scale * (eps - scale * (inside @ self.factor.mT))

    def _trace_ratio(self, other: Self) -> Tensor:
        """Σ d' diag(S⁻¹) + tr(U'ᵀS⁻¹U')."""
        columns = other.factor.mT
        return (other.diagonal * self.variance).sum() + (columns * self.solve(columns)).sum()

    def _near_precision(self, mean: Vector, precision: Tensor) -> Self:
        """See ``_nearest``, which starts from the diagonal of this member."""
        return type(self)(mean, *self._nearest(precision, self.diagonal))

    def _near_covariance(self, mean: Vector, covariance: Tensor) -> Self:
        root = positive_cholesky(covariance, "LowRankGaussian: covariance")
        return self._near_precision(mean, torch.cholesky_inverse(root))

    def _nearest(self, precision: Tensor, start: Vector) -> tuple[Tensor, Vector]:
        r"""U and d > 0 with the diagonal of T exact and UUᵀ + diag(d) near to the dense T > 0.

        Least squares in the unit of each weight, min Σ_ij (T − UUᵀ − diag d)²_ij/(T_ii T_jj): with
        d given, U is the r leading eigenpairs of T − diag(d), and the best d is found from
        ``start`` by `_best_diagonal`. This is factor analysis; SLANG's projection is the U that
        belongs to ``start``. A member's own d is found wherever that is unique, and there the
        derivative is exact. Where the best d is not positive (a Heywood case), U is shrunk until
        every d has a hundredth of 1/(T⁻¹)_ii, the most that it could have.
        """
        root = positive_cholesky(precision, "LowRankGaussian: precision")
        unit = precision.diagonal().detach().double().sqrt()
        correlation = precision.double() / torch.outer(unit, unit)
        bound = 1 / (torch.cholesky_inverse(root.detach().double()).diagonal() * unit.square())
        starts = (
            start.detach().double() / unit.square(),
            (1 - 0.5 * self.rank / self.size) * bound,
        )
        part = _best_diagonal(correlation.detach(), starts, self.rank)
        factor, diagonal = _split(correlation, part, self.rank)
        if bool((diagonal <= 0).any()):
            factor, diagonal = _shrunk(factor, diagonal, 0.01 * bound)
        factor, diagonal = unit.unsqueeze(-1) * factor, unit.square() * diagonal
        return factor.to(precision.dtype), diagonal.to(precision.dtype)


def _shrunk(factor: Tensor, diagonal: Vector, floor: Vector) -> tuple[Tensor, Vector]:
    """As little less of U as lets d reach the floor, at the same diagonal of UUᵀ + diag(d)."""
    squares = factor.square().sum(-1)
    lacking = floor - diagonal
    share = torch.where(lacking > 0, lacking / squares, torch.zeros_like(lacking)).max()
    return (1 - share).sqrt() * factor, diagonal + share * squares


_MAX_STEPS = 50
_EXACT = 1e-20
"""A sum of squared correlations that is nothing but rounding."""


def _leading(columns: Tensor, core: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Of ZKZᵀ: a factor (P, rank) of its leading positive part, and the diagonal of the rest."""
    orthonormal, triangle = torch.linalg.qr(columns)
    values, vectors = torch.linalg.eigh(triangle @ core @ triangle.mT)
    noise = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    values = torch.where(values.abs() > noise, values, torch.zeros_like(values))
    directions = orthonormal @ vectors
    kept = values[-rank:].clamp(min=0)
    rest = torch.cat([values[:-rank], values[-rank:] - kept])
    return directions[:, -rank:] * kept.sqrt(), directions.square() @ rest


class _Fit:
    """How well the leading part of K − diag(ψ) explains it, for a correlation matrix K."""

    def __init__(self, correlation: Tensor, part: Vector, rank: int) -> None:
        self.part = part
        values, vectors = torch.linalg.eigh(correlation - torch.diag(part))
        noise = len(values) * torch.finfo(values.dtype).eps
        positive = values[-rank:] > noise
        self.vectors = vectors[:, -rank:][:, positive]
        rest = torch.cat([values[:-rank], values[-rank:][~positive]])
        others = torch.cat([vectors[:, :-rank], vectors[:, -rank:][:, ~positive]], dim=1)
        self.misfit = float(rest.square().sum())
        self.remainder = others.square() @ rest
        self.converged = bool(self.remainder.abs().max() <= 8 * noise)

    def newton(self, remainder: Vector) -> Vector:
        """The change of ψ that takes the remainder away: (Q∘Q)⁻¹, Q = I − leading projector.

        −Q∘Q is the derivative of the remainder with respect to ψ where the rest is zero. It is
        regular where ψ is locally unique (Anderson & Rubin, 1956); elsewhere the ridge decides.
        """
        one = torch.eye(len(self.part), dtype=self.part.dtype, device=self.part.device)
        outside = one - self.vectors @ self.vectors.mT
        root = torch.linalg.cholesky(outside.square() + 1e-10 * one)
        return torch.cholesky_solve(remainder.unsqueeze(-1), root).squeeze(-1)


@torch.no_grad()
def _best_diagonal(correlation: Tensor, starts: Iterable[Vector], rank: int) -> Vector:
    """The ψ that minimises Σ (the eigenvalues of K − diag ψ but the leading ones)².

    Gauss–Newton from each start, the best one; after an exact fit no other start is tried.
    """
    fits = []
    for start in starts:
        fits.append(_descend(_Fit(correlation, start, rank), correlation, rank))
        if fits[-1].misfit < _EXACT:
            break
    return min(fits, key=lambda fit: fit.misfit).part


def _descend(fit: _Fit, correlation: Tensor, rank: int) -> _Fit:
    for _ in range(_MAX_STEPS):
        if fit.converged:
            break
        step = fit.newton(fit.remainder)
        for halvings in range(12):
            # ψ stays positive, and a step towards zero covers at most nine tenths of the way.
            part = torch.maximum(fit.part + 0.5**halvings * step, 0.1 * fit.part)
            trial = _Fit(correlation, part, rank)
            if trial.misfit < fit.misfit:
                break
        else:
            break
        settled = trial.misfit > 0.99 * fit.misfit
        fit = trial
        if settled:
            break
    return fit


def _split(correlation: Tensor, part: Vector, rank: int) -> tuple[Tensor, Vector]:
    """U (P, rank) and d of K = UUᵀ + diag(d), d near ``part``, differentiable in K.

    The value of U is QΛ^½ of the leading eigenpairs of K − diag ψ. It is written KQ(QᵀKQ)^−½ with
    Q held, whose derivative exists also where eigenvalues meet, and is that of U where the other
    eigenvalues are zero; and ψ follows K by one Newton step of no length.
    """
    with torch.no_grad():
        fit = _Fit(correlation, part, rank)
    squares = _span(correlation - torch.diag(part), fit.vectors).square().sum(-1)
    remainder = correlation.diagonal() - part - squares
    part = part + fit.newton(remainder - remainder.detach())
    factor = _span(correlation - torch.diag(part), fit.vectors)
    diagonal = correlation.diagonal() - factor.square().sum(-1)
    missing = factor.new_zeros(len(factor), rank - factor.shape[1])
    return torch.cat([factor, missing], dim=1), diagonal


def _span(matrix: Tensor, vectors: Tensor) -> Tensor:
    """MQ L⁻ᵀ with LLᵀ = QᵀMQ: a factor of M's part in the span of the eigenvectors Q."""
    image = matrix @ vectors
    root = torch.linalg.cholesky(vectors.mT @ image)
    return torch.linalg.solve_triangular(root, image.mT, upper=False).mT
