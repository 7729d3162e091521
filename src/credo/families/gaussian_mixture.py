"""Mixtures of Gaussians: several modes in one distribution over the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self, TypeAlias

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
from credo.families.diag_gaussian import DiagGaussian
from credo.families.full_gaussian import FullGaussian
from credo.noise import NoiseSource
from credo.types import Json, Vector

Component: TypeAlias = DiagGaussian | FullGaussian

COMPONENTS: dict[str, type[Component]] = {
    "DiagGaussian": DiagGaussian,
    "FullGaussian": FullGaussian,
}
"""What a mixture may be made of, by name."""


@dataclass(frozen=True, eq=False)
class GaussianMixture(Family):
    r"""q(θ) = Σ_k π_k N_k(θ), where ln(π_k/π_K) is ``log_odds`` (K − 1,), and 0 for the last one.

    ``components`` are K ≥ 1 members of DiagGaussian, or K of FullGaussian, all of one size.

    Args:
        log_odds: ln(π_k/π_K) of all components but the last, (K − 1,).
        components: K members of `DiagGaussian`, or K of `FullGaussian`.

    >>> left, right = (DiagGaussian(torch.tensor([m]), torch.tensor(1.0)) for m in (-2.0, 2.0))
    >>> q = GaussianMixture(torch.tensor([0.0]), (left, right))
    >>> q.mean, q.variance
    (tensor([0.]), tensor([5.]))
    >>> q.responsibilities(torch.tensor([1.0]))
    tensor([0.0180, 0.9820])
    """

    log_odds: Tensor
    components: tuple[Component, ...]
    mean: Vector = field(init=False)

    def __post_init__(self) -> None:
        kinds = sorted({type(component).__name__ for component in self.components})
        if len(kinds) != 1 or kinds[0] not in COMPONENTS:
            raise DataError(
                f"components must be one or more of one type, {' or '.join(COMPONENTS)}; "
                f"got {kinds or 'none'}"
            )
        sizes = sorted({component.size for component in self.components})
        if len(sizes) != 1:
            raise DataError(f"components must all be over the same weights, got sizes {sizes}")
        means = {f"mean of component {k}": c.mean for k, c in enumerate(self.components)}
        check_floating(log_odds=self.log_odds, **means)
        if self.log_odds.shape != (len(self.components) - 1,):
            raise DataError(
                f"log_odds must be ({len(self.components) - 1},), one for each of the "
                f"{len(self.components)} components but the last; got "
                f"{tuple(self.log_odds.shape)}"
            )
        object.__setattr__(self, "mean", self.weights @ self._means)

    # --- weights and moments ----------------------------------------------------------------------

    @property
    def log_weights(self) -> Tensor:
        """ln π_k, (K,)."""
        return torch.cat([self.log_odds, self.log_odds.new_zeros(1)]).log_softmax(0)

    @property
    def weights(self) -> Tensor:
        """π_k, (K,)."""
        return self.log_weights.exp()

    @property
    def _means(self) -> Tensor:
        return torch.stack([component.mean for component in self.components])

    @property
    def variance(self) -> Vector:
        """Σ_k π_k(σ_k² + (m_k − m)²): what is within the components and what is between them."""
        within = torch.stack([component.variance for component in self.components])
        return self.weights @ (within + (self._means - self.mean).square())

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight, (P,)."""
        return self.variance.sqrt()

    # --- the density ------------------------------------------------------------------------------

    def log_prob(self, w: Vector) -> Tensor:
        """ln Σ_k π_k N_k(w)."""
        return self._log_joint(w).logsumexp(-1)

    def responsibilities(self, w: Vector) -> Tensor:
        """q(z = k | w): (..., P) → (..., K).

        Args:
            w: Weights, (..., P).
        """
        return self._log_joint(w).softmax(-1)

    def grad_log_prob(self, w: Vector) -> Tensor:
        """Σ_k r_k g_k, with r_k the responsibilities and g_k = ∇ ln N_k(w)."""
        gradients = [component.grad_log_prob(w) for component in self.components]
        return torch.einsum(
            "...k,...kp->...p", self.responsibilities(w), torch.stack(gradients, -2)
        )

    def _log_joint(self, w: Vector) -> Tensor:
        check_points(w, self.size)
        densities = [component.log_prob(w) for component in self.components]
        return torch.stack(densities, -1) + self.log_weights

    # --- entropy ----------------------------------------------------------------------------------

    def entropy(self) -> NoReturn:
        """Refused: it has no closed form."""
        raise UnsupportedError(
            "the entropy of a GaussianMixture has no closed form; estimate it by the mean of "
            "−log_prob over draws"
        )

    # --- draws ------------------------------------------------------------------------------------

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, P); differentiable in the components, not in the log-odds."""
        return self.sample_joint(n, generator)[0]

    def sample_joint(self, n: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draws of θ, (n, P), and the component each comes from, (n,).

        Args:
            n: How many draws.
            generator: Where the randomness comes from; torch's own if None.
        """
        check_count(n)
        z = self._draw_components(n, generator)
        theta = self.mean.new_empty(n, self.size)
        for k, component in enumerate(self.components):
            rows = torch.nonzero(z == k).squeeze(-1)
            if len(rows):
                theta[rows] = component.sample(len(rows), generator)
        return theta, z

    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """n draws, each written into ``out``."""
        check_count(n)
        generator = torch.Generator(self.mean.device).manual_seed(noise.seed)
        eps = torch.empty_like(out)
        for index in range(n):
            # One at a time, so that the first draws are the same however many are asked for.
            component = self.components[int(self._draw_components(1, generator))]
            yield component.draw_(out, noise.draw(eps, index))

    def _draw_components(self, n: int, generator: Generator | None) -> Tensor:
        weights = self.weights.detach()
        return torch.multinomial(weights, n, replacement=True, generator=generator)

    # --- storage ----------------------------------------------------------------------------------

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """The log-odds, and each field of the components stacked, (K, ...)."""
        kind = type(self.components[0])
        tensors = {
            name: torch.stack([getattr(component, name).detach() for component in self.components])
            for name in _field_names(kind)
        }
        meta = {"type": type(self).__name__, "size": self.size, "component": kind.__name__}
        return {"log_odds": self.log_odds.detach().contiguous(), **tensors}, meta

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], meta: Json) -> Self:
        """The inverse of ``pack``; what can't have come from it is a `FileFormatError`."""
        stored_size(cls.__name__, meta)
        kind = COMPONENTS.get(str(meta.get("component")))
        if kind is None:
            raise FileFormatError(
                f"a stored {cls.__name__} must say its component as one of {list(COMPONENTS)}, "
                f"got {meta.get('component')!r}"
            )
        names = _field_names(kind)
        if tensors.keys() != {"log_odds", *names}:
            raise FileFormatError(
                f"a stored {cls.__name__} has the tensors {sorted(['log_odds', *names])}, "
                f"got {sorted(tensors)}"
            )
        log_odds = tensors["log_odds"]
        stacked = [tensors[name] for name in names]
        if log_odds.dim() != 1 or any(
            tensor.dim() < 2 or len(tensor) != len(log_odds) + 1 for tensor in stacked
        ):
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            raise FileFormatError(f"the tensors of a stored {cls.__name__} don't fit: {shapes}")
        if not torch.isfinite(log_odds).all():
            raise FileFormatError(
                f"log_odds of the stored {cls.__name__} has values that are not finite"
            )
        components = tuple(
            kind.unpack(dict(zip(names, parts, strict=True)), meta)
            for parts in zip(*stacked, strict=True)
        )
        try:
            return cls(log_odds, components)
        except DataError as error:
            raise FileFormatError(
                f"the tensors of a stored {cls.__name__} don't fit: {error}"
            ) from error


def _field_names(kind: type[Component]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(kind)]
