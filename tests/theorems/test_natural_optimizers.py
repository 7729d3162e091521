"""What VON, VOGN, IVON and Vadam converge to, and that they take the published steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

from credo.families import DiagGaussian
from credo.likelihoods import Gaussian
from credo.noise import source
from credo.optim import IVON, VOGN, VON, NaturalOptimizer, Vadam
from credo.optim.ivon import absorb_curvature_
from credo.types import Vector


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(opt: NaturalOptimizer, loss: Tensor) -> None:
    if isinstance(opt, VON):
        opt.backward(loss)
    else:
        loss.backward()


def steps(opt: NaturalOptimizer, loss: Callable[[], Tensor], count: int) -> None:
    for _ in range(count):
        with opt.sampled():
            backward(opt, loss())
        opt.step()


def flat(net: nn.Module) -> Vector:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


class Weights(nn.Module):
    """A vector that is its own output."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(start.clone())

    def forward(self) -> Tensor:
        return self.weights


def precision(opt: NaturalOptimizer, net: nn.Module) -> Tensor:
    q = opt.posterior(net, Gaussian(1.0)).q
    assert isinstance(q, DiagGaussian)
    return q.precision


# --- resting points on quadratics -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_von_rests_at_the_exact_precision_of_a_quadratic(temperature: float) -> None:
    """The Hessian is constant, so nothing is random but the mean, and rounding is all that's left.

    The distance to the resting point halves at every step: 60 steps leave 2⁻⁶⁰.
    """
    a = torch.tensor([0.5, 2.0, 30.0], dtype=torch.float64)
    net = Weights(numbers(3, seed=0))
    opt = VON(net, lr=0.5, num_data=100, betas=(0.0, 0.5), prior_precision=5.0,
              temperature=temperature)  # fmt: skip
    steps(opt, lambda: 0.5 * (a * (net() - 1.0).square()).sum(), 60)
    torch.testing.assert_close(precision(opt, net), 100 * a / temperature + 5, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.05, 3.0])
def test_tempered_vogn_has_the_exact_precision(temperature: float) -> None:
    """Per-example losses x_i·w have constant gradients x_i: precision (n/τ)·mean x_i² + p.

    The published pseudo-code would give (n/τ)·mean x_i² + τp.
    """
    x = numbers(20, 3, seed=1)
    net = nn.Linear(3, 1, bias=False).double()
    opt = VOGN(net, lr=1e-3, num_data=100, betas=(0.9, 0.5), prior_precision=5.0,
               temperature=temperature)  # fmt: skip
    steps(opt, lambda: net(x).mean(), 60)
    expected = 100 / temperature * x.square().mean(0) + 5.0
    torch.testing.assert_close(precision(opt, net), expected, rtol=1e-12, atol=0)


def test_the_scalar_example_of_the_tempered_form() -> None:
    """a = 2, n = 100, τ = 0.3, p = 5: 671.67, where the published form has 668.17."""
    net = nn.Linear(1, 1, bias=False).double()
    opt = VOGN(net, num_data=100, betas=(0.9, 0.5), prior_precision=5.0, temperature=0.3)
    x = torch.full((4, 1), 2.0**0.5, dtype=torch.float64)
    steps(opt, lambda: net(x).mean(), 60)
    assert precision(opt, net).item() == pytest.approx(100 * 2 / 0.3 + 5, rel=1e-12)


COPIES = 5000
"""Independent copies of one weight: the average over them is a Monte Carlo estimate."""


def assert_mean(values: Tensor, expected: float, bias: float) -> None:
    """Within 5 standard errors, and a bias that is known to be of second order in the rate."""
    error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - expected) < 5 * error + bias, (
        f"{float(values.mean())} ± {error}, expected {expected}"
    )


def test_ivon_rests_at_the_precision_of_a_quadratic() -> None:
    """N(h + δ) with h the Hessian a, up to the positive step's ½r·Var(ĥ)/(a + δ), Var(ĥ) = 2a²."""
    a, rate, delta = 2.0, 0.005, 0.05
    net = Weights(torch.ones(COPIES, dtype=torch.float64))
    settings = {"betas": (0.9, 1 - rate), "weight_decay": delta, "hess_init": 1.0}
    opt = IVON(net, lr=1e-3, num_data=100, **settings)
    steps(opt, lambda: 0.5 * a * (net() - 1.0).square().sum(), 1500)
    h = opt.state[net.weights]["curvature"]
    assert_mean(h, a + rate * a**2 / (a + delta), bias=10 * rate**2 * a)
    torch.testing.assert_close(precision(opt, net), 100 * (h + delta), rtol=1e-12, atol=0)
    assert float(precision(opt, net).mean()) == pytest.approx(100 * (a + delta), rel=0.01)


def test_vadam_rests_where_its_squared_gradient_says() -> None:
    """h = E[ḡ²] = a²σ² with σ² = 1/(N(h + δ)): not the posterior's precision, and known."""
    a, num_data, prior_precision, rate = 2.0, 100, 20.0, 0.002
    net = Weights(torch.ones(COPIES, dtype=torch.float64))
    opt = Vadam(net, lr=0.0, num_data=num_data, betas=(0.9, 1 - rate),
                prior_precision=prior_precision, hess_init=0.1)  # fmt: skip
    steps(opt, lambda: 0.5 * a * (net() - 1.0).square().sum(), 2500)
    delta = prior_precision / num_data
    expected = 0.5 * (-delta + (delta**2 + 4 * a**2 / num_data) ** 0.5)
    h = opt.state[net.weights]["curvature"]
    assert_mean(h, expected, bias=rate * expected)
    torch.testing.assert_close(precision(opt, net), 100 * h + 20.0, rtol=1e-12, atol=0)
    assert expected < a / 10, "far from the Hessian, which is the point"


def test_vogn_rests_where_its_squared_residuals_say() -> None:
    """ℓ_i = ½(wx_i − y_i)²: h = mean_i x_i²(mx_i − y_i)² + σ²·mean_i x_i⁴, not mean_i x_i²."""
    x, y = numbers(10, 1, seed=2), numbers(10, 1, seed=3)
    n, p, rate = 10, 5.0, 0.005
    m = float((x * y).sum() / (x.square().sum() + p))  # the posterior's mean, where E[ḡ] + δm = 0
    net = nn.Linear(1, COPIES, bias=False).double()
    nn.init.constant_(net.weight, m)
    opt = VOGN(net, lr=0.0, num_data=n, betas=(0.0, 1 - rate), prior_precision=p, hess_init=0.5)
    steps(opt, lambda: 0.5 * (net(x) - y).square().sum(1).mean(), 1200)
    fixed = (x.square() * (m * x - y).square()).mean().item()
    slope = (x**4).mean().item()
    h = scipy.optimize.brentq(lambda h: h - fixed - slope / (n * h + p), 0.0, 100.0)
    assert_mean(opt.state[net.weight]["curvature"].flatten(), h, bias=rate * h)
    torch.testing.assert_close(
        precision(opt, net), n * opt.state[net.weight]["curvature"].flatten() + p
    )


# --- logistic regression --------------------------------------------------------------------------

ROWS = 24
X = numbers(ROWS, 2, seed=4)
Y = (X[:, 0] - 0.5 * X[:, 1] + 0.7 * numbers(ROWS, seed=5) > 0).double()
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
GRID = np.stack(np.meshgrid(NODES, NODES), -1).reshape(-1, 2)
SHARES = np.outer(WEIGHTS, WEIGHTS).ravel() / WEIGHTS.sum() ** 2
PRIOR = 1.0


def expected_gradient(q: np.ndarray, squares: bool) -> tuple[np.ndarray, np.ndarray]:
    """E_q[Σ∇ℓ_i] + pm and E_q[Σ curvature] + p by Gauss–Hermite quadrature; q = (m, ln σ)."""
    x, y = X.numpy(), Y.numpy()
    probs = scipy.special.expit((q[:2] + np.exp(q[2:]) * GRID) @ x.T)
    gradient = SHARES @ ((probs - y) @ x)
    curvature = (probs - y) ** 2 if squares else probs * (1 - probs)
    return gradient + PRIOR * q[:2], SHARES @ (curvature @ x**2) + PRIOR


def resting_point(squares: bool) -> tuple[np.ndarray, np.ndarray]:
    def residual(q: np.ndarray) -> np.ndarray:
        gradient, precision = expected_gradient(q, squares)
        return np.concatenate([gradient, 2 * q[2:] + np.log(precision)])

    found = scipy.optimize.root(residual, np.zeros(4), tol=1e-13)
    assert found.success
    return found.x[:2], np.exp(found.x[2:])


def best_mean_field() -> tuple[np.ndarray, np.ndarray]:
    """The minimum of E_q[Σℓ_i] + KL by scipy, from values alone."""
    x, signs = X.numpy(), 2 * Y.numpy() - 1

    def objective(q: np.ndarray) -> float:
        m, scale = q[:2], np.exp(q[2:])
        losses = np.logaddexp(0, -((m + scale * GRID) @ x.T) * signs).sum(1)
        return SHARES @ losses + 0.5 * (PRIOR * (m**2 + scale**2)).sum() - q[2:].sum()

    found = scipy.optimize.minimize(objective, np.zeros(4), method="BFGS", options={"gtol": 1e-9})
    return found.x[:2], np.exp(found.x[2:])


def true_posterior() -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviations on a fine grid: the trapezoid rule is exact to many digits."""
    axis = np.linspace(-6, 8, 701)
    w = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    signs = 2 * Y.numpy() - 1
    log = -np.logaddexp(0, -(w @ X.numpy().T) * signs).sum(1) - 0.5 * PRIOR * (w**2).sum(1)
    mass = np.exp(log - log.max())
    mass /= mass.sum()
    mean = mass @ w
    return mean, np.sqrt(mass @ (w - mean) ** 2)


def trained_on_logistic(kind: type[NaturalOptimizer], **options: Any) -> tuple[Tensor, Tensor]:
    """Mean and scale, averaged over copies of the same regression that have their own noise."""
    copies = 40
    net = nn.Linear(2, copies, bias=False).double()
    nn.init.zeros_(net.weight)
    opt = kind(net, num_data=ROWS, prior_precision=PRIOR, hess_init=0.1, **options)
    targets = Y.unsqueeze(1).expand(-1, copies)

    def loss() -> Tensor:
        return F.binary_cross_entropy_with_logits(net(X), targets, reduction="none").sum(1).mean()

    steps(opt, loss, 400)
    means, scales = [], []
    for group in opt.param_groups:
        group["lr"] /= 5
    for _ in range(250):
        steps(opt, loss, 1)
        means.append(net.weight.detach().clone())
        scales.append(precision(opt, net).rsqrt().view(copies, 2))
    return torch.stack(means).mean((0, 1)), torch.stack(scales).mean((0, 1))


def test_von_finds_the_best_mean_field_posterior_of_logistic_regression() -> None:
    """The resting point is the optimum by scipy; the training comes within 2 % of a scale of it.

    Steps of finite size leave a bias of their order: the last rate is 0.02, that of h 0.01.
    """
    m, scale = resting_point(squares=False)
    best_m, best_scale = best_mean_field()
    np.testing.assert_allclose(m, best_m, atol=1e-6)
    np.testing.assert_allclose(scale, best_scale, rtol=1e-6)
    found_m, found_scale = trained_on_logistic(VON, lr=0.1, betas=(0.0, 0.99))
    np.testing.assert_allclose(found_m, best_m, atol=0.02 * float(scale.min()))
    np.testing.assert_allclose(found_scale, best_scale, rtol=0.01)


def test_mean_field_is_near_the_true_posterior_of_logistic_regression() -> None:
    """What the family costs here: mean within 0.05 scales, scales 6 % too small."""
    m, scale = best_mean_field()
    true_m, true_scale = true_posterior()
    np.testing.assert_allclose(m, true_m, atol=0.05 * float(true_scale.min()))
    np.testing.assert_allclose(scale / true_scale, [0.942, 0.944], atol=1e-3)


def test_vogn_finds_its_own_posterior_of_logistic_regression() -> None:
    """E_q[mean g_i²] in place of E_q[H] moves the resting point; training finds that one.

    Here its scales are 13 % and 11 % wider than the best, its mean 0.05 scales away.
    """
    m, scale = resting_point(squares=True)
    exact_m, exact_scale = resting_point(squares=False)
    found_m, found_scale = trained_on_logistic(VOGN, lr=0.1, betas=(0.0, 0.99))
    np.testing.assert_allclose(found_m, m, atol=0.02 * float(scale.min()))
    np.testing.assert_allclose(found_scale, scale, rtol=0.01)
    np.testing.assert_allclose(scale / exact_scale, [1.130, 1.113], atol=1e-3)
    np.testing.assert_allclose((m - exact_m) / exact_scale, [0.049, -0.024], atol=1e-3)


# --- other people's updates -----------------------------------------------------------------------


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


INPUTS, TARGETS = numbers(12, 3, seed=7), torch.tensor([0, 1, 1, 0] * 3)


def batches(count: int, size: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(count):
        chosen = torch.randperm(12, generator=torch.Generator().manual_seed(index))[:size]
        yield INPUTS[chosen], TARGETS[chosen]


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_vadam_without_noise_and_prior_is_torch_adam(eps: float) -> None:
    """Rounding alone differs: 1e-10 after 60 steps."""
    ours, theirs = network(), network()
    groups = [{"params": ours.parameters(), "deterministic": True}]
    opt = Vadam(groups, lr=1e-2, num_data=12, damping=eps)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=eps)
    for x, y in batches(60):
        with opt.sampled():
            F.cross_entropy(ours(x), y).backward()
        opt.step()
        adam.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        adam.step()
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("samples", [1, 3])
def test_ivon_is_the_published_update(clip: float | None, samples: int) -> None:
    """An independent statement in numpy, from the formula sheet; 40 steps, differences of 1e-12."""
    lr, ess, decay, h0, (b1, b2) = 0.1, 12, 0.01, 0.7, (0.9, 0.95)
    net, reference = network(), network()
    opt = IVON(net.parameters(), lr=lr, num_data=ess, weight_decay=decay, hess_init=h0,
               betas=(b1, b2), clip_radius=clip, draws="normal", seed=3)  # fmt: skip
    noise = source("normal", 3)
    m = flat(reference).numpy().copy()
    h, g_bar = np.full_like(m, h0), np.zeros_like(m)
    for t, (x, y) in enumerate(batches(40), start=1):
        sigma = 1 / np.sqrt(ess * (h + decay))
        g_sum, h_sum = np.zeros_like(m), np.zeros_like(m)
        for sample in range(samples):
            eps = noise.draw(torch.empty(len(m), dtype=torch.float64), t - 1, sample, 0).numpy()
            theta = m + sigma * eps
            nn.utils.vector_to_parameters(torch.from_numpy(theta), reference.parameters())
            grads = torch.autograd.grad(
                F.cross_entropy(reference(x), y), list(reference.parameters())
            )
            g = torch.cat([grad.reshape(-1) for grad in grads]).numpy()
            g_sum += g
            h_sum += g * (theta - m) / sigma**2
            with opt.sampled():
                F.cross_entropy(net(x), y).backward()
        opt.step()
        g, h_hat = g_sum / samples, h_sum / samples
        g_bar = b1 * g_bar + (1 - b1) * g
        h = b2 * h + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h_hat - h) ** 2 / (h + decay)
        direction = (g_bar / (1 - b1**t) + decay * m) / (h + decay)
        if clip is not None:
            direction = np.clip(direction, -clip, clip)
        m = m - lr * (h0 + decay) * direction
        np.testing.assert_allclose(flat(net).numpy(), m, atol=1e-12)
    curvature = torch.cat([opt.state[p]["curvature"].reshape(-1) for p in net.parameters()])
    np.testing.assert_allclose(curvature.numpy(), h, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    before=st.floats(1e-6, 1e6),
    found=st.floats(-1e9, 1e9),
    delta=st.floats(1e-9, 1e3),
    rate=st.floats(1e-7, 1.0),
)
def test_curvature_never_loses_more_than_half(
    before: float, found: float, delta: float, rate: float
) -> None:
    """(a² + (a + x)²)/(2a) ≥ a/2, whatever arrives.

    Rounding is relative to the largest number met, found²·rate²/a where that is large.
    """
    h = torch.tensor([before], dtype=torch.float64)
    surplus = h - found
    absorb_curvature_(h, surplus, delta, rate, torch.empty_like(h))
    slack = 1e-12 * (before + delta + rate * abs(found))
    assert float(h) + delta >= 0.5 * (before + delta) - slack


def test_adversarial_gradients_leave_ivon_a_distribution() -> None:
    """Gradients against the noise claim a huge negative curvature at every step."""
    net = Weights(torch.zeros(4, dtype=torch.float64))
    opt = IVON(net, lr=0.0, num_data=10, betas=(0.0, 0.5), weight_decay=0.1)
    for _ in range(20):
        before = precision(opt, net)
        with opt.sampled():
            (-50 * net().square().sum()).backward()
        opt.step()
        assert (precision(opt, net) >= 0.5 * before * (1 - 1e-12)).all()
