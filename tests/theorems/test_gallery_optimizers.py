"""The optimizers of the gallery are the known ones, step for step.

Tolerance of the trajectories: 200 float64 steps of a smooth network let rounding (1e-16 a step)
grow by a few orders of magnitude; 1e-10 is far below any error of the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import credo
from credo.autodiff.loss import Loss
from credo.errors import ConvergenceError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian
from credo.rule import learner
from credo.rule.curvatures import ExactHessian, ExampleSquares, GaussNewton, Hutchinson
from credo.rule.expectations import AtMean, GaussHermite, MonteCarlo
from credo.rule.families import natural_parameters
from credo.rule.gallery.adam import adam
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.gallery.laplace import laplace
from credo.rule.gallery.newton import newton
from credo.rule.gallery.online_gauss_newton import online_gauss_newton
from credo.rule.gallery.preconditioned_descent import preconditioned_descent
from credo.rule.gallery.rmsprop import rmsprop
from credo.rule.gallery.von import von
from credo.rule.learner import Learner
from credo.rule.quadrature import gauss_hermite

STEPS = 200
TRAJECTORY = 1e-10


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(0.5 * numbers(*parameter.shape, seed=index))
    return net


def batches() -> list[tuple[Tensor, Tensor]]:
    """Minibatches, so that gradients are as noisy as in practice."""
    x, y = numbers(64, 3), torch.arange(64) % 2
    return [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]


def torch_trajectory(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], net: nn.Module
) -> Tensor:
    optimizer, data, path = make(list(net.parameters())), batches(), []
    for index in range(STEPS):
        x, y = data[index % len(data)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        path.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return torch.stack(path)


def rule_trajectory(method: Learner, make: Callable[[Tensor], Gaussian]) -> Tensor:
    model = credo.Model(small_net(), credo.likelihoods.Categorical())
    state, data, path = method.init(make(model.weights())), batches(), []
    for index in range(STEPS):
        method.update(state, Loss.of_model(model, data[index % len(data)]))
        path.append(state.q.mean.clone())
    return torch.stack(path)


def unit(mean: Tensor) -> FixedGaussian:
    return FixedGaussian(mean, torch.ones((), dtype=mean.dtype))


def flat(mean: Tensor) -> DiagGaussian:
    return DiagGaussian(mean, torch.full((), math.inf, dtype=mean.dtype))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fixed_gaussian_is_torch_sgd(momentum: float) -> None:
    ours = rule_trajectory(gradient_descent(0.1, momentum), unit)
    theirs = torch_trajectory(lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum), small_net())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TRAJECTORY)


def test_fixed_gaussian_is_torch_sgd_bit_for_bit_without_momentum() -> None:
    """With S = 1 the rule's arithmetic is m − ρ·g/1, and division by one is exact."""
    target, start = numbers(5, seed=1), numbers(5, seed=2)
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    method = gradient_descent(0.1)
    state = method.init(unit(start))
    for _ in range(50):
        optimizer.zero_grad()
        (parameter - target).pow(4).sum().backward()
        optimizer.step()
        method.update(state, Loss.of(lambda theta: (theta - target).pow(4).sum()))
        assert torch.equal(state.q.mean, parameter.detach())


def test_square_root_of_squares_is_torch_rmsprop() -> None:
    ours = rule_trajectory(rmsprop(lr=1e-3, alpha=0.9, eps=1e-6), flat)
    theirs = torch_trajectory(
        lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, eps=1e-6), small_net()
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TRAJECTORY)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.95, 0.5)])
def test_heavy_ball_in_natural_parameters_is_torch_adam(
    betas: tuple[float, float], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composed from the learner's parts, and as the engine takes it, by torch's fused kernel."""
    if not fused:
        monkeypatch.setattr(learner, "is_adam", lambda step: False)
    ours = rule_trajectory(adam(lr=1e-2, betas=betas, eps=1e-6), flat)
    theirs = torch_trajectory(
        lambda p: torch.optim.Adam(p, lr=1e-2, betas=betas, eps=1e-6), small_net()
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TRAJECTORY)


@pytest.mark.parametrize("structure", ["number", "diagonal", "matrix"])
def test_fixed_precision_is_a_linear_solve(structure: str) -> None:
    root = numbers(4, 4, seed=3)
    dense = root @ root.mT + torch.eye(4, dtype=torch.float64)
    precision = {"number": dense[0, 0], "diagonal": dense.diagonal(), "matrix": dense}[structure]
    matrix = {"number": dense[0, 0] * torch.eye(4, dtype=torch.float64),
              "diagonal": torch.diag(dense.diagonal()), "matrix": dense}[structure]  # fmt: skip
    loss, mean = Loss.of(lambda theta: theta.cosh().sum()), numbers(4)
    method = preconditioned_descent(0.3)
    moved = method.update(method.init(FixedGaussian(mean, precision)), loss).q.mean
    expected = mean - 0.3 * torch.linalg.solve(matrix, mean.sinh())
    torch.testing.assert_close(moved, expected, rtol=1e-13, atol=1e-13)


def quadratic(size: int = 5) -> tuple[Loss, Tensor, Tensor]:
    root = numbers(size, size, seed=4)
    hessian, minimum = root @ root.mT + torch.eye(size, dtype=torch.float64), numbers(size, seed=5)
    loss = Loss.of(lambda theta: 0.5 * (theta - minimum) @ hessian @ (theta - minimum))
    return loss, hessian, minimum


def test_newton_solves_a_quadratic_in_one_step() -> None:
    loss, hessian, minimum = quadratic()
    method = newton()
    q = method.update(method.init(FullGaussian(numbers(5), 3 * torch.eye(5).double())), loss).q
    # The solve loses the condition number, some 100 here.
    torch.testing.assert_close(q.mean, minimum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(-2 * natural_parameters(q)[1], hessian, rtol=1e-13, atol=1e-13)


def logistic(size: int, seed: int = 0, n: int = 12) -> tuple[Loss, Tensor, Tensor]:
    """Logistic regression, whose posterior is not Gaussian."""
    x = numbers(n, size, seed=seed + 10)
    y = (numbers(n, seed=seed + 11) + x[:, 0] > 0).double()
    return (
        Loss.over_examples(
            lambda w, x, y: nn.functional.binary_cross_entropy_with_logits(
                x @ w, y, reduction="sum"
            ),
            (x, y),
        ),
        x,
        y,
    )


def test_laplace_rests_at_the_map_and_its_hessian() -> None:
    loss, _, _ = logistic(3)
    prior = FixedGaussian(torch.zeros(3, dtype=torch.float64), torch.tensor(0.5).double())
    q = laplace(loss, FullGaussian(numbers(3), torch.eye(3).double()), prior)
    found = minimize(
        lambda w: float(loss.value(torch.tensor(w)) + 0.25 * (w @ w)),
        np.zeros(3),
        jac=lambda w: (loss.gradient(torch.tensor(w)) + 0.5 * torch.tensor(w)).numpy(),
        tol=1e-12,
    )
    # scipy stops at a gradient of 1e-12 or where the line search sees no more: 1e-7 in w.
    np.testing.assert_allclose(q.mean.numpy(), found.x, atol=1e-6)
    gradient = loss.gradient(q.mean) + 0.5 * q.mean
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)
    expected = loss.hessian(q.mean) + 0.5 * torch.eye(3)
    torch.testing.assert_close(-2 * natural_parameters(q)[1], expected, rtol=1e-9, atol=1e-9)


def test_laplace_says_so_when_it_does_not_rest() -> None:
    loss, _, _ = logistic(1)
    with pytest.raises(ConvergenceError, match="no rest after 2 steps"):
        laplace(loss, FullGaussian(numbers(1), torch.eye(1).double()), max_steps=2)


def test_online_gauss_newton_uses_the_matrix_of_autodiff() -> None:
    """Σ JᵀΛJ by explicit Jacobians; for a linear network it is the Hessian itself."""
    net = small_net()
    model = credo.Model(net, credo.likelihoods.Categorical())
    theta = model.weights()
    x, y = batches()[0]
    loss = Loss.of_model(model, (x, y), num_data=64)
    prior = unit(torch.zeros_like(theta))
    method = online_gauss_newton(prior, rate=0.2)
    start = FullGaussian(theta, torch.eye(len(theta)).double())
    q = method.update(method.init(start), loss).q

    matrix = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for row in x:
        out = net(row.unsqueeze(0)).squeeze(0)
        probs = out.softmax(0).detach()
        weights = list(net.parameters())
        rows = [torch.autograd.grad(o, weights, retain_graph=True) for o in out]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        matrix += jacobian.mT @ (torch.diag(probs) - torch.outer(probs, probs)) @ jacobian
    one = torch.eye(len(theta), dtype=torch.float64)
    expected = 0.8 * one + 0.2 * (4 * matrix + one)
    torch.testing.assert_close(-2 * natural_parameters(q)[1], expected, rtol=1e-12, atol=1e-12)

    linear = nn.Linear(3, 2).double()
    model = credo.Model(linear, credo.likelihoods.Categorical())
    loss = Loss.of_model(model, (x, y), num_data=64)
    theta = model.weights()
    torch.testing.assert_close(
        loss.gauss_newton(theta), loss.hessian(theta), rtol=1e-12, atol=1e-12
    )


def best_gaussian(loss: Loss, size: int, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Minimise E_q[ℓ] + ½·0.5·E‖θ‖² − H over all Gaussians by a general optimizer on quadrature."""
    nodes, weights = gauss_hermite(order, like=torch.zeros((), dtype=torch.float64))
    grid = torch.cartesian_prod(*[nodes] * size).reshape(-1, size)
    shares = torch.cartesian_prod(*[weights] * size).reshape(-1, size).prod(-1)
    rows, columns = torch.tril_indices(size, size)

    def objective(packed: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(packed, requires_grad=True)
        mean, factor = leaf[:size], torch.zeros(size, size, dtype=torch.float64)
        factor = factor.index_put((rows, columns), leaf[size:])
        points = mean + grid @ factor.mT
        energy = torch.func.vmap(loss.value)(points) + 0.25 * points.square().sum(-1)
        value = shares @ energy - factor.diagonal().abs().log().sum()
        value.backward()
        assert leaf.grad is not None
        return value.item(), leaf.grad.numpy()

    start = np.concatenate([np.zeros(size), np.eye(size)[rows.numpy(), columns.numpy()]])
    found = minimize(objective, start, jac=True, tol=1e-13, options={"maxiter": 1000})
    factor = np.zeros((size, size))
    factor[rows.numpy(), columns.numpy()] = found.x[size:]
    return found.x[:size], factor @ factor.T


@pytest.mark.parametrize("size", [1, 2])
def test_von_reaches_the_best_gaussian_by_quadrature(size: int) -> None:
    order = 24
    loss, _, _ = logistic(size)
    prior = FixedGaussian(torch.zeros(size).double(), torch.tensor(0.5).double())
    method = von(0.5, GaussHermite(order), prior=prior)
    state = method.init(FullGaussian(numbers(size), torch.eye(size).double()))
    for _ in range(60):
        method.update(state, loss)
    mean, covariance = best_gaussian(loss, size, order)
    # scipy's stopping rule bounds this; the rule itself has converged to rounding.
    np.testing.assert_allclose(state.q.mean.numpy(), mean, atol=2e-6)
    np.testing.assert_allclose(
        (-2 * natural_parameters(state.q)[1]).inverse().numpy(), covariance, atol=2e-6
    )


def test_von_rests_where_its_objective_does() -> None:
    """E_q[∇ℓ] = 0 and S = E_q[∇²ℓ], its diagonal for a diagonal q."""
    loss, _, _ = logistic(2)
    prior = DiagGaussian(torch.zeros(2).double(), torch.ones(2).double())
    method = von(0.5, GaussHermite(24), prior=prior)
    state = method.init(DiagGaussian(numbers(2), torch.ones(2).double()))
    for _ in range(100):
        method.update(state, loss)
    gradient, curvature = method.estimate(state, loss)
    assert curvature is not None
    assert (gradient + state.q.mean).abs().max() < 1e-12
    torch.testing.assert_close(state.q.variance.reciprocal(), curvature + 1, rtol=1e-12, atol=0)


def test_von_with_draws_hovers_around_the_optimum() -> None:
    """Averages over a long run of single draws: within 5 standard errors, in blocks of 80 steps."""
    loss, _, _ = logistic(1)
    prior = DiagGaussian(torch.zeros(1).double(), torch.ones(1).double())
    exact = von(0.5, GaussHermite(24), prior=prior)
    state = exact.init(DiagGaussian(numbers(1), torch.ones(1).double()))
    for _ in range(100):
        exact.update(state, loss)
    best = state.q
    method = von(0.02, MonteCarlo(2, antithetic=True), Hutchinson(), prior)
    state, means, precisions = method.init(best), [], []
    for _ in range(800):
        method.update(state, loss)
        means.append(state.q.mean.item())
        precisions.append(1 / state.q.variance.item())
    for values, target in ((means, best.mean), (precisions, 1 / best.variance)):
        blocks = np.array(values).reshape(-1, 80).mean(1)
        error = blocks.std(ddof=1) / math.sqrt(len(blocks))
        assert abs(blocks.mean() - target.item()) < 5 * error


def test_squares_of_examples_equal_gauss_newton_in_expectation_over_labels() -> None:
    """Enumerating the labels of a Bernoulli, Σ_y p(y) g_y gᵀ_y is JᵀΛJ."""
    net = nn.Linear(2, 1).double()
    x = numbers(1, 2, seed=7)
    model = credo.Model(net, credo.likelihoods.Bernoulli())
    theta = model.weights()
    p = net(x).sigmoid().item()
    total = torch.zeros(3, 3, dtype=torch.float64)
    matrix = torch.zeros_like(total)
    for label, share in ((0.0, 1 - p), (1.0, p)):
        loss = Loss.of_model(model, (x, torch.tensor([[label]]).double()), num_data=1)
        q, generator = FullGaussian(theta, torch.eye(3).double()), torch.Generator()
        total += share * ExampleSquares().at(loss, theta, q, True, generator)[1]
        matrix = GaussNewton().at(loss, theta, q, True, generator)[1]
    torch.testing.assert_close(total, matrix, rtol=1e-12, atol=1e-14)


def test_delta_method_is_exact_for_quadratics() -> None:
    loss, _, _ = quadratic(2)
    q = FullGaussian(numbers(2), torch.eye(2).double())
    generator = torch.Generator()
    at_mean = ExactHessian().at(loss, q.mean, q, True, generator)
    points = list(GaussHermite(3).points(q, generator))
    gradient = sum(w * loss.gradient(theta) for w, theta in points)
    torch.testing.assert_close(at_mean[0], gradient, rtol=1e-12, atol=1e-12)
    assert [w for w, _ in AtMean().points(q, generator)] == [1.0]
