r"""The linear model behind a Gaussian posterior: pseudo-targets, and inference over functions.

    ỹ_i = J_iw − Λ_i⁻¹r_i        ỹ_i ~ N(J_iw', Λ_i⁻¹),   w' ~ N(v, V)

======  ==================================  ===================================================
symbol  argument                            shape
======  ==================================  ===================================================
w       the network's weights               (P,); J_i = ∂f_i/∂w (K, P), r_i = ∂ℓ_i/∂f (K,)
Λ_i     ``model.likelihood``                (K, K), ∂²ℓ_i/∂f²
N(v,V)  ``prior``                           over (P,); N(0, 1/δ) for weight decay δ
ỹ       ``targets``                         (n, K)
======  ==================================  ===================================================

The posterior of this model over w' has precision Σ_i J_iᵀΛ_iJ_i + V⁻¹, and its mean is w wherever
the loss's gradient vanishes. As functions it is a Gaussian process with mean J(x)v, kernel
J(x)VJ(x')ᵀ and the observations ỹ: the same answer, found in n·K dimensions and not in P.

A softmax's Λ = diag(p) − ppᵀ has no inverse. With roots RRᵀ = Λ the observations are taken as
u_i = R_iᵀJ_iw − R_i⁺r_i of R_iᵀJ_iw', with noise I: r_i lies in the span of R_i, so nothing is
lost.

The evidence, of which the first term is the likelihood at the network itself,

    log p(D) ≈ Σ_i log p(y_i | f_i) + log N(u; RᵀJv, RᵀJVJᵀR + I) − log N(u; RᵀJw, I)

is log N(ỹ; 0, JJᵀ/δ + σ²I) for regression, and Laplace's evidence for any likelihood at a
stationary point.

References: Khan, Immer, Abedi & Korzepa, "Approximate inference turns deep networks into Gaussian
processes", 2019 (arXiv:1906.01930). Khan's tutorial (2019) leaves out the ½ that the
regression loss needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.checks import Positive, checked
from credo.errors import UnsupportedError
from credo.families import DiagGaussian, Family, Gaussian
from credo.functionspace.kernels import Kernel
from credo.likelihoods import Categorical
from credo.likelihoods import Gaussian as GaussianLikelihood
from credo.likelihoods.curvature import output_gradient, output_hessian_roots
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import as_inputs, chunks, like_weights, number_of_examples, pieces
from credo.posterior.features import Features
from credo.posterior.outputs import Linearisation
from credo.posterior.posterior import Posterior
from credo.types import Batch, Inputs, Vector

MAX_OBSERVATIONS = 8192
"""Up to how many observations, n·K, a matrix between them is factored: 0.5 GB in float64."""


@dataclass(frozen=True, eq=False)
class FunctionPosterior:
    """The Gaussian of the linear model's outputs at some inputs.

    Args:
        mean: Of every output, (m, K).
        covariance: Between all of them, (m, K, m, K).
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Of every output by itself, (m, K)."""
        count = self.mean.numel()
        return self.covariance.reshape(count, count).diagonal().view_as(self.mean)


@checked
class PseudoData:
    """What one batch of data is to the network made linear at ``posterior.mean``.

    Args:
        posterior: Where the network is made linear: at its mean.
        batch: (inputs, targets).
        prior: A Gaussian over the weights, N(v, V).
        weight: By which the losses are multiplied: 1 for the posterior itself, ρ·n/S for a step on
            S of n examples (`credo.functionspace.iterate_as_gp`).
    """

    def __init__(
        self, posterior: Posterior, batch: Batch, prior: Gaussian, weight: Positive = 1.0
    ) -> None:
        self._posterior, self.prior, self._weight = posterior, prior, weight
        self._likelihood = posterior.model.likelihood
        with posterior.on_copy() as (model, flat):
            inputs = like_weights(as_inputs(batch[0]), flat.vector)
            self._inputs, self._targets = inputs, batch[1].to(flat.vector.device)
            step = Linearisation(model, flat, posterior.q).batch_size(inputs)
            self._measure(model, flat, step)
            count = self.whitened.numel()
            if count > MAX_OBSERVATIONS:
                raise UnsupportedError(
                    f"{len(self._targets)} examples are {count} observations, and function space "
                    f"needs a matrix between all of them, for at most {MAX_OBSERVATIONS}. Give "
                    "fewer examples; in weight space (credo.Laplace) their number does not matter"
                )

    @property
    def targets(self) -> Tensor:
        """ỹ = Jw − Λ⁺r, (n, K): f + residual for regression, moved to the linear model."""
        matrix = self._roots.movedim(0, -1)  # (n, K, R)
        inverse = torch.linalg.pinv(matrix.mT)
        return self.linear + (inverse @ -self._pulls.unsqueeze(-1)).squeeze(-1)

    def at(self, x: Inputs) -> FunctionPosterior:
        """The posterior of J(x)w', by Gaussian process regression on the pseudo-data.

        Args:
            x: Inputs, examples first.
        """
        posterior, x = self._posterior, as_inputs(x)
        with posterior.on_copy() as (model, flat), torch.no_grad():
            x = like_weights(x, flat.vector)
            kernel = Kernel(model, flat, self.prior)
            test = kernel.features(x, 0, number_of_examples(x))
            across = self._scale * self._features(kernel).kernel(test, "joint").flatten(2)
            across = across.flatten(0, 1)  # (N, m·K)
            itself = test.kernel(test, "joint")
            means = _times(model, flat, posterior.q, x, self.prior.mean)
        solved = torch.cholesky_solve(across, self._root)
        residual = (self.whitened - self._prior_mean).flatten()
        mean = means + (solved.mT @ residual).view_as(means)
        return FunctionPosterior(mean, itself - (across.mT @ solved).view_as(itself))

    @checked
    def log_marginal_likelihood(
        self, prior_precision: Positive | None = None, noise_scale: Positive | None = None
    ) -> float:
        """The evidence in nats; the weights stay where they are.

        Args:
            prior_precision: δ of a prior N(0, 1/δ) for all weights; None takes ``prior``.
            noise_scale: Another noise of a Gaussian likelihood.
        """
        scale, log_likelihood = 1.0, self._log_likelihood
        if noise_scale is not None:
            scale, log_likelihood = self._with_noise(noise_scale)
        u = scale * self.whitened.flatten().double()
        fitted = scale * self._fitted.flatten().double()
        if prior_precision is None:
            values, vectors = self._spectrum
            u_centred = u - scale * self._prior_mean.flatten().double()
        else:
            values, vectors = self._unit_spectrum
            values, u_centred = values / prior_precision, u
        spread = scale**2 * values + 1
        turned = vectors.mT @ u_centred
        # The normalisations of the two Gaussians cancel.
        gp = -0.5 * (turned.square() / spread + spread.log()).sum()
        return float(log_likelihood + gp + 0.5 * (u - fitted).square().sum())

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _scale(self) -> float:
        return math.sqrt(self._weight)

    def _measure(self, model: Model, flat: FlatParams, step: int) -> None:
        """One pass: f, r, the roots of Λ, Jw and Jv."""
        likelihood = self._likelihood
        weights = torch.stack([self._posterior.mean, self.prior.mean.to(self._posterior.mean)], 1)
        measured: list[tuple[Tensor, ...]] = []
        self._log_likelihood = 0.0
        for inputs, targets in pieces((self._inputs, self._targets), step):
            jacobians = Jacobians.at(model.net, flat, model.random, inputs)
            outputs = jacobians.outputs
            roots = output_hessian_roots(likelihood, outputs, targets).flatten(2)
            gradient = output_gradient(likelihood, outputs, targets).flatten(1)
            with torch.no_grad():
                log_prob = likelihood.log_prob(outputs, targets).double().sum()
                self._log_likelihood += float(log_prob)
                measured.append(
                    (roots.movedim(0, 1), _pulled(likelihood, roots, gradient), outputs.flatten(1),
                     jacobians.times(weights))
                )  # fmt: skip
        roots, pulls, self.outputs, linear = (torch.cat(p) for p in zip(*measured, strict=True))
        self._roots, self._pulls = roots.movedim(1, 0), pulls
        self.linear = linear[..., 0]
        """J(x_i)w, (n, K)."""
        self._fitted = self._scale * torch.einsum("rnk,nk->nr", self._roots, linear[..., 0])
        self._prior_mean = self._scale * torch.einsum("rnk,nk->nr", self._roots, linear[..., 1])
        self.whitened = self._fitted - self._scale * pulls
        """u, (n, R): the observations with unit noise."""

    def _features(self, kernel: Kernel) -> Features:
        shape = self.outputs.shape

        def directions(outputs: Tensor, places: slice) -> Tensor:
            return self._roots[:, places].reshape(-1, *outputs.shape)

        return kernel.features(self._inputs, 0, shape[0], directions)

    def _gram(self, prior: Gaussian) -> Tensor:
        """RᵀJVJᵀR between all observations, (N, N)."""
        with self._posterior.on_copy() as (model, flat), torch.no_grad():
            features = self._features(Kernel(model, flat, prior))
            return self._weight * features.kernel(features, "joint").flatten(2).flatten(0, 1)

    @cached_property
    def _root(self) -> Tensor:
        gram = self._gram(self.prior)
        gram.diagonal().add_(1.0)
        return torch.linalg.cholesky(gram)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        return _eigen(self._gram(self.prior))

    @cached_property
    def _unit_spectrum(self) -> tuple[Tensor, Tensor]:
        mean = self._posterior.mean
        return _eigen(self._gram(DiagGaussian(torch.zeros_like(mean), torch.ones_like(mean[0]))))

    def _with_noise(self, noise_scale: float) -> tuple[float, float]:
        """By what roots and observations change, and the log-likelihood at another noise."""
        likelihood = self._likelihood
        if not isinstance(likelihood, GaussianLikelihood):
            raise UnsupportedError(
                "noise_scale is of credo.likelihoods.Gaussian alone: other likelihoods have no "
                "noise of one scale"
            )
        scale = likelihood.scale / noise_scale
        squares = float(self._pulls.double().square().sum()) * scale**2
        level = self.outputs.numel() * (math.log(noise_scale) + 0.5 * math.log(2 * math.pi))
        return scale, -0.5 * squares - level


def _pulled(likelihood: object, roots: Tensor, gradient: Tensor) -> Tensor:
    """R⁺r, (n, R)."""
    matrix = roots.movedim(0, -1)  # (n, K, R)
    if isinstance(likelihood, Categorical) and len(roots) == gradient.shape[1] - 1:
        # The Cholesky factor without its last, empty column: exact however small its entries.
        square, short = matrix[:, :-1], gradient[:, :-1].unsqueeze(-1)
        return torch.linalg.solve_triangular(square, short, upper=False).squeeze(-1)
    return (torch.linalg.pinv(matrix) @ gradient.unsqueeze(-1)).squeeze(-1)


def _eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram.double())
    return values.clamp(min=0), vectors


def _times(model: Model, flat: FlatParams, q: Family, x: Inputs, vector: Vector) -> Tensor:
    """J(x)·vector, (m, K), at the weights that ``flat`` holds."""
    parts = []
    linear = Linearisation(model, flat, q)
    for inputs in chunks(x, linear.batch_size(x)):
        jacobians = Jacobians.at(model.net, flat, model.random, inputs)
        parts.append(jacobians.times(vector.to(jacobians.outputs).unsqueeze(1))[..., 0])
    return torch.cat(parts)
