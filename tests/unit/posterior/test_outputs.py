"""What `Posterior.predict(at="linearised")` promises and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.autodiff import layer_calls
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, Empirical, FullGaussian
from credo.posterior import outputs
from credo.posterior.closed_form import NormalPredictive, ProbitPredictive
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive, PredictiveError


def network(inputs: int = 3, outputs: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def build(likelihood: Any, net: nn.Module | None = None) -> Posterior:
    model = credo.Model(net or network(), likelihood)
    mean = model.weights(model.random)
    return Posterior.at_network(model, DiagGaussian(mean, torch.full_like(mean, 0.3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CATEGORICAL = credo.likelihoods.Categorical()
QUANTITIES: dict[str, Callable[[Posterior, Any], Tensor]] = {
    "samples": lambda p, x: p.predict(x, samples=4, at="linearised", link="samples").outputs,
    "probit": lambda p, x: p.predict(x, at="linearised", link="probit").probs,
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_batches_and_loaders_change_nothing(name: str, x: Tensor) -> None:
    posterior = build(CATEGORICAL)
    whole = QUANTITIES[name](posterior, x)
    loader = torch.utils.data.DataLoader([(a, 0) for a in x], batch_size=4)
    torch.testing.assert_close(QUANTITIES[name](posterior, loader), whole, rtol=0, atol=1e-12)
    pieces = posterior.predict(x, samples=4, batch_size=2, at="linearised")
    kept = posterior.predict(x, samples=4, at="linearised")
    torch.testing.assert_close(pieces.outputs, kept.outputs, rtol=0, atol=1e-12)


def test_it_repeats_itself_unless_a_generator_is_given(x: Tensor) -> None:
    posterior = build(CATEGORICAL)

    def draw(generator: torch.Generator | None = None) -> Tensor:
        return posterior.predict(x, 3, generator=generator, at="linearised").outputs

    assert torch.equal(draw(), draw())
    seeds = [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
    one, same, other = (draw(generator) for generator in seeds)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_stream_has_the_same_averages(x: Tensor) -> None:
    posterior = build(CATEGORICAL)
    kept = posterior.predict(x, 8, at="linearised")
    streamed = posterior.predict(x, 8, at="linearised", keep_samples=False)
    for name in ("probs", "entropy", "mutual_information"):
        torch.testing.assert_close(getattr(streamed, name), getattr(kept, name))
    assert not hasattr(streamed, "outputs")


def test_the_network_is_left_as_it_was(x: Tensor) -> None:
    posterior = build(CATEGORICAL)
    net = posterior.model.net.train()
    with posterior.model.bind().writing() as vector:
        vector.add_(1.0)
    before = posterior.model.weights()
    posterior.predict(x, at="linearised", link="probit")
    assert torch.equal(posterior.model.bind().vector, before)
    assert net.training
    assert all(p.requires_grad for p in net.parameters())


def test_probit_has_what_follows_from_probabilities_and_no_more(x: Tensor) -> None:
    pred = build(CATEGORICAL).predict(x, at="linearised", link="probit")
    assert isinstance(pred, ProbitPredictive)
    assert pred.samples == 0
    torch.testing.assert_close(pred.probs.sum(1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(pred.entropy, torch.special.entr(pred.probs).sum(1))
    torch.testing.assert_close(pred.confidence, pred.probs.amax(1))
    assert torch.equal(pred.labels, pred.probs.argmax(1))
    labels = torch.arange(9) % 2
    torch.testing.assert_close(pred.log_prob(labels), pred.probs[torch.arange(9), labels].log())
    for name in ("mutual_information", "expected_entropy", "epistemic_std", "outputs",
                 "sample_probs", "mean", "std"):  # fmt: skip
        with pytest.raises(PredictiveError, match=rf"no {name}|no outputs.*"):
            getattr(pred, name)
        assert not hasattr(pred, name)
    with pytest.raises(PredictiveError, match=r'no interval.*link="samples"'):
        pred.interval()
    with pytest.raises(DataError, match="Label 5"):
        pred.log_prob(torch.full((9,), 5))
    assert "ProbitPredictive: classification by a formula, shape=(9, 2)" in repr(pred)


def test_bernoulli_probit_keeps_the_shape_of_the_outputs(x: Tensor) -> None:
    pred = build(credo.likelihoods.Bernoulli(), network(outputs=1)).predict(
        x, at="linearised", link="probit"
    )
    assert pred.probs.shape == (9, 1)
    torch.testing.assert_close(pred.log_prob(torch.ones(9)), pred.probs[:, 0].log())


def test_a_gaussian_likelihood_is_closed_unless_samples_are_asked_for(x: Tensor) -> None:
    posterior = build(credo.likelihoods.Gaussian(scale=0.5))
    pred = posterior.predict(x, at="linearised")
    assert isinstance(pred, NormalPredictive)
    torch.testing.assert_close(pred.variance, pred.epistemic_std**2 + 0.25)
    for name in ("probs", "entropy", "outputs", "mutual_information"):
        with pytest.raises(PredictiveError, match=f"no {name}"):
            getattr(pred, name)
    with pytest.raises(DataError, match="level"):
        pred.interval(1.0)
    with pytest.raises(DataError, match="do not fit"):
        pred.log_prob(torch.zeros(9, 3))
    drawn = posterior.predict(x, 5, at="linearised", link="samples")
    assert type(drawn) is Predictive
    assert drawn.outputs.shape == (5, 9, 2)


def test_outputs_without_a_second_dimension(x: Tensor) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:, 0]

    pred = build(credo.likelihoods.Gaussian(scale=0.5), Flat()).predict(x, at="linearised")
    assert pred.std.shape == pred.log_prob(torch.zeros(9)).shape == (9,)
    expected = 0.3 * (x.square().sum(1) + 1).sqrt()
    torch.testing.assert_close(pred.epistemic_std, expected)


def test_parts_are_joined_by_their_own_kind(x: Tensor) -> None:
    posterior = build(credo.likelihoods.Gaussian(scale=0.5))
    parts = [posterior.predict(part, at="linearised") for part in x.split(4)]
    whole = posterior.predict(x, at="linearised")
    joined = Predictive.concatenate(parts)
    assert isinstance(joined, NormalPredictive)
    torch.testing.assert_close(joined.std, whole.std)
    with pytest.raises(DataError, match="own kind"):
        Predictive.concatenate([*parts, posterior.predict(x, 2)])
    other = build(credo.likelihoods.Gaussian(scale=0.6)).predict(x, at="linearised")
    with pytest.raises(DataError, match="different likelihoods"):
        Predictive.concatenate([whole, other])


def test_noise_that_the_network_predicts_is_integrated_by_samples(x: Tensor) -> None:
    posterior = build(credo.likelihoods.HeteroscedasticGaussian())
    assert posterior.predict(x, 3, at="linearised").std.shape == (9, 1)
    with pytest.raises(UnsupportedError, match="Categorical and Bernoulli, not for Hetero"):
        posterior.predict(x, at="linearised", link="probit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "probit"}, 'link=.* is for at="linearised", not for at=.samples'),
        ({"at": "linearised", "link": "logit"}, "link must be one of 'samples', 'probit' or None"),
        ({"at": "linear"}, '"samples", "mean" or "linearised"'),
    ],
)
def test_options_that_do_not_exist_are_refused(
    x: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build(CATEGORICAL).predict(x, **options)


def test_a_family_that_is_no_gaussian_is_refused(x: Tensor) -> None:
    model = credo.Model(network(), CATEGORICAL)
    points = model.weights(model.random).repeat(3, 1)
    posterior = Posterior.at_network(model, Empirical(points))
    with pytest.raises(UnsupportedError, match=r'Empirical is none.*at="samples"'):
        posterior.predict(x, at="linearised")


def test_too_many_positions_and_too_much_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, x: Tensor
) -> None:
    dense = nn.Conv2d(1, 2, 3, padding=1).double()
    image = torch.zeros(2, 1, 50, 50, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"\(B, 2, 50, 50\) are 5000 .*at=.samples"):
        build(CATEGORICAL, dense).predict(image, at="linearised")
    monkeypatch.setattr(outputs, "MAX_EXAMPLE_BYTES", 100)
    with pytest.raises(UnsupportedError, match=r"needs 0\.0 GB for 2 outputs.*last_layer"):
        build(CATEGORICAL).predict(x, at="linearised")


def test_batches_shrink_with_what_an_example_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = build(CATEGORICAL)
    with posterior.in_network() as flat:
        cheap = outputs.Linearisation(posterior.model, flat, posterior.q)
        full = FullGaussian(posterior.q.mean, torch.eye(posterior.q.size, dtype=torch.float64))
        dear = outputs.Linearisation(posterior.model, flat, full)
        one = torch.zeros(5, 3, dtype=torch.float64)
        assert cheap.batch_size(one) == dear.batch_size(one) == 1024
        monkeypatch.setattr(outputs, "BATCH_BYTES", 8000)
        assert 1 <= dear.batch_size(one) < cheap.batch_size(one) < 1024


@pytest.mark.parametrize("link", ["probit", "samples"])
def test_chunks_within_a_batch_change_nothing(monkeypatch: pytest.MonkeyPatch, link: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    image = torch.randn(7, 1, 4, 4, dtype=torch.float64)
    posterior = build(CATEGORICAL, net)
    whole = posterior.predict(image, 2, at="linearised", link=link).probs
    monkeypatch.setattr(layer_calls, "CHUNK_NUMBERS", 60)
    torch.testing.assert_close(posterior.predict(image, 2, at="linearised", link=link).probs, whole)
