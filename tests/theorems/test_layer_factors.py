"""Penalties and the priors they stand for: variance 1/fan-in, density one, the same pull."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import credo
from credo.penalties import KINDS, Penalty, layer_factors
from credo.priors import ElasticNet, GroupLasso, Laplace, Normal
from credo.priors.elastic_net import elastic_rate, elastic_variance
from credo.types import Prior, Segment

F64 = torch.float64
PRIORS: dict[str, Prior] = {
    "l2": Normal.fan_in(),
    "l1": Laplace.fan_in(),
    "group_lasso": GroupLasso.fan_in(),
    "group_lasso_transposed": GroupLasso.fan_in(groups="outgoing"),
    "elastic_net": ElasticNet.fan_in(l1_ratio=0.5),
}
LAYERS: dict[str, nn.Module] = {
    "linear": nn.Linear(5, 3, bias=False),
    "conv1d": nn.Conv1d(3, 4, 3, bias=False),
    "conv2d": nn.Conv2d(3, 4, (3, 2), bias=False),
    "conv3d": nn.Conv3d(2, 3, 2, bias=False),
    "grouped": nn.Conv2d(6, 4, 3, groups=2, bias=False),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "transposed": nn.ConvTranspose2d(4, 4, 3, groups=2, bias=False),
    "embedding": nn.Embedding(7, 3),
}


def brute_force_groups(layer: nn.Module, side: str) -> list[list[int]]:
    """Groups by asking the layer: flat indices of the weights that join a unit, or an input."""
    weight = next(layer.parameters())
    count = weight.numel()
    if isinstance(layer, nn.Embedding):
        rows = torch.arange(count).view(weight.shape)
        return [[i] for i in range(count)] if side == "incoming" else rows.tolist()
    dims = {nn.Linear: 0, nn.Conv1d: 1}.get(type(layer), weight.dim() - 2)
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    where: dict[int, tuple[int, int]] = {}
    for i in range(count):
        with torch.no_grad():
            weight.zero_().view(-1)[i] = 1.0
            for c in range(channels):
                x = torch.zeros(1, channels, *[7] * dims)
                x[:, c] = 1.0
                out = layer(x)
                if bool(out.any()):
                    unit = (
                        int(out[0].flatten(1).any(1).nonzero())
                        if dims
                        else int(out.nonzero()[0, 1])
                    )
                    where[i] = (unit, c)
    key = 0 if side == "incoming" else 1
    groups: dict[int, list[int]] = {}
    for i, joined in where.items():
        groups.setdefault(joined[key], []).append(i)
    return list(groups.values())


@pytest.mark.parametrize("side", ["incoming", "outgoing"])
@pytest.mark.parametrize("name", LAYERS)
def test_groups_are_what_the_layer_connects(name: str, side: str) -> None:
    layer = LAYERS[name]
    groups = brute_force_groups(layer, side)
    values = torch.randn(
        next(layer.parameters()).numel(), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        next(layer.parameters()).view(-1).copy_(values)
    expected = sum(values[group].norm().item() for group in groups)
    kind = "group_lasso" if side == "incoming" else "group_lasso_transposed"
    found = credo.penalties.penalty(layer, kind, 1.0, factors={"*": 1.0}).item()
    assert found == pytest.approx(expected, rel=1e-5)
    usual = layer_factors(layer, kind, "usual")
    assert list(usual.values()) == pytest.approx([math.sqrt(len(groups[0]))])


def test_the_table_of_document_001() -> None:
    """Factors by hand, for a linear layer of 5 inputs and 3 units and a convolution."""
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    conv = nn.Conv2d(6, 4, 3, groups=2)
    p, n = 3 * 9, 2 * 9  # fan-in, and the weights out of one input
    for kind, linear, convolutional in [
        ("l2", 5 / 2, p / 2),
        ("l1", math.sqrt(10), math.sqrt(2 * p)),
        ("group_lasso", math.sqrt(30), math.sqrt(p * (p + 1))),
        ("group_lasso_transposed", math.sqrt(4 * 5), math.sqrt((n + 1) * p)),
    ]:
        assert layer_factors(net, kind) == pytest.approx({"0.weight": linear}, rel=1e-14)
        assert layer_factors(conv, kind) == pytest.approx({"weight": convolutional}, rel=1e-14)
        assert list(layer_factors(net, kind, gain=2.0).values()) == pytest.approx(
            [linear / (4 if kind == "l2" else 2)], rel=1e-14
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["linear", "conv2d", "grouped"])
def test_draws_have_the_variance_of_the_initialisation(kind: str, layer: str) -> None:
    segment = credo.network.bind(LAYERS[layer]).segments[0]
    prior = PRIORS[kind].on([segment], torch.zeros(segment.size, dtype=F64))
    draws = prior.sample(20_000, torch.Generator().manual_seed(0))
    squares = draws.square().mean(1)
    error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - 1 / segment.fan_in) < 5 * error
    assert abs(draws.mean()) < 5 * draws.std() / math.sqrt(draws.numel())


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)])
def test_group_densities_integrate_to_one(shape: tuple[int, int]) -> None:
    segment = Segment("w", shape, 0, math.prod(shape), shape[1], shape[0], "", "Linear")
    p = GroupLasso(0.7).on([segment], torch.zeros(1, dtype=F64))

    def density(*w: float) -> float:
        return p.log_prob(torch.tensor(w, dtype=F64)).exp().item()

    if shape[1] == 1:
        total = 2 * integrate.quad(density, 0, 40)[0]
    else:  # polar coordinates, on both of which it is smooth
        total = integrate.quad(lambda r: 2 * math.pi * r * density(r, 0.0), 0, 60)[0]
        assert density(0.3, 0.4) == pytest.approx(density(0.5, 0.0), rel=1e-14)
    assert total == pytest.approx(1, abs=1e-9)


def test_lengths_are_gamma_and_directions_uniform() -> None:
    segment = Segment("w", (1, 3), 0, 3, 3, 1, "", "Linear")
    p = GroupLasso(0.7).on([segment], torch.zeros(1, dtype=F64))
    draws = p.sample(5000, torch.Generator().manual_seed(0))
    lengths = draws.norm(dim=1)
    rate = math.sqrt(4) / 0.7
    assert stats.kstest(lengths.numpy(), stats.gamma(3, scale=1 / rate).cdf).pvalue > 1e-3
    # In three dimensions each coordinate of a uniform direction is uniform (Archimedes).
    for coordinate in (draws / lengths[:, None]).T:
        assert stats.kstest(coordinate.numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_groups_of_one_are_the_laplace_prior() -> None:
    segment = Segment("b", (6,), 0, 6, 4, 6, "", "Linear")
    w = torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(0))
    group, laplace = (kind(0.3).on([segment], w) for kind in (GroupLasso, Laplace))
    torch.testing.assert_close(group.log_prob(w), laplace.log_prob(w), rtol=1e-13, atol=0)


@pytest.mark.parametrize("ratio", [1e-6, 0.5, 0.99])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_elastic_net_has_density_one_and_the_given_scale(scale: float, ratio: float) -> None:
    segment = Segment("w", (1,), 0, 1, 1, 1, "", "Linear")
    p = ElasticNet(scale, ratio).on([segment], torch.zeros(1, dtype=F64))

    def moment(power: int) -> float:
        def integrand(u: float) -> float:
            w = torch.tensor([u * scale], dtype=F64)
            return 2 * scale * u**power * p.log_prob(w).exp().item()

        return integrate.quad(integrand, 0, 40, epsabs=0, epsrel=1e-10, limit=200)[0]

    # Quadrature was asked for ten digits.
    assert moment(0) == pytest.approx(1, abs=1e-9)
    assert moment(2) == pytest.approx(1, abs=1e-9)


def test_elastic_net_tends_to_its_parts() -> None:
    assert elastic_rate(0.1, 1e-9) == pytest.approx(1 / (2 * 0.01), rel=1e-6)
    assert elastic_rate(0.1, 1 - 1e-9) == pytest.approx(math.sqrt(2) / 0.1, rel=1e-6)
    # The two ways of computing it meet.
    rate = 2 * (9.999999 / 10.000001) ** 2
    values = [elastic_variance(r * 100, 0.5) for r in (rate, 2.0)]
    assert values[0] / values[1] == pytest.approx(2.0 / rate, rel=1e-5)


def test_elastic_net_draws_follow_its_distribution() -> None:
    segment = Segment("w", (2,), 0, 2, 1, 1, "", "Linear")
    for ratio in (0.2, 0.95):
        p = ElasticNet(0.5, ratio).on([segment], torch.zeros(1, dtype=F64))
        draws = p.sample(4000, torch.Generator().manual_seed(0)).numpy()
        a, s = p.absolute[0].item(), math.sqrt(0.5 / p.square[0].item())
        # |w| is a normal with mean −a·s² cut off at zero.
        reference = stats.truncnorm(a * s, np.inf, loc=-a * s * s, scale=s)
        for column in draws.T:
            assert stats.kstest(np.abs(column), reference.cdf).pvalue > 1e-3
            assert abs((column > 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(len(column))


@pytest.mark.parametrize("kind", KINDS)
def test_map_with_the_prior_is_map_with_the_penalty(kind: str) -> None:
    """At λ = 1/num_data and Bayesian factors the two descend the same gradient, step for step."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, 4, 4, dtype=F64, generator=g)
    y = torch.randint(3, (12,), generator=g)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3, bias=False)
    ).double()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    found = []
    for penalty in (None, kind):
        net.load_state_dict(start)
        model = credo.Model(net, credo.likelihoods.Categorical(), PRIORS[kind])
        method = credo.MAP(optimizer="sgd", lr=0.1, penalty=penalty)
        state = method.init(model, num_data=40)
        steps = []
        for _ in range(5):
            state, _ = method.update(state, (x, y))
            steps.append(state.gradient.clone())
        found.append(torch.stack(steps))
    # The same numbers by two routes, over five steps.
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_differ_from_log_priors_by_a_constant(kind: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    model = credo.Model(net, credo.likelihoods.Categorical(), PRIORS[kind])
    differences = []
    for seed in range(3):
        with model.bind().writing() as vector:
            vector.normal_(generator=torch.Generator().manual_seed(seed))
        penalty = credo.penalties.penalty(net, kind, num_data=1)
        differences.append((penalty + model.prior_over_weights().log_prob(vector)).item())
    assert np.ptp(differences) < 1e-12


@pytest.mark.parametrize(("kind", "power"), [("l2", 2), ("l1", 1), ("group_lasso", 1)])
def test_a_wider_prior_is_a_smaller_lambda(kind: str, power: int) -> None:
    """Variance v/fan-in at λ is variance 1/fan-in at λ/v for L2, λ/√v for norms."""
    net = nn.Linear(4, 3)
    wide = Penalty(kind, 0.3, gain=math.sqrt(10)).value(net)
    small = Penalty(kind, 0.3 / math.sqrt(10) ** power).value(net)
    torch.testing.assert_close(wide, small, rtol=1e-6, atol=0)
