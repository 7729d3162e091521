"""Mixtures of Gaussians: several modes in one distribution over the weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Self, TypeAlias

import torch
from torch import Generator, Tensor

from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.families.base import Family, check_count, check_floating, check_points
from credo.families.diag_gaussian import DiagGaussian
from credo.families.exponential import Parameters, check_parameters, refuse_unless
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

    q(θ) is not an exponential family. The pair of θ and its component z is a *conditional* one: z
    is categorical, and given z = k, θ belongs to the exponential family of N_k, with parameters λ_k

        q(θ, z) = π_z h(θ) exp(⟨λ_z, T(θ)⟩ − A(λ_z))

        λ = (ln π_k/π_K for k < K; λ_1; …; λ_K)              ``natural``
        statistics (1[z=k] for k < K; 1[z=1]T(θ); …; 1[z=K]T(θ))  ``joint_statistics(theta, z)``
        μ = (π_k for k < K; π_1 E_1 T; …; π_K E_K T)         ``expectation``, their mean

    In these coordinates no function A has μ = ∇A(λ): π_k E_k T moves with the log-odds while π does
    not move with λ_k, so the Jacobian of μ is not symmetric, and ``log_partition`` refuses. (With
    ln π_k/π_K − A(λ_k) + A(λ_K) in place of the log-odds there is one, A(λ_K) − ln π_K, and μ is
    its gradient; but then components and weights move each other.) What holds instead: the Fisher
    matrix of q(θ, z) is block-diagonal, so the natural gradient is ∇_μ taken block by block, the
    λ of the other blocks held. With L = E_q[f] and N_k = N(m_k, V_k),

        ∂L/∂π_k = E_{N_k}[f] − E_{N_K}[f]
        ∂L/∂m_k = π_k E_{N_k}[∇f]        ∂L/∂V_k = ½π_k E_{N_k}[∇²f]

    and the learning rule descends f = ℓ + log q with ``grad_log_prob`` and ``hessian_log_prob``.

    >>> left, right = (DiagGaussian(torch.tensor([m]), torch.tensor(1.0)) for m in (-2.0, 2.0))
    >>> q = GaussianMixture(torch.tensor([0.0]), (left, right))
    >>> q.mean, q.variance
    (tensor([0.]), tensor([5.]))
    >>> q.responsibilities(torch.tensor([1.0]))
    tensor([0.0180, 0.9820])

    Reference: Lin, Khan & Schmidt, "Fast and simple natural-gradient variational inference with
    mixture of exponential-family approximations", 2019 (arXiv:1906.02914); FORMULAS E.
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
        """q(z = k | w): (..., P) → (..., K)."""
        return self._log_joint(w).softmax(-1)

    def grad_log_prob(self, w: Vector) -> Tensor:
        """Σ_k r_k g_k, with r_k the responsibilities and g_k = ∇ ln N_k(w)."""
        return self._average_gradient(self.responsibilities(w), self._gradients(w))

    def hessian_log_prob(self, w: Vector) -> Tensor:
        """∇² ln q(w) = Σ_k r_k[(g_k − g)(g_k − g)ᵀ − S_k], where g = Σ_k r_k g_k.

        (..., P, P) with full components; with diagonal ones its diagonal, (..., P).
        """
        responsibilities, gradients = self.responsibilities(w), self._gradients(w)
        precisions = torch.stack([component.precision for component in self.components])
        apart = gradients - self._average_gradient(responsibilities, gradients).unsqueeze(-2)
        if precisions.dim() == 2:
            terms = "...k,...kp,...kp->...p"
        else:
            terms = "...k,...kp,...kr->...pr"
        between = torch.einsum(terms, responsibilities, apart, apart)
        return between - torch.tensordot(responsibilities, precisions, dims=1)

    def _log_joint(self, w: Vector) -> Tensor:
        check_points(w, self.size)
        densities = [component.log_prob(w) for component in self.components]
        return torch.stack(densities, -1) + self.log_weights

    def _gradients(self, w: Vector) -> Tensor:
        return torch.stack([component.grad_log_prob(w) for component in self.components], -2)

    @staticmethod
    def _average_gradient(responsibilities: Tensor, gradients: Tensor) -> Tensor:
        return torch.einsum("...k,...kp->...p", responsibilities, gradients)

    # --- entropy ----------------------------------------------------------------------------------

    def entropy(self) -> NoReturn:
        """Refused: it has no closed form."""
        raise UnsupportedError(
            "the entropy of a GaussianMixture has no closed form; entropy_of_joint() is an upper "
            "bound in closed form, entropy_estimate(samples, generator) a Monte Carlo estimate "
            "with its standard error"
        )

    def entropy_of_joint(self) -> Tensor:
        """H(θ, z) = H(π) + Σ_k π_k H(N_k), 0-dim, in nats.

        It exceeds H(q) by the uncertainty about z once θ is known: by nothing where the components
        are far apart, by H(π) where they coincide.
        """
        within = torch.stack([component.entropy() for component in self.components])
        return torch.special.entr(self.weights).sum() + self.weights @ within

    def entropy_estimate(
        self, samples: int, generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """−(1/n) Σ ln q(θ_i) over n ≥ 2 draws, and its standard error; both 0-dim."""
        if samples < 2:
            raise DataError(f"a standard error needs at least 2 samples, got {samples}")
        values = -self.log_prob(self.sample(samples, generator))
        return values.mean(), values.std() / math.sqrt(samples)

    # --- draws ------------------------------------------------------------------------------------

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, P); differentiable in the components, not in the log-odds."""
        return self.sample_joint(n, generator)[0]

    def sample_joint(self, n: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draws of θ, (n, P), and the component each comes from, (n,)."""
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

    # --- the conditional exponential family -------------------------------------------------------

    @property
    def natural(self) -> Parameters:
        """(ln π_k/π_K; λ_1; …; λ_K), flat: one tensor for each statistic of each component."""
        return self.log_odds, *(p for component in self.components for p in component.natural)

    @property
    def expectation(self) -> Parameters:
        """(π_k for k < K; π_1 E_1 T; …; π_K E_K T), in the order of ``natural``."""
        weights = self.weights
        moments = (
            weight * moment
            for weight, component in zip(weights, self.components, strict=True)
            for moment in component.expectation
        )
        return weights[:-1], *moments

    @property
    def natural_names(self) -> tuple[str, ...]:
        """What each natural parameter is called in an error."""
        return "log odds", *self._component_names(self.components[0].natural_names)

    @property
    def expectation_names(self) -> tuple[str, ...]:
        """What each expectation parameter is called in an error."""
        return "weights", *self._component_names(self.components[0].expectation_names)

    def with_natural(self, natural: Parameters) -> Self:
        """The mixture with these λ; differentiable, out of range is refused."""
        check_parameters(natural, self.natural, self.natural_names, type(self).__name__)
        components = (
            _named(k, component.with_natural, part)
            for k, (component, part) in enumerate(
                zip(self.components, self._by_component(natural), strict=True)
            )
        )
        return type(self)(natural[0], tuple(components))

    def with_expectation(self, expectation: Parameters) -> Self:
        """The mixture with these μ; differentiable, out of range is refused."""
        names = self.expectation_names
        check_parameters(expectation, self.natural, names, type(self).__name__)
        first = expectation[0]
        weights = torch.cat([first, 1 - first.sum().unsqueeze(0)])
        refuse_unless(
            weights > 0,
            weights,
            type(self).__name__,
            "weights, the last 1 − their sum,",
            "positive",
        )
        components = (
            _named(k, component.with_expectation, tuple(moment / weights[k] for moment in part))
            for k, (component, part) in enumerate(
                zip(self.components, self._by_component(expectation), strict=True)
            )
        )
        log_weights = weights.log()
        return type(self)(log_weights[:-1] - log_weights[-1], tuple(components))

    def joint_statistics(self, theta: Tensor, z: Tensor) -> Parameters:
        """(1[z=k] for k < K; 1[z=1]T(θ); …; 1[z=K]T(θ)) of θ (..., P) and z (...).

        z counts from 0. The mean over q(θ, z) is ``expectation``.
        """
        check_points(theta, self.size)
        if z.shape != theta.shape[:-1]:
            raise DataError(
                f"z must have one component for each θ, {tuple(theta.shape[:-1])}, got shape "
                f"{tuple(z.shape)}"
            )
        refuse_unless(
            (z >= 0) & (z < len(self.components)),
            z,
            type(self).__name__,
            "z",
            f"a component, 0 to {len(self.components) - 1}",
        )
        which = torch.nn.functional.one_hot(z, len(self.components)).to(theta.dtype)
        statistics = (
            which[..., k].reshape(z.shape + (1,) * (value.dim() - z.dim())) * value
            for k, component in enumerate(self.components)
            for value in component.statistics(theta)
        )
        return which[..., :-1], *statistics

    def log_partition(self) -> NoReturn:
        """Refused: in these coordinates no function has μ as its gradient."""
        raise UnsupportedError(
            "a GaussianMixture has no log-partition function: it is a conditional exponential "
            "family, whose μ is not the gradient of any function of its λ. Each component has "
            "one, q.components[k].log_partition()"
        )

    def _by_component(self, parameters: Parameters) -> list[Parameters]:
        each = (len(parameters) - 1) // len(self.components)
        return [parameters[start : start + each] for start in range(1, len(parameters), each)]

    def _component_names(self, names: tuple[str, ...]) -> list[str]:
        return [f"component {k}'s {name}" for k in range(len(self.components)) for name in names]

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
        size = meta.get("size")
        if not isinstance(size, int) or size < 1:
            raise FileFormatError(
                f"a stored {cls.__name__} must say its size as a positive integer, got {size!r}"
            )
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


def _named(k: int, build: Callable[[Parameters], Component], parameters: Parameters) -> Component:
    """The component built from these parameters; what it refuses is refused by its number."""
    try:
        return build(parameters)
    except DataError as error:
        raise DataError(f"component {k}: {error}") from error


def _field_names(kind: type[Component]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(kind)]
