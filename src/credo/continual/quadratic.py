r"""Quadratic forms around old weights: how a task that is over is remembered by its curvature.

    ½ Σ_t (θ − m_t)ᵀ H_t (θ − m_t)        H_t = Σ_k w_k H_tk + diag(d)

symbols: m_t ``anchor``, H_tk ``curvatures`` (`credo.laplace.structures`: diagonal, Kronecker or
full, summed over a task's data, so possibly singular) with ``weights`` w_k, d ``damping``.

Several diagonal forms are one diagonal form around A⁻¹Σ_t H_t m_t, A = Σ_t H_t, plus a constant, so
`QuadraticPull` costs one pass over the weights however many tasks there were.

    >>> from credo.laplace.structures import DiagonalCurvature
    >>> from credo.network import bind
    >>> flat = bind(torch.nn.Linear(1, 1))
    >>> curvature = DiagonalCurvature(flat.segments, flat.vector)
    >>> curvature.diagonal += torch.tensor([2.0, 0.0])
    >>> form = Quadratic(torch.tensor([1.0, 1.0]), [curvature])
    >>> form.value(torch.tensor([4.0, 7.0])), form.gradient(torch.tensor([4.0, 7.0]))
    (9.0, tensor([6., 0.]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from credo.autodiff.layer_jacobians import DiagonalFactors
from credo.continual.regularised import Regulariser
from credo.errors import DataError, UnsupportedError
from credo.laplace.structures import DataCurvature, DiagonalCurvature, FullCurvature, KronCurvature
from credo.map import MAPState
from credo.storage import under
from credo.types import Json, Segment, Vector

STRUCTURES: dict[str, type[DataCurvature]] = {
    "diag": DiagonalCurvature,
    "kron": KronCurvature,
    "full": FullCurvature,
}


def times(curvature: DataCurvature, vector: Vector) -> Vector:
    """H v, (P,)."""
    if isinstance(curvature, DiagonalCurvature):
        return curvature.diagonal * vector
    if isinstance(curvature, FullCurvature):
        return curvature.matrix @ vector
    if isinstance(curvature, KronCurvature):
        product = torch.zeros_like(vector)
        for factors in curvature.factors:
            part = vector[factors.place]
            if isinstance(factors, DiagonalFactors):
                product[factors.place] = factors.diagonal * part
                continue
            matrix = part.view(len(factors.left), len(factors.right))
            product[factors.place] = (factors.left @ matrix @ factors.right).flatten()
        return product
    raise UnsupportedError(
        f"{type(curvature).__name__} has no product with a vector here; use one of "
        f"{sorted(STRUCTURES)}"
    )


@dataclass
class Quadratic:
    """½(θ − m)ᵀH(θ − m), H = Σ_k w_k H_k + diag(d); weights default to 1 and d to none."""

    anchor: Vector
    curvatures: list[DataCurvature]
    weights: list[float] = field(default_factory=list)
    damping: Vector | None = None

    def __post_init__(self) -> None:
        self.weights = self.weights or [1.0] * len(self.curvatures)

    def times(self, vector: Vector) -> Vector:
        """H v."""
        total = torch.zeros_like(vector) if self.damping is None else self.damping * vector
        for weight, curvature in zip(self.weights, self.curvatures, strict=True):
            total = total.add_(times(curvature, vector), alpha=weight)
        return total

    def gradient(self, theta: Vector) -> Vector:
        """H(θ − m)."""
        return self.times(theta - self.anchor)

    def value(self, theta: Vector) -> float:
        """½(θ − m)ᵀH(θ − m)."""
        away = theta - self.anchor
        return 0.5 * float(away @ self.times(away))

    def is_diagonal(self) -> bool:
        """Whether H is a vector."""
        return all(isinstance(c, DiagonalCurvature) for c in self.curvatures)

    def pack(self) -> dict[str, Tensor]:
        """All of it, as tensors."""
        tensors = {"anchor": self.anchor, "weights": torch.tensor(self.weights).double()}
        if self.damping is not None:
            tensors["damping"] = self.damping
        for index, curvature in enumerate(self.curvatures):
            tensors |= {f"{index}.{name}": t for name, t in curvature.pack().items()}
        return tensors

    @classmethod
    def unpack(
        cls, tensors: Mapping[str, Tensor], structure: str, segments: Sequence[Segment]
    ) -> Quadratic:
        """The inverse of ``pack``."""
        curvatures = []
        for index in range(len(tensors["weights"])):
            curvature = STRUCTURES[structure](segments, tensors["anchor"])
            curvature.unpack(under(f"{index}.", tensors))
            curvatures.append(curvature)
        return cls(
            tensors["anchor"], curvatures, tensors["weights"].tolist(), tensors.get("damping")
        )


class QuadraticPull(Regulariser):
    """R = weight · Σ_t ½(θ − m_t)ᵀH_t(θ − m_t), over the model's random weights."""

    def __init__(self, forms: Sequence[Quadratic], weight: float) -> None:
        if not forms:
            raise DataError("there is no form to pull with: the first task has no regulariser")
        self.weight, self.constant, self.tasks = weight, 0.0, len(forms)
        self.forms = list(forms)
        if all(form.is_diagonal() for form in forms):
            self._merge(forms)

    def add_gradient(self, state: MAPState) -> None:
        """weight · Σ_t H_t(θ − m_t)."""
        random = state.random
        theta = random.view(state.flat.vector) if random.is_one_run else random.read(
            state.flat.vector
        )  # fmt: skip
        if len(self.forms) == 1 and self.precision is not None:
            pull = self.precision * (theta - self.forms[0].anchor)
        else:
            pull = torch.stack([form.gradient(theta) for form in self.forms]).sum(0)
        if random.is_one_run:
            random.view(state.gradient).add_(pull, alpha=self.weight)
            return
        random.write(state.gradient, random.read(state.gradient) + self.weight * pull)

    precision: Vector | None = None
    """The sum of the forms, where they are diagonal."""

    def value(self, state: MAPState) -> float:
        """R at the present weights."""
        theta = state.random.read(state.flat.vector)
        return self.weight * (self.constant + sum(form.value(theta) for form in self.forms))

    def config(self) -> Json:
        """Its settings."""
        return {"type": "QuadraticPull", "weight": self.weight, "tasks": self.tasks}

    def _merge(self, forms: Sequence[Quadratic]) -> None:
        ones = torch.ones_like(forms[0].anchor)
        precisions = torch.stack([form.times(ones) for form in forms])
        total = precisions.sum(0)
        shares = precisions / total.where(total > 0, 1.0)
        anchors = torch.stack([form.anchor for form in forms])
        centre = (shares * anchors).sum(0) if len(forms) > 1 else anchors[0]
        self.constant = sum(form.value(centre) for form in forms)
        self.precision = total
        self.forms = [Quadratic(centre, [], [], total)]
