"""The last layer is the one that runs last."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo import ZOO, specimen

import credo
from credo.errors import DataError
from credo.network import last_layer


class HeadFirst(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.head = head or nn.Linear(6, 3)
        self.body = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Twice(HeadFirst):
    """The head runs twice, at two depths."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.head(self.body(x).tanh()).tanh())


class Tied(nn.Module):
    """The output layer is the embedding, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))


class BareMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.ParameterList([torch.randn(4, 3), torch.zeros(3)])
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh() @ self.out[0] + self.out[1]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


def names(model: credo.Model) -> set[str]:
    return {segment.name for segment in model.random.segments}


@pytest.mark.parametrize("network", ZOO)
def test_every_network_ends_where_its_outputs_come_from(network: str) -> None:
    net, x, _ = specimen(network)
    modes = [module.training for module in net.modules()]
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    layer = net.get_submodule(last_layer(net, x))
    assert isinstance(layer, nn.Linear)
    assert layer.out_features == 3
    assert modes == [module.training for module in net.modules()]
    assert all(torch.equal(b, buffers[name]) for name, b in net.named_buffers())


def test_sequential_networks_need_no_inputs() -> None:
    block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), block, nn.LayerNorm(3), nn.ReLU())
    assert last_layer(net) == "1.2"
    model = credo.Model(net, credo.likelihoods.Categorical(), random="last_layer")
    assert names(model) == {"1.2.weight", "1.2.bias"}
    assert last_layer(nn.Linear(2, 1)) == ""


@pytest.mark.parametrize(
    "method", [credo.VI(), credo.MAP(), credo.Laplace(), credo.IVON(), credo.VOGN()]
)
@pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")
def test_fit_finds_the_head_that_was_declared_first(method) -> None:
    net, x = HeadFirst(), torch.randn(16, 4)
    data = x, torch.randint(3, (16,))
    model = credo.Model(net, credo.likelihoods.Categorical(), random="last_layer")
    with pytest.raises(DataError, match=r"known only after a forward pass.*random=\"head\""):
        _ = model.random
    posterior = credo.fit(model, method, data, epochs=1, progress=False)
    assert names(model) == names(posterior.model) == {"head.weight", "head.bias"}
    assert posterior.predict(x, samples=3).probs.shape == (16, 3)


@pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")
def test_laplace_of_the_last_layer_takes_the_head(tmp_path) -> None:
    net, x = HeadFirst(), torch.randn(16, 4)
    model = credo.Model(net, credo.likelihoods.Categorical())
    method = credo.Laplace(subset="last_layer", structure="full")
    posterior = credo.fit(model, method, (x, torch.randint(3, (16,))), progress=False)
    assert names(posterior.model) == {"head.weight", "head.bias"}
    posterior.save(tmp_path / "p.safetensors")
    assert names(credo.load(tmp_path / "p.safetensors", HeadFirst()).model) == names(
        posterior.model
    )


def test_observing_by_hand() -> None:
    model = credo.Model(HeadFirst(), credo.likelihoods.Categorical(), random="last_layer")
    model.observe(torch.randn(2, 4))
    assert names(model) == {"head.weight", "head.bias"}
    assert names(model.replace(prior=credo.priors.Normal(2.0))) == names(model)


def test_a_parametrised_head_is_one_layer() -> None:
    net = HeadFirst(parametrizations.weight_norm(nn.Linear(6, 3)))
    model = credo.Model(net, credo.likelihoods.Categorical(), random="last_layer")
    model.observe(torch.randn(2, 4))
    assert names(model) == {
        "head.bias",
        "head.parametrizations.weight.original0",
        "head.parametrizations.weight.original1",
    }


def test_matrices_without_a_layer_of_their_own() -> None:
    assert last_layer(BareMatrices(), torch.randn(2, 4)) == "out"


AMBIGUOUS = {
    "used twice": (Twice, torch.randn(2, 4), "used more than once"),
    "tied": (Tied, torch.randint(7, (2, 3)), "used more than once"),
    "attention": (Attends, torch.randn(2, 3, 8), "run in one call"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_is_ambiguous_is_refused(case: str) -> None:
    make, x, reason = AMBIGUOUS[case]
    with pytest.raises(DataError, match=reason):
        last_layer(make(), x)
    model = credo.Model(make(), credo.likelihoods.Categorical(), random="last_layer")
    model.observe(x)
    with pytest.raises(DataError, match="Name the layer"):
        _ = model.random


def test_sequential_ambiguities_are_seen_without_running() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(DataError, match="used more than once"):
        last_layer(nn.Sequential(layer, nn.Tanh(), layer))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    with pytest.raises(DataError, match="used more than once"):
        last_layer(tied)


@pytest.mark.parametrize(
    "make", [HeadFirst, lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))]
)
def test_a_frozen_last_layer_is_refused(make) -> None:
    net = make()
    layer = net.head if isinstance(net, HeadFirst) else net[1]
    layer.requires_grad_(False)
    with pytest.raises(DataError, match="is frozen"):
        last_layer(net, torch.randn(2, 4))
    layer.weight.requires_grad_(True)
    model = credo.Model(net, credo.likelihoods.Categorical(), random="last_layer")
    model.observe(torch.randn(2, 4))
    assert [name.rpartition(".")[2] for name in names(model)] == ["weight"]
