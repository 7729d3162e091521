"""Prediction from many threads gives the numbers of one, and nobody else sees it happen."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, specimen

import credo
from credo.families import DiagGaussian
from credo.network.replica import replica

THREADS = 8
WAYS = ["samples", "mean", "linearised"]
LIKELIHOOD = credo.likelihoods.Categorical()

pytestmark = pytest.mark.filterwarnings("ignore:Jacobians of these:UserWarning")


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def around(net: nn.Module, shift: float = 0.1, scale: float = 0.3) -> credo.Posterior:
    """A posterior whose mean is not where the network is."""
    model = credo.Model(net, LIKELIHOOD)
    weights = model.weights(model.random) + shift
    return credo.Posterior.at_network(model, DiagGaussian(weights, torch.full_like(weights, scale)))


class Watch:
    """A thread that runs the network all the time, and looks at its weights and modes."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net, self.x, self.runs, self.differences = net, x, 0, 0
        self.modes = [module.training for module in net.modules()]
        self.state = {name: value.clone() for name, value in net.state_dict().items()}
        with torch.no_grad():
            self.expected = net(x)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with torch.no_grad():
            while not self._stop.is_set() or not self.runs:
                self.differences += not torch.equal(self.net(self.x), self.expected)
                self.differences += self.modes != [m.training for m in self.net.modules()]
                self.runs += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.runs
        assert not self.differences
        assert self.modes == [module.training for module in self.net.modules()]
        for name, value in self.net.state_dict().items():
            assert torch.equal(value, self.state[name]), name


def together(work: Callable[[int], Tensor], count: int = 24) -> list[Tensor]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(count)))


@pytest.mark.parametrize("network", ZOO)
@pytest.mark.parametrize("at", WAYS)
def test_many_threads_predict_what_one_does(network: str, at: str) -> None:
    net, x, _ = specimen(network)
    net.train()
    if network == "conv, batch norm, group norm":
        net[1].eval()  # its statistics would move with every pass of the other thread
    posterior = around(net)
    expected = posterior.predict(x, samples=6, at=at).probs
    with Watch(net, x):
        found = together(lambda _: posterior.predict(x, samples=6, at=at).probs)
    assert all(torch.equal(probs, expected) for probs in found)


def test_two_posteriors_share_a_network() -> None:
    net, x, _ = specimen("layer norm")
    posteriors = [around(net, 0.1), around(net, -0.5, scale=0.01)]
    expected = [p.predict(x, samples=6).probs for p in posteriors]
    with Watch(net, x):
        found = together(lambda i: posteriors[i % 2].predict(x, samples=6).probs)
    assert all(torch.equal(probs, expected[i % 2]) for i, probs in enumerate(found))


def test_failures_in_some_threads_disturb_no_other() -> None:
    net, x, _ = specimen("mlp")
    posterior = around(net)
    expected = posterior.predict(x, samples=6).probs

    def work(index: int) -> Tensor:
        if index % 2:
            with pytest.raises(RuntimeError):
                posterior.predict(x[:, :1], samples=6)
        return posterior.predict(x, samples=6).probs

    with Watch(net, x):
        assert all(torch.equal(probs, expected) for probs in together(work))


def test_predictions_while_the_network_is_trained() -> None:
    """A posterior does not care what becomes of the network, nor training who predicts."""
    net, x, y = specimen("conv, batch norm, group norm", n=16)
    alone, _, _ = specimen("conv, batch norm, group norm", n=16)
    posterior = around(net)
    expected = posterior.predict(x, samples=6).probs
    stop = threading.Event()
    found: list[bool] = []

    def predict() -> None:
        while not stop.is_set() or not found:
            found.append(torch.equal(posterior.predict(x, samples=6).probs, expected))

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        for each in (net, alone):
            model = credo.Model(each, LIKELIHOOD)
            credo.fit(model, credo.IVON(), (x, y), epochs=20, batch_size=8, progress=False)
    finally:
        stop.set()
        thread.join()
    assert all(found)
    state = alone.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


class Uncopyable(nn.Module):
    """A network that holds a lock can't be copied: it is used in place, by one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(4, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_network_that_cannot_be_copied_is_used_in_turn() -> None:
    net, x = Uncopyable(), torch.randn(5, 4)
    assert replica(net) is None
    posterior = around(net)
    before = [p.data_ptr() for p in net.parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    expected = posterior.predict(x, samples=6).probs
    found = together(lambda _: posterior.predict(x, samples=6).probs)
    assert all(torch.equal(probs, expected) for probs in found)
    assert [p.data_ptr() for p in net.parameters()] == before
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
