"""Function space: the Gaussian process of a posterior is the posterior.

Float64. Both routes are algebra on the same numbers, so they agree to 1e-14 times the condition of
the matrices inverted, below 1e5 here: 1e-8 leaves room. Widths give the tolerances of limits.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import credo
from credo.autodiff.loss import Loss
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
from credo.functionspace import (
    Kernel,
    iterate_as_gp,
    leave_one_out,
    leverage,
    local_prior,
    to_gp,
)
from credo.functionspace.pseudo_data import PseudoData
from credo.likelihoods import Bernoulli, Categorical, FromLoss, Gaussian
from credo.posterior.posterior import Posterior
from credo.rule.families import KroneckerGaussian
from credo.rule.gallery.online_gauss_newton import online_gauss_newton

SIGMA, DELTA = 0.3, 2.0
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def conv_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def rows(net: nn.Module, x: Tensor) -> Tensor:
    """J by one backward pass for every number that comes out, (n, K, P)."""
    parameters = list(net.parameters())
    outputs = net(x)
    found = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, parameters, retain_graph=True)])
        for f in outputs.flatten()
    ]
    return torch.stack(found).view(*outputs.shape, -1)


def stationary(model: credo.Model, data: tuple[Tensor, Tensor]) -> None:
    """The mode of the posterior: BFGS to its neighbourhood, Newton's steps until it is there."""
    flat = model.bind()
    places = {s.name: (s.slice, s.shape) for s in flat.segments}

    def objective(w: Tensor) -> Tensor:
        values = {name: w[place].view(shape) for name, (place, shape) in places.items()}
        outputs = torch.func.functional_call(model.net, values, (data[0],))
        nll = -model.likelihood.log_prob(outputs, data[1]).sum()
        return nll + 0.5 * DELTA * w.square().sum()

    def value_and_slope(w: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(w, requires_grad=True)
        value = objective(leaf)
        (slope,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), slope.numpy()

    found = minimize(value_and_slope, flat.vector.numpy().copy(), jac=True, method="BFGS")
    point = torch.tensor(found.x)
    for _ in range(4):
        slope = torch.tensor(value_and_slope(point.numpy())[1])
        point = point - torch.linalg.solve(
            torch.autograd.functional.hessian(objective, point), slope
        )
    assert float(np.linalg.norm(value_and_slope(point.numpy())[1])) < 1e-9
    with torch.no_grad(), flat.writing() as vector:
        vector.copy_(point)


LIKELIHOODS = {
    "regression": (Gaussian(scale=SIGMA), lambda n: normal(n, 3, seed=7)),
    "binary": (Bernoulli(), lambda n: (normal(n, 3, seed=7) > 0).double()),
    "softmax": (Categorical(), lambda n: torch.arange(n) % 3),
}


@functools.cache
def fitted(kind: str, n: int = 15) -> tuple[Posterior, tuple[Tensor, Tensor]]:
    likelihood, targets = LIKELIHOODS[kind]
    model = credo.Model(dense_net(), likelihood, credo.priors.Normal(scale=DELTA**-0.5), "all")
    data = normal(n, 3), targets(n)
    stationary(model, data)
    return credo.fit(model, credo.Laplace(structure="full"), data), data


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_weight_space_is_function_space(kind: str) -> None:
    posterior, data = fitted(kind)
    x = normal(6, 3, seed=5)
    gp = to_gp(posterior)
    functions = gp.pseudo_data(data).at(x)
    jacobian = rows(posterior.model.net, x)
    torch.testing.assert_close(functions.mean, jacobian @ posterior.mean, **CLOSE)
    torch.testing.assert_close(functions.covariance, gp.kernel(x, outputs="joint"), **CLOSE)
    covariance = torch.linalg.inv(posterior.q.precision)
    expected = torch.einsum("nkp,pq,mlq->nkml", jacobian, covariance, jacobian)
    torch.testing.assert_close(functions.covariance, expected, **CLOSE)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_evidence_is_laplaces_at_a_stationary_point(kind: str) -> None:
    posterior, data = fitted(kind)
    found = to_gp(posterior).log_marginal_likelihood(data)
    assert found == pytest.approx(float(posterior.log_marginal_likelihood()), rel=1e-9)


def test_the_evidence_of_regression_is_the_density_of_the_pseudo_targets() -> None:
    posterior, data = fitted("regression")
    pseudo = to_gp(posterior).pseudo_data(data)
    jacobian = rows(posterior.model.net, data[0])
    targets = jacobian @ posterior.mean + data[1] - posterior.model.net(data[0]).detach()
    torch.testing.assert_close(pseudo.targets, targets, **CLOSE)
    for delta, sigma in ((DELTA, SIGMA), (0.3, 0.3), (5.0, 1.1)):
        flat = jacobian.flatten(0, 1)
        kernel = flat @ flat.mT / delta + sigma**2 * torch.eye(len(flat)).double()
        density = torch.distributions.MultivariateNormal(torch.zeros(len(flat)).double(), kernel)
        expected = float(density.log_prob(targets.flatten()))
        assert pseudo.log_marginal_likelihood(delta, sigma) == pytest.approx(expected, rel=1e-9)


def gaussians(size: int, shapes: list[tuple[int, int]]) -> dict[str, Family]:
    mean = normal(size, seed=3) * 0.3
    root = normal(size, size, seed=4) / math.sqrt(size)
    precision = root @ root.mT + torch.eye(size).double()

    def positive(n: int) -> Tensor:
        factor = normal(n, n, seed=8)
        return factor @ factor.mT / n + torch.eye(n).double()

    blocks = [(positive(a), positive(b)) for a, b in shapes]
    eigen = [EigenBlock.of_factors(a, b, 0.7) for a, b in blocks]
    scale = 0.1 + normal(size, seed=6).square()
    return {
        "delta": Delta(mean),
        "one scale": DiagGaussian(mean, torch.tensor(0.7).double()),
        "diagonal": DiagGaussian(mean, scale),
        "fixed": FixedGaussian(mean, precision),
        "full": FullGaussian(mean, precision),
        "low rank": LowRankGaussian(mean, normal(size, 3, seed=5), 0.5 + scale),
        "factor": FactorGaussian(mean, normal(size, 3, seed=5), 0.5 + scale),
        "kronecker": KroneckerGaussian(mean, tuple(blocks)),
        "eigen": EigenKroneckerGaussian(mean, tuple(eigen)),
    }


NETS = {
    "dense": (dense_net, (3,), [(5, 3), (5, 1), (3, 5), (3, 1)]),
    "convolution": (conv_net, (1, 5, 5), [(2, 9), (2, 1), (4, 18), (4, 1), (3, 4), (3, 1)]),
}
FAMILIES = sorted(gaussians(8, [(2, 3), (2, 1)]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("net_name", NETS)
def test_the_kernel_of_every_family_is_brute_force(net_name: str, family: str) -> None:
    make, shape, shapes = NETS[net_name]
    net = make()
    size = sum(p.numel() for p in net.parameters())
    q = gaussians(size, shapes)[family]
    model = credo.Model(net, Categorical(), random="all")
    x, other = normal(5, *shape), normal(4, *shape, seed=9)
    one = torch.eye(size).double()
    covariance = torch.zeros_like(one) if family == "delta" else None
    posterior = Posterior.at_network(model, q)
    with posterior.in_network():
        left, right = rows(net, x), rows(net, other)
        bend = Categorical().hessian(net(x).detach())
    if covariance is None:
        covariance = q.solve(one) if hasattr(q, "solve") else torch.diag(q.variance)
    joint = torch.einsum("nkp,pq,mlq->nkml", left, covariance, right)
    gp = to_gp(posterior)
    torch.testing.assert_close(gp.kernel(x, other, "joint"), joint, **CLOSE)
    each = torch.einsum("nkmk->knm", joint)
    torch.testing.assert_close(gp.kernel(x, other, "each"), each, **CLOSE)
    torch.testing.assert_close(gp.kernel(x, other), each.sum(0), **CLOSE)
    itself = torch.einsum("nkp,pq,mlq->nkml", left, covariance, left)
    small = to_gp(posterior, max_memory=2_000)  # a few inputs at a time
    torch.testing.assert_close(small.kernel(x, outputs="joint"), itself, **CLOSE)
    probs = torch.einsum("nik,nkml,mjl->nimj", bend, itself, bend)
    torch.testing.assert_close(gp.kernel(x, outputs="joint", of="probs"), probs, **CLOSE)
    model_variance = torch.einsum("nini->ni", probs)
    torch.testing.assert_close(gp.predict(x).model_variance, model_variance, **CLOSE)


@pytest.mark.parametrize("kind", ["regression", "softmax"])
@pytest.mark.parametrize("drawn", [False, True], ids=["at the mean", "at a draw"])
def test_an_iterate_of_online_gauss_newton_is_a_gp_posterior(kind: str, drawn: bool) -> None:
    likelihood, targets = LIKELIHOODS[kind]
    net = dense_net()
    model = credo.Model(net, likelihood, random="all")
    size, rate = model.random.size, 0.3
    q = FullGaussian(0.3 * normal(size, seed=3), torch.diag(1 + normal(size, seed=4).square()))
    x, y = normal(8, 3), targets(8)
    w = q.mean + 0.1 * normal(size, seed=11) if drawn else q.mean
    step = iterate_as_gp(model, q, (x, y), rate, DELTA, weights=w, num_data=24)
    with Posterior.at_network(model, Delta(w)).in_network():
        jacobian, outputs = rows(net, x), net(x).detach()
        test = rows(net, normal(4, 3, seed=5))
    bend = likelihood.hessian(outputs)
    leaf = outputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(-likelihood.log_prob(leaf, y).sum(), leaf)
    share = 24 / 8
    curvature = share * torch.einsum("nkp,nkl,nlq->pq", jacobian, bend, jacobian)
    one = torch.eye(size).double()
    precision = (1 - rate) * q.precision + rate * (curvature + DELTA * one)
    pull = curvature @ w - share * torch.einsum("nkp,nk->p", jacobian, slope)
    mean = torch.linalg.solve(precision, (1 - rate) * q.precision @ q.mean + rate * pull)
    found = step.at(normal(4, 3, seed=5))
    torch.testing.assert_close(found.mean, test @ mean, **CLOSE)
    expected = torch.einsum("nkp,pq,mlq->nkml", test, torch.linalg.inv(precision), test)
    torch.testing.assert_close(found.covariance, expected, **CLOSE)
    if not drawn:  # and it is what the learning rule's own engine does
        prior = FixedGaussian(torch.zeros(size).double(), torch.tensor(DELTA).double())
        learner = online_gauss_newton(prior, rate=rate)
        loss = Loss.of_model(model, (x, y), num_data=24)
        stepped = learner.update(learner.init(q), loss).q
        torch.testing.assert_close(stepped.mean, mean, **CLOSE)


def test_a_quadratic_penalty_is_its_own_gaussian_and_others_give_the_curvature() -> None:
    w = normal(6)
    assert torch.allclose(
        local_prior(lambda v: 1.5 * v.square().sum(), w).mean, torch.zeros(6).double()
    )
    softplus = local_prior(lambda v: torch.cosh(v).sum(), w)
    torch.testing.assert_close(1 / softplus.variance, torch.cosh(w))
    coupling = torch.eye(6).double() + 0.2
    coupled = local_prior(lambda v: 0.5 * v @ coupling @ v + v.pow(4).sum() / 12, w)
    assert isinstance(coupled, FullGaussian)
    torch.testing.assert_close(coupled.precision, coupling + torch.diag(w.square()))
    slope = coupling @ w + w.pow(3) / 3
    torch.testing.assert_close(coupled.grad_log_prob(w), -slope)
    with pytest.raises(credo.errors.UnsupportedError, match="curvature"):
        local_prior(lambda v: v.abs().sum(), w)


def test_any_smooth_convex_loss_and_prior_make_a_gp_whose_mean_is_the_minimum() -> None:
    # Huber-like loss and a log-cosh prior: neither is quadratic.
    def loss(f: Tensor, y: Tensor) -> Tensor:
        return torch.log(torch.cosh(f - y)).sum(1)

    def penalty(v: Tensor) -> Tensor:
        return (0.5 * v.square() + torch.cosh(v)).sum()

    net = nn.Linear(3, 1).double()
    model = credo.Model(net, FromLoss(loss), random="all")
    x, y = normal(12, 3), normal(12, 1, seed=2)
    w = model.weights().requires_grad_()
    design = torch.cat([x, torch.ones(12, 1).double()], 1)
    for _ in range(50):  # Newton on the true objective
        value = loss((design @ w).unsqueeze(1), y).sum() + penalty(w)
        (slope,) = torch.autograd.grad(value, w)
        hessian = torch.autograd.functional.hessian(
            lambda v: loss((design @ v).unsqueeze(1), y).sum() + penalty(v), w.detach()
        )
        w = (w - torch.linalg.solve(hessian, slope)).detach().requires_grad_()
    mode = w.detach()
    posterior = Posterior.at_network(model, Delta(mode))
    test = normal(4, 3, seed=5)
    found = PseudoData(posterior, (x, y), local_prior(penalty, mode)).at(test)
    ones = torch.ones(4, 1).double()
    jacobian = torch.cat([test, ones], 1)
    torch.testing.assert_close(found.mean, (jacobian @ mode).unsqueeze(1), **CLOSE)
    expected = jacobian @ torch.linalg.inv(hessian) @ jacobian.mT
    torch.testing.assert_close(found.covariance[:, 0, :, 0], expected, **CLOSE)


def test_leverages_add_up_to_the_effective_number_of_weights() -> None:
    for kind in LIKELIHOODS:
        posterior, data = fitted(kind)
        total = leverage(posterior, data, tolerance=0).sum()
        covariance = torch.linalg.inv(posterior.q.precision)
        torch.testing.assert_close(total, len(covariance) - DELTA * covariance.trace(), **CLOSE)


def test_leverage_under_a_diagonal_is_brute_force_and_tolerance_bounds_its_error() -> None:
    net = conv_net()
    model = credo.Model(net, Categorical(), random="all")
    size = model.random.size
    q = DiagGaussian(0.5 * normal(size, seed=3), 0.1 + normal(size, seed=6).square())
    posterior = Posterior.at_network(model, q)
    data = 3 * normal(20, 1, 5, 5), torch.arange(20) % 3
    with posterior.in_network():
        jacobian, outputs = rows(net, data[0]), net(data[0]).detach()
    spread = torch.einsum("nkp,p,nlp->nkl", jacobian, q.variance, jacobian)
    bend = Categorical().hessian(outputs)
    expected = torch.einsum("nkl,nlk->n", bend, spread)
    torch.testing.assert_close(leverage(posterior, data, tolerance=0), expected, **CLOSE)
    rough = leverage(posterior, data, tolerance=0.05)
    largest = torch.linalg.eigvalsh(spread)[:, -1]
    trace = bend.diagonal(dim1=1, dim2=2).sum(1)
    assert bool(((expected - rough) >= -1e-12).all())
    assert bool((expected - rough <= 0.05 * trace * largest + 1e-12).all())
    assert bool((rough < expected).any())


def test_leaving_one_out_of_a_linear_regression_is_refitting_without_it() -> None:
    x, y = normal(10, 3), normal(10, 1, seed=2)
    design = torch.cat([x, torch.ones(10, 1).double()], 1)

    def ridge(keep: Tensor) -> Tensor:
        a, b = design[keep], y[keep]
        inner = a.mT @ a / SIGMA**2 + DELTA * torch.eye(4).double()
        return torch.linalg.solve(inner, a.mT @ b / SIGMA**2)

    net = nn.Linear(3, 1).double()
    model = credo.Model(net, Gaussian(SIGMA), credo.priors.Normal(scale=DELTA**-0.5), "all")
    whole = ridge(torch.ones(10, dtype=torch.bool))
    with torch.no_grad():
        net.weight.copy_(whole[:3].mT)
        net.bias.copy_(whole[3])
    posterior = credo.fit(model, credo.Laplace(structure="full"), (x, y))
    found = leave_one_out(posterior, (x, y))
    for i in range(10):
        without = ridge(torch.arange(10) != i)
        error = [float((y[i] - design[i] @ w).square().sum()) for w in (whole, without)]
        expected = (error[1] - error[0]) / (2 * SIGMA**2)
        assert float(found[i]) == pytest.approx(expected, rel=1e-8)


# --- limits of wide networks ----------------------------------------------------------------------


class WideReLU(nn.Module):
    """f = √(2/H)·Σ_h u_h relu(w_h·x/√d), all weights standard normal: the tangent kernel's form."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width, bias=False).double()
        self.second = nn.Linear(width, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x) / math.sqrt(x.shape[1]))
        return self.second(hidden) * math.sqrt(2 / hidden.shape[1])


def arc_cosine(x: Tensor) -> tuple[Tensor, Tensor]:
    """NNGP and NTK of `WideReLU`: Cho & Saul's kernels of order one and zero."""
    inner = x @ x.mT / x.shape[1]
    norms = inner.diagonal().sqrt()
    cosine = (inner / torch.outer(norms, norms)).clamp(-1, 1)
    angle = torch.arccos(cosine)
    first = (torch.sin(angle) + (math.pi - angle) * cosine) / math.pi
    zeroth = (math.pi - angle) / math.pi
    nngp = torch.outer(norms, norms) * first
    return nngp, nngp + inner * zeroth


def test_the_prior_kernel_of_a_wide_network_is_the_tangent_kernel() -> None:
    x = normal(6, 4)
    ntk = arc_cosine(x)[1]
    errors = []
    for width in (64, 4096):
        net = WideReLU(4, width)
        model = credo.Model(net, Gaussian(1.0), credo.priors.Normal(scale=1.0), "all")
        drawn = DiagGaussian(normal(model.random.size, seed=1), torch.tensor(1.0).double())
        found = to_gp(Posterior.at_network(model, drawn)).prior_kernel(x)
        errors.append(float((found - ntk).abs().max() / ntk.max()))
    # An average of H independent terms, each of the size of the kernel, has an error ~ H^{-1/2};
    # five of these at 4096, and clearly less than at 64.
    assert errors[1] < 5 / math.sqrt(4096)
    assert errors[1] < errors[0] / 2


def test_functions_of_a_wide_prior_have_the_arc_cosine_covariance() -> None:
    x, draws, width = normal(5, 4), 4000, 512
    nngp = arc_cosine(x)[0]
    generator = torch.Generator().manual_seed(0)
    net = WideReLU(4, width)
    model = credo.Model(net, Gaussian(1.0), credo.priors.Normal(scale=1.0), "all")
    prior = model.prior_over_weights()
    functions = []
    for _ in range(8):
        w = prior.sample(draws // 8, generator)
        first, second = w[:, : 4 * width].view(-1, width, 4), w[:, 4 * width :]
        hidden = torch.relu(torch.einsum("swd,nd->snw", first, x) / 2)
        functions.append(torch.einsum("snw,sw->sn", hidden, second) * math.sqrt(2 / width))
    values = torch.cat(functions)
    with torch.no_grad(), model.bind().writing() as vector:
        vector.copy_(w[-1])
    torch.testing.assert_close(net(x).detach().flatten(), values[-1], **CLOSE)
    found = values.mT @ values / draws
    # The variance of a product of two unit normals is at most 2: five standard errors.
    tolerance = 5 * math.sqrt(2 / draws) * float(nngp.max())
    assert float((found - nngp).abs().max()) < tolerance
    # As Gaussian as 4000 draws can tell: the fourth moment is 3 plus O(1/width).
    kurtosis = float((values / values.std(0)).pow(4).mean())
    assert abs(kurtosis - 3) < 5 * math.sqrt(96 / (draws * 5)) + 10 / width


def test_blocks_are_lazy_and_cover_the_upper_half() -> None:
    model = credo.Model(dense_net(), Categorical(), random="all")
    q = DiagGaussian(model.weights(), torch.tensor(0.3).double())
    x = normal(9, 3)
    with Posterior.at_network(model, q).in_network() as flat:
        kernel = Kernel(model, flat, q, max_memory=3_000)
        whole = kernel.matrix(x)
        seen = torch.zeros(9, 9)
        for block in kernel.blocks(x):
            torch.testing.assert_close(block.values, whole[block.rows, block.columns])
            seen[block.rows, block.columns] += 1
    assert bool((torch.triu(seen) == torch.triu(torch.ones(9, 9))).all())
    assert float(seen.sum()) < 81
