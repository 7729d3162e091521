"""Settings that know the network: priors by fan-in, the first noise, bounded steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.likelihoods import Categorical
from credo.optim import IVON, VOGN, Vadam
from credo.optim.base import NaturalOptimizer
from credo.optim.by_layer import CLIP_RADIUS, FIRST_NOISE, layer_precisions

KINDS = [IVON, VOGN, Vadam]
NOISE = {IVON: FIRST_NOISE, VOGN: FIRST_NOISE, Vadam: 0.05}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    ).double()


def train(opt: NaturalOptimizer, net: nn.Module, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (16,), generator=generator)
    for _ in range(steps):
        with opt.sampled():
            nn.functional.cross_entropy(net(x), y).backward()
        opt.step()


def test_a_parameter_alone_is_read_by_its_shape_as_its_layer_would_be() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Linear(8, 2))
    with_module = layer_precisions(list(net.parameters()), net)
    alone = layer_precisions(list(net.parameters()), None)
    assert alone == with_module
    assert alone == pytest.approx([37.5, 37.5, 4.0, 4.0])


def test_a_vector_without_a_matrix_and_a_scalar() -> None:
    parameters = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(()))]
    assert layer_precisions(parameters, None) == pytest.approx([3.5, 0.5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["module", "parameters"])
def test_the_first_noise_is_a_share_of_each_layers_scale(kind: Any, by: str) -> None:
    net = nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 3))
    options = {"module": net} if kind is VOGN and by == "parameters" else {}
    opt = kind(net if by == "module" else net.parameters(), num_data=1000, **options)
    q = opt.posterior(net, Categorical()).q
    share = NOISE[kind]
    expected = [share * math.sqrt(2 / 50)] * 1020 + [share * math.sqrt(2 / 20)] * 63
    torch.testing.assert_close(q.scale, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_prior_of_ones_own_does_not_widen_the_first_noise(kind: Any) -> None:
    net = nn.Linear(50, 20)
    q = kind(net, num_data=1000, prior_precision=1e-3).posterior(net, Categorical()).q
    expected = torch.full((1020,), NOISE[kind] * math.sqrt(2 / 50))
    torch.testing.assert_close(q.scale, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prior_and_temperature_are_those_of_the_method(kind: Any) -> None:
    """`NAME(net)` in a loop and ``credo.NAME()`` in fit mean the same."""
    net = network()
    opt = kind(net, num_data=1000)
    model = credo.Model(net, Categorical())
    state = getattr(credo, kind.__name__)().init(model, 1000)
    known = ("temperature", "prior_precision", "hess_init", "lr", "betas", "clip_radius")

    def settings(groups: list[dict[str, Any]]) -> list[list[Any]]:
        return sorted([group.get(key) for key in known] for group in groups)

    def rounded(rows: list[list[Any]]) -> list[Any]:
        flat = [torch.tensor(value, dtype=torch.float64) for row in rows for value in row if value]
        return [value.round(decimals=6).tolist() for value in flat]

    theirs = rounded(settings(state.optimizer.param_groups))
    assert rounded(settings(opt.param_groups)) == theirs


def test_a_given_start_is_the_published_optimizer() -> None:
    (group,) = IVON(nn.Linear(5, 2), num_data=100, hess_init=1.0).param_groups
    assert group["temperature"] == 1.0
    assert group["prior_precision"] == pytest.approx(1e-4 * 100)
    assert math.isinf(group["clip_radius"])
    assert group["rescale_lr"]
    (group,) = VOGN(nn.Linear(5, 2), num_data=100, hess_init=0.01).param_groups
    assert (group["temperature"], group["prior_precision"]) == (1.0, 1.0)
    assert math.isinf(group["clip_radius"])


def test_a_balanced_temperature_of_ones_own() -> None:
    balanced = credo.Balanced(tau=0.01)
    (group,) = VOGN(nn.Linear(99, 1), num_data=100, temperature=balanced).param_groups
    assert group["temperature"] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_is_a_prior_for_each_of_them(kind: Any) -> None:
    (group,) = kind(nn.Linear(5, 2), num_data=100, weight_decay=0.02).param_groups
    assert group["prior_precision"] == pytest.approx(2.0)


@pytest.mark.parametrize("kind", [IVON, VOGN])
def test_no_weight_moves_farther_than_adam_would(kind: Any) -> None:
    net = network()
    opt = kind(net, num_data=50)
    bound = 1e-3 if kind is VOGN else 0.1 * CLIP_RADIUS
    weights = [*net[0].parameters(), *net[4].parameters()]  # Adam itself trains the norm layer
    for _ in range(5):
        before = [p.detach().clone() for p in weights]
        train(opt, net)
        moves = [(p - b).detach().abs().max() for p, b in zip(weights, before, strict=True)]
        assert max(moves) <= bound * (1 + 1e-9)
        assert max(moves) > 0.9 * bound  # else the bound would not be seen


def test_a_published_step_is_not_bounded() -> None:
    """The control of the test above: without a radius the first steps are far larger."""
    net = network()
    opt = VOGN(net, num_data=50, clip_radius=math.inf, lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    train(opt, net)
    moves = [(p - b).detach().abs().max() for p, b in zip(net.parameters(), before, strict=True)]
    assert max(moves) > 0.01


def test_vadams_draws_have_a_floor_under_their_curvature() -> None:
    net = nn.Linear(50, 3).double()
    opt = Vadam(net, num_data=1000, lr=0.0)
    x = torch.zeros(8, 50, dtype=torch.float64)
    for _ in range(3000):  # weights without any gradient, far beyond the memory of β₂
        with opt.sampled():
            net(x).square().mean().backward()
        opt.step()
    scale = opt.posterior(net, Categorical()).q.scale[:150]
    torch.testing.assert_close(scale, torch.full_like(scale, 0.05 * 0.2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_group_keep_its_options_and_names(kind: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    options = {"module": net} if kind is VOGN else {}
    groups = [{"params": list(net.named_parameters()), "lr": 0.5}]
    opt = kind(groups, num_data=100, **options)
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.5]
    assert [group["param_names"] for group in opt.param_groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
