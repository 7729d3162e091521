r"""The score-function estimator: for losses that can be evaluated but not differentiated.

    ∇_θ E_q[f(w)] = E_q[(f(w) − b) ∇_θ log q(w)],     f = NLL + κ(log q − log p)

with ∇_μ log q = ε/σ and ∇_σ log q = (ε² − 1)/σ. Any b that does not depend on the draw leaves the
mean untouched; ``loo`` takes the mean of the *other* draws, ``optimal`` the variance-minimising
b* = E[f s²]/E[s²] of each coordinate, estimated on the other draws so that it stays unbiased.

Reference: Book 2020, §3. Its variance grows with the number of weights: use it for
small networks, or to check the others.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor

from credo.errors import UnsupportedError
from credo.noise import NoiseSource
from credo.types import Vector
from credo.variational.estimators.monte_carlo import GaussianStep, write_weights

Baseline: TypeAlias = Literal["loo", "optimal", "none"]


class HasDensity(Protocol):
    """A distribution with a log-density."""

    def log_prob(self, w: Vector) -> Tensor:
        """Log-density summed over the weights."""
        ...


@final
class ScoreFunction:
    """Gradient of E_q without a gradient of the network.

    Deterministic parameters still get their gradients by backpropagation, if there are any.
    """

    integrates_kl = True

    def __init__(self, noise: NoiseSource, prior: HasDensity, baseline: Baseline = "loo") -> None:
        self.noise, self.prior, self.baseline = noise, prior, baseline

    def gradients(self, step: GaussianStep) -> float:
        """Fill in both gradients; return the mean NLL over the draws."""
        if self.baseline != "none" and step.samples < 2:
            raise UnsupportedError(
                f'estimator="score" with baseline={self.baseline!r} estimates the baseline of each '
                f"draw from the others, but samples={step.samples}: set samples to 2 or more."
            )
        eps = torch.stack([torch.empty_like(step.mean) for _ in range(step.samples)])
        values, nll = [], 0.0
        for sample in range(step.samples):
            eps[sample] = self.noise.draw(eps[sample], *step.key_of(sample))
            weights = write_weights(step, eps[sample])
            loss = step.energy()
            if loss.requires_grad:
                (loss / step.samples).backward()
            nll += loss.item() / step.samples
            log_q = _log_density(eps[sample], step.scale)
            values.append(loss.detach() + step.kl_weight * (log_q - self.prior.log_prob(weights)))
        for segment in step.random.segments:
            step.flat.parameter_at[segment.start].grad = None
        f = torch.stack(values).to(step.mean.dtype)[:, None]
        for out, score in (
            (step.grad_mean, eps / step.scale),
            (step.grad_scale, (eps.square() - 1) / step.scale),
        ):
            torch.mean((f - self._baseline(f, score)) * score, dim=0, out=out)
        return nll

    def _baseline(self, f: Tensor, score: Tensor) -> Tensor:
        if self.baseline == "none":
            return torch.zeros_like(f)
        if self.baseline == "loo":
            return (f.sum(0) - f) / (len(f) - 1)
        weight = score.square()
        return ((f * weight).sum(0) - f * weight) / (weight.sum(0) - weight)


def _log_density(eps: Vector, scale: Vector) -> Tensor:
    return -(0.5 * eps.square() + scale.log() + 0.5 * math.log(2 * math.pi)).sum()
