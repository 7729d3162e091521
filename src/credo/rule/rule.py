r"""The Bayesian learning rule, written once.

    λ ← λ − ρ∇_μ( E_q[ℓ(θ)] − τ H(q) )

minimises E_q[ℓ] − τH(q) over an exponential family. λ are q's natural and μ its expectation
parameters, ρ is ``rate``, τ is ``temperature`` (1 for Bayes; 0 drops the entropy and leaves a plain
search), and ℓ is the loss with the prior in it: ℓ = −log p(D, θ) makes the minimum the posterior.

Four ways to write the same step live here, and tests hold them equal:

=========================== ====================================================================
`step`                      any family, given ∇_μE_q[ℓ]; also with heavy-ball momentum in λ
`gaussian_step`             a Gaussian, given E_q[∇ℓ] and E_q[∇²ℓ] instead (Bonnet, Price)
`natural_gradient`          F(λ)⁻¹∇_λ, which is ∇_μ: natural-gradient variational inference
mirror descent              argmin_μ ⟨∇_μ, μ⟩ + KL(q_μ‖q)/ρ, A's conjugate as mirror map; see tests
=========================== ====================================================================

`black_box_step` is what they are not: plain gradient descent on λ.

For a Gaussian the chain rule gives ∇_{E θ}E ℓ = E[∇ℓ] − E[H]m and ∇_{E θθᵀ}E ℓ = ½E[H], so

    S ← (1 − ρτ)S + ρE[H],      m ← m − ρS⁻¹E[∇ℓ]  with the *new* S

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> q = DiagGaussian(torch.tensor([2.0]), torch.tensor([1.0]))
    >>> loss_gradient, loss_hessian = 4.0 * q.mean, torch.tensor([4.0])      # ℓ = 2θ²
    >>> q = gaussian_step(q, loss_gradient, loss_hessian, rate=1.0)
    >>> q.mean, q.variance                                   # one step: the posterior N(0, 1/4)
    (tensor([0.]), tensor([0.2500]))

Reference: Khan & Rue, "The Bayesian learning rule", 2021 (arXiv:2107.04562), and document 004,
whose slides have E[H]m doubled, the sign of S's step reversed, and the old S in m's step
(FORMULAS H 40–42). Momentum: Khan et al., 2018 (arXiv:1806.04854).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from credo.checks import finite, positive
from credo.errors import DataError
from credo.families import ExponentialFamily, Gaussian
from credo.families.exponential import Parameters
from credo.types import Vector

F = TypeVar("F", bound=ExponentialFamily)
G = TypeVar("G", bound=Gaussian)


def step(
    q: F,
    gradient: Parameters,
    rate: float,
    *,
    temperature: float = 1.0,
    momentum: float = 0.0,
    previous: F | None = None,
) -> F:
    """λ − ρ(∇_μE_q[ℓ] − τ∇_μH) + γ(λ − λ₋): one step of the rule in any family.

    ``gradient`` is ∇_μE_q[ℓ], one tensor for each statistic; `expectation_gradient` finds it by
    autodiff. γ is ``momentum`` and λ₋ belongs to ``previous``, the member before ``q``. A step that
    leaves the family is refused with the parameter's name.

    >>> import torch
    >>> from credo.rule.families import Categorical
    >>> q = Categorical.from_probs(torch.tensor([0.5, 0.25, 0.25]))
    >>> losses = torch.tensor([0.0, 1.0, 2.0])
    >>> gradient = (losses[:-1] - losses[-1],)              # ∇_μ Σ_k π_k ℓ_k, with π_K the rest
    >>> step(q, gradient, rate=1.0).probs                   # one step: the Gibbs distribution
    tensor([0.6652, 0.2447, 0.0900])
    """
    positive("rate", rate)
    temperature = _not_negative("temperature", temperature)
    momentum = _not_negative("momentum", momentum)
    _check_gradient(q, gradient)
    natural = tuple(
        parameter - rate * (down - temperature * up)
        for parameter, down, up in zip(q.natural, gradient, q.entropy_gradient(), strict=True)
    )
    if momentum and previous is not None:
        q.check_same_family(previous)
        natural = tuple(
            new + momentum * (now - before)
            for new, now, before in zip(natural, q.natural, previous.natural, strict=True)
        )
    return q.with_natural(natural)


def gaussian_step(
    q: G,
    gradient: Vector,
    curvature: Tensor,
    rate: float,
    *,
    mean_rate: float | None = None,
    temperature: float = 1.0,
    keep_positive: bool = False,
) -> G:
    """The rule for a Gaussian: S ← (1 − ρτ)S + ρE[H], then m ← m − αS⁻¹E[∇ℓ].

    ``gradient`` is E_q[∇ℓ] (P,), ``curvature`` E_q[∇²ℓ] as (P,) or (P, P), or an estimate of them.
    ``mean_rate`` α defaults to ρ. ``keep_positive`` takes the improved step, which stays positive
    definite even where the curvature is not; it differs in second order of ρ.
    """
    positive("rate", rate)
    temperature = _not_negative("temperature", temperature)
    _check_vector(q, gradient)
    if keep_positive:
        moved = q.absorb_positive(curvature, rate, temperature)
    else:
        moved = q.absorb(curvature, keep=1.0 - rate * temperature, gain=rate)
    return moved.with_mean(q.mean - (mean_rate or rate) * moved.solve(gradient))


def bonnet_price(q: Gaussian, gradient: Vector, curvature: Tensor) -> Parameters:
    """∇_μE_q[ℓ] from E_q[∇ℓ] and E_q[∇²ℓ]: (E[∇ℓ] − E[H]m, ½E[H]).

    H is (P,) for a diagonal family, (P, P) for a dense one.
    """
    _check_vector(q, gradient)
    along = curvature * q.mean if curvature.dim() == 1 else curvature @ q.mean
    return gradient - along, 0.5 * curvature


def expectation_gradient(q: F, objective: Callable[[F], Tensor]) -> Parameters:
    """∇_μ of an objective of q by autodiff through ``q.with_expectation``.

    >>> import torch
    >>> from credo.rule.families import SignBernoulli
    >>> q = SignBernoulli(torch.tensor([0.3]))
    >>> expectation_gradient(q, lambda q: 5.0 * q.mean.sum())
    (tensor([5.]),)
    """
    return _gradient(q.expectation, lambda expectation: objective(q.with_expectation(expectation)))


def natural_parameter_gradient(q: F, objective: Callable[[F], Tensor]) -> Parameters:
    """∇_λ of an objective of q by autodiff through ``q.with_natural``."""
    return _gradient(q.natural, lambda natural: objective(q.with_natural(natural)))


def natural_gradient(q: ExponentialFamily, gradient: Parameters) -> Parameters:
    """F(λ)⁻¹∇_λ with the Fisher matrix F = ∇²A(λ), solved densely: for checks and small families.

    It equals ∇_μ, which is why the rule never needs F.
    """
    natural = q.natural
    sizes = [parameter.numel() for parameter in natural]

    def split(flat: Tensor) -> Parameters:
        parts = zip(flat.split(sizes), natural, strict=True)
        return tuple(part.reshape(parameter.shape) for part, parameter in parts)

    def log_partition(flat: Tensor) -> Tensor:
        return q.with_natural(split(flat)).log_partition()

    joined = torch.cat([parameter.detach().reshape(-1) for parameter in natural])
    fisher = torch.autograd.functional.hessian(log_partition, joined)
    right = torch.cat([part.reshape(-1) for part in gradient])
    # A symmetric matrix among the parameters makes F singular in directions that leave it, where
    # the gradient is zero too: the smallest solution is the one wanted.
    return split(torch.linalg.lstsq(fisher, right, driver="gelsd").solution)


def black_box_step(q: F, gradient: Parameters, rate: float) -> F:
    """λ − ρ∇_λ(E_q[ℓ] − τH): gradient descent that ignores the family's geometry.

    ``gradient`` is with respect to λ, for instance from `natural_parameter_gradient`.
    """
    positive("rate", rate)
    _check_gradient(q, gradient)
    moved = (p - rate * g for p, g in zip(q.natural, gradient, strict=True))
    return q.with_natural(tuple(moved))


def _gradient(parameters: Parameters, objective: Callable[[Parameters], Tensor]) -> Parameters:
    leaves = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)
    found = torch.autograd.grad(objective(leaves), leaves, materialize_grads=True)
    return tuple(found)


def _not_negative(name: str, value: float) -> float:
    if finite(name, value) < 0:
        raise DataError(f"{name} must not be negative, but it is {value!r}")
    return float(value)


def _check_gradient(q: ExponentialFamily, gradient: Parameters) -> None:
    shapes = tuple(tuple(parameter.shape) for parameter in q.natural)
    given = tuple(tuple(part.shape) for part in gradient)
    if given != shapes:
        raise DataError(
            f"the gradient must have one tensor for each natural parameter of "
            f"{type(q).__name__}, of shapes {shapes}; got {given}"
        )


def _check_vector(q: Gaussian, gradient: Vector) -> None:
    if gradient.shape != q.mean.shape:
        raise DataError(
            f"the gradient must be ({q.size},), one entry for each weight of the "
            f"{type(q).__name__}; got {tuple(gradient.shape)}"
        )
