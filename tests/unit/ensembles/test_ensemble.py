"""Ensembles: what a member is, what is mixed, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.ensembles.members import another
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.posterior import MixturePosterior
from credo.train.feed import make_feed


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def fit(method, net=None, train=None, likelihood=None, **more):
    model = credo.Model(network() if net is None else net, likelihood or CATEGORICAL)
    options = {"epochs": 3, "batch_size": 8, "seed": 5, "progress": False, **more}
    return credo.fit(model, method, data() if train is None else train, **options)


CATEGORICAL = credo.likelihoods.Categorical()


@pytest.mark.parametrize("method", [credo.MAP(lr=0.01), credo.VI(lr=0.01), credo.IVON()])
def test_the_first_member_is_the_run_without_an_ensemble(method) -> None:
    alone = fit(method, schedule="cosine")
    net = network()
    together = fit(credo.Ensemble(method, members=3), net, schedule="cosine")
    assert isinstance(together, MixturePosterior)
    first = together.members[0]
    assert torch.equal(first.mean, alone.mean)
    assert all(torch.equal(first.buffers[k], alone.buffers[k]) for k in alone.buffers)
    assert torch.equal(together.model.weights(together.model.random), alone.mean)
    assert torch.equal(together.centre, alone.mean)


def test_members_differ_by_their_start_and_their_order() -> None:
    same_start = credo.Ensemble(credo.MAP(lr=0.01), members=3, factory=network)
    posterior = fit(same_start)
    means = [member.mean for member in posterior.members]
    assert all(not torch.equal(means[0], other) for other in means[1:])
    model = credo.Model(network(), CATEGORICAL)
    starts = [another(model, None, seed).weights() for seed in (1, 2, 1)]
    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], model.weights())


def test_a_run_is_repeatable() -> None:
    one, two = (fit(credo.Ensemble(credo.VI(), members=2)) for _ in range(2))
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(one.members, two.members, strict=True))


def test_frozen_parameters_stay_as_they_are() -> None:
    net = network()
    net[0].weight.requires_grad_(False)
    other = another(credo.Model(net, CATEGORICAL), None, 3).net
    assert torch.equal(other[0].weight, net[0].weight)
    assert not torch.equal(other[3].weight, net[3].weight)


class Bare(nn.Module):
    """A parameter that nothing knows how to draw anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


def test_a_layer_that_can_not_begin_anew_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"itself \(Bare\).*reset_parameters.*factory="):
        fit(credo.Ensemble(members=2), Bare())
    assert len(fit(credo.Ensemble(members=2, factory=Bare), Bare()).members) == 2
    with pytest.raises(DataError, match=r"another architecture.*gain"):
        fit(credo.Ensemble(members=2, factory=network), Bare())
    with pytest.raises(DataError, match="gave a int"):
        fit(credo.Ensemble(members=2, factory=lambda: 3), Bare())
    with pytest.raises(DataError, match="another Ensemble"):
        credo.Ensemble(credo.Ensemble())


def test_a_member_that_diverges_is_named_and_the_rest_kept() -> None:
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    with torch.no_grad():
        nets[0].weight.fill_(float("inf"))
    built = iter(nets)

    def broken() -> nn.Module:
        return next(built)

    with pytest.warns(UserWarning, match=r"member 1 of the ensemble diverged.*the others go on"):
        posterior = fit(credo.Ensemble(members=3, factory=broken), nn.Linear(3, 2))
    assert len(posterior.members) == 2
    assert posterior.history[-1]["members"] == 2
    assert torch.isfinite(posterior.predict(data()[0]).probs).all()


def test_where_the_first_member_diverges_the_network_is_left_at_another() -> None:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(float("inf"))
    with pytest.warns(UserWarning, match="member 0 of the ensemble diverged"):
        posterior = fit(credo.Ensemble(members=2), net)
    assert torch.isfinite(net.weight).all()
    assert torch.equal(posterior.model.weights(), posterior.centre)


def test_all_members_lost_is_an_error() -> None:
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(NonFiniteError, match="all 2 members"):
            fit(credo.Ensemble(credo.MAP(lr=1e30), members=2), train=(x * 1e20, y))


def test_bootstrap_draws_one_sample_for_each_member() -> None:
    x = torch.arange(20.0)[:, None]
    model = credo.Model(nn.Linear(1, 1), credo.likelihoods.Gaussian())
    feed = make_feed((x, x), 4, model)

    def seen(order: int, epoch: int, resamples: bool = True) -> list[float]:
        batches = feed.in_orders(2, resamples, seed=0, epoch=epoch)
        return sorted(v for batch in batches for v in batch[order][1].flatten().tolist())

    assert seen(0, 0) == seen(0, 1) != seen(1, 0)
    assert len(set(seen(0, 0))) < 20
    assert seen(1, 0, resamples=False) == x.flatten().tolist()
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    with pytest.raises(DataError, match="bootstrap=False"):
        fit(credo.Ensemble(members=2, bootstrap=True), train=loader)


def test_a_loader_is_read_once_for_all_members() -> None:
    class Counting(TensorDataset):
        reads = 0

        def __getitem__(self, index: int):
            Counting.reads += 1
            return super().__getitem__(index)

    loader = DataLoader(Counting(*data()), batch_size=8)
    fit(credo.Ensemble(members=3), train=loader, epochs=2)
    assert Counting.reads <= 2 * 40 + 40 + 8  # two epochs, the last pass, the first batch


def test_every_member_predicts_with_its_own_noise() -> None:
    x = torch.linspace(-1, 1, 40)[:, None]
    y = x + 0.3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    likelihood = credo.likelihoods.Gaussian(scale=0.5, learned=True)
    method = credo.Ensemble(credo.MAP(lr=0.02), members=3, bootstrap=True)
    posterior = fit(method, nn.Linear(1, 1), (x, y), likelihood, epochs=20)
    pred = posterior.predict(x)
    assert pred.samples == 3
    scales = [member.model.likelihood.scale for member in posterior.members]
    assert len(set(scales)) == 3
    means = torch.stack([member.predict(x).mean for member in posterior.members])
    normal = torch.distributions.Normal(means, torch.tensor(scales)[:, None, None])
    by_hand = normal.log_prob(y).squeeze(-1).logsumexp(0) - torch.log(torch.tensor(3.0))
    torch.testing.assert_close(pred.log_prob(y), by_hand)
    torch.testing.assert_close(pred.aleatoric_std**2, normal.variance.mean(0))
    torch.testing.assert_close(pred.epistemic_std, means.std(0, correction=0))
    low, high = pred.interval(0.8)
    torch.testing.assert_close(normal.cdf(low).mean(0), torch.full((40, 1), 0.1), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        normal.cdf(high).mean(0), torch.full((40, 1), 0.9), rtol=0, atol=1e-5
    )
    streamed = posterior.predict(x, keep_samples=False)
    torch.testing.assert_close(streamed.std, pred.std)
    batches = DataLoader(TensorDataset(x), batch_size=7)
    torch.testing.assert_close(posterior.predict(batches).log_prob(y), by_hand)


def test_members_share_the_samples_equally() -> None:
    posterior = fit(credo.Ensemble(credo.VI(), members=3))
    x, _ = data()
    pred = posterior.predict(x, samples=7)
    assert pred.samples == 9
    assert posterior.predict(x, at="mean").samples == 3
    each = [member.predict(x, at="mean").probs for member in posterior.members]
    torch.testing.assert_close(posterior.predict(x, at="mean").probs, torch.stack(each).mean(0))
    with pytest.raises(DataError, match="probit"):
        posterior.predict(x, at="linearised", link="probit")
    assert posterior.predict(x, samples=6, at="linearised").samples == 6


def test_members_are_trained_even_where_the_method_would_take_the_network_as_it_is() -> None:
    assert credo.Laplace().default_epochs == 0
    assert credo.Ensemble(credo.Laplace()).default_epochs == credo.MAP().default_epochs
