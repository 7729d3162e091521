r"""The covariance Σ of every family, through a network's Jacobians: JΣJᵀ, kernels JΣJ'ᵀ, tr(ΛJΣJᵀ).

=========================  =====================================  =================================
family                     JΣJᵀ                                   kept for kernels
=========================  =====================================  =================================
`Delta`                    zero                                   nothing
`DiagGaussian`             layer by layer, from what passes it    g, a and v of dense layers, rows
                                                                  times √v of others
`EigenKroneckerGaussian`   the same, in the factors' eigenbases   the same, in those bases
`LowRankGaussian`          J D⁻¹ Jᵀ − (JW)(JW)ᵀ: the diagonal,    those of the diagonal, and the
                           and as many products as the rank       columns to be taken off
`FactorGaussian`           J D Jᵀ + (JF)(JF)ᵀ, as well            the same, to be added
`FullGaussian`             J itself, (B, K, P)                    J times the inverse of the
                                                                  precision's Cholesky factor
other Gaussians            J itself                               J and JΣ
=========================  =====================================  =================================

A new family is one registration: a `WeightCovariance` for it, with `weight_covariance`.

For a diagonal Σ = diag(v) traces need sums of squares alone, one root of Λ after the other,

    tr(ΛJΣJᵀ) = Σ_r Σ_p v_p (J_bᵀc_rb)_p²        Σ_r c_r c_rᵀ = Λ

and for a dense layer (J_bᵀc)_oi² = g_o² a_i², so Σ_r g² is all that its roots leave behind. A
convolution makes its windows once for all roots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.autodiff.layer_jacobians import KronCovariance, MatrixBlock, MatrixTap, Tap
from credo.errors import UnsupportedError
from credo.families import (
    Delta,
    DiagGaussian,
    EigenKroneckerGaussian,
    FactorGaussian,
    Family,
    FixedGaussian,
    FullGaussian,
    Gaussian,
    LowRankGaussian,
)
from credo.posterior.features import (
    Features,
    Rows,
    Solved,
    diagonal_features,
    output_rows,
    tiled_features,
)
from credo.types import Vector


class WeightCovariance(ABC):
    """Σ, as far as Jacobians J (`credo.autodiff.jacobians.Jacobians`) ask for it.

    ``directions`` are cotangents (R, B, ...) of the outputs; None stands for all outputs.
    """

    forms_rows = True
    """Whether J itself is formed, because Σ is no structure that layers share."""

    @abstractmethod
    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """JΣJᵀ, (B, R, R).

        Args:
            jacobians: J of a batch.
            directions: Cotangents (R, B, ...); None for all outputs.
        """

    @abstractmethod
    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """What is kept of a batch for kernels with other ones.

        Args:
            jacobians: J of a batch.
            directions: Cotangents (R, B, ...); None for all outputs.
        """

    def trace(self, jacobians: Jacobians, roots: Tensor) -> Tensor:
        """tr(ΛJΣJᵀ), (B,).

        Args:
            jacobians: J of a batch.
            roots: Those of Λ, (R, B, ...).
        """
        return self.of_outputs(jacobians, roots).diagonal(dim1=-2, dim2=-1).sum(-1)


@singledispatch
def weight_covariance(q: Family) -> WeightCovariance:
    """The covariance Σ of q; a family that has none is refused.

    >>> from credo.network import bind, select
    >>> net = torch.nn.Linear(2, 1)
    >>> flat = bind(net)
    >>> q = DiagGaussian(torch.zeros(3), torch.tensor(0.1))
    >>> jacobians = Jacobians.at(net, flat, select(flat.segments), torch.tensor([[3.0, 0.0]]))
    >>> weight_covariance(q).of_outputs(jacobians)
    tensor([[[0.1000]]])

    Args:
        q: A distribution over the weights.
    """
    raise UnsupportedError(
        "a network that is linear in its weights needs a Gaussian over them, and a "
        f'{type(q).__name__} is none. Predict with at="samples"; as a Gaussian process take '
        "credo.functionspace.SampledGP(posterior), which has the mean and covariance of the "
        "functions that it draws."
    )


class SolvedCovariance(WeightCovariance):
    """Σ of any Gaussian, by solving with its precision."""

    def __init__(self, q: Gaussian) -> None:
        self._q = q

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """(JΣ)Jᵀ."""
        rows = output_rows(jacobians, directions)
        return self._q.solve(rows) @ rows.mT

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """J and JΣ."""
        rows = output_rows(jacobians, directions)
        return Features([Solved(rows, self._q.solve(rows))], len(rows))


class DenseCovariance(WeightCovariance):
    """Σ = (LLᵀ)⁻¹ from the Cholesky factor of its inverse."""

    def __init__(self, cholesky: Tensor) -> None:
        self._cholesky = cholesky

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """(JL⁻ᵀ)(JL⁻ᵀ)ᵀ."""
        half = self._half(jacobians, directions)
        return half @ half.mT

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """JL⁻ᵀ."""
        half = self._half(jacobians, directions)
        return Features([Rows(half)], len(half))

    def _half(self, jacobians: Jacobians, directions: Tensor | None) -> Tensor:
        rows = output_rows(jacobians, directions)
        columns = rows.flatten(0, 1).mT
        white = torch.linalg.solve_triangular(self._cholesky, columns, upper=False)
        return white.mT.unflatten(0, rows.shape[:2])


class NoCovariance(WeightCovariance):
    """Σ = 0."""

    forms_rows = False

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """Zeros."""
        outputs = jacobians.outputs
        count = jacobians.num_outputs if directions is None else len(directions)
        return outputs.new_zeros(len(outputs), count, count)

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """Rows of no numbers."""
        count = jacobians.num_outputs if directions is None else len(directions)
        empty = jacobians.outputs.new_zeros(jacobians.num_examples, count, 0)
        return Features([Rows(empty)], len(empty))


class DiagonalCovariance(WeightCovariance):
    """Σ = diag(v)."""

    forms_rows = False

    def __init__(self, variance: Vector) -> None:
        self._variance = variance

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """Layer by layer."""
        return jacobians.variance_diag(self._variance, directions)

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """Layer by layer."""
        return diagonal_features(jacobians, directions, self._variance.detach())

    def trace(self, jacobians: Jacobians, roots: Tensor) -> Tensor:
        """From sums of squares."""
        blocks = [(block, self._variance[block.place]) for block in jacobians.blocks]
        total = roots.new_zeros(roots.shape[1])
        summed: dict[Tap, Tensor] = {}
        windows: dict[Tap, Tensor] = {}
        for root in roots.split(1):
            cotangents = jacobians.cotangents(root)
            for tap in {block.outer for block, _ in blocks if block.outer is not None}:
                g = cotangents.at[tap][0].flatten(0, -2)
                if tap in summed:
                    summed[tap].addcmul_(g, g)
                else:
                    summed[tap] = g.square()
            for block, v in blocks:
                if block.outer is not None:
                    continue
                tap_of = block.parts[0].tap if isinstance(block, MatrixBlock) else None
                if isinstance(tap_of, MatrixTap) and not tap_of.left_is_input:
                    left = tap_of.sides(cotangents.at[tap_of], slice(0, 1))[0]
                    if tap_of not in windows:
                        windows[tap_of] = tap_of.sides(cotangents.at[tap_of], slice(None))[1][0]
                    g = tap_of.features(cotangents.at[tap_of], slice(None))[0]  # (B, T, groups·out)
                    g = g.mT.unflatten(1, left.shape[2:5:2])  # (B, groups, out, T)
                    pulled = (g @ windows[tap_of]).flatten(1)
                else:
                    pulled = block.pull(cotangents, slice(None))[0]
                total += pulled.square_() @ v
        for block, v in blocks:
            if block.outer is None:
                continue
            spread = v
            if isinstance(block, MatrixBlock):
                a = block.outer.inputs.flatten(0, -2).to(roots.dtype)
                spread = a.square() @ v.view(-1, a.shape[1]).mT
            total += (summed[block.outer] * spread).sum(1)
        return total


class LowRankCovariance(WeightCovariance):
    """Σ = diag(v) ± WWᵀ.

    Args:
        variance: v, (P,).
        columns: W, (P, r).
        sign: 1 or -1.
    """

    forms_rows = False

    def __init__(self, variance: Vector, columns: Tensor, sign: int) -> None:
        self._diagonal, self._columns, self._sign = DiagonalCovariance(variance), columns, sign

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """That of the diagonal, and (JW)(JW)ᵀ."""
        along = jacobians.times(self._columns, directions)
        return self._diagonal.of_outputs(jacobians, directions) + self._sign * (along @ along.mT)

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """Those of the diagonal, and JW to be added or taken off."""
        diagonal = self._diagonal.features(jacobians, directions)
        along = Rows(jacobians.times(self._columns, directions), sign=self._sign)
        return Features([*diagonal.parts, along], diagonal.count)


class TiledCovariance(WeightCovariance):
    """A block-diagonal Σ of Kronecker products.

    Args:
        tiles: The blocks, which follow each other and cover all weights.
    """

    forms_rows = False

    def __init__(self, tiles: Sequence[KronCovariance]) -> None:
        self._tiles = tiles

    def of_outputs(self, jacobians: Jacobians, directions: Tensor | None = None) -> Tensor:
        """In the tiles' bases."""
        return jacobians.kron_variance(self._tiles, directions)

    def features(self, jacobians: Jacobians, directions: Tensor | None = None) -> Features:
        """In the tiles' bases."""
        return tiled_features(jacobians, directions, self._tiles)


@weight_covariance.register
def _(q: Gaussian) -> WeightCovariance:
    return SolvedCovariance(q)


@weight_covariance.register
def _(q: FullGaussian) -> WeightCovariance:
    return DenseCovariance(q.cholesky)


@weight_covariance.register
def _(q: FixedGaussian) -> WeightCovariance:
    if q.precision.dim() == 2:
        return weight_covariance(FullGaussian(q.mean, q.precision))
    return weight_covariance(DiagGaussian(q.mean, q.scale))


@weight_covariance.register
def _(q: Delta) -> WeightCovariance:
    return NoCovariance()


@weight_covariance.register
def _(q: DiagGaussian) -> WeightCovariance:
    return DiagonalCovariance(q.variance)


@weight_covariance.register
def _(q: LowRankGaussian) -> WeightCovariance:
    return LowRankCovariance(1 / q.diagonal, _reduction(q), sign=-1)


@weight_covariance.register
def _(q: FactorGaussian) -> WeightCovariance:
    return LowRankCovariance(q.diagonal, q.factor, sign=1)


@weight_covariance.register
def _(q: EigenKroneckerGaussian) -> WeightCovariance:
    return TiledCovariance([KronCovariance(b.left, b.right, 1 / b.values) for b in q.blocks])


def _reduction(q: LowRankGaussian) -> Tensor:
    """W, (P, r), of Σ = D⁻¹ − WWᵀ: W = D⁻¹U L⁻ᵀ with LLᵀ = I + UᵀD⁻¹U."""
    scaled = q.factor / q.diagonal.unsqueeze(-1)
    inner = q.factor.mT @ scaled
    one = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    root = torch.linalg.cholesky(inner + one)
    return torch.linalg.solve_triangular(root, scaled.mT, upper=False).mT
