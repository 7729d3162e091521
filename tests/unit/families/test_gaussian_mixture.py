"""Mixtures of Gaussians as densities and as a conditional exponential family."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from gaussians import (
    F64,
    MIXTURES,
    P,
    close,
    definite,
    diagonal,
    fixed,
    full,
    leaves,
    numbers,
)
from torch import Tensor
from torch.distributions import (
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

from credo.errors import DataError, UnsupportedError
from credo.families.diag_gaussian import DiagGaussian
from credo.families.full_gaussian import FullGaussian
from credo.families.gaussian_mixture import GaussianMixture
from credo.rule.families import (
    expectation_parameters,
    joint_statistics,
    log_partition,
    natural_parameters,
    with_expectation,
    with_natural,
)
from credo.rule.families.exponential import Parameters, inner
from credo.rule.families.gaussian_mixture import hessian_log_prob

every_mixture = pytest.mark.parametrize("make", MIXTURES.values(), ids=MIXTURES.keys())


def torchs_mixture(q: GaussianMixture) -> MixtureSameFamily:
    means = torch.stack([c.mean for c in q.components])
    weights = torch.distributions.Categorical(logits=q.log_weights)
    if isinstance(q.components[0], DiagGaussian):
        scales = torch.stack([c.scale for c in q.components])
        return MixtureSameFamily(weights, Independent(Normal(means, scales), 1))
    precisions = torch.stack([c.precision for c in q.components])
    return MixtureSameFamily(weights, MultivariateNormal(means, precision_matrix=precisions))


@every_mixture
def test_mixture_is_torchs(make: Callable[[torch.dtype], GaussianMixture]) -> None:
    q, w = make(F64), numbers(2, 3, P, seed=5)
    reference = torchs_mixture(q)
    close(q.log_prob(w), reference.log_prob(w))
    close(q.mean, reference.mean)
    close(q.variance, reference.variance)
    close(q.weights[:-1] / q.weights[-1], q.log_odds.exp())


@every_mixture
def test_derivatives_of_the_mixture_are_autodiffs(
    make: Callable[[torch.dtype], GaussianMixture],
) -> None:
    q, w = make(F64), numbers(2, 3, P, seed=5)
    gradients, hessians = q.grad_log_prob(w), hessian_log_prob(q, w)
    is_diagonal = isinstance(q.components[0], DiagGaussian)
    assert hessians.shape == ((2, 3, P) if is_diagonal else (2, 3, P, P))
    for index in np.ndindex(2, 3):
        close(gradients[index], torch.autograd.functional.jacobian(q.log_prob, w[index]))
        hessian = torch.autograd.functional.hessian(q.log_prob, w[index])
        close(hessians[index], hessian.diagonal() if is_diagonal else hessian)
    close(hessian_log_prob(q, w[0, 0]), hessians[0, 0])


@every_mixture
def test_responsibilities_are_bayes_rule(make: Callable[[torch.dtype], GaussianMixture]) -> None:
    q, w = make(F64), numbers(2, 3, P, seed=5)
    densities = torch.stack([c.log_prob(w).exp() for c in q.components], -1) * q.weights
    close(q.responsibilities(w), densities / densities.sum(-1, keepdim=True))


def test_far_from_every_component_the_density_stays_defined() -> None:
    q, w = MIXTURES["diagonal mixture"](torch.float32), torch.full((P,), 1e6)
    for value in (q.log_prob(w), q.grad_log_prob(w), hessian_log_prob(q, w)):
        assert torch.isfinite(value).all()


@every_mixture
def test_mixture_parameters_round_trip(make: Callable[[torch.dtype], GaussianMixture]) -> None:
    q = make(F64)
    for other in (
        with_natural(q, natural_parameters(q)),
        with_expectation(q, expectation_parameters(q)),
    ):
        close(natural_parameters(other), natural_parameters(q))
        close(expectation_parameters(other), expectation_parameters(q))


@every_mixture
def test_joint_statistics_have_mean_mu(make: Callable[[torch.dtype], GaussianMixture]) -> None:
    q, n = make(F64), 20_000
    theta, z = q.sample_joint(n, torch.Generator().manual_seed(0))
    statistics = joint_statistics(q, theta, z)
    for values, expected in zip(statistics, expectation_parameters(q), strict=True):
        assert values.shape == (n, *expected.shape)
        if expected.numel():
            assert ((values.mean(0) - expected).abs() < 5 * values.std(0) / math.sqrt(n)).all()


def test_no_log_partition_has_mu_as_its_gradient_but_the_joint_one_does() -> None:
    """What the docstring says about the two systems of coordinates."""
    q = MIXTURES["diagonal mixture"](F64)

    def flat_mu(*natural: Tensor) -> Tensor:
        return torch.cat(expectation_parameters(with_natural(q, natural)))

    blocks = torch.autograd.functional.jacobian(flat_mu, natural_parameters(q))
    jacobian = torch.cat(blocks, 1)
    assert not torch.allclose(jacobian, jacobian.T)

    def joint_log_partition(eta: Parameters) -> Tensor:
        slopes, halves = eta[1::2], eta[2::2]
        base = (
            with_natural(c, (s, h)) for c, s, h in zip(q.components, slopes, halves, strict=True)
        )
        free = torch.cat([eta[0], eta[0].new_zeros(1)])
        return (free + torch.stack([log_partition(c) for c in base])).logsumexp(0)

    partitions = torch.stack([log_partition(c) for c in q.components])
    eta = leaves((q.log_odds - partitions[:-1] + partitions[-1], *natural_parameters(q)[1:]))
    value = joint_log_partition(eta)
    close(value, partitions[-1] - q.log_weights[-1])
    close(torch.autograd.grad(value, eta), expectation_parameters(q))
    with pytest.raises(UnsupportedError, match="conditional exponential family"):
        log_partition(q)


def test_gradients_of_an_expectation_by_component() -> None:
    """∂π_k = E_k f − E_K f, ∂m_k = π_k E_k f', ∂V_k = ½π_k E_k f'', by the trapezoidal rule."""
    nodes = torch.linspace(-12, 12, 2001, dtype=F64)
    weight = Normal(0.0, 1.0).log_prob(nodes).softmax(0)
    means = torch.tensor([-1.0, 0.5, 1.5], dtype=F64, requires_grad=True)
    variances = torch.tensor([0.5, 1.0, 0.3], dtype=F64, requires_grad=True)
    odds = torch.tensor([0.3, -0.4], dtype=F64)
    mixture = GaussianMixture(
        odds,
        tuple(
            DiagGaussian(m.detach()[None], v.detach().sqrt()[None])
            for m, v in zip(means, variances, strict=True)
        ),
    )
    first = mixture.weights[:-1].clone().requires_grad_()
    weights = torch.cat([first, 1 - first.sum()[None]])
    theta = means[:, None] + variances.sqrt()[:, None] * nodes

    def loss(theta: Tensor) -> Tensor:
        return theta.sin() + 0.1 * theta**4

    objective = weights @ ((loss(theta) + mixture.log_prob(theta[..., None])) @ weight)
    by_weight, by_mean, by_variance = torch.autograd.grad(objective, (first, means, variances))

    points = theta.detach()[..., None]
    value = (loss(points[..., 0]) + mixture.log_prob(points)) @ weight
    slope = points.cos() + 0.4 * points**3 + mixture.grad_log_prob(points)
    bend = -points.sin() + 1.2 * points**2 + hessian_log_prob(mixture, points)
    # The rule converges geometrically for analytic functions: at this width to rounding.
    close(by_weight, value[:-1] - value[-1], rtol=1e-12)
    close(by_mean, mixture.weights * (slope[..., 0] @ weight), rtol=1e-12)
    close(by_variance, 0.5 * mixture.weights * (bend[..., 0] @ weight))


def test_the_entropy_of_a_mixture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no closed form.*draws"):
        next(iter(MIXTURES.values()))(F64).entropy()


@every_mixture
def test_draws_come_with_their_component(make: Callable[[torch.dtype], GaussianMixture]) -> None:
    q = make(F64)
    theta, z = q.sample_joint(20_000, torch.Generator().manual_seed(1))
    chosen = torch.stack([c.log_prob(theta) for c in q.components], -1) + q.log_weights
    joint = -chosen.gather(-1, z[:, None]).squeeze(-1)
    within = torch.stack([c.entropy() for c in q.components])
    expected = torch.special.entr(q.weights).sum() + q.weights @ within
    assert abs(joint.mean() - expected) < 5 * joint.std() / math.sqrt(len(joint))


def test_a_mixture_of_one_is_its_component() -> None:
    q, w = MIXTURES["mixture of one"](F64), numbers(3, P)
    (component,) = q.components
    close(q.log_prob(w), component.log_prob(w))
    close(hessian_log_prob(q, w), -component.precision.expand(3, P, P))


@pytest.mark.parametrize(
    ("log_odds", "components", "message"),
    [
        (torch.zeros(0), (), "got none"),
        (torch.zeros(1), (full(), diagonal()), "one type.*'DiagGaussian', 'FullGaussian'"),
        (torch.zeros(0), (fixed(torch.tensor(1.0)),), "FixedGaussian"),
        (
            torch.zeros(1, dtype=F64),
            (full(), FullGaussian(numbers(2), definite(2))),
            r"same weights.*\[2, 4\]",
        ),
        (torch.zeros(2, dtype=F64), (full(), full()), r"\(1,\).*2 components.*\(2,\)"),
        (torch.zeros(1), (full(), full()), "one dtype"),
    ],
)
def test_mixture_refuses(log_odds: Tensor, components: tuple[FullGaussian], message: str) -> None:
    with pytest.raises(DataError, match=message):
        GaussianMixture(log_odds, components)


def test_mixture_refuses_parameters_out_of_range() -> None:
    q = MIXTURES["diagonal mixture"](F64)
    natural, mu = list(natural_parameters(q)), list(expectation_parameters(q))
    with pytest.raises(DataError, match=r"component 1: .*precision"):
        with_natural(q, (*natural[:4], -natural[4], *natural[5:]))
    with pytest.raises(DataError, match=r"component 2: .*second moment"):
        with_expectation(q, (*mu[:-1], 0 * mu[-1]))
    with pytest.raises(DataError, match=r"weights.*positive.*entry \[2\] is -0\.2"):
        with_expectation(q, (torch.tensor([0.6, 0.6], dtype=F64), *mu[1:]))
    with pytest.raises(DataError, match=r"component 0's precision times mean has values"):
        with_natural(q, (natural[0], natural[1] * math.nan, *natural[2:]))
    with pytest.raises(DataError, match="z must have one component"):
        joint_statistics(q, numbers(3, P), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"0 to 2, but entry \[1\] is 3"):
        joint_statistics(q, numbers(2, P), torch.tensor([0, 3]))


def test_mixture_parameters_are_differentiable() -> None:
    q, w = MIXTURES["full mixture"](F64), numbers(P)
    for build, parameters in (
        (partial(with_natural, q), natural_parameters(q)),
        (partial(with_expectation, q), expectation_parameters(q)),
    ):
        assert torch.autograd.gradcheck(lambda *p, b=build: b(p).log_prob(w), leaves(parameters))


def test_inner_product_of_mixture_parameters_fits() -> None:
    """``natural`` and ``joint_statistics`` pair up: ln q(θ, z) less what depends on neither."""
    q = MIXTURES["full mixture"](F64)
    theta, z = numbers(6, P), torch.tensor([0, 1, 2, 0, 1, 2])
    pairing = inner(joint_statistics(q, theta, z), natural_parameters(q))
    partitions = torch.stack([log_partition(c) for c in q.components])
    expected = torch.stack([c.log_prob(theta) for c in q.components], -1) + q.log_weights
    constant = pairing - partitions[z] + q.log_weights[-1]
    close(constant, expected.gather(-1, z[:, None]).squeeze(-1))
