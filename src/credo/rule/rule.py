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

For a Gaussian the chain rule gives ∇_{E θ}E ℓ = E[∇ℓ] − E[H]m and ∇_{E θθᵀ}E ℓ = ½E[H], so

    S ← (1 − ρτ)S + ρE[H],      m ← m − ρS⁻¹E[∇ℓ]  with the *new* S

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> q = DiagGaussian(torch.tensor([2.0]), torch.tensor([1.0]))
    >>> loss_gradient, loss_hessian = 4.0 * q.mean, torch.tensor([4.0])      # ℓ = 2θ²
    >>> q = gaussian_step(q, loss_gradient, loss_hessian, rate=1.0)
    >>> q.mean, q.variance                                   # one step: the posterior N(0, 1/4)
    (tensor([0.]), tensor([0.2500]))

Reference: Khan & Rue, "The Bayesian learning rule", 2021 (arXiv:2107.04562), and Khan's tutorial
"Deep learning with Bayesian principles", 2019, where E[H]m is doubled, the sign of S's step
reversed, and the old S stands in m's step. Momentum: Khan et al., 2018 (arXiv:1806.04854).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from credo.checks import NotNegative, Positive, checked
from credo.errors import DataError
from credo.families import Gaussian
from credo.rule.families.exponential import (
    Member,
    Parameters,
    entropy_gradient,
    expectation_parameters,
    log_partition,
    natural_parameters,
    with_expectation,
    with_natural,
)
from credo.rule.families.gaussian import absorb, absorb_positive
from credo.types import Vector

F = TypeVar("F", bound=Member)
G = TypeVar("G", bound=Gaussian)


@checked
def step(
    q: F,
    gradient: Parameters,
    rate: Positive,
    *,
    temperature: NotNegative = 1.0,
    momentum: NotNegative = 0.0,
    previous: F | None = None,
) -> F:
    """λ − ρ(∇_μE_q[ℓ] − τ∇_μH) + γ(λ − λ₋): one step of the rule in any family.

    A step that leaves the family is refused with the parameter's name.

    Args:
        q: Where the step starts, with natural parameters λ.
        gradient: ∇_μE_q[ℓ], one tensor for each statistic; `expectation_gradient` finds it by
            autodiff.
        rate: ρ.
        temperature: τ, the weight of the entropy.
        momentum: γ.
        previous: The member before ``q``, with natural parameters λ₋; None at the first step.

    >>> import torch
    >>> from credo.rule.families import Categorical
    >>> q = Categorical.from_probs(torch.tensor([0.5, 0.25, 0.25]))
    >>> losses = torch.tensor([0.0, 1.0, 2.0])
    >>> gradient = (losses[:-1] - losses[-1],)              # ∇_μ Σ_k π_k ℓ_k, with π_K the rest
    >>> step(q, gradient, rate=1.0).probs                   # one step: the Gibbs distribution
    tensor([0.6652, 0.2447, 0.0900])
    """
    _check_gradient(q, gradient)
    here = natural_parameters(q)
    natural = tuple(
        parameter - rate * (down - temperature * up)
        for parameter, down, up in zip(here, gradient, entropy_gradient(q), strict=True)
    )
    if momentum and previous is not None:
        q.check_same_family(previous)
        natural = tuple(
            new + momentum * (now - before)
            for new, now, before in zip(natural, here, natural_parameters(previous), strict=True)
        )
    moved: F = with_natural(q, natural)
    return moved


@checked
def gaussian_step(
    q: G,
    gradient: Vector,
    curvature: Tensor,
    rate: Positive,
    *,
    mean_rate: Positive | None = None,
    temperature: NotNegative = 1.0,
    keep_positive: bool = False,
) -> G:
    """The rule for a Gaussian: S ← (1 − ρτ)S + ρE[H], then m ← m − αS⁻¹E[∇ℓ].

    Args:
        q: N(m, S⁻¹), where the step starts.
        gradient: E_q[∇ℓ], (P,), or an estimate of it.
        curvature: E_q[∇²ℓ] as (P,) or (P, P), or an estimate of it.
        rate: ρ.
        mean_rate: α; ρ unless it is given.
        temperature: τ, the weight of the entropy.
        keep_positive: Whether to take the improved step (`absorb_positive`), which stays positive
            definite even where the curvature is not; it differs in second order of ρ.
    """
    _check_vector(q, gradient)
    moved: G
    if keep_positive:
        moved = absorb_positive(q, curvature, rate, temperature)
    else:
        moved = absorb(q, curvature, keep=1.0 - rate * temperature, gain=rate)
    return moved.with_mean(q.mean - (mean_rate or rate) * moved.solve(gradient))


def expectation_gradient(q: F, objective: Callable[[F], Tensor]) -> Parameters:
    """∇_μ of an objective of q by autodiff through `with_expectation`.

    Args:
        q: The member to differentiate at.
        objective: A function of a member, 0-dim.

    >>> import torch
    >>> from credo.rule.families import SignBernoulli
    >>> q = SignBernoulli(torch.tensor([0.3]))
    >>> expectation_gradient(q, lambda q: 5.0 * q.mean.sum())
    (tensor([5.]),)
    """
    return _gradient(
        expectation_parameters(q),
        lambda expectation: objective(with_expectation(q, expectation)),
    )


def natural_parameter_gradient(q: F, objective: Callable[[F], Tensor]) -> Parameters:
    """∇_λ of an objective of q by autodiff through `with_natural`.

    Args:
        q: The member to differentiate at.
        objective: A function of a member, 0-dim.
    """
    return _gradient(natural_parameters(q), lambda natural: objective(with_natural(q, natural)))


def natural_gradient(q: Member, gradient: Parameters) -> Parameters:
    """F(λ)⁻¹∇_λ with the Fisher matrix F = ∇²A(λ), solved densely: for checks and small families.

    It equals ∇_μ, which is why the rule never needs F.

    Args:
        q: The member with natural parameters λ.
        gradient: ∇_λ of an objective, one tensor for each statistic.
    """
    natural = natural_parameters(q)
    sizes = [parameter.numel() for parameter in natural]

    def split(flat: Tensor) -> Parameters:
        parts = zip(flat.split(sizes), natural, strict=True)
        return tuple(part.reshape(parameter.shape) for part, parameter in parts)

    def partition(flat: Tensor) -> Tensor:
        return log_partition(with_natural(q, split(flat)))

    joined = torch.cat([parameter.detach().reshape(-1) for parameter in natural])
    fisher = torch.autograd.functional.hessian(partition, joined)
    right = torch.cat([part.reshape(-1) for part in gradient])
    # A symmetric matrix among the parameters makes F singular in directions that leave it, where
    # the gradient is zero too: the smallest solution is the one wanted.
    return split(torch.linalg.lstsq(fisher, right, driver="gelsd").solution)


def _gradient(parameters: Parameters, objective: Callable[[Parameters], Tensor]) -> Parameters:
    leaves = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)
    return tuple(torch.autograd.grad(objective(leaves), leaves, materialize_grads=True))


def _check_gradient(q: Member, gradient: Parameters) -> None:
    shapes = tuple(tuple(parameter.shape) for parameter in natural_parameters(q))
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
