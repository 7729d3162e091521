"""SWAG: what it collects and when, batch-norm statistics of draws, and what it says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import CheckpointError, DataError
from credo.families import Delta, FactorGaussian
from credo.posterior import MixturePosterior, RefreshedPosterior

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(norm: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inside = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *inside, nn.Tanh(), nn.Linear(8, 2))


def fit(net: nn.Module, method: credo.SWAG | credo.Ensemble | None = None, **more) -> object:
    model = credo.Model(net, credo.likelihoods.Categorical())
    options = {"epochs": 16, "batch_size": 16, "progress": False, **more}
    return credo.fit(model, method or credo.SWAG(), (X, Y), **options)


def test_q_is_that_of_the_paper_over_the_iterates_of_training() -> None:
    """By hand, from every iterate of MAP in float64: rounding of sums of twelve."""
    x, steps = X.double(), 20
    train = credo.MAP(lr=0.05, optimizer="sgd")
    nets = [network().double() for _ in range(2)]
    models = [credo.Model(net, credo.likelihoods.Categorical()) for net in nets]
    method = credo.SWAG(train=train, start=0.4, rate=1.0, iterates=6, rank=3)
    swag = method.init(models[0], 48, torch.Generator().manual_seed(0))
    swag.clock.epochs, swag.clock.num_batches = steps, 1
    plain, seen = train.init(models[1], 48), []
    for _ in range(steps):
        swag, _ = method.update(swag, (x, Y))
        plain, _ = train.update(plain, (x, Y))
        seen.append(plain.flat.vector.detach().clone())
    collected = torch.stack([seen[k - 1] for k in (10, 12, 14, 16, 18, 20)])
    mean = collected.mean(0)
    columns = torch.stack([seen[k - 1] for k in (12, 16, 20)], 1) - mean[:, None]
    variance = collected.square().mean(0) - mean.square()
    covariance = 0.5 * torch.diag(variance) + columns @ columns.T / (2 * (3 - 1))
    q = method.posterior(swag).q
    assert isinstance(q, FactorGaussian)
    torch.testing.assert_close(q.mean, mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(q.dense_covariance(), covariance, rtol=0, atol=1e-14)


def test_looking_at_the_posterior_does_not_disturb_training() -> None:
    """Validation puts the network at the mean; the next step goes on from where training was."""
    plain, watched = fit(network()), fit(network(), val_data=(X, Y))
    assert torch.equal(plain.mean, watched.mean)
    assert torch.equal(plain.q.factor, watched.q.factor)
    scores = [record["val_nll"] for record in watched.history]
    assert len(set(scores)) == 16
    assert [record["iterates"] for record in watched.history[10:]] == [0, 0, 3, 6, 9, 12]


def test_the_rate_falls_to_its_share_and_stays_whatever_the_schedule() -> None:
    factors = [record["rate_factor"] for record in fit(network(), credo.SWAG(rate=0.5)).history]
    assert 1 > factors[0] > factors[5] > 0.5
    assert factors[12:] == [0.5] * 4
    # A schedule of nothing leaves the first part at the start and does not reach the second.
    net = network()
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    posterior = fit(net, schedule=lambda fraction: 0.0)
    moved = (posterior.mean - start).abs().max()
    assert 0 < float(moved) < 12 * 3e-3
    assert float(posterior.q.scale.max()) > 1e-5
    assert posterior.history[-1]["rates"]["mean"] == 0.0  # what the schedule set is left in place


def test_networks_without_batch_norm_draw_freely() -> None:
    posterior = fit(network())
    outputs = posterior.predict(X, samples=50).outputs
    assert len(outputs) == 50
    assert len({tuple(o) for o in outputs[:, 0].tolist()}) == 50
    assert not isinstance(posterior, RefreshedPosterior)
    assert posterior.predict(X, at="linearised").probs.shape == (48, 2)


def by_hand(net: nn.Sequential, weights: Tensor, posterior: RefreshedPosterior) -> Tensor:
    """Outputs at these random weights, with statistics of all training data at once."""
    twin = copy.deepcopy(net)
    with posterior.model.replace(net=twin).bind().writing() as vector:
        posterior.model.replace(net=twin).random.write(vector, weights)
    twin.eval()
    twin[1].train()
    twin[1].momentum = 1.0
    with torch.no_grad():
        twin(X)
        twin.eval()
        return twin(X)


def test_each_draw_has_the_batch_statistics_of_the_training_data() -> None:
    net = network(norm=True)
    net.insert(2, nn.Dropout(0.2))  # which has no part in statistics
    # One minibatch of all data, so that its mean and variance are those of the data.
    method = credo.SWAG(train=credo.MAP(lr=0.05), draws=4)
    posterior = fit(net, method, batch_size=48, epochs=60)
    assert isinstance(posterior, RefreshedPosterior)
    outputs = posterior.predict(X, samples=9).outputs
    assert len(outputs) == 4
    for draw, found in zip(posterior.kept, outputs, strict=True):
        expected = by_hand(net, draw, posterior)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mean = posterior.predict(X, at="mean").outputs[0]
    torch.testing.assert_close(mean, by_hand(net, posterior.mean, posterior), rtol=1e-4, atol=1e-5)
    # With the mean's statistics for all draws the outputs are others: this is not a small thing.
    plain = credo.Posterior(
        posterior.model, posterior.q, posterior.point, posterior.buffers
    ).predict(X, at="samples", samples=4)
    assert float((plain.outputs.mean(0) - outputs.mean(0)).abs().max()) > 1e-4
    net.train()
    torch.testing.assert_close(net[1].running_mean, posterior.buffers["1.running_mean"])
    assert net[1].momentum == 0.1


def test_draws_that_were_kept_survive_the_disk_and_the_choice_of_some(tmp_path: Path) -> None:
    posterior = fit(network(norm=True), credo.SWAG(draws=5))
    every = posterior.predict(X).outputs
    some = posterior.predict(X, samples=2, generator=torch.Generator().manual_seed(3)).outputs
    assert all(any(torch.equal(one, each) for each in every) for one in some)
    assert not torch.equal(some[0], some[1])
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", network(norm=True, seed=4))
    assert isinstance(again, RefreshedPosterior)
    assert torch.equal(again.predict(X).outputs, every)
    with pytest.raises(DataError, match=r"draws must be \(S, 58\)"):
        RefreshedPosterior.of(posterior, posterior.kept[:, 1:], posterior.statistics)
    with pytest.raises(DataError, match=r"statistics 1\.running_mean don't fit"):
        RefreshedPosterior.of(posterior, posterior.kept[1:], posterior.statistics)


def test_multiswag_is_a_mixture_of_them() -> None:
    posterior = fit(network(norm=True), credo.Ensemble(credo.SWAG(draws=3), members=2))
    assert isinstance(posterior, MixturePosterior)
    assert all(isinstance(member, RefreshedPosterior) for member in posterior.members)
    assert len(posterior.predict(X, samples=6).outputs) == 6
    alone = fit(network(norm=True), credo.SWAG(draws=3))
    assert torch.equal(posterior.members[0].mean, alone.mean)


def test_points_without_a_distribution_are_averaged_too() -> None:
    net = network(norm=True)
    posterior = fit(net, credo.SWAG(train=credo.MAP(lr=0.05)))
    assert posterior.point.numel() == 16
    with torch.no_grad():
        here = torch.cat([net[1].weight, net[1].bias])
    assert torch.equal(here, posterior.point)
    others = fit(network(norm=True), credo.SWAG(train=credo.MAP(lr=0.05), iterates=10))
    assert not torch.equal(posterior.point, others.point)


def test_weights_that_never_move_have_a_density() -> None:
    x = torch.cat([X, torch.zeros(48, 1)], 1)
    torch.manual_seed(0)
    model = credo.Model(nn.Linear(5, 2), credo.likelihoods.Categorical())
    posterior = credo.fit(
        model, credo.SWAG(train=credo.MLE()), (x, Y), epochs=60, batch_size=16, progress=False
    )
    assert float(posterior.q.scale.min()) < 1e-7
    assert torch.isfinite(posterior.q.log_prob(posterior.mean))
    assert torch.isfinite(posterior.predict(x).probs).all()


def test_too_few_iterates_and_unknown_lengths_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="collected the weights of 3 steps.*more epochs"):
        posterior = fit(network(), epochs=4)
    assert isinstance(posterior.q, FactorGaussian)
    with pytest.warns(UserWarning, match="collected the weights of 1 steps"):
        assert isinstance(fit(network(), epochs=1, batch_size=48).q, Delta)
    method = credo.SWAG()
    state = method.init(credo.Model(network(), credo.likelihoods.Categorical()), 48)
    state, _ = method.update(state, (X, Y))
    with pytest.raises(DataError, match=r"SWAG keeps weights .* set state\.clock\.epochs"):
        method.posterior(state)
    fit(network(), folder=tmp_path / "run")
    with pytest.raises(CheckpointError, match="epochs was 16 and is now 17"):
        fit(network(), folder=tmp_path / "run", epochs=17)
