"""MC dropout: masks that are drawn in prediction, and networks that have or get them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import credo
from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.network.dropout import dropout_layers, with_dropout

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(p: float | None = 0.3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    drop = [] if p is None else [nn.Dropout(p)]
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), *drop, nn.Linear(16, 2))


def fit(net: nn.Module, method=None, **more) -> credo.Posterior:
    model = credo.Model(net, credo.likelihoods.Categorical())
    options = {"epochs": 3, "batch_size": 16, "progress": False, **more}
    return credo.fit(model, method or credo.MCDropout(), (X, Y), **options)


def test_samples_are_the_network_with_dropout_on_and_batch_statistics_off() -> None:
    net = network()
    posterior = fit(net)
    pred = posterior.predict(X, samples=3000)
    # By hand: the layers before and after, with masks of torch's own.
    net.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        hidden = net[2](net[1](net[0](X)))
        by_hand = torch.stack(
            [net[4](nn.functional.dropout(hidden, 0.3)).softmax(1) for _ in range(3000)]
        )
    # Two independent means of 3,000 draws each; 5 standard errors of their difference.
    error = (pred.sample_probs.var(0) + by_hand.var(0)).div(3000).sqrt()
    assert ((pred.probs - by_hand.mean(0)).abs() <= 5 * error + 1e-6).all()
    assert pred.epistemic_std.min() > 0
    at_mean = posterior.predict(X, at="mean")
    with torch.no_grad():
        torch.testing.assert_close(at_mean.outputs[0], net(X))


def test_training_is_that_of_map() -> None:
    one = fit(network(), credo.MAP(), seed=2, schedule="cosine")
    other = fit(network(), seed=2, schedule="cosine")
    assert torch.equal(one.mean, other.q.mean)
    assert torch.equal(other.centre, other.model.weights(other.model.random))


def test_predictions_are_repeatable_and_leave_torchs_generator_alone() -> None:
    posterior = fit(network())
    before = torch.get_rng_state()
    one, two = (posterior.predict(X, samples=4).outputs for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    other = posterior.predict(X, samples=4, generator=torch.Generator().manual_seed(3)).outputs
    assert not torch.equal(one, other)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: posterior.predict(X, samples=4).outputs, range(12)))
    assert all(torch.equal(one, each) for each in found)
    streamed = posterior.predict(X, samples=4, keep_samples=False)
    torch.testing.assert_close(streamed.probs, posterior.predict(X, samples=4).probs)
    assert posterior.predict(DataLoader(X, batch_size=10), samples=4).probs.shape == (48, 2)


def test_a_network_without_dropout_gets_it_on_a_copy_that_shares_its_weights(
    tmp_path: Path,
) -> None:
    net = network(None)
    start = net[0].weight.detach().clone()
    posterior = fit(net, credo.MCDropout(p=0.2))
    assert [type(layer) for layer in net] == [type(layer) for layer in network(None)]
    assert not torch.equal(start, net[0].weight)
    assert dropout_layers(posterior.model.net) == ["2.1"]
    assert posterior.predict(X).epistemic_std.min() > 0
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", network(None, seed=4))
    assert torch.equal(again.predict(X).probs, posterior.predict(X).probs)
    tensors, meta = posterior.pack()
    credo.storage.write_tensors(tmp_path / "bad.safetensors", tensors, {**meta, "inserted": 3})
    with pytest.raises(FileFormatError, match="no posterior of MC dropout"):
        credo.load(tmp_path / "bad.safetensors", network(None))


def test_a_probability_is_set_where_there_are_layers() -> None:
    net = network(0.5)
    assert with_dropout(net, 0.1)[3].p == 0.1
    assert net[3].p == 0.5


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
        lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True),
    ],
    ids=["transformer", "LSTM"],
)
def test_layers_that_drop_inside_do_so(layer) -> None:
    """In eval mode torch's fast path for transformers passes over dropout without a word."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = layer(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            found = self.core(x.unsqueeze(1).expand(-1, 3, -1))
            return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])

    torch.manual_seed(0)
    assert fit(Sequence()).predict(X, samples=6).outputs.std(0).min() > 0


def test_ensembles_of_mc_dropout_have_masks_and_members() -> None:
    posterior = fit(network(None), credo.Ensemble(credo.MCDropout(p=0.2), members=2))
    pred = posterior.predict(X, samples=10)
    assert pred.samples == 10
    for part in (pred.outputs[:5], pred.outputs[5:]):
        assert part.std(0).mean() > 0
    assert not torch.equal(pred.outputs[0], pred.outputs[5])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def test_what_can_not_be_meant_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no dropout layer.*MCDropout\(p=0\.1\)"):
        fit(network(None))
    with pytest.raises(UnsupportedError, match="neither dropout layers nor activations"):
        fit(Functional(), credo.MCDropout(p=0.1))
    posterior = fit(network())
    for call in (lambda: posterior.mean, lambda: posterior.sample(3)):
        with pytest.raises(UnsupportedError, match="one of masks"):
            call()
    with pytest.raises(UnsupportedError, match="no Gaussian over weights"):
        posterior.predict(X, at="linearised")
    with pytest.raises(DataError, match="samples=0"):
        posterior.predict(X, samples=0)
    with pytest.raises(DataError, match="p must be"):
        credo.MCDropout(p=1.0)
