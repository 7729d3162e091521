"""Laplace's approximation: what it must equal, and where it is exact.

Everything is float64. Equalities of formulas hold to rounding, a few hundred additions of numbers
of one size: 1e-10 relative leaves room for condition numbers of 1e4.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge, LogisticRegression
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import credo
from credo.families import LowRankGaussian
from credo.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from credo.likelihoods.curvature import curvature_roots
from credo.priors import Normal

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
NOISE, PRECISION = 0.3, 2.5

pytestmark = pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def fitted(net: nn.Module, likelihood, data, prior: float = PRECISION, **settings):
    model = credo.Model(net, likelihood, Normal(prior**-0.5))
    return credo.fit(model, credo.Laplace(**settings), data, progress=False)


def linear(weights: Tensor) -> nn.Linear:
    net = nn.Linear(weights.shape[-1], 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(weights)
    return net


def mlp(outputs: int = 3, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def regression(n: int = 30) -> tuple[Tensor, Tensor]:
    x = numbers(n, 4)
    return x, (x @ numbers(4, seed=1) + NOISE * numbers(n, seed=2))[:, None]


def mode(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior's mean and precision, by the normal equations."""
    precision = x.mT @ x / NOISE**2 + PRECISION * torch.eye(x.shape[1], dtype=F64)
    return torch.linalg.solve(precision, x.mT @ y / NOISE**2).flatten(), precision


# --- linear models -----------------------------------------------------------------------------


def test_linear_regression_is_exact() -> None:
    x, y = regression()
    mean, precision = mode(x, y)
    posterior = fitted(linear(mean), Gaussian(NOISE), (x, y), structure="full")
    assert_close(posterior.q.precision, precision, **CLOSE)
    assert_close(posterior.mean, mean, **CLOSE)
    # The evidence is that of the Gaussian process the model is: y ~ N(0, XXᵀ/δ + σ²).
    covariance = x @ x.mT / PRECISION + NOISE**2 * torch.eye(len(x), dtype=F64)
    exact = MultivariateNormal(torch.zeros(len(x), dtype=F64), covariance).log_prob(y.flatten())
    assert_close(posterior.log_marginal_likelihood(), exact, **CLOSE)


def bayesian_ridge() -> tuple[Tensor, Tensor, BayesianRidge]:
    x, y = regression(60)
    ridge = BayesianRidge(
        alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, fit_intercept=False, compute_score=True,
        tol=1e-12, max_iter=10_000,
    ).fit(x.numpy(), y.numpy().ravel())  # fmt: skip
    return x, y, ridge


def test_evidence_is_sklearns_and_stationary_where_it_rests() -> None:
    """BayesianRidge maximises it over precision λ and noise α^−½ with the weights at the mode."""
    x, y, ridge = bayesian_ridge()
    net = linear(torch.from_numpy(ridge.coef_))
    posterior = fitted(net, Gaussian(ridge.alpha_**-0.5), (x, y), ridge.lambda_, structure="full")
    assert_close(float(posterior.log_marginal_likelihood()), ridge.scores_[-1], rtol=1e-9, atol=0)
    # sklearn stops when the weights move by less than tol: the optimum is found to about 1e-6.
    logs = torch.tensor([ridge.lambda_, ridge.alpha_**-0.5], dtype=F64).log().requires_grad_()
    evidence = posterior.log_marginal_likelihood(logs[0].exp(), logs[1].exp())
    (gradient,) = torch.autograd.grad(evidence, logs)
    assert_close(gradient, torch.zeros(2, dtype=F64), rtol=0, atol=1e-5)
    better = posterior.optimise("global", noise=True)
    assert better.model.likelihood.scale == pytest.approx(ridge.alpha_**-0.5, rel=1e-5)
    assert_close(better.q.precision, posterior.q.precision, rtol=1e-4, atol=1e-4)


def test_training_by_the_evidence_finds_sklearns_prior_and_noise() -> None:
    x, y, ridge = bayesian_ridge()
    likelihood = Gaussian(1.0, learned=True).double()
    model = credo.Model(linear(torch.zeros(4, dtype=F64)), likelihood, Normal(1.0))
    method = credo.Laplace("full", train=credo.MAP(lr=0.02), evidence_every=20)
    posterior = credo.fit(
        model, method, (x, y), epochs=400, batch_size=60, progress=False, schedule="linear"
    )
    # What is left is the distance of Adam's weights from the mode.
    assert_close(posterior.mean, torch.from_numpy(ridge.coef_), rtol=1e-4, atol=1e-4)
    assert posterior.model.likelihood.scale == pytest.approx(ridge.alpha_**-0.5, rel=1e-3)
    assert float(posterior.evidence.precision) == pytest.approx(ridge.lambda_, rel=1e-3)
    assert likelihood.scale == posterior.model.likelihood.scale


def test_logistic_regression_has_the_hessian_of_iteratively_reweighted_least_squares() -> None:
    x = numbers(80, 4)
    y = (x @ numbers(4, seed=1) + numbers(80, seed=2) > 0).to(F64)
    sklearns = LogisticRegression(C=1 / PRECISION, fit_intercept=False, tol=1e-12, max_iter=1000)
    sklearns.fit(x.numpy(), y.numpy())
    p = torch.from_numpy(sklearns.predict_proba(x.numpy())[:, 1])
    expected = x.mT @ ((p * (1 - p)).unsqueeze(-1) * x) + PRECISION * torch.eye(4, dtype=F64)
    net = linear(torch.from_numpy(sklearns.coef_))
    for curvature in ("ggn", "hessian"):
        q = fitted(net, Bernoulli(), (x, y[:, None]), structure="full", curvature=curvature).q
        assert_close(q.precision, expected, **CLOSE)


def test_the_predictive_of_last_layer_weights_is_exact() -> None:
    """Outputs are linear in them: Gaussian with covariance JS⁻¹Jᵀ."""
    net, x = mlp(2), numbers(6, 4, seed=5)
    data = numbers(20, 4), numbers(20, 2, seed=1)
    posterior = fitted(net, Gaussian(NOISE), data, structure="full", subset="last_layer")
    hidden = torch.tanh(net[0](x)).detach()
    features = torch.cat([hidden, torch.ones(6, 1, dtype=F64)], 1)
    covariance = posterior.q.covariance
    # Weights first, (2, 5) row by row, then biases.
    for k in range(2):
        index = [*range(5 * k, 5 * k + 5), 10 + k]
        expected = (features @ covariance[index][:, index] * features).sum(1)
        found = posterior.predict(x, at="linearised").epistemic_std[:, k].square()
        assert_close(found, expected, **CLOSE)


# --- likelihoods -------------------------------------------------------------------------------

CASES = {
    "categorical": (Categorical(), torch.arange(20) % 3, 3),
    "gaussian": (Gaussian(NOISE), numbers(20, 2, seed=3), 2),
    "bernoulli": (Bernoulli(), (numbers(20, 2, seed=4) > 0).to(F64), 2),
    "heteroscedastic": (HeteroscedasticGaussian(), numbers(20, 1, seed=6), 2),
}
every_case = pytest.mark.parametrize("case", CASES)


# --- structures --------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_diagonal_is_that_of_the_full_matrix(case: str, curvature: str) -> None:
    likelihood, y, outputs = CASES[case]
    net, x = mlp(outputs), numbers(20, 4)
    full = fitted(net, likelihood, (x, y), structure="full", curvature=curvature).q
    diagonal = fitted(net, likelihood, (x, y), structure="diag", curvature=curvature).q
    assert_close(diagonal.precision, full.precision.diagonal(), **CLOSE)


def blocks_of(matrix: Tensor, sizes: list[int]) -> Tensor:
    """Without what lies between different blocks."""
    parts, start = [], 0
    for size in sizes:
        parts.append(matrix[start : start + size, start : start + size])
        start += size
    return torch.block_diag(*parts)


@every_case
def test_kron_is_exact_for_one_example(case: str) -> None:
    """(Σ_r g_r g_rᵀ) ⊗ aaᵀ is then what each layer's block is."""
    likelihood, y, outputs = CASES[case]
    net, data = mlp(outputs), (numbers(1, 4), y[:1])
    full = fitted(net, likelihood, data, structure="full").q
    kron = fitted(net, likelihood, data, structure="kron").q
    sizes = [parameter.numel() for parameter in net.parameters()]
    assert_close(kron.dense_precision(), blocks_of(full.precision, sizes), **CLOSE)


def test_kron_is_exact_for_one_linear_layer_with_gaussian_noise() -> None:
    """H = I/σ² ⊗ XᵀX, whatever the number of examples."""
    net = nn.Linear(4, 3, bias=False).double()
    data = numbers(25, 4), numbers(25, 3, seed=1)
    full = fitted(net, Gaussian(NOISE), data, structure="full")
    kron = fitted(net, Gaussian(NOISE), data, structure="kron")
    assert_close(kron.q.dense_precision(), full.q.precision, **CLOSE)
    assert_close(kron.log_marginal_likelihood(), full.log_marginal_likelihood(), **CLOSE)


def test_low_rank_is_exact_where_the_rank_suffices() -> None:
    net, data = mlp(1), (numbers(6, 4), numbers(6, 1, seed=1))
    full = fitted(net, Gaussian(NOISE), data, structure="full")
    low = fitted(net, Gaussian(NOISE), data, structure="low_rank", rank=6)
    assert isinstance(low.q, LowRankGaussian)
    # The sketch loses √rounding of the largest eigenvalue where it adds it to a singular matrix.
    assert_close(low.q.dense_precision(), full.q.precision, rtol=1e-6, atol=1e-6)
    assert_close(low.log_marginal_likelihood(), full.log_marginal_likelihood(), rtol=1e-7, atol=0)


def test_low_rank_has_the_leading_eigenpairs() -> None:
    net, data = mlp(3), (numbers(60, 4), torch.arange(60) % 3)
    full = fitted(net, Categorical(), data, structure="full").q.precision
    low = fitted(net, Categorical(), data, structure="low_rank", rank=5).q
    exact = torch.linalg.eigvalsh(full).flip(0)[:5] - PRECISION
    found = low.factor.square().sum(0)
    assert bool((found <= exact * (1 + 1e-8)).all())
    # 25 random directions for 5 eigenpairs of 43 weights.
    assert_close(found, exact, rtol=0.02, atol=0)


def test_temperature_is_that_of_variational_inference() -> None:
    """S = H/T + δ: at the optimum of E_q[loss] + T·KL, σ² = T/(F + T/s²)."""
    net, data = mlp(3), (numbers(20, 4), torch.arange(20) % 3)
    fisher = fitted(net, Categorical(), data, structure="diag").q.precision - PRECISION
    for temperature in (0.1, 3.0):
        q = fitted(net, Categorical(), data, structure="diag", temperature=temperature).q
        assert_close(q.variance, temperature / (fisher + temperature * PRECISION), **CLOSE)


# --- the evidence ------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "low_rank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_gradient_of_the_evidence(structure: str, curvature: str) -> None:
    """Against finite differences; and at the fitted values it is the fitted one."""
    data = numbers(15, 4), numbers(15, 2, seed=1)
    posterior = fitted(mlp(2), Gaussian(NOISE), data, structure=structure, curvature=curvature)
    delta = numbers(4, seed=7).exp().requires_grad_()
    sigma = torch.tensor(0.5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(posterior.log_marginal_likelihood, (delta, sigma))
    assert_close(
        posterior.log_marginal_likelihood(PRECISION, NOISE),
        posterior.log_marginal_likelihood(),
        **CLOSE,
    )


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "low_rank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_evidence_at_another_prior_and_noise_is_that_of_a_fit_with_them(
    structure: str, curvature: str
) -> None:
    data = numbers(15, 4), numbers(15, 2, seed=1)
    settings = {"structure": structure, "curvature": curvature}
    posterior = fitted(mlp(2), Gaussian(NOISE), data, **settings)
    other = fitted(mlp(2), Gaussian(0.7), data, 11.0, **settings)
    assert_close(
        posterior.log_marginal_likelihood(11.0, 0.7),
        other.log_marginal_likelihood(),
        rtol=1e-7,
        atol=0,
    )


@pytest.mark.parametrize("sharing", ["global", "per_layer"])
def test_the_best_prior_is_stationary_and_better(sharing: str) -> None:
    net, data = mlp(3), (numbers(60, 4), torch.arange(60) % 3)
    model = credo.Model(net, Categorical(), Normal(1.0))
    method = credo.Laplace(train=credo.MAP(lr=0.02))
    posterior = credo.fit(model, method, data, epochs=30, progress=False)
    better = posterior.optimise(sharing)
    assert better.log_marginal_likelihood() > posterior.log_marginal_likelihood()
    groups = [[0, 1, 2, 3]] if sharing == "global" else [[0, 1], [2, 3]]
    for group in groups:
        shift = torch.zeros((), dtype=F64, requires_grad=True)
        mask = torch.zeros(4, dtype=F64)
        mask[group] = 1.0
        evidence = better.log_marginal_likelihood(better.evidence.precision * (shift * mask).exp())
        (slope,) = torch.autograd.grad(evidence, shift)
        assert abs(float(slope)) < 1e-4
        assert len(set(better.evidence.precision[group].tolist())) == 1
    # The posterior is that of a fit under the prior it found.
    again = credo.fit(
        credo.Model(net, Categorical(), better.model.prior), credo.Laplace(), data, progress=False
    )
    assert_close(again.q.variance, better.q.variance, **CLOSE)


# --- roots -------------------------------------------------------------------------------------


@every_case
def test_roots_make_the_likelihoods_hessian(case: str) -> None:
    likelihood, y, outputs = CASES[case]
    f = 2 * numbers(20, outputs, seed=8)
    roots = curvature_roots("ggn", likelihood, f, y)
    assert_close(torch.einsum("rbi,rbj->bij", roots, roots), likelihood.hessian(f), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_roots_of_a_saturated_softmax(dtype: torch.dtype) -> None:
    """Probabilities that round to 0 and 1, in any order."""
    f = torch.tensor([[300, 0, -300], [-300, 0, 300], [0, 300, 300], [0, 0, 40]], dtype=dtype)
    roots = curvature_roots("ggn", Categorical(), f, torch.zeros(4, dtype=torch.int64))
    assert roots.shape == (2, 4, 3)
    products = torch.einsum("rbi,rbj->bij", roots, roots)
    assert_close(products, Categorical().hessian(f), rtol=1e-6, atol=1e-30)


@every_case
def test_sampled_labels_make_it_in_expectation(case: str) -> None:
    likelihood, y, outputs = CASES[case]
    f, draws = numbers(1, outputs, seed=8), 20_000
    many, labels = f.expand(draws, -1), y[:1].expand(draws, *y.shape[1:])
    (scores,) = curvature_roots(
        "fisher", likelihood, many, labels, torch.Generator().manual_seed(0)
    )
    products = torch.einsum("bi,bj->bij", scores, scores)
    error = products.std(0) / math.sqrt(draws)
    assert bool(((products.mean(0) - likelihood.hessian(f)[0]).abs() <= 5 * error + 1e-12).all())
    (_, two) = curvature_roots("fisher", likelihood, f, y[:1], torch.Generator(), samples=2)
    assert two.shape == f.shape


def test_pixels_are_independent_and_ignored_ones_count_for_nothing() -> None:
    """The dense GGN: Σ over pixels of the pixel's own, for one with labels to leave out."""
    likelihood = Categorical(ignore_index=9)
    f, y = numbers(2, 3, 2, 2), torch.tensor([[[0, 1], [9, 2]], [[9, 9], [1, 0]]])
    roots = curvature_roots("ggn", likelihood, f, y)
    found = torch.einsum("rbcxy,rbdzw->bxyzwcd", roots, roots)
    blocks = likelihood.hessian(f) * (y != 9)[..., None, None]
    expected = torch.zeros_like(found)
    for place in np.ndindex(2, 2):
        expected[:, place[0], place[1], place[0], place[1]] = blocks[:, place[0], place[1]]
    assert_close(found, expected, **CLOSE)
    sampled = curvature_roots("fisher", likelihood, f, y, torch.Generator().manual_seed(0))
    assert not sampled[0].movedim(1, -1)[y == 9].any()
