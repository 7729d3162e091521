r"""Estimators of the loss's curvature at one point θ, with the gradient that comes for free.

=================== ============================================ ==============================
name                H                                            needs
=================== ============================================ ==============================
`ExactHessian`      ∇²ℓ(θ)                                       a small or smooth problem
`GaussNewton`       w Σ_i J_iᵀ Λ_i J_i                           outputs and a likelihood
`ExampleSquares`    w Σ_i g_i g_iᵀ                               a sum over examples
`SquaredGradient`   g gᵀ of the whole minibatch                  nothing: what Adam has
`Reparameterised`   S(θ − m) gᵀ, symmetrised                     θ drawn around m
`Hutchinson`        mean of v∘(∇²ℓ v), v = ±1                    a diagonal family
`FromValues`        (ℓ − ℓ(m))·(S(θ − m)(θ − m)ᵀS − S)           values of ℓ alone
=================== ============================================ ==============================

Under E_q the exact, the reparameterised, Hutchinson's and the score estimator all have the mean
E_q[∇²ℓ] (Stein's identity for the second and fourth). Gauss–Newton drops the network's own second
derivatives. Σ g_i g_iᵀ is the empirical Fisher matrix, Gauss–Newton only in expectation over the
model's labels; the squared minibatch gradient is smaller still, by about the batch size where
gradient noise dominates. For a diagonal family each gives its diagonal, (P,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from credo.autodiff.loss import Loss
from credo.checks import Count, checked
from credo.families import Gaussian
from credo.rule.families import natural_parameters
from credo.types import Vector


class Curvature(Protocol):
    """A way to estimate ∇ℓ and ∇²ℓ at a point."""

    needs_spread: bool
    """Whether it reads θ − m, which must then not always be zero."""

    diagonal_only: bool
    """Whether it can't give a dense matrix."""

    is_derivative: bool
    """Whether it commutes with averages: the curvature of an average is that average."""

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """∇ℓ(θ), (P,), and H, (P, P) if dense and else its diagonal (P,).

        Args:
            loss: ℓ.
            theta: Where it is looked at, (P,).
            q: The Gaussian that is being learned.
            dense: Whether a matrix (P, P) is wanted, or a diagonal (P,).
            generator: Where draws come from.
        """
        ...


@dataclass(frozen=True)
class ExactHessian:
    """∇²ℓ(θ) by automatic differentiation; not positive where the loss is not convex."""

    needs_spread = False
    diagonal_only = False
    is_derivative = True

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and the Hessian or its diagonal."""
        hessian = loss.hessian(theta) if dense else loss.hessian_diagonal(theta)
        return loss.gradient(theta), hessian


@dataclass(frozen=True)
class GaussNewton:
    """w Σ_i J_iᵀΛ_iJ_i: the Hessian of the loss with the network linearised, never negative."""

    needs_spread = False
    diagonal_only = False
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and the matrix or its diagonal."""
        matrix = loss.gauss_newton(theta)
        return loss.gradient(theta), matrix if dense else matrix.diagonal()


@dataclass(frozen=True)
class ExampleSquares:
    """w Σ_i g_i g_iᵀ: the empirical Fisher matrix, VOGN's curvature."""

    needs_spread = False
    diagonal_only = False
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and the matrix or its diagonal."""
        if not dense:
            return loss.example_squares(theta)
        gradients = loss.example_gradients(theta)
        return loss.weight * gradients.sum(0), loss.weight * gradients.mT @ gradients


@dataclass(frozen=True)
class SquaredGradient:
    """The minibatch gradient times itself: what RMSprop and Adam take for curvature."""

    needs_spread = False
    diagonal_only = False
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and its square."""
        gradient = loss.gradient(theta)
        return gradient, torch.outer(gradient, gradient) if dense else gradient.square()


@dataclass(frozen=True)
class Reparameterised:
    """S(θ − m)∇ℓ(θ)ᵀ, symmetrised: the Hessian's mean from gradients, by Stein's identity."""

    needs_spread = True
    diagonal_only = False
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and its product with the whitened displacement."""
        gradient, pull = loss.gradient(theta), -q.grad_log_prob(theta)
        if not dense:
            return gradient, pull * gradient
        outer = torch.outer(pull, gradient)
        return gradient, 0.5 * (outer + outer.mT)


@checked
@dataclass(frozen=True)
class Hutchinson:
    """The mean over ``probes`` sign vectors v of v∘(∇²ℓ v), whose expectation is the diagonal.

    Args:
        probes: How many sign vectors are averaged.
    """

    probes: Count = 1

    needs_spread = False
    diagonal_only = True
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """The gradient and an unbiased estimate of the Hessian's diagonal."""
        total = torch.zeros_like(theta)
        for _ in range(self.probes):
            signs = torch.randint(2, theta.shape, generator=generator, device=theta.device)
            v = signs.to(theta.dtype).mul_(2).sub_(1)
            gradient, product = loss.hessian_product(theta, v)
            total += v * product
        return gradient, total / self.probes


@dataclass(frozen=True)
class FromValues:
    """Both derivatives from values of the loss: what `MonteCarlo(estimator="score")` uses."""

    needs_spread = True
    diagonal_only = False
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Gaussian, dense: bool, generator: Generator
    ) -> tuple[Vector, Tensor]:
        """(ℓ − b)·S(θ − m) and (ℓ − b)·(S(θ − m)(θ − m)ᵀS − S) with b = ℓ(m)."""
        with torch.no_grad():
            excess = loss.value(theta) - loss.value(q.mean)
        pull = -q.grad_log_prob(theta)
        if not dense:
            return excess * pull, excess * (pull.square() - q.scale.square().reciprocal())
        precision = -2 * natural_parameters(q)[1]
        return excess * pull, excess * (torch.outer(pull, pull) - precision)
