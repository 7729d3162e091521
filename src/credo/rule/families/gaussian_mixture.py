r"""Mixtures of Gaussians as conditional exponential families.

q(θ) is not an exponential family. The pair of θ and its component z is a *conditional* one: z
is categorical, and given z = k, θ belongs to the exponential family of N_k, with parameters λ_k

    q(θ, z) = π_z h(θ) exp(⟨λ_z, T(θ)⟩ − A(λ_z))

    λ = (ln π_k/π_K for k < K; λ_1; …; λ_K)              `natural_parameters`
    statistics (1[z=k] for k < K; 1[z=1]T(θ); …; 1[z=K]T(θ))  `joint_statistics`
    μ = (π_k for k < K; π_1 E_1 T; …; π_K E_K T)         `expectation_parameters`

In these coordinates no function A has μ = ∇A(λ): π_k E_k T moves with the log-odds while π does
not move with λ_k, so the Jacobian of μ is not symmetric, and `log_partition` refuses. (With
ln π_k/π_K − A(λ_k) + A(λ_K) in place of the log-odds there is one, A(λ_K) − ln π_K, and μ is
its gradient; but then components and weights move each other.) What holds instead: the Fisher
matrix of q(θ, z) is block-diagonal, so the natural gradient is ∇_μ taken block by block, the
λ of the other blocks held. With L = E_q[f] and N_k = N(m_k, V_k),

    ∂L/∂π_k = E_{N_k}[f] − E_{N_K}[f]
    ∂L/∂m_k = π_k E_{N_k}[∇f]        ∂L/∂V_k = ½π_k E_{N_k}[∇²f]

and the learning rule descends f = ℓ + log q with ``q.grad_log_prob`` and
`hessian_log_prob`.

Reference: Lin, Khan & Schmidt, "Fast and simple natural-gradient variational inference with
mixture of exponential-family approximations", 2019 (arXiv:1906.02914).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import GaussianMixture
from credo.families.base import check_points, refuse_unless
from credo.rule.families.exponential import (
    Parameters,
    check_parameters,
    expectation_parameters,
    log_partition,
    natural_parameters,
    parameter_names,
    sufficient_statistics,
    with_expectation,
    with_natural,
)
from credo.types import Vector


@natural_parameters.register
def _(q: GaussianMixture) -> Parameters:
    """(ln π_k/π_K; λ_1; …; λ_K), flat: one tensor for each statistic of each component."""
    return q.log_odds, *(p for component in q.components for p in natural_parameters(component))


@expectation_parameters.register
def _(q: GaussianMixture) -> Parameters:
    """(π_k for k < K; π_1 E_1 T; …; π_K E_K T), in the order of the natural parameters."""
    weights = q.weights
    moments = (
        weight * moment
        for weight, component in zip(weights, q.components, strict=True)
        for moment in expectation_parameters(component)
    )
    return weights[:-1], *moments


@parameter_names.register
def _(q: GaussianMixture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    natural, expectation = parameter_names(q.components[0])
    return (
        ("log odds", *_component_names(q, natural)),
        ("weights", *_component_names(q, expectation)),
    )


@with_natural.register
def _(q: GaussianMixture, natural: Parameters) -> GaussianMixture:
    check_parameters(natural, natural_parameters(q), parameter_names(q)[0], "GaussianMixture")
    components = (
        _built(k, with_natural, component, part)
        for k, (component, part) in enumerate(
            zip(q.components, _by_component(q, natural), strict=True)
        )
    )
    return GaussianMixture(natural[0], tuple(components))


@with_expectation.register
def _(q: GaussianMixture, expectation: Parameters) -> GaussianMixture:
    names = parameter_names(q)[1]
    check_parameters(expectation, natural_parameters(q), names, "GaussianMixture")
    first = expectation[0]
    weights = torch.cat([first, 1 - first.sum().unsqueeze(0)])
    what = "weights, the last 1 − their sum,"
    refuse_unless(weights > 0, weights, "GaussianMixture", what, "positive")
    components = (
        _built(k, with_expectation, component, tuple(moment / weights[k] for moment in part))
        for k, (component, part) in enumerate(
            zip(q.components, _by_component(q, expectation), strict=True)
        )
    )
    log_weights = weights.log()
    return GaussianMixture(log_weights[:-1] - log_weights[-1], tuple(components))


def joint_statistics(q: GaussianMixture, theta: Tensor, z: Tensor) -> Parameters:
    """(1[z=k] for k < K; 1[z=1]T(θ); …; 1[z=K]T(θ)), whose mean over q(θ, z) is μ.

    Args:
        q: The mixture.
        theta: θ, (..., P).
        z: Which component each θ comes from, (...), counted from 0.
    """
    check_points(theta, q.size)
    if z.shape != theta.shape[:-1]:
        raise DataError(
            f"z must have one component for each θ, {tuple(theta.shape[:-1])}, got shape "
            f"{tuple(z.shape)}"
        )
    last = len(q.components) - 1
    refuse_unless((z >= 0) & (z <= last), z, "GaussianMixture", "z", f"a component, 0 to {last}")
    which = torch.nn.functional.one_hot(z, len(q.components)).to(theta.dtype)
    statistics = (
        which[..., k].reshape(z.shape + (1,) * (value.dim() - z.dim())) * value
        for k, component in enumerate(q.components)
        for value in sufficient_statistics(component, theta)
    )
    return which[..., :-1], *statistics


@log_partition.register
def _(q: GaussianMixture) -> NoReturn:
    raise UnsupportedError(
        "a GaussianMixture has no log-partition function: it is a conditional exponential "
        "family, whose μ is not the gradient of any function of its λ. Each component has "
        "one, log_partition(q.components[k])"
    )


def _by_component(q: GaussianMixture, parameters: Parameters) -> list[Parameters]:
    each = (len(parameters) - 1) // len(q.components)
    return [parameters[start : start + each] for start in range(1, len(parameters), each)]


def _component_names(q: GaussianMixture, names: tuple[str, ...]) -> list[str]:
    return [f"component {k}'s {name}" for k in range(len(q.components)) for name in names]


def _built(k: int, build: Any, component: Any, parameters: Parameters) -> Any:
    """The component built from these parameters; what it refuses is refused by its number."""
    try:
        return build(component, parameters)
    except DataError as error:
        raise DataError(f"component {k}: {error}") from error


def hessian_log_prob(q: GaussianMixture, w: Vector) -> Tensor:
    """∇² ln q(w) = Σ_k r_k[(g_k − g)(g_k − g)ᵀ − S_k], where g = Σ_k r_k g_k.

    (..., P, P) with full components; with diagonal ones its diagonal, (..., P).

    Args:
        q: The mixture.
        w: Weights, (..., P).
    """
    responsibilities = q.responsibilities(w)
    gradients = torch.stack([component.grad_log_prob(w) for component in q.components], -2)
    precisions = torch.stack([component.precision for component in q.components])
    apart = gradients - torch.einsum("...k,...kp->...p", responsibilities, gradients).unsqueeze(-2)
    terms = "...k,...kp,...kp->...p" if precisions.dim() == 2 else "...k,...kp,...kr->...pr"
    between = torch.einsum(terms, responsibilities, apart, apart)
    return between - torch.tensordot(responsibilities, precisions, dims=1)
