"""Every posterior predicts, samples, saves and loads the same way, on every kind of network."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS, WARNINGS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import ZOO, specimen

import credo
from credo.errors import BindingError, DataError, FileFormatError
from credo.families import DiagGaussian, Empirical
from credo.posterior.posterior import Posterior

pytestmark = [
    pytest.mark.filterwarnings("ignore:activation noise reaches:UserWarning"),
    pytest.mark.filterwarnings("ignore:per-example gradients of these:UserWarning"),
    pytest.mark.filterwarnings("ignore:Jacobians of these:UserWarning"),
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
]

EVERYWHERE = {name: row for name, row in METHODS.items() if row.on_every_network}
LIKELIHOOD = credo.likelihoods.Categorical()


def trained(name: str, method: str = "VI", **more) -> tuple[Posterior, torch.Tensor, torch.Tensor]:
    net, x, y = specimen(name, n=16)
    row = METHODS[method]
    model = credo.Model(credo.smooth(net) if row.smooth else net, LIKELIHOOD, **more)
    return credo.fit(model, row.make(), (x, y), epochs=2, progress=False), x, y


@pytest.mark.parametrize("network", ZOO)
@pytest.mark.parametrize("method", EVERYWHERE)
def test_every_method_on_every_network(network, method, tmp_path) -> None:
    posterior, x, y = trained(network, method)
    net = posterior.model.net
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    pred = posterior.predict(x, samples=4)
    assert pred.probs.shape == (16, 3)
    torch.testing.assert_close(pred.probs.sum(1), torch.ones(16))
    assert torch.isfinite(pred.log_prob(y)).all()
    assert all(torch.equal(weights[k], v) for k, v in net.state_dict().items())
    assert posterior.sample(5).shape == (5, posterior.mean.numel())
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    other, _, _ = specimen(network, seed=9)
    again = credo.load(path, credo.smooth(other) if METHODS[method].smooth else other)
    torch.testing.assert_close(again.predict(x, samples=4).probs, pred.probs, rtol=0, atol=0)


def test_prediction_is_repeatable_and_follows_its_generator() -> None:
    posterior, x, _ = trained("mlp")
    a, b = posterior.predict(x).outputs, posterior.predict(x).outputs
    assert torch.equal(a, b)
    c = posterior.predict(x, generator=torch.Generator().manual_seed(1)).outputs
    d = posterior.predict(x, generator=torch.Generator().manual_seed(1)).outputs
    assert torch.equal(c, d)
    assert not torch.equal(a, c)


def test_batches_arrays_and_loaders_give_the_same_prediction() -> None:
    posterior, x, y = trained("mlp")
    whole = posterior.predict(x, samples=5).outputs
    rounding = {"rtol": 1e-5, "atol": 1e-6}  # matrix products of other sizes round differently
    torch.testing.assert_close(posterior.predict(x, 5, batch_size=3).outputs, whole, **rounding)
    torch.testing.assert_close(posterior.predict(x.numpy(), 5).outputs, whole, **rounding)
    double = posterior.predict(x.numpy().astype(np.float64), 5).outputs
    torch.testing.assert_close(double, whole, **rounding)
    for loader in (DataLoader(TensorDataset(x, y), batch_size=7), DataLoader(x, batch_size=7)):
        torch.testing.assert_close(posterior.predict(loader, 5).outputs, whole, **rounding)
    streamed = posterior.predict(x, samples=5, keep_samples=False)
    torch.testing.assert_close(streamed.probs, posterior.predict(x, samples=5).probs, **rounding)


def test_at_mean_is_the_network_itself() -> None:
    posterior, x, _ = trained("conv, batch norm, group norm")
    net = posterior.model.net.eval()
    with torch.no_grad():
        torch.testing.assert_close(posterior.predict(x, at="mean").outputs[0], net(x))


def test_the_network_is_restored_whatever_happens() -> None:
    posterior, x, _ = trained("conv, batch norm, group norm")
    net = posterior.model.net
    net.train()
    net[2].eval()
    with torch.no_grad():
        net[1].running_mean.fill_(3.0)
        next(net.parameters()).fill_(2.0)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    with pytest.raises(ZeroDivisionError), posterior.in_network():
        _ = 1 / net.training  # False in eval mode
    with pytest.raises(RuntimeError):
        posterior.predict(x[:, :1])
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes


def test_buffers_belong_to_the_posterior() -> None:
    posterior, x, _ = trained("conv, batch norm, group norm")
    expected = posterior.predict(x).probs
    with torch.no_grad():
        posterior.model.net[1].running_var.fill_(100.0)
    torch.testing.assert_close(posterior.predict(x).probs, expected, rtol=0, atol=0)


def test_a_posterior_follows_a_network_that_moves() -> None:
    posterior, x, _ = trained("mlp")
    expected = posterior.predict(x, samples=3, at="mean").probs
    posterior.model.net.double()
    pred = posterior.predict(x.double(), samples=3, at="mean")
    assert pred.probs.dtype == torch.float64
    torch.testing.assert_close(pred.probs.float(), expected, rtol=1e-5, atol=1e-6)
    next(posterior.model.net.parameters()).requires_grad_(False)
    with pytest.raises(BindingError, match="added, removed or frozen"):
        posterior.predict(x)


def test_a_subset_is_random_and_the_rest_is_trained() -> None:
    net, x, y = specimen("mlp", n=16)
    start = copy.deepcopy(net.state_dict())
    model = credo.Model(net, LIKELIHOOD, random="last_layer")
    posterior = credo.fit(model, credo.VI(lr=0.05), (x, y), epochs=3, progress=False)
    assert posterior.mean.numel() == 21
    assert not torch.equal(start["0.weight"], net.state_dict()["0.weight"])
    outputs = posterior.predict(x, samples=4).outputs
    assert outputs.std(0).min() > 0


def test_a_scattered_subset_draws_the_right_weights() -> None:
    net, x, y = specimen("mlp", n=16)
    model = credo.Model(net, LIKELIHOOD, random="*.bias")
    posterior = credo.fit(model, credo.VI(lr=0.05), (x, y), epochs=2, progress=False)
    assert posterior.mean.numel() == 9
    weights = net[0].weight.detach().clone()
    with posterior.in_network():
        torch.testing.assert_close(net[0].weight.detach(), weights)
        torch.testing.assert_close(torch.cat([net[0].bias, net[2].bias]).detach(), posterior.mean)


def test_bags_of_samples_predict_with_every_member() -> None:
    net, x, _ = specimen("mlp")
    model = credo.Model(net, LIKELIHOOD)
    bag = Empirical(torch.randn(3, model.random.size))
    posterior = Posterior.at_network(model, bag)
    outputs = posterior.predict(x, samples=3).outputs
    for member, expected in zip(bag.samples, outputs, strict=True):
        alone = Posterior.at_network(model, Empirical(member[None])).predict(x, samples=1)
        torch.testing.assert_close(alone.outputs[0], expected, rtol=0, atol=0)


def test_learned_noise_and_regression_survive_the_disk(tmp_path) -> None:
    x = torch.linspace(-1, 1, 64)[:, None]
    y = 2 * x + 0.3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(1, 1)
    nn.init.zeros_(net.weight)
    likelihood = credo.likelihoods.Gaussian(scale=1.0, learned=True)
    posterior = credo.fit(
        credo.Model(net, likelihood), credo.VI(lr=0.02), (x, y), epochs=300, progress=False
    )
    pred = posterior.predict(x)
    assert float(pred.aleatoric_std.mean()) == pytest.approx(0.3, abs=0.08)
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", nn.Linear(1, 1))
    torch.testing.assert_close(again.predict(x).std, pred.std)
    torch.testing.assert_close(
        pred.std**2, pred.epistemic_std**2 + pred.aleatoric_std**2, rtol=1e-5, atol=1e-7
    )


def test_yesterdays_posterior_is_todays_prior(tmp_path) -> None:
    posterior, x, y = trained("mlp")
    assert isinstance(posterior.q, DiagGaussian)
    model = credo.Model(posterior.model.net, LIKELIHOOD, prior=posterior.q)
    second = credo.fit(model, credo.VI(lr=0.01), (x, y), epochs=2, progress=False)
    second.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", specimen("mlp", seed=3)[0])
    torch.testing.assert_close(again.model.prior.mean, posterior.mean)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> bytes:
    posterior, _, _ = trained("conv, batch norm, group norm")
    path = tmp_path_factory.mktemp("stored") / "p.safetensors"
    posterior.save(path)
    return path.read_bytes()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_files_are_refused_or_read_right(stored, tmp_path_factory, data) -> None:
    raw = bytearray(stored)
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            # mostly the header, where the lies are told
            end = min(len(raw), 2000) if data.draw(st.booleans()) else len(raw)
            raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "p.safetensors"
    path.write_bytes(bytes(raw))
    net, _, _ = specimen("conv, batch norm, group norm")
    try:
        posterior = credo.load(path, net)
    except DataError:
        return
    assert posterior.mean.shape == (posterior.model.random.size,)


def test_wrong_requests_are_refused(tmp_path) -> None:
    posterior, x, _ = trained("mlp")
    with pytest.raises(DataError, match="samples=0"):
        posterior.predict(x, samples=0)
    with pytest.raises(DataError, match="at="):
        posterior.predict(x, at="median")
    with pytest.raises(DataError, match="inputs are empty"):
        posterior.predict(x[:0])
    with pytest.raises(DataError, match="different numbers of examples"):
        posterior.predict({"input": x, "mask": x[:3]})
    by_name = posterior.predict({"input": x}, samples=3, batch_size=5).outputs
    torch.testing.assert_close(by_name, posterior.predict(x, samples=3).outputs)
    posterior.save(tmp_path / "p.safetensors")
    with pytest.raises(FileFormatError, match="another network"):
        credo.load(tmp_path / "p.safetensors", nn.Linear(3, 3))
    with pytest.raises(FileFormatError, match="does not exist"):
        credo.load(tmp_path / "nothing.safetensors", nn.Linear(3, 3))
    with pytest.raises(DataError, match="FromLoss"):
        credo.Model(nn.Linear(1, 1), nn.functional.mse_loss)
    with pytest.raises(DataError, match="Module"):
        credo.Model("net", LIKELIHOOD)
