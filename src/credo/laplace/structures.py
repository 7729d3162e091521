r"""Σ_i J_iᵀΛ_iJ_i over a data set, gathered batch by batch in the structure it is kept in.

=================== ==================================================== ==========================
structure           what is kept of H                                    N(m, (wH + δ)⁻¹) is a
=================== ==================================================== ==========================
`DiagonalCurvature` its diagonal, (P,)                                   `DiagGaussian`
`KronCurvature`     factors G ⊗ A of every layer, and their eigenvectors `EigenKroneckerGaussian`
`FullCurvature`     all of it, (P, P)                                    `FullGaussian`
`LowRankCurvature`  its leading eigenpairs                               `LowRankGaussian`
=================== ==================================================== ==========================

There is no prior in it: the prior's precision δ, one number for each parameter tensor, and the
weight w are arguments, so that the evidence can be had as a function of them at little cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.autodiff.layer_jacobians import DiagonalFactors, KronFactors
from credo.autodiff.loss import Loss
from credo.collectives import Ranks
from credo.errors import DataError, UnsupportedError
from credo.families import (
    DiagGaussian,
    EigenBlock,
    EigenKroneckerGaussian,
    FullGaussian,
    Gaussian,
)
from credo.types import Segment, Vector


class DataCurvature(ABC):
    """H = Σ_i J_iᵀΛ_iJ_i over the examples added so far."""

    forms_rows = False
    """Whether a batch is taken as rows Jᵀc, (R·B, P)."""

    def __init__(self, segments: Sequence[Segment], like: Vector) -> None:
        self.names = [segment.name for segment in segments]
        self.sizes = torch.tensor([segment.size for segment in segments], device=like.device)
        self.size = sum(segment.size for segment in segments)
        self.like = like.new_empty(0)

    @abstractmethod
    def add(self, jacobians: Jacobians, roots: Tensor) -> None:
        """The examples of one batch, with their `credo.likelihoods.curvature.curvature_roots`."""

    def add_exact(self, loss: Loss, theta: Vector) -> None:
        """∇²ℓ(θ) of one batch itself, in place of JᵀΛJ."""
        raise UnsupportedError(
            'curvature="hessian" is taken with structure="full" or "diag": the exact Hessian has '
            "no factors, and not only positive eigenvalues"
        )

    @abstractmethod
    def add_up(self, ranks: Ranks) -> None:
        """Make H the sum of all ranks'."""

    @property
    @abstractmethod
    def trace(self) -> float:
        """tr H."""

    @abstractmethod
    def log_det(self, precision: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """ln|wH + δ| in float64, differentiable in δ, one for each segment, and in w."""

    @abstractmethod
    def gaussian(self, mean: Vector, precision: Tensor, weight: float = 1.0) -> Gaussian:
        """N(mean, (wH + δ)⁻¹)."""

    @abstractmethod
    def pack(self) -> dict[str, Tensor]:
        """What was added so far, as contiguous tensors."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``pack``, into a fresh one."""

    def spread(self, precision: Tensor) -> Vector:
        """δ of every weight, (P,)."""
        return precision.repeat_interleave(self.sizes, output_size=self.size)


class DiagonalCurvature(DataCurvature):
    """The diagonal of H alone."""

    def __init__(self, segments: Sequence[Segment], like: Vector) -> None:
        super().__init__(segments, like)
        self.diagonal = like.new_zeros(self.size)

    def add(self, jacobians: Jacobians, roots: Tensor) -> None:
        """Σ_b Σ_r (J_bᵀc_rb)²."""
        self.diagonal += jacobians.squares(roots)

    def add_exact(self, loss: Loss, theta: Vector) -> None:
        """The Hessian's diagonal, by P products with it."""
        self.diagonal += loss.hessian_diagonal(theta)

    def add_up(self, ranks: Ranks) -> None:
        """Their sum."""
        ranks.sum_([self.diagonal])

    @property
    def trace(self) -> float:
        """Its sum."""
        return float(self.diagonal.sum())

    def log_det(self, precision: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Σ ln(wh + δ)."""
        return (weight * self.diagonal.double() + self.spread(precision.double())).log().sum()

    def gaussian(self, mean: Vector, precision: Tensor, weight: float = 1.0) -> DiagGaussian:
        """Standard deviations (wh + δ)^−½."""
        total = weight * self.diagonal + self.spread(precision.to(self.like))
        if not bool((total > 0).all()):
            raise _not_positive(float(total.min()))
        return DiagGaussian(mean, total.rsqrt())

    def pack(self) -> dict[str, Tensor]:
        """The diagonal."""
        return {"diagonal": self.diagonal}

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``pack``."""
        self.diagonal.copy_(tensors["diagonal"])


class FullCurvature(DataCurvature):
    """All of H, (P, P)."""

    forms_rows = True

    def __init__(self, segments: Sequence[Segment], like: Vector) -> None:
        super().__init__(segments, like)
        self.matrix = like.new_zeros(self.size, self.size)

    def add(self, jacobians: Jacobians, roots: Tensor) -> None:
        """Their sum of outer products."""
        self.matrix += jacobians.gram(roots)

    def add_exact(self, loss: Loss, theta: Vector) -> None:
        """The Hessian."""
        self.matrix += loss.hessian(theta)

    def add_up(self, ranks: Ranks) -> None:
        """Their sum."""
        ranks.sum_([self.matrix.view(-1)])

    @property
    def trace(self) -> float:
        """Of the matrix."""
        return float(self.matrix.trace())

    def log_det(self, precision: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """By a Cholesky factor."""
        total = weight * self.matrix.double() + torch.diag(self.spread(precision.double()))
        root, info = torch.linalg.cholesky_ex(total)
        if int(info):
            raise _not_positive(float(torch.linalg.eigvalsh(total.detach())[0]))
        return 2 * root.diagonal().log().sum()

    def gaussian(self, mean: Vector, precision: Tensor, weight: float = 1.0) -> FullGaussian:
        """The precision itself."""
        total = weight * self.matrix
        total = total.add_(total.mT.clone()).mul_(0.5)
        total.diagonal().add_(self.spread(precision.to(self.like)))
        try:
            return FullGaussian(mean, total)
        except DataError as error:
            raise _not_positive(float(torch.linalg.eigvalsh(total)[0])) from error

    def pack(self) -> dict[str, Tensor]:
        """The matrix."""
        return {"matrix": self.matrix}

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``pack``."""
        self.matrix.copy_(tensors["matrix"])


class KronCurvature(DataCurvature):
    """G ⊗ A for every weight matrix, G for every bias, the diagonal for what has no factors.

    G sums gradients at the layer's output over the data, A averages its inputs.
    """

    def __init__(self, segments: Sequence[Segment], like: Vector) -> None:
        super().__init__(segments, like)
        self.examples = 0
        self.factors: list[KronFactors | DiagonalFactors] = []

    def add(self, jacobians: Jacobians, roots: Tensor) -> None:
        """Left factors add up, right factors average."""
        found = jacobians.kron(roots)
        before, self.examples = self.examples, self.examples + jacobians.num_examples
        if not self.factors:
            self.factors = found
            return
        share = jacobians.num_examples / self.examples
        for mine, new in zip(self.factors, found, strict=True):
            if isinstance(mine, KronFactors) and isinstance(new, KronFactors):
                mine.left.add_(new.left)
                mine.right.lerp_(new.right, share)
            elif isinstance(mine, DiagonalFactors) and isinstance(new, DiagonalFactors):
                mine.diagonal.add_(new.diagonal)
            else:
                raise DataError(
                    f"the network uses {mine.name} in another way after {before} examples: its "
                    'curvature has Kronecker factors on some batches only; use structure="diag"'
                )
        self.__dict__.pop("_eigen", None)

    def add_up(self, ranks: Ranks) -> None:
        """Left factors add up, right factors average, by the ranks' examples."""
        sums, means = [], []
        for factors in self.factors:
            if isinstance(factors, DiagonalFactors):
                sums.append(factors.diagonal)
            else:
                sums.append(factors.left)
                means.append(factors.right)
        # Whatever their layout in memory, ranks agree on their order.
        wholes = [[tensor.reshape(-1).clone() for tensor in some] for some in (sums, means)]
        examples = ranks.sum_(wholes[0], [self.examples])
        ranks.average_(wholes[1] or [self.like], self.examples)
        for some, whole in zip((sums, means), wholes, strict=True):
            for tensor, total in zip(some, whole, strict=True):
                tensor.copy_(total.view(tensor.shape))
        self.examples = int(examples.sum())
        self.__dict__.pop("_eigen", None)

    @cached_property
    def _eigen(self) -> list[tuple[int, EigenBlock]]:
        """For each block its segment and its eigenvectors and -values, without a prior."""
        segment = {name: index for index, name in enumerate(self.names)}
        blocks: list[tuple[int, EigenBlock]] = []
        last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        for factors in self.factors:
            if isinstance(factors, DiagonalFactors):
                block = EigenBlock(None, None, factors.diagonal.unsqueeze(-1))
            else:
                # A layer's bias has the left factor of its weight.
                if last is None or not torch.equal(last[0], factors.left):
                    last = factors.left, _eigh(factors.left)
                left, left_vectors = last[1]
                right, right_vectors = _eigh(factors.right)
                basis = None if len(right) == 1 else right_vectors
                block = EigenBlock(left_vectors, basis, torch.outer(left, right))
            blocks.append((segment[factors.name], block))
        return blocks

    @property
    def trace(self) -> float:
        """Σ tr G · tr A."""
        return sum(
            float(f.diagonal.sum() if isinstance(f, DiagonalFactors) else _product_trace(f))
            for f in self.factors
        )

    def log_det(self, precision: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Σ ln(w·αβ + δ)."""
        terms = [
            (weight * block.values.double() + precision[segment].double()).log().sum()
            for segment, block in self._eigen
        ]
        return torch.stack(terms).sum()

    def gaussian(
        self, mean: Vector, precision: Tensor, weight: float = 1.0
    ) -> EigenKroneckerGaussian:
        """The same eigenvectors, eigenvalues w·αβ + δ."""
        delta = precision.to(self.like)
        blocks = (
            block._replace(values=weight * block.values + delta[segment])
            for segment, block in self._eigen
        )
        return EigenKroneckerGaussian(mean, tuple(blocks))

    def pack(self) -> dict[str, Tensor]:
        """All factors; their order is that of the parameters."""
        tensors: dict[str, Tensor] = {"examples": torch.tensor(self.examples)}
        for index, factors in enumerate(self.factors):
            tensors[f"{index}.place"] = torch.tensor(
                [self.names.index(factors.name), factors.place.start, factors.place.stop]
            )
            if isinstance(factors, DiagonalFactors):
                tensors[f"{index}.diagonal"] = factors.diagonal
            else:
                tensors[f"{index}.left"] = factors.left.contiguous()
                tensors[f"{index}.right"] = factors.right.contiguous()
        return tensors

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``pack``."""
        self.examples = int(tensors["examples"])
        self.factors = []
        while f"{len(self.factors)}.place" in tensors:
            index = len(self.factors)
            segment, start, stop = tensors[f"{index}.place"].tolist()
            name, place = self.names[segment], slice(start, stop)
            if f"{index}.diagonal" in tensors:
                diagonal = tensors[f"{index}.diagonal"].to(self.like).clone()
                self.factors.append(DiagonalFactors(name, place, diagonal))
            else:
                left, right = (
                    tensors[f"{index}.{side}"].to(self.like).clone() for side in ("left", "right")
                )
                self.factors.append(KronFactors(name, place, left, right))


def _product_trace(factors: KronFactors) -> Tensor:
    return factors.left.trace() * factors.right.trace()


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, none negative, and eigenvectors of a positive semi-definite matrix.

    In single precision LAPACK's may end without convergence, or with undefined numbers, where many
    units are dead and the others differ by orders of magnitude; double precision gets through.
    """
    symmetric = 0.5 * (matrix + matrix.mT)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
        converged = bool(torch.isfinite(vectors).all())
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        converged = False
    if not converged:
        values, vectors = torch.linalg.eigh(symmetric.double())
    return values.clamp(min=0).to(matrix), vectors.to(matrix).contiguous()


def _not_positive(smallest: float) -> DataError:
    return DataError(
        f"the posterior precision is not positive definite: its smallest eigenvalue is "
        f"{smallest:.3g}. The exact Hessian is negative in some directions away from a minimum: "
        'train longer, give the prior a smaller scale, or use curvature="ggn", which never is'
    )
