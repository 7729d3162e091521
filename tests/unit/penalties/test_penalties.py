"""Penalties in a plain loop and in MAP: gradients, kinks, names, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import CheckpointError, DataError, NonFiniteError, UnsupportedError
from credo.penalties import KINDS, Penalty, layer_factors, penalty

F64 = torch.float64


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(),
            nn.Linear(16, 3),
        ).double()  # fmt: skip


def by_hand(net: nn.Sequential, kind: str) -> Tensor:
    """Σ_ℓ λ_ℓ r(θ_ℓ) from the table, by autograd's own operations."""
    conv, linear = net[0].weight, net[4].weight
    p = (9, 16)
    if kind == "l2":
        return sum(n / 2 * w.square().sum() for n, w in zip(p, (conv, linear), strict=True))
    if kind == "l1":
        return sum(math.sqrt(2 * n) * w.abs().sum() for n, w in zip(p, (conv, linear), strict=True))
    if kind == "group_lasso":
        norms = [conv.flatten(1).norm(dim=1).sum(), linear.norm(dim=1).sum()]
        return math.sqrt(9 * 10) * norms[0] + math.sqrt(16 * 17) * norms[1]
    # Two groups of channels: the input of each reaches two units by nine weights.
    ends = [conv[:2].norm() + conv[2:].norm(), linear.norm(dim=0).sum()]
    return math.sqrt(19 * 9) * ends[0] + math.sqrt(4 * 16) * ends[1]


@pytest.mark.parametrize("bound", [False, True], ids=["plain", "bound"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "elastic_net"])
def test_value_and_gradient_are_autograds(kind: str, bound: bool) -> None:
    net = network()
    if bound:
        credo.network.bind(net)
    expected = by_hand(net, kind) / 50
    gradients = torch.autograd.grad(expected, [net[0].weight, net[4].weight])
    found = penalty(net, kind, num_data=50)
    (3 * found).backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-13, atol=0)
    for layer, gradient in zip((net[0], net[4]), gradients, strict=True):
        torch.testing.assert_close(layer.weight.grad, 3 * gradient, rtol=1e-12, atol=1e-15)
        assert layer.bias.grad is None
    assert net[1].weight.grad is None


def test_elastic_net_mixes_the_two() -> None:
    net = network()
    parts = [penalty(net, kind, 0.1, factors="usual") for kind in ("l1", "l2")]
    mixed = penalty(net, "elastic_net", 0.1, factors="usual", l1_ratio=0.3)
    torch.testing.assert_close(mixed, 0.3 * parts[0] + 0.7 * parts[1], rtol=1e-13, atol=0)
    mixed.backward()
    weight = net[4].weight.detach()
    expected = 0.1 * (0.3 * weight.sign() + 1.4 * weight)
    torch.testing.assert_close(net[4].weight.grad, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiny", [0.0, 1e-310])
def test_gradient_at_a_kink_is_finite(kind: str, tiny: float) -> None:
    net = network()
    with torch.no_grad():
        net[4].weight.fill_(tiny)
        net[0].weight[1].fill_(tiny)
    penalty(net, kind, num_data=5).backward()
    for layer in (net[0], net[4]):
        assert bool(torch.isfinite(layer.weight.grad).all())
    if tiny == 0:
        assert not net[4].weight.grad.any()
        alive = kind == "group_lasso_transposed" and net[0].weight.grad[0].any()
        assert alive or not net[0].weight.grad[1].any()


def test_the_gradient_is_that_of_the_weights_at_the_forward_pass() -> None:
    net = nn.Linear(2, 2)
    expected = net.weight.detach().clone()
    found = penalty(net, "l2", 1.0, factors="usual")
    with torch.no_grad():
        net.weight.zero_()
    found.backward()
    torch.testing.assert_close(net.weight.grad, 2 * expected)


def test_without_gradients_it_is_a_number() -> None:
    with torch.no_grad():
        assert not penalty(network(), "l1", num_data=5).requires_grad


def test_tied_weights_count_once_and_frozen_ones_not_at_all() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    assert list(layer_factors(net, "l2")) == ["0.weight"]
    expected = net[0].weight.square().sum()
    torch.testing.assert_close(penalty(net, "l2", 1.0, factors="usual"), expected)


def test_factors_and_weights_can_be_named() -> None:
    net = network()
    table = {"*.weight": 2.0, "4": 3.0}
    assert layer_factors(net, "l1", table) == {"0.weight": 2.0, "4.weight": 3.0}
    assert list(layer_factors(net, "l1", weights="4.*")) == ["4.weight", "4.bias"]
    assert layer_factors(net, "group_lasso", weights=["*.bias"])["4.bias"] == math.sqrt(2 * 16)
    weights = penalty(net, "l1", 0.5, factors=table, weights=["4.weight"])
    torch.testing.assert_close(weights, 1.5 * net[4].weight.abs().sum())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda net: penalty(net, "l3", 1.0), DataError, "group_lasso.*'l3'"),
        (lambda net: penalty(net, "l2", -1.0), DataError, "lam must be 0 or a positive.*-1.0"),
        (lambda net: penalty(net, "l2", math.nan), DataError, "lam"),
        (lambda net: penalty(net, "l2", "theory"), DataError, "lam"),
        (lambda net: penalty(net, "l2"), DataError, "number of training examples"),
        (lambda net: penalty(net, "l2", num_data=0), DataError, "num_data"),
        (lambda net: penalty(net, "l2", 1.0, gain=0.0), DataError, "gain"),
        (lambda net: penalty(net, "elastic_net", 1.0, l1_ratio=1.0), DataError, "l1_ratio"),
        (lambda net: penalty(net, "l2", 1.0, factors="best"), DataError, "'best'"),
        (lambda net: penalty(net, "l2", 1.0, factors={"4": 1.0}), DataError, r"'0\.weight'"),
        (lambda net: penalty(net, "l2", 1.0, factors={"4": -1.0}), DataError, "factor of '4'"),
        (lambda net: penalty(net, "l2", 1.0, weights="head"), DataError, "head"),
        (lambda net: layer_factors(nn.BatchNorm1d(3), "l2"), DataError, "no weight to penalise"),
        (lambda net: credo.MAP(penalty=3.0), DataError, "penalty must be.*3.0"),
        (lambda net: credo.MAP(penalty="l3"), DataError, "'l3'"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(
    call: Callable[[nn.Module], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(network())


def test_weights_that_are_not_finite_are_named() -> None:
    net = network()
    with torch.no_grad():
        net[4].weight[0, 0] = math.nan
    for kind in KINDS:
        with pytest.raises(NonFiniteError, match=r"weights of 4\.weight"):
            penalty(net, kind, num_data=5)


def test_a_tensor_without_known_groups_is_refused_by_name() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 2)

    # A GRU's rows are units; of a gate's input weights it knows the fans.
    assert len(layer_factors(Strange(), "group_lasso")) == 2
    odd = credo.types.Segment("odd", (2, 3), 0, 6, 5, 7, "", "Odd")
    for groups in ("incoming", "outgoing"):
        with pytest.raises(UnsupportedError, match="odd"):
            credo.priors.GroupLasso(groups=groups).on([odd], torch.zeros(6))


def test_second_derivatives_are_refused() -> None:
    net = nn.Linear(2, 2)
    (first,) = torch.autograd.grad(penalty(net, "l2", 1.0), net.weight, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


# --- MAP ------------------------------------------------------------------------------------------


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(24, 2, 4, 4, dtype=F64, generator=g), torch.randint(3, (24,), generator=g)


def fitted(method: credo.MAP, **settings: object) -> credo.Posterior:
    model = credo.Model(network(), credo.likelihoods.Categorical())
    return credo.fit(model, method, data(), batch_size=8, progress=False, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_map_descends_the_loss_of_a_plain_loop(kind: str) -> None:
    spec = Penalty(kind, 0.02, l1_ratio=0.4)
    x, y = data()
    method = credo.MAP(optimizer="sgd", lr=0.05, penalty=spec)
    model = credo.Model(network(), credo.likelihoods.Categorical())
    state = method.init(model, num_data=24)
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        state, _ = method.update(state, (x, y))
        loss = nn.functional.cross_entropy(plain(x), y)
        loss = loss + penalty(plain, kind, 0.02, l1_ratio=0.4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(model.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    summary = method.summary(state)
    torch.testing.assert_close(summary["penalty"], spec.value(plain).item(), rtol=1e-9, atol=0)


def test_temperature_scales_the_penalty() -> None:
    half = fitted(credo.MAP(temperature=0.5, penalty=Penalty("l1", 0.1)), epochs=2)
    same = fitted(credo.MAP(penalty=Penalty("l1", 0.05)), epochs=2)
    none = fitted(credo.MLE(penalty=Penalty("l1", 0.1)), epochs=2)
    # Halving before or after a multiplication rounds differently at most in the last place.
    torch.testing.assert_close(half.mean, same.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(none.mean, fitted(credo.MLE(), epochs=2).mean, rtol=0, atol=0)


def test_the_last_layer_alone_can_be_penalised() -> None:
    model = credo.Model(network(), credo.likelihoods.Categorical(), random="last_layer")
    state = credo.MAP(penalty="group_lasso").init(model, num_data=24)
    pull = state.prior.grad_log_prob(state.random.read(state.flat.vector))
    expected = math.sqrt(16 * 17) * torch.ones(3, dtype=F64)
    torch.testing.assert_close(pull[:48].view(3, 16).norm(dim=1), expected)
    assert not pull[48:].any()


def test_a_run_records_its_penalty_and_resumes(tmp_path: Path) -> None:
    method = credo.MAP(penalty=Penalty("group_lasso", factors={"0": 1.0, "*": 2.0}))
    whole = fitted(method, epochs=4, folder=tmp_path / "whole")
    stored = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert stored["method"]["penalty"]["factors"] == [["0", 1.0], ["*", 2.0]]
    again = fitted(method, epochs=4, folder=tmp_path / "whole")
    assert torch.equal(whole.mean, again.mean)
    with pytest.raises(CheckpointError):
        fitted(credo.MAP(penalty="group_lasso"), epochs=4, folder=tmp_path / "whole")

    stopped = credo.Model(network(), credo.likelihoods.Categorical())
    state = method.init(stopped, 24)
    for _ in range(3):
        state, _ = method.update(state, data())
    tensors, meta = method.pack(state)
    tensors = {name: t.clone() for name, t in tensors.items()}
    state, _ = method.update(state, data())
    resumed = method.unpack(
        method.init(credo.Model(network(), stopped.likelihood), 24), tensors, meta
    )
    resumed, _ = method.update(resumed, data())
    assert torch.equal(resumed.flat.vector, state.flat.vector)


def test_a_run_without_a_penalty_records_the_prior() -> None:
    assert credo.MAP().config()["penalty"] is None
    assert "negative_log_prior" in fitted(credo.MAP(), epochs=1).history[0]
