"""The leading eigenpairs of a curvature that is summed over data, without forming it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.collectives import Ranks
from credo.families import LowRankGaussian
from credo.laplace.structures import DataCurvature
from credo.types import Segment, Vector


class LowRankCurvature(DataCurvature):
    r"""The leading r eigenpairs of H from one pass, by Nyström's approximation.

        Y = HΩ        H ≈ Y(ΩᵀY)⁻¹Yᵀ        Ω (P, l) orthonormal and random, l = 3r + 10

    exact where H has at most l eigenvalues that are not zero, and never more than H (Tropp,
    Yurtsever, Udell & Cevher, "Fixed-rank approximation of a positive-semidefinite matrix from
    streaming data", 2017, arXiv:1706.05736).
    """

    forms_rows = True

    def __init__(self, segments: Sequence[Segment], like: Vector, rank: int = 20) -> None:
        super().__init__(segments, like)
        self.rank = min(rank, self.size)
        columns = sketch_columns(self.rank, self.size)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.size, columns, generator=generator, dtype=like.dtype)
        self.probe = torch.linalg.qr(drawn.to(like.device)).Q
        self.image = torch.zeros_like(self.probe)
        self._trace = torch.zeros((), dtype=torch.float64)

    def add(self, jacobians: Jacobians, roots: Tensor) -> None:
        """Y += Rᵀ(RΩ) for the rows R."""
        rows = jacobians.pull(roots).flatten(0, 1)
        self.image.addmm_(rows.mT, rows @ self.probe)
        self._trace += float(rows.square().sum())
        self.__dict__.pop("factor", None)

    def add_up(self, ranks: Ranks) -> None:
        """The sum of images, and of traces."""
        image, trace = self.image.flatten(), self._trace.to(self.like.device, copy=True).view(1)
        ranks.sum_([image])
        ranks.sum_([trace])
        self.image, self._trace = image.view(self.image.shape), trace[0].to(self._trace.device)
        self.__dict__.pop("factor", None)

    @cached_property
    def factor(self) -> Tensor:
        """U with UUᵀ ≈ H, (P, r), its columns orthogonal."""
        # A little of the identity, taken off again, keeps ΩᵀY from losing definiteness to rounding.
        nudge = torch.finfo(self.like.dtype).eps * float(self.image.norm()) or 1e-30
        image = self.image.double() + nudge * self.probe.double()
        inner = self.probe.double().mT @ image
        root = torch.linalg.cholesky(0.5 * (inner + inner.mT))
        half = torch.linalg.solve_triangular(root, image.mT, upper=False).mT
        vectors, values, _ = torch.linalg.svd(half, full_matrices=False)
        kept = (values.square() - nudge).clamp(min=0).sqrt()[: self.rank]
        return (vectors[:, : self.rank] * kept).to(self.like).contiguous()

    @property
    def trace(self) -> float:
        """Of all of H, not of what is kept."""
        return float(self._trace)

    def log_det(self, precision: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """ln|I + w UᵀD⁻¹U| + Σ ln δ."""
        delta, factor = self.spread(precision.double()), self.factor.double()
        inner = weight * factor.mT @ (factor / delta.unsqueeze(-1))
        one = torch.eye(self.rank, dtype=inner.dtype, device=inner.device)
        return torch.linalg.slogdet(inner + one).logabsdet + delta.log().sum()

    def gaussian(self, mean: Vector, precision: Tensor, weight: float = 1.0) -> LowRankGaussian:
        """U√w and δ."""
        delta = self.spread(precision.to(self.like))
        return LowRankGaussian(mean, math.sqrt(weight) * self.factor, delta)

    def pack(self) -> dict[str, Tensor]:
        """Y and the trace; Ω is always the same."""
        return {"image": self.image, "trace": self._trace}

    def unpack(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``pack``."""
        self.image.copy_(tensors["image"])
        self._trace.copy_(tensors["trace"])


def sketch_columns(rank: int, size: int) -> int:
    """l of `LowRankCurvature`."""
    return min(size, 3 * rank + 10)
