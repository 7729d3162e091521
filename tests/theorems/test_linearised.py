"""The linearised predictive: a Gaussian over weights and a network linear in them.

Float64. Where both sides are algebra on the same numbers they agree to some 1e-14 times the
condition of the matrices that are inverted, which the priors and noises here keep below 1e4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import DotProduct
from torch import Tensor, nn

import credo
from credo.families import (
    Delta,
    DiagGaussian,
    FactorGaussian,
    Family,
    FixedGaussian,
    FullGaussian,
    LowRankGaussian,
)
from credo.families.eigen_kronecker_gaussian import EigenBlock, EigenKroneckerGaussian
from credo.posterior.closed_form import ProbitPredictive
from credo.posterior.outputs import OutputGaussian
from credo.posterior.posterior import Posterior
from credo.rule.families import KroneckerGaussian

SIGMA, DELTA = 0.3, 2.0
SHAPES = [(5, 3), (5, 1), (2, 5), (2, 1)]
"""Of the network of `tanh_network`, layer by layer."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def positive(n: int, seed: int = 0) -> Tensor:
    root = normal(n, n, seed=seed)
    return root @ root.mT / n + torch.eye(n, dtype=torch.float64)


def tanh_network(inputs: int = 3, outputs: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def posterior_of(net: nn.Module, likelihood: credo.types.Likelihood, q: Family) -> Posterior:
    return Posterior.at_network(credo.Model(net, likelihood, random="all"), q)


def weights_of(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """(B, K, P) by torch.func.jacrev."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    found = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(parameters)
    return torch.cat([f.reshape(len(x), -1, p.numel()) for f, p in
                      zip(found.values(), parameters.values(), strict=True)], dim=-1)  # fmt: skip


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def regression() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and inputs to predict at."""
    return normal(20, 3), normal(20, 1), normal(7, 3, seed=1)


def linear_posterior(x: Tensor, y: Tensor) -> Posterior:
    """The exact posterior of a linear layer with N(0, 1/δ) weights and biases."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    precision = design.mT @ design / SIGMA**2 + DELTA * torch.eye(4, dtype=x.dtype)
    mean = torch.linalg.solve(precision, design.mT @ y[:, 0] / SIGMA**2)
    likelihood = credo.likelihoods.Gaussian(scale=SIGMA)
    return posterior_of(nn.Linear(3, 1).double(), likelihood, FullGaussian(mean, precision))


def test_a_linear_model_predicts_as_bayesian_linear_regression(
    regression: tuple[Tensor, Tensor, Tensor],
) -> None:
    x, y, new = regression
    pred = linear_posterior(x, y).predict(new, at="linearised")
    # The same model as a Gaussian process: kernel (x·x' + 1)/δ, by scikit-learn.
    scale = math.sqrt(1 / DELTA)
    process = GaussianProcessRegressor(DotProduct(1.0, "fixed"), alpha=SIGMA**2 / scale**2)
    mean, std = process.fit(x.numpy(), y[:, 0].numpy()).predict(new.numpy(), return_std=True)
    close(pred.mean[:, 0], torch.from_numpy(mean))
    close(pred.epistemic_std[:, 0], scale * torch.from_numpy(std))
    close(pred.aleatoric_std[:, 0], torch.full((7,), SIGMA, dtype=torch.float64))
    reference = stats.norm(mean, np.hypot(scale * std, SIGMA))
    targets = normal(7, 1, seed=3)
    close(pred.log_prob(targets), torch.from_numpy(reference.logpdf(targets[:, 0].numpy())))
    for found, expected in zip(pred.interval(0.8), reference.interval(0.8), strict=True):
        close(found[:, 0], torch.from_numpy(expected))


def test_it_is_the_gaussian_process_of_the_function_space_view() -> None:
    """Σ = (JᵀJ/σ² + δI)⁻¹ gives the posterior of the process with kernel JJ'ᵀ/δ and noise σ²."""
    net = tanh_network()
    x, new = normal(20, 3), normal(7, 3, seed=1)
    j, j_new = jacobian(net, x).flatten(0, 1), jacobian(net, new).flatten(0, 1)
    precision = j.mT @ j / SIGMA**2 + DELTA * torch.eye(j.shape[1], dtype=j.dtype)
    q = FullGaussian(weights_of(net), precision)
    pred = posterior_of(net, credo.likelihoods.Gaussian(scale=SIGMA), q).predict(
        new, at="linearised"
    )
    noise = SIGMA**2 * torch.eye(len(j), dtype=j.dtype)
    between = j_new @ j.mT / DELTA
    known = between @ torch.linalg.solve(j @ j.mT / DELTA + noise, between.mT)
    covariance = j_new @ j_new.mT / DELTA - known
    close(pred.epistemic_std.square().flatten(), covariance.diagonal())
    close(pred.mean, net(new).detach())
    targets = normal(7, 2, seed=3)
    for b in range(7):
        part = slice(2 * b, 2 * b + 2)
        joint = covariance[part, part] + SIGMA**2 * torch.eye(2, dtype=j.dtype)
        reference = stats.multivariate_normal(pred.mean[b].numpy(), joint.numpy())
        assert float(pred.log_prob(targets)[b]) == pytest.approx(
            reference.logpdf(targets[b].numpy()), rel=1e-10
        )


def eigen(a: int, b: int, index: int) -> EigenBlock:
    values = normal(a, b, seed=index).square() + 0.5
    if index == 1:
        return EigenBlock(None, None, values)
    left, right = (torch.linalg.qr(normal(n, n, seed=index))[0] for n in (a, b))
    return EigenBlock(left, right, values)


FAMILIES: dict[str, Callable[[Tensor], Family]] = {
    "diagonal": lambda m: DiagGaussian(m, normal(len(m)).abs() + 0.1),
    "fixed number": lambda m: FixedGaussian(m, torch.tensor(3.0, dtype=m.dtype)),
    "fixed diagonal": lambda m: FixedGaussian(m, normal(len(m)).square() + 0.5),
    "fixed dense": lambda m: FixedGaussian(m, positive(len(m))),
    "full": lambda m: FullGaussian(m, positive(len(m))),
    "low rank": lambda m: LowRankGaussian(m, normal(len(m), 3), normal(len(m)).square() + 0.5),
    "factor": lambda m: FactorGaussian(m, normal(len(m), 3), normal(len(m)).square() + 0.5),
    "kronecker": lambda m: KroneckerGaussian(
        m, tuple((positive(a), positive(b, seed=1)) for a, b in SHAPES)
    ),
    "kronecker in other blocks": lambda m: KroneckerGaussian(
        m, ((positive(4), positive(8)),)
    ),
    "eigen-kronecker": lambda m: EigenKroneckerGaussian(
        m, tuple(eigen(a, b, index) for index, (a, b) in enumerate(SHAPES))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_gaussian_gives_the_outputs_its_covariance(name: str) -> None:
    net, x = tanh_network(), normal(6, 3)
    q = FAMILIES[name](weights_of(net))
    one = torch.eye(q.size, dtype=torch.float64)
    covariance = torch.diag(q.variance) if name.endswith(("diagonal", "number")) else q.solve(one)  # type: ignore[attr-defined]
    j = jacobian(net, x)
    pred = posterior_of(net, credo.likelihoods.Gaussian(scale=SIGMA), q).predict(x, at="linearised")
    full = j @ covariance @ j.mT
    close(pred.epistemic_std.square(), full.diagonal(dim1=1, dim2=2))
    close(pred._gaussian.covariance, full)  # type: ignore[attr-defined]


def test_a_point_mass_leaves_the_noise() -> None:
    net, x = tanh_network(), normal(6, 3)
    likelihood = credo.likelihoods.Gaussian(scale=SIGMA)
    pred = posterior_of(net, likelihood, Delta(weights_of(net))).predict(x, at="linearised")
    assert float(pred.epistemic_std.max()) == 0
    close(pred.log_prob(normal(6, 2)), likelihood.log_prob(net(x).detach(), normal(6, 2)))
    drawn = posterior_of(net, likelihood, Delta(weights_of(net))).predict(
        x, at="linearised", link="samples", samples=3
    )
    close(drawn.outputs, net(x).detach().expand(3, -1, -1))


def test_a_last_layer_is_regression_on_the_features() -> None:
    net, x = tanh_network(), normal(6, 3)
    model = credo.Model(net, credo.likelihoods.Gaussian(scale=SIGMA), random="last_layer")
    features = torch.cat([torch.tanh(net[0](x)), torch.ones(6, 1, dtype=x.dtype)], 1).detach()
    variance = normal(2, 6).square()  # of each output's weights and bias
    flat = torch.cat([variance[:, :5].flatten(), variance[:, 5]])
    mean = model.weights(model.random)
    pred = Posterior.at_network(model, DiagGaussian(mean, flat.sqrt())).predict(x, at="linearised")
    close(pred.epistemic_std.square(), features.square() @ variance.mT)


def test_outputs_with_positions_have_the_marginals_of_each() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, size = normal(3, 2, 2, 3), len(weights_of(net))
    q = DiagGaussian(weights_of(net), normal(size).abs() + 0.1)
    j = jacobian(net, x)
    full = (j * q.variance @ j.mT).view(3, 3, 6, 3, 6)
    marginal = full.diagonal(dim1=2, dim2=4).movedim(-1, 1).reshape(3, 2, 3, 3, 3)
    posterior = posterior_of(net, credo.likelihoods.Categorical(), q)
    pred = posterior.predict(x, at="linearised", link="probit")
    close(pred._gaussian.covariance, marginal)  # type: ignore[attr-defined]
    variance = marginal.diagonal(dim1=-2, dim2=-1).movedim(-1, 1)
    close(pred.probs, (net(x).detach() / (1 + math.pi / 8 * variance).sqrt()).softmax(1))
    assert posterior.predict(x, samples=5, at="linearised").entropy.shape == (3, 2, 3)


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0, 3.0, 10.0, 40.0])
def test_probit_is_within_its_stated_error_of_the_integral(mean: float, scale: float) -> None:
    """E σ(f), f ~ N(mean, scale²), by adaptive quadrature.

    The worst case is scale → ∞, where Φ(t) meets σ(t√(8/π)): 0.0177 apart at most. To both sides
    of f = 0 the integrand is smooth, so the integral is split there.
    """

    def integrand(f: float) -> float:
        return float(special.expit(f) * stats.norm.pdf(f, mean, scale))

    ends = (mean - 12 * scale, 0.0, mean + 12 * scale)
    parts = [integrate.quad(integrand, a, b, points=None, limit=200)[0]
             for a, b in ((ends[0], max(ends[0], 0.0)), (max(ends[0], 0.0), ends[2]))]  # fmt: skip
    logits = torch.tensor([[mean]], dtype=torch.float64)
    pred = ProbitPredictive(
        OutputGaussian(logits, torch.full((1, 1, 1), scale**2, dtype=torch.float64)),
        credo.likelihoods.Bernoulli(),
    )
    assert float(pred.probs) == pytest.approx(sum(parts), abs=0.0178)
    if mean == 0.0:
        assert float(pred.probs) == 0.5


def test_probit_of_certain_logits_is_the_softmax() -> None:
    logits = normal(4, 3)
    pred = ProbitPredictive(
        OutputGaussian(logits, torch.zeros(4, 3, 3, dtype=torch.float64)),
        credo.likelihoods.Categorical(),
    )
    labels = torch.tensor([0, 1, 2, 0])
    close(pred.probs, logits.softmax(1))
    close(pred.log_prob(labels), logits.log_softmax(1)[torch.arange(4), labels])


def test_samples_of_the_outputs_have_the_moments_of_the_formula() -> None:
    """Five standard errors: of a mean std/√S, of a variance var·√(2/S)."""
    net, x, draws = tanh_network(), normal(6, 3), 2000
    q = FAMILIES["full"](weights_of(net))
    posterior = posterior_of(net, credo.likelihoods.Gaussian(scale=SIGMA), q)
    exact = posterior.predict(x, at="linearised")
    drawn = posterior.predict(x, at="linearised", link="samples", samples=draws)
    variance = exact.epistemic_std.square()
    assert drawn.outputs.shape == (draws, 6, 2)
    assert ((drawn.mean - exact.mean).abs() < 5 * exact.epistemic_std / math.sqrt(draws)).all()
    off = (drawn.epistemic_std.square() - variance).abs()
    assert (off < 5 * variance * math.sqrt(2 / draws)).all()
    centred = drawn.outputs - exact.mean
    cross = (centred[..., 0] * centred[..., 1]).mean(0)
    covariance = exact._gaussian.covariance[:, 0, 1]  # type: ignore[attr-defined]
    error = ((variance.prod(1) + covariance.square()) / draws).sqrt()
    assert ((cross - covariance).abs() < 5 * error).all()
    # log p(y) of the mixture converges to the joint normal's: the delta method's standard error.
    y = normal(6, 2, seed=4)
    each = torch.stack([posterior.model.likelihood.log_prob(f, y) for f in drawn.outputs]).exp()
    relative = each.std(0) / each.mean(0) / math.sqrt(draws)
    assert ((drawn.log_prob(y) - exact.log_prob(y)).abs() < 5 * relative).all()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_draws_have_a_covariance_that_may_be_singular(rank: int) -> None:
    """Of strongly correlated outputs; five standard errors of every entry."""
    factor, draws = normal(1, 3, rank, seed=7) + 1, 4000
    covariance = factor @ factor.mT
    gaussian = OutputGaussian(normal(1, 3), covariance)
    generator = torch.Generator().manual_seed(0)
    centred = torch.cat(list(gaussian.draws(draws, generator))) - gaussian.mean
    variance = covariance[0].diagonal()
    error = ((torch.outer(variance, variance) + covariance[0].square()) / draws).sqrt()
    assert ((centred.mT @ centred / draws - covariance[0]).abs() < 5 * error).all()


def test_a_network_linear_in_its_weights_predicts_the_same_with_sampled_weights() -> None:
    """JΣJᵀ is then no approximation: variances agree within five standard errors."""
    torch.manual_seed(0)
    net, x, draws = nn.Linear(3, 2).double(), normal(6, 3), 1000
    q = FullGaussian(weights_of(net), positive(8))
    posterior = posterior_of(net, credo.likelihoods.Categorical(), q)
    sampled = posterior.predict(x, samples=draws)
    exact = posterior.predict(x, at="linearised", link="probit")._gaussian  # type: ignore[attr-defined]
    off = (sampled.outputs.var(0) - exact.variance).abs()
    assert (off < 5 * exact.variance * math.sqrt(2 / draws)).all()
    linear = posterior.predict(x, at="linearised", samples=draws)
    error = (linear.epistemic_std.square() + sampled.epistemic_std.square()) / draws
    assert ((linear.probs - sampled.probs).abs() < 5 * error.sqrt()).all()
