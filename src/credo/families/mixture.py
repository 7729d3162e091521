"""Equal mixtures of distributions of any kind: what an ensemble of posteriors is over weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.families.base import (
    Family,
    check_count,
    check_floating,
    check_points,
    stored_size,
)
from credo.noise import NoiseSource
from credo.storage import under
from credo.types import Json, Vector


@dataclass(frozen=True, eq=False)
class Mixture(Family):
    r"""q(w) = (1/K) Σ_k q_k(w), of any families over the same weights.

    It has a density where every component has one. `credo.families.GaussianMixture` is the one
    whose weights are learned.

    Args:
        components: K ≥ 1 families of one size.

    >>> from credo.families import Delta
    >>> q = Mixture((Delta(torch.tensor([0.0])), Delta(torch.tensor([2.0]))))
    >>> q.mean, q.variance
    (tensor([1.]), tensor([1.]))
    """

    components: tuple[Family, ...]
    mean: Vector = field(init=False)

    def __post_init__(self) -> None:
        sizes = sorted({component.size for component in self.components})
        if len(sizes) != 1:
            raise DataError(
                f"a Mixture needs one or more components over the same weights, got sizes {sizes}"
            )
        means = {f"mean of component {k}": c.mean for k, c in enumerate(self.components)}
        check_floating(**means)
        object.__setattr__(self, "mean", torch.stack(list(means.values())).mean(0))

    @property
    def is_continuous(self) -> bool:  # type: ignore[override]
        """Whether every component has a density."""
        return all(component.is_continuous for component in self.components)

    @property
    def variance(self) -> Vector:
        """(1/K) Σ_k (σ_k² + (m_k − m)²): what is within the components and what is between them."""
        terms = [c.variance + (c.mean - self.mean).square() for c in self.components]
        return torch.stack(terms).mean(0)

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight, (P,)."""
        return self.variance.sqrt()

    def log_prob(self, w: Vector) -> Tensor:
        """ln (1/K) Σ_k q_k(w); components without a density refuse."""
        return self._log_densities(w).logsumexp(-1) - math.log(len(self.components))

    def grad_log_prob(self, w: Vector) -> Tensor:
        """Σ_k r_k ∇ ln q_k(w), with r_k the share of component k in the density."""
        shares = self._log_densities(w).softmax(-1)
        slopes = torch.stack([component.grad_log_prob(w) for component in self.components], -2)
        return torch.einsum("...k,...kp->...p", shares, slopes)

    def entropy(self) -> NoReturn:
        """Refused: it has no closed form."""
        raise UnsupportedError(
            "the entropy of a Mixture has no closed form; where it has a density, estimate it by "
            "the mean of −log_prob over draws"
        )

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, P), each from a component drawn at random."""
        check_count(n)
        device = self.mean.device
        chosen = torch.randint(
            len(self.components), (n,), generator=generator, device=device
        ).tolist()
        return torch.cat([self.components[k].sample(1, generator) for k in chosen])

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """Draws of one component after the other, as many of each: at least n in all."""
        check_count(n)
        each = -(-n // len(self.components))
        for component in self.components:
            yield from component.walk(each, noise, out)

    def _log_densities(self, w: Vector) -> Tensor:
        check_points(w, self.size)
        return torch.stack([component.log_prob(w) for component in self.components], -1)

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Every component's tensors behind its number, and its JSON."""
        tensors: dict[str, Tensor] = {}
        metas = []
        for k, component in enumerate(self.components):
            own, meta = component.pack()
            tensors |= {f"{k}.{name}": tensor for name, tensor in own.items()}
            metas.append(meta)
        return tensors, {"type": type(self).__name__, "size": self.size, "components": metas}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], meta: Json) -> Self:
        """The inverse of ``pack``; what can't have come from it is a `FileFormatError`."""
        from credo.families import unpack  # the table of all families, which has this one too

        size, metas = stored_size(cls.__name__, meta), meta.get("components")
        if not isinstance(metas, list) or not metas or not all(isinstance(m, dict) for m in metas):
            raise FileFormatError("a stored Mixture must list its components")
        if any(m.get("type") == cls.__name__ for m in metas):
            raise FileFormatError("a stored Mixture is not made of mixtures")
        components = tuple(unpack(under(f"{k}.", tensors), m) for k, m in enumerate(metas))
        known = {f"{k}.{name}" for k, c in enumerate(components) for name in c.pack()[0]}
        if not tensors.keys() <= known:
            raise FileFormatError(
                f"a stored Mixture of {len(metas)} has tensors of no component: "
                f"{sorted(tensors.keys() - known)[:3]}"
            )
        try:
            found = cls(components)
        except DataError as error:
            raise FileFormatError(
                f"the components of a stored Mixture don't fit: {error}"
            ) from error
        if found.size != size:
            raise FileFormatError(
                f"a stored Mixture says size {size} but its components have {found.size}"
            )
        return found
