r"""The learning rule's steps in precisions of low rank plus a diagonal, S = UUᵀ + diag(d).

The sum of two such precisions has more columns, and is projected: SLANG's projection where the
curvature comes in factors, factor analysis where it is dense.

Reference: Mishkin, Kunstner, Nielsen, Schmidt & Khan, "SLANG: Fast structured covariance
approximations for Bayesian deep learning with natural gradient", 2018 (arXiv:1811.04504).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families import LowRankGaussian
from credo.families.full_gaussian import positive_cholesky
from credo.families.low_rank_gaussian import check_rows
from credo.rule.families.gaussian import absorb, absorb_positive
from credo.rule.families.structured_gaussian import (
    check_dense_or_diagonal,
    near_covariance,
    near_precision,
)
from credo.types import Vector

FactoredCurvature: TypeAlias = tuple[Tensor, Tensor | None]
"""(F, h) with H = FFᵀ + diag(h), never formed: F is (P, k), h is (P,) or None for zero."""

_MAX_STEPS = 50
_EXACT = 1e-20
"""A sum of squared correlations that is nothing but rounding."""


@absorb.register
def _(
    q: LowRankGaussian, curvature: Tensor | FactoredCurvature, keep: float, gain: float
) -> LowRankGaussian:
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
        return absorb_factor(q, *curvature, keep=keep, gain=gain)
    check_dense_or_diagonal(q, curvature)
    if curvature.dim() == 1:
        mixed = keep * q.diagonal + gain * curvature
        return LowRankGaussian(q.mean, math.sqrt(keep) * q.factor, mixed)
    precision = keep * q.dense_precision() + gain * curvature
    return LowRankGaussian(q.mean, *_nearest(q, precision, keep * q.diagonal))


def absorb_factor(
    q: LowRankGaussian, factor: Tensor, diagonal: Vector | None = None, *, keep: float, gain: float
) -> LowRankGaussian:
    """The same mean with keep·S + gain·H for H = FFᵀ + diag(h), without a dense matrix.

    SLANG's projection: the r leading eigenpairs of keep·UUᵀ + gain·FFᵀ become the new U, and
    the diagonal of what they leave out goes to d.

    Args:
        q: The Gaussian.
        factor: F, (P, k).
        diagonal: h, (P,), or None for zero.
        keep: How much of S stays.
        gain: How much of H comes.
    """
    check_rows("the curvature's factor", factor, q.size)
    mixed = keep * q.diagonal
    if diagonal is not None:
        check_dense_or_diagonal(q, diagonal)
        mixed = mixed + gain * diagonal
    weights = torch.cat(
        [factor.new_full((q.rank,), keep), factor.new_full((factor.shape[1],), gain)]
    )
    both = torch.cat([q.factor, factor], dim=1)
    leading, left_out = _leading(both, torch.diag(weights), q.rank)
    return LowRankGaussian(q.mean, leading, mixed + left_out)


@absorb_positive.register
def _(
    q: LowRankGaussian, curvature: Tensor | FactoredCurvature, rate: float, temperature: float = 1.0
) -> LowRankGaussian:
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
        check_dense_or_diagonal(q, curvature)
        if curvature.dim() == 2:
            squared = curvature @ q.solve(curvature.mT).mT
            precision = fade * q.dense_precision() + mixed * curvature + square * squared
            precision = 0.5 * (precision + precision.mT)
            return LowRankGaussian(q.mean, *_nearest(q, precision, fade * q.diagonal))
    factor, along = curvature if isinstance(curvature, tuple) else (None, curvature)
    factor = q.factor[:, :0] if factor is None else factor
    along = torch.zeros_like(q.mean) if along is None else along
    check_rows("the curvature's factor", factor, q.size)
    check_dense_or_diagonal(q, along)
    # HS⁻¹H = F(FᵀS⁻¹F)Fᵀ + F(hS⁻¹F)ᵀ + (hS⁻¹F)Fᵀ − (hD⁻¹U)C⁻¹(hD⁻¹U)ᵀ + diag(h²/d)
    solved = q.solve(factor.mT).mT
    over = along.unsqueeze(-1)
    columns = (q.factor, factor, over * solved, over * q.factor / q.diagonal.unsqueeze(-1))
    k = factor.shape[1]
    between = square * _identity(q, k)
    core = torch.block_diag(
        fade * _identity(q, q.rank),
        mixed * _identity(q, k) + square * factor.mT @ solved,
        0 * between,
        -square * torch.cholesky_inverse(q.inner_cholesky),
    )
    first, second = slice(q.rank, q.rank + k), slice(q.rank + k, q.rank + 2 * k)
    core[first, second] = core[second, first] = between
    leading, left_out = _leading(torch.cat(columns, dim=1), core, q.rank)
    diagonal = fade * q.diagonal + mixed * along + square * along.square() / q.diagonal
    return LowRankGaussian(q.mean, *_shrunk(leading, diagonal + left_out, 0.25 * q.diagonal))


@near_precision.register
def _(q: LowRankGaussian, mean: Vector, precision: Tensor) -> LowRankGaussian:
    """See ``_nearest``, which starts from the diagonal of this member."""
    return LowRankGaussian(mean, *_nearest(q, precision, q.diagonal))


@near_covariance.register
def _(q: LowRankGaussian, mean: Vector, covariance: Tensor) -> LowRankGaussian:
    root = positive_cholesky(covariance, "LowRankGaussian: covariance")
    return LowRankGaussian(mean, *_nearest(q, torch.cholesky_inverse(root), q.diagonal))


def _nearest(q: LowRankGaussian, precision: Tensor, start: Vector) -> tuple[Tensor, Vector]:
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
        (1 - 0.5 * q.rank / q.size) * bound,
    )
    part = _best_diagonal(correlation.detach(), starts, q.rank)
    factor, diagonal = _split(correlation, part, q.rank)
    if bool((diagonal <= 0).any()):
        factor, diagonal = _shrunk(factor, diagonal, 0.01 * bound)
    factor, diagonal = unit.unsqueeze(-1) * factor, unit.square() * diagonal
    return factor.to(precision.dtype), diagonal.to(precision.dtype)


def _identity(q: LowRankGaussian, size: int) -> Tensor:
    return torch.eye(size, dtype=q.mean.dtype, device=q.mean.device)


def _shrunk(factor: Tensor, diagonal: Vector, floor: Vector) -> tuple[Tensor, Vector]:
    """As little less of U as lets d reach the floor, at the same diagonal of UUᵀ + diag(d)."""
    squares = factor.square().sum(-1)
    lacking = floor - diagonal
    share = torch.where(lacking > 0, lacking / squares, torch.zeros_like(lacking)).max()
    return (1 - share).sqrt() * factor, diagonal + share * squares


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
