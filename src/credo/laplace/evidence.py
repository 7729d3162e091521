r"""The evidence of a Laplace approximation: how well prior and noise explain the data.

    log p(D) ≈ log p(D | m) + log p(m) + ½P ln 2π − ½ ln|S|,        S = H + δ

symbols: m the network's weights, H the data's curvature there, δ the prior's precision, one number
for each parameter tensor. As a function of δ, and for a Gaussian likelihood of its noise scale σ
(H ∝ 1/σ²), it needs no second look at the data: what was gathered there is kept. Its maximum over
both is "type II maximum likelihood".

References: MacKay, "A practical Bayesian framework for backpropagation networks", 1992; Immer,
Bauer, Fortuin, Rätsch & Khan, "Scalable marginal likelihood estimation for model selection in deep
learning", 2021 (arXiv:2104.04975).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.families import Gaussian
from credo.laplace.structures import DataCurvature
from credo.likelihoods import Gaussian as GaussianLikelihood
from credo.model import Model
from credo.posterior.posterior import Posterior
from credo.priors import Normal
from credo.types import Segment, Vector

Sharing: TypeAlias = Literal["global", "per_layer"]
"""Which weights share a prior precision: all, or those of a layer."""

PRECISIONS = (1e-8, 1e10)
"""Between these the best prior precision is looked for: where weights are zero there is none."""
NOISES = (1e-6, 1e6)


@dataclass(frozen=True)
class Noise:
    """What the evidence needs to know of a Gaussian likelihood's noise.

    ``squared_error`` is Σ(y − f)² over ``count`` numbers; H was taken at noise ``scale`` and goes
    with its power −``power``.
    """

    scale: float
    squared_error: float
    count: float
    power: int


@dataclass(frozen=True, eq=False)
class Evidence:
    """log p(D) of a fitted Laplace approximation, as a function of prior precisions and noise.

    ``precision`` holds those it was fitted with, one for each of ``segments``; ``weight`` is what
    the gathered curvature is multiplied with (num_data over examples seen, over temperature).
    """

    segments: tuple[Segment, ...]
    mean: Vector
    curvature: DataCurvature
    precision: Tensor
    log_likelihood: float
    num_data: int
    weight: float = 1.0
    temperature: float = 1.0
    noise: Noise | None = None

    def gaussian(self) -> Gaussian:
        """q = N(m, S⁻¹)."""
        return self.curvature.gaussian(self.mean, self.precision, self.weight)

    def log_marginal_likelihood(
        self,
        prior_precision: Tensor | float | None = None,
        noise_scale: Tensor | float | None = None,
    ) -> Tensor:
        """The evidence in nats, 0-dim, float64 and differentiable in both arguments.

        ``prior_precision`` is one number or one for each segment; None takes the fitted one.
        """
        if self.temperature != 1.0:
            raise UnsupportedError(
                f"the evidence is that of a posterior at temperature 1, not {self.temperature:g}: "
                "a tempered one is not p(D | w) p(w) of any model"
            )
        delta = self._precisions(prior_precision)
        log_likelihood, weight = self._with_noise(noise_scale)
        sizes = self.curvature.sizes.double()
        norms = torch.stack([part.square().sum() for part in self._parts()])
        # ½P ln 2π of the integral and of the prior's normalisation cancel.
        log_prior = 0.5 * (sizes * delta.log() - delta * norms).sum()
        return log_likelihood + log_prior - 0.5 * self.curvature.log_det(delta, weight)

    def maximised(
        self, prior: Sharing = "per_layer", noise: bool = False, steps: int = 200
    ) -> Evidence:
        """The same with the prior precisions, and noise if asked, that have the most evidence.

        By L-BFGS on their logarithms, at most ``steps`` iterations. A layer of weights that are all
        zero has no best precision and gets the largest of `PRECISIONS`.
        """
        groups = _groups(self.segments, prior)
        if noise and self.noise is None:
            raise UnsupportedError(
                "noise can be fitted for credo.likelihoods.Gaussian alone: others have none, or "
                "the network predicts it"
            )
        members = torch.tensor(groups)
        number = max(groups) + 1
        logs = self.precision.double().log().cpu()
        start = [float(logs[members == group].mean()) for group in range(number)]
        bounds = [tuple(map(math.log, PRECISIONS))] * number
        if noise and self.noise is not None:
            start.append(math.log(self.noise.scale))
            bounds.append(tuple(map(math.log, NOISES)))

        def unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
            delta = x[:number].exp()[members].to(self.mean.device)
            return delta, x[number].exp() if noise else None

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
            value = -self.log_marginal_likelihood(*unpacked(leaf))
            (gradient,) = torch.autograd.grad(value, leaf)
            return value.item(), gradient.numpy()

        begin = [min(max(x, low), high) for x, (low, high) in zip(start, bounds, strict=True)]
        found = minimize(
            objective,
            begin,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8},
        )
        with torch.no_grad():
            return self._moved_to(*unpacked(torch.tensor(found.x, dtype=torch.float64)))

    # --- inside -----------------------------------------------------------------------------------

    def _moved_to(self, delta: Tensor, scale: Tensor | None) -> Evidence:
        log_likelihood, weight = self._with_noise(scale)
        noise = self.noise
        if noise is not None and scale is not None:
            noise = Noise(float(scale), noise.squared_error, noise.count, noise.power)
        return replace(
            self,
            precision=delta,
            log_likelihood=float(log_likelihood),
            weight=float(weight),
            noise=noise,
        )

    def _parts(self) -> Sequence[Tensor]:
        return self.mean.double().split([segment.size for segment in self.segments])

    def _precisions(self, given: Tensor | float | None) -> Tensor:
        if given is None:
            return self.precision.double()
        delta = torch.as_tensor(given, dtype=torch.float64, device=self.mean.device)
        if delta.shape not in ((), (len(self.segments),)) or not bool((delta > 0).all()):
            raise DataError(
                f"prior_precision must be positive, one number or one for each of the "
                f"{len(self.segments)} segments, got {given!r}"
            )
        return delta.expand(len(self.segments))

    def _with_noise(self, scale: Tensor | float | None) -> tuple[Tensor | float, Tensor | float]:
        """log p(D | m) and the curvature's weight at another noise scale."""
        if scale is None:
            return self.log_likelihood, self.weight
        if self.noise is None:
            raise UnsupportedError(
                "noise_scale is of credo.likelihoods.Gaussian alone: other likelihoods have no "
                "noise of one scale"
            )
        sigma = torch.as_tensor(scale, dtype=torch.float64)
        fit = -0.5 * self.noise.squared_error / sigma.square()
        level = self.noise.count * (sigma.log() + 0.5 * math.log(2 * math.pi))
        return fit - level, self.weight * (self.noise.scale / sigma) ** self.noise.power


class LaplacePosterior(Posterior):
    """The posterior of `credo.Laplace`, with the evidence it was fitted by.

    It predicts by the linearised network, for which Gauss–Newton curvature is exact; weights drawn
    from it and put through the network itself predict worse (Immer et al., 2021, arXiv:2008.08400).
    """

    predicts = "linearised"
    evidence: Evidence

    def log_marginal_likelihood(
        self,
        prior_precision: Tensor | float | None = None,
        noise_scale: Tensor | float | None = None,
    ) -> Tensor:
        """`Evidence.log_marginal_likelihood`: log p(D), for choosing between models."""
        return self.evidence.log_marginal_likelihood(prior_precision, noise_scale)

    def optimise(
        self, prior: Sharing = "per_layer", noise: bool | None = None, steps: int = 200
    ) -> LaplacePosterior:
        """The posterior under the prior, and noise, that have the most evidence; no data needed.

        ``prior`` says which weights share a scale. ``noise=None`` fits the noise scale of a
        Gaussian likelihood that was made with ``learned=True``, True that of any Gaussian. The mean
        stays where it is.

        >>> import credo
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> y = 2 * x + 0.3 * torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
        >>> net = torch.nn.Linear(1, 1)
        >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0))
        >>> laplace = credo.Laplace(structure="full", train=credo.MAP(lr=0.05))
        >>> posterior = credo.fit(model, laplace, (x, y), epochs=200, progress=False)
        >>> better = posterior.optimise(noise=True)
        >>> bool(better.log_marginal_likelihood() > posterior.log_marginal_likelihood())
        True
        >>> round(better.model.likelihood.scale, 1)
        0.3
        """
        asked = is_learned(self.model) if noise is None else noise
        evidence = self.evidence.maximised(prior, asked, steps)
        model = with_hyperparameters(self.model, evidence)
        posterior = LaplacePosterior(
            model, evidence.gaussian(), self.point, self.buffers, self.draws
        )
        posterior.evidence, posterior.history = evidence, self.history
        return posterior


def is_learned(model: Model) -> bool:
    """Whether the likelihood is Gaussian with noise to be fitted."""
    likelihood = model.likelihood
    return isinstance(likelihood, GaussianLikelihood) and likelihood.log_scale is not None


def noise_scale(model: Model) -> float | None:
    """That of a Gaussian likelihood; None for others."""
    likelihood = model.likelihood
    return likelihood.scale if isinstance(likelihood, GaussianLikelihood) else None


def set_noise_scale(model: Model, scale: float) -> None:
    """Give a Gaussian likelihood with learned noise this scale; others are left as they are."""
    likelihood = model.likelihood
    if isinstance(likelihood, GaussianLikelihood) and likelihood.log_scale is not None:
        with torch.no_grad():
            likelihood.log_scale.fill_(math.log(scale))


def with_fixed_noise(model: Model) -> Model:
    """The model with learned noise held at its present scale."""
    if not is_learned(model):
        return model
    fixed = GaussianLikelihood(noise_scale(model) or 1.0)
    return model.replace(likelihood=fixed)


def noise_of(model: Model, log_likelihood: float, count: float, power: int) -> Noise | None:
    """The sum of squared errors, read off the log-likelihood; None unless that is Gaussian."""
    likelihood = model.likelihood
    if not isinstance(likelihood, GaussianLikelihood):
        return None
    scale = likelihood.scale
    level = count * (math.log(scale) + 0.5 * math.log(2 * math.pi))
    return Noise(scale, max(0.0, -2 * scale**2 * (log_likelihood + level)), count, power)


def with_hyperparameters(model: Model, evidence: Evidence) -> Model:
    """The model with the evidence's prior and noise; its own objects stay as they are."""
    scales = evidence.precision.rsqrt().tolist()
    table = {s.name: scale for s, scale in zip(evidence.segments, scales, strict=True)}
    likelihood = copy.deepcopy(model.likelihood)
    if evidence.noise is not None and isinstance(likelihood, GaussianLikelihood):
        likelihood = GaussianLikelihood(evidence.noise.scale, likelihood.log_scale is not None)
        likelihood.to(evidence.mean.device, evidence.mean.dtype)
    return model.replace(likelihood=likelihood, prior=prior_with(model, table))


def prior_with(model: Model, table: Mapping[str, float]) -> Normal:
    """A normal prior with these scales for these tensors; the model's random others keep theirs."""
    before = model.prior_over_weights().scale
    places = model.random.slices()
    kept = {name: float(before.expand(model.random.size)[places[name]][0]) for name in places}
    return Normal.per_layer({**kept, **table})


def _groups(segments: Sequence[Segment], prior: Sharing) -> list[int]:
    """The group of each segment."""
    if prior == "global":
        return [0] * len(segments)
    if prior != "per_layer":
        raise DataError(f'prior={prior!r} must be "global" or "per_layer"')
    layers = list(dict.fromkeys(segment.layer for segment in segments))
    return [layers.index(segment.layer) for segment in segments]
