r"""Book (2020), eqs. 2.4.3 and 2.4.4: the gradient of the AND node's loss in the mean μ₁.

With w = μ + σε and a N(0, 1) prior, the derivatives of log q cancel sample by sample, so

    ∂L/∂μ₁ = E_ε[ −∂ log P(y | w)/∂w₁ + w₁ ].

The thesis prints E_ε[∂ log P(y | w)/∂w₁ + 1]: the likelihood's sign is wrong, and the prior's
gradient is w₁ where 1 stands. Both are compared with automatic differentiation of eq. 2.4.3's loss,
log q(w | θ) − log P(y | w) − log P(w), at random θ and ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from credo.families import DiagGaussian
from credo.report.style import blank_figure, save
from credo.rule.quadrature import gauss_hermite
from credo.types import Json
from credo_papers.and_model import elbo, log_likelihood, truth_table
from credo_papers.experiment import Experiment, Settings, Verdict

TOLERANCE = 1e-10
"""Float64 sums of a few terms of size ten, times a margin."""

CUBATURE_TOLERANCE = 1e-6
"""Gauss–Hermite of order 40 on a logistic function of a normal of standard deviation up to 2.6."""


@dataclass(frozen=True, kw_only=True)
class GradientSettings(Settings):
    """``points`` random pairs of q and ε."""

    net: str = "one node, 2-1"
    num_data: int = 4
    epochs: int = 0
    points: int = 200


def corrected_gradient(w: Tensor) -> Tensor:
    """−∂ log P(y | w)/∂w + w at weights w (..., 3)."""
    return _likelihood_gradient(w).neg() + w


def printed_gradient(w: Tensor) -> Tensor:
    """∂ log P(y | w)/∂w + 1, as eq. 2.4.4 has it."""
    return _likelihood_gradient(w) + 1


def autodiff_gradient(mean: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    """d/dμ of log q(w; μ, σ) − log P(y | w) − log P(w) at w = μ + σε: all three are (3,)."""
    mu = mean.clone().requires_grad_()
    w = mu + scale * eps
    log_q = DiagGaussian(mu, scale).log_prob(w)
    log_prior = -0.5 * w.square().sum()
    (gradient,) = torch.autograd.grad(log_q - log_likelihood(w, copies=1) - log_prior, mu)
    return gradient


def expected_gradients(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E_ε of the corrected gradient by cubature, and −d ELBO/dμ by automatic differentiation."""
    nodes, weights = gauss_hermite(40, like=mean)
    w = mean + scale * torch.cartesian_prod(nodes, nodes, nodes)
    mass = torch.cartesian_prod(weights, weights, weights).prod(1)
    mu = mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-elbo(mu, scale, copies=1), mu)
    return mass @ corrected_gradient(w), gradient


def run_one(settings: GradientSettings, seed: int, folder: Path) -> Json:
    """The largest deviation of both forms from automatic differentiation."""
    generator = torch.Generator().manual_seed(seed)
    mean, eps, log_scale = torch.randn(
        3, settings.points, 3, generator=generator, dtype=torch.float64
    )
    scale = log_scale.exp()
    truth = torch.stack([autodiff_gradient(*row) for row in zip(mean, scale, eps, strict=True)])
    w = mean + scale * eps
    expected, differentiated = expected_gradients(mean[0], scale[0].clamp(max=1.5))
    return {
        "corrected_error": float((corrected_gradient(w) - truth).abs().max()),
        "printed_error": float((printed_gradient(w) - truth).abs().max()),
        "expected_error": float((expected - differentiated).abs().max()),
        "truth": truth[:, 0].tolist(),
        "corrected": corrected_gradient(w)[:, 0].tolist(),
        "printed": printed_gradient(w)[:, 0].tolist(),
    }


def check(results: list[Json]) -> Verdict:
    """The corrected form is the gradient and the printed one is not."""
    worst = {
        name: max(r[name] for r in results)
        for name in ("corrected_error", "printed_error", "expected_error")
    }
    right = (
        worst["corrected_error"] < TOLERANCE < worst["printed_error"]
        and worst["expected_error"] < CUBATURE_TOLERANCE
    )
    return Verdict("reproduced" if right else "not reproduced", worst)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Both forms against automatic differentiation."""
    figure = blank_figure(4.5, 4)
    axes = figure.subplots()
    for name in ("corrected", "printed"):
        axes.plot(results[0]["truth"], results[0][name], ".", label=name)
    axes.set(xlabel="automatic differentiation", ylabel="eq. 2.4.4")
    axes.legend()
    return [save(figure, folder / "and-gradient.png")]


def _likelihood_gradient(w: Tensor) -> Tensor:
    """∂ log P(y | w)/∂w = Σ_rows (y − σ(w·x̃)) x̃: (..., 3) → (..., 3)."""
    x, y = truth_table()
    return (y - torch.sigmoid(w @ x.T)) @ x


EXPERIMENT = Experiment(
    id="003-and-gradient",
    paper="003",
    claim="Book (2020), eq. 2.4.4, corrected: the gradient of the AND node's loss in a mean is "
    "E[−∂ log P(y|w)/∂w + w]. As printed, E[∂ log P(y|w)/∂w + 1], it is not the gradient.",
    theorem=True,
    minutes=0.1,
    presets={"quick": GradientSettings(), "paper": GradientSettings()},
    run_one=run_one,
    check=check,
    figures=figures,
)
