"""Every estimator of the ELBO's gradient has the right mean, and the variances are ordered."""

import math

import pytest
import torch
from torch import nn

import credo
from credo.families import DiagGaussian, links
from credo.kl import kl
from credo.noise import source
from credo.rule.quadrature import expectation
from credo.variational.elbo import chain_to_rho_, prior_term
from credo.variational.estimators import GaussianStep

N_DRAWS = 2000


class Conjugate(nn.Module):
    """Three weights, read out directly: y ~ N(w, noise²) has a Gaussian posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


NOISE, PRIOR_SCALE, NUM_DATA = 0.5, 1.5, 4
Y = torch.tensor([[1.0, -0.5, 0.3]], dtype=torch.float64).repeat(NUM_DATA, 1)
X = torch.ones(NUM_DATA, 1, dtype=torch.float64)


def conjugate_model() -> credo.Model:
    return credo.Model(
        Conjugate(), credo.likelihoods.Gaussian(scale=NOISE), credo.priors.Normal(PRIOR_SCALE)
    )


def exact_posterior() -> DiagGaussian:
    precision = NUM_DATA / NOISE**2 + PRIOR_SCALE**-2
    mean = Y.sum(0) / NOISE**2 / precision
    return DiagGaussian(mean, torch.full_like(mean, precision**-0.5))


def exact_gradient(model: credo.Model, mean: torch.Tensor, rho: torch.Tensor):
    """∇ of mean NLL + KL/n, both integrated in closed form, by autodiff."""
    mean, rho = mean.clone().requires_grad_(), rho.clone().requires_grad_()
    scale = rho.exp()
    nll = 0.5 * ((Y - mean).square().mean(0) + scale.square()).sum() / NOISE**2
    loss = nll + kl(DiagGaussian(mean, scale), model.prior_over_weights()) / NUM_DATA
    return torch.autograd.grad(loss, (mean, rho))


def draws_of(estimator: str, mean, rho, n: int = N_DRAWS, **settings):
    """Gradients (n, P) with respect to mean and rho from n independent estimates."""
    model = conjugate_model()
    method = credo.VI(estimator=estimator, draws="normal", **settings)
    state = method.init(model, NUM_DATA, torch.Generator().manual_seed(0))
    state.mean.copy_(mean)
    state.rho.copy_(rho)
    found = []
    for key in range(n):
        torch.exp(state.rho, out=state.scale)
        weight = 1 / NUM_DATA
        step = GaussianStep(
            state.flat, state.random, state.mean, state.scale,
            lambda: model.mean_nll((X, Y)), weight, method.samples, (key,),
            state.grad_mean, state.grad_scale,
        )  # fmt: skip
        state.estimator.gradients(step)
        if state.prior_term is not None:
            state.prior_term.add_gradients_(
                state.mean, state.scale, weight, state.grad_mean, state.grad_scale
            )
        entropy = 0.0 if state.estimator.integrates_kl else weight
        chain_to_rho_(state.grad_scale, state.scale, links.EXP, entropy)
        found.append(torch.stack([state.grad_mean, state.grad_scale]))
    return torch.stack(found)


ESTIMATORS = {
    "reparam": {"estimator": "reparam"},
    "reparam, 3 samples": {"estimator": "reparam", "samples": 3},
    "total": {"estimator": "total"},
    "path": {"estimator": "path"},
    "score, leave one out": {"estimator": "score", "samples": 4},
    "score, optimal baseline": {"estimator": "score", "samples": 4, "baseline": "optimal"},
    "score, no baseline": {"estimator": "score", "baseline": "none"},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_are_unbiased(name: str) -> None:
    """Means over 2,000 draws within 5 standard errors of the closed form, away from the optimum."""
    mean = torch.tensor([0.2, -0.1, 0.7], dtype=torch.float64)
    rho = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    found = draws_of(mean=mean, rho=rho, **ESTIMATORS[name])
    expected = torch.stack(exact_gradient(conjugate_model(), mean, rho))
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() <= 5 * error + 1e-12).all()


def test_path_derivative_has_no_variance_at_the_posterior() -> None:
    """Sticking the landing: at q = posterior every single draw is the exact gradient, zero.

    Zero up to rounding: terms of size ~10 cancel in float64.
    """
    q = exact_posterior()
    found = draws_of("path", q.mean, q.scale.log(), n=50)
    assert found.abs().max() < 1e-12


def test_variances_are_ordered_near_the_optimum() -> None:
    """var(path) < var(total) < var(score), for means and scales."""
    q = exact_posterior()
    mean, rho = q.mean + 0.02, q.scale.log() + 0.05
    spread = {
        name: draws_of(mean=mean, rho=rho, n=1000, estimator=name, **more).var(0).sum(1)
        for name, more in (("path", {}), ("total", {}), ("score", {"baseline": "none"}))
    }
    assert (spread["path"] < spread["total"]).all()
    assert (spread["total"] < spread["score"]).all()


def test_baselines_reduce_the_variance_of_the_score_function() -> None:
    q = exact_posterior()
    spread = [
        draws_of("score", q.mean + 0.1, q.scale.log(), n=1000, samples=4, baseline=b).var(0).sum()
        for b in ("none", "loo")
    ]
    assert spread[1] < spread[0]


@pytest.mark.parametrize("link", ["exp", "softplus"])
@pytest.mark.parametrize(
    "prior",
    [credo.priors.Normal(0.7, mean=0.3), credo.priors.Laplace(0.7)],
    ids=["normal", "laplace"],
)
def test_closed_form_kl_gradients_equal_autodiff(link: str, prior) -> None:
    """Float64; 1e-12 because both sides are a few roundings away from the same number."""
    model = credo.Model(Conjugate(), credo.likelihoods.Gaussian(), prior)
    p = model.prior_over_weights()
    mean = torch.tensor([0.4, -2.0, 0.0], dtype=torch.float64)
    rho = torch.tensor([-3.0, 0.2, 1.0], dtype=torch.float64)
    leaves = mean.clone().requires_grad_(), rho.clone().requires_grad_()
    q = DiagGaussian(leaves[0], links.by_name(link).forward(leaves[1]))
    expected = torch.autograd.grad(0.3 * kl(q, p), leaves)
    scale = links.by_name(link).forward(rho)
    grad_mean, grad_rho = torch.zeros_like(mean), torch.zeros_like(rho)
    prior_term(p).add_gradients_(mean, scale, 0.3, grad_mean, grad_rho)
    chain_to_rho_(grad_rho, scale, links.by_name(link), 0.3)
    torch.testing.assert_close(grad_mean, expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_rho, expected[1], rtol=1e-12, atol=1e-14)


def test_one_step_equals_autodiff_through_the_sampling() -> None:
    """The closed forms in (g, ε) are the reparameterisation gradient of a whole network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model = credo.Model(net, credo.likelihoods.Categorical())
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    method = credo.VI(temperature=1.0, draws="normal", optimizer="sgd", lr=1.0, scale_lr=1.0)
    state = method.init(model, 50, torch.Generator().manual_seed(1))
    leaves = state.mean.clone().requires_grad_(), state.rho.clone().requires_grad_()
    before = leaves[0].detach().clone()
    eps = source("normal", state.estimator.noise.seed).draw(torch.empty_like(state.mean), 0, 0)
    weights = leaves[0] + leaves[1].exp() * eps
    named = {s.name: weights[s.slice].view(s.shape) for s in state.random.segments}
    outputs = torch.func.functional_call(net, named, (x,))
    q = DiagGaussian(leaves[0], leaves[1].exp())
    loss = nn.functional.cross_entropy(outputs, y) + kl(q, state.prior) / 50
    expected = torch.autograd.grad(loss, leaves)
    state, info = method.update(state, (x, y))
    torch.testing.assert_close(before - state.mean, expected[0], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(state.grad_scale, expected[1], rtol=1e-10, atol=1e-13)
    assert info.nll == pytest.approx(nn.functional.cross_entropy(outputs, y).item(), rel=1e-12)


@pytest.mark.parametrize("narrow", [0.3, 0.5])
def test_priors_without_closed_form_train_by_sampling(narrow: float) -> None:
    """The estimator's mean equals the gradient of the KL by quadrature within 5 s.e.

    The narrow component is wide enough for the 200 nodes to resolve it.
    """
    prior = credo.priors.ScaleMixture(pi=0.5, scale1=1.0, scale2=narrow)
    model = credo.Model(Conjugate(), credo.likelihoods.Gaussian(), prior)
    mean = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64)
    rho = torch.tensor([-1.0, -0.5, -0.2], dtype=torch.float64)
    p = model.prior_over_weights()
    leaves = mean.clone().requires_grad_(), rho.clone().requires_grad_()
    cross = -sum(
        expectation(lambda w: _log_density(p, w), leaves[0][i], leaves[1][i].exp(), order=200)
        for i in range(3)
    )
    expected = torch.autograd.grad(cross - leaves[1].sum(), leaves)
    method = credo.VI(draws="normal")
    state = method.init(model, 1, torch.Generator().manual_seed(0))
    assert state.estimator.integrates_kl
    found = []
    for key in range(N_DRAWS):
        step = GaussianStep(
            state.flat, state.random, mean, rho.exp(), lambda: (0 * model.net.w).sum(), 1.0, 1,
            (key,), state.grad_mean, state.grad_scale,
        )  # fmt: skip
        state.estimator.gradients(step)
        chain_to_rho_(state.grad_scale, rho.exp(), links.EXP, 0.0)
        found.append(torch.stack([state.grad_mean, state.grad_scale]))
    stacked = torch.stack(found)
    error = stacked.std(0) / math.sqrt(len(stacked))
    assert ((stacked.mean(0) - torch.stack(expected)).abs() <= 5 * error).all()


def _log_density(p, w: torch.Tensor) -> torch.Tensor:
    flat = w.reshape(-1, 1).expand(-1, 3)
    return (p.log_prob(flat) / 3).reshape(w.shape)
