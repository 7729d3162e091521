"""Members trained as one: the same as in turn, whatever they are, and what can't be is told."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import credo
from credo.ensembles.stacked import ELEMENTWISE
from credo.errors import DataError, NonFiniteError, UnsupportedError

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(70, 4, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :1] * 2 - X[:, 1:2] ** 2 + 0.1 * torch.randn(70, 1, generator=GENERATOR).double()
LABELS = (X[:, 0] > X[:, 1]).long()

ROUNDING = 1e-12
"""Twenty steps and more multiply rounding errors of 1e-16 by a few powers of ten at most."""


def layers(out: int = 1) -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh())
    return nn.Sequential(nn.Flatten(), inner, nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, out))


class Own(nn.Module):
    """A ``forward`` of its own, a weight used twice, a norm layer, and a buffer of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)) + self.shift)
        return self.head(torch.tanh(self.second(h)))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(27, 1),
    )  # fmt: skip


def frozen() -> nn.Module:
    net = layers()
    net[2].requires_grad_(False)
    return net


def fit(training: str, net=layers, method=None, likelihood=None, targets=Y, folder=None, **more):
    torch.manual_seed(0)
    # A copy, because training moves the learned noise of the one it is given.
    likelihood = copy.deepcopy(likelihood or credo.likelihoods.Gaussian(scale=0.5))
    model = credo.Model(net().double(), likelihood)
    settings = {k: more.pop(k) for k in ("order", "bootstrap", "factory", "members") if k in more}
    ensemble = credo.Ensemble(
        method or credo.MAP(lr=0.02), **{"members": 3, **settings}, training=training
    )
    options = {
        "epochs": 5,
        "batch_size": 16,
        "seed": 3,
        "progress": False,
        "folder": folder,
        **more,
    }
    return credo.fit(model, ensemble, (X, targets), **options)


def assert_same(one, other, tolerance: float = ROUNDING) -> None:
    assert len(one.members) == len(other.members)
    for a, b in zip(one.members, other.members, strict=True):
        torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=tolerance)
        torch.testing.assert_close(a.point, b.point, rtol=0, atol=tolerance)
        assert a.model.likelihood.config() == pytest.approx(b.model.likelihood.config(), abs=1e-6)
    nll = [[record["nll"] for record in each.history] for each in (one, other)]
    assert nll[0] == pytest.approx(nll[1], abs=tolerance)


def learned() -> credo.likelihoods.Gaussian:
    return credo.likelihoods.Gaussian(scale=0.5, learned=True).double()


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    # It compares the examples of a batch, so that batches must stay what they are.
    return (outputs - targets).abs().flatten(1).sum(1) + outputs.std()


CASES = {
    "layers": {},
    "common order": {"order": "common"},
    "bootstrap": {"bootstrap": True},
    "own forward": {"net": Own},
    "own forward, common order": {"net": Own, "order": "common"},
    "convolutions": {"net": convolutions},
    "frozen": {"net": frozen},
    "learned noise": {"likelihood": learned()},
    "learned noise, own forward": {"likelihood": learned(), "net": Own, "order": "common"},
    "classes": {
        "net": lambda: layers(2),
        "targets": LABELS,
        "likelihood": credo.likelihoods.Categorical(),
    },
    "left out": {
        "net": lambda: layers(2),
        "targets": torch.where(torch.arange(70) % 3 == 0, -1, LABELS),
        "likelihood": credo.likelihoods.Categorical(ignore_index=-1),
    },
    "yes or no": {"targets": LABELS.double(), "likelihood": credo.likelihoods.Bernoulli()},
    "own noise": {
        "net": lambda: layers(2),
        "targets": Y,
        "likelihood": credo.likelihoods.HeteroscedasticGaussian(),
    },
    "any loss": {"likelihood": credo.likelihoods.FromLoss(absolute)},
    "maximum likelihood": {"method": credo.MLE(lr=0.02)},
    "penalty": {"method": credo.MAP(lr=0.02, penalty="group_lasso")},
    "warm temperature": {"method": credo.MAP(lr=0.02, temperature=lambda epoch: min(1, epoch / 3))},
    "schedule": {"schedule": "cosine"},
    "best epoch": {"val_data": (X[:20], Y[:20]), "keep": "best", "method": credo.MAP(lr=0.3)},
}


@pytest.mark.parametrize("case", CASES)
def test_together_is_in_turn(case: str) -> None:
    one, other = (fit(training, **CASES[case]) for training in ("together", "in_turn"))
    assert [each.history[-1]["together"] for each in (one, other)] == [True, False]
    assert_same(one, other)


@pytest.mark.parametrize("optimizer", sorted(ELEMENTWISE - {"momentum"}))
def test_every_elementwise_optimizer_makes_its_own_steps(optimizer: str) -> None:
    method = credo.MAP(lr=0.02, optimizer=optimizer)
    assert_same(*(fit(training, method=method) for training in ("together", "in_turn")))


@pytest.mark.parametrize("prior", [credo.priors.Laplace(scale=0.5), credo.priors.Normal(scale=0.3)])
def test_every_member_is_drawn_to_the_prior_by_itself(prior) -> None:
    found = []
    for training in ("together", "in_turn"):
        torch.manual_seed(0)
        model = credo.Model(layers().double(), credo.likelihoods.Gaussian(), prior)
        method = credo.Ensemble(members=3, training=training)
        found.append(credo.fit(model, method, (X, Y), epochs=5, batch_size=16, progress=False))
    assert_same(*found)


def test_a_run_may_go_on_in_the_other_way(tmp_path: Path) -> None:
    """The checkpoint is the members', with optimizer and noise, however they were trained."""
    whole = fit("in_turn", likelihood=learned(), epochs=6)
    for first, then in (("together", "in_turn"), ("in_turn", "together")):
        folder = tmp_path / first
        fit(first, likelihood=learned(), epochs=3, folder=folder)
        rest = fit(then, likelihood=learned(), epochs=6, folder=folder)
        assert rest.history[-1]["together"] == (then == "together")
        assert_same(rest, whole)


def broken_factory(bad: int):
    """Networks whose number ``bad`` has weights that overflow."""
    built = 0

    def build() -> nn.Module:
        nonlocal built
        built += 1
        net = layers().double()
        if built == bad:
            with torch.no_grad():
                net[4].weight.fill_(1e300)
        return net

    return build


def test_a_member_that_diverges_is_named_and_the_others_learn_as_if_it_were_not_there(
    tmp_path: Path,
) -> None:
    found = {}
    for training in ("together", "in_turn"):
        with pytest.warns(UserWarning, match=r"member 2 of the ensemble diverged.*layer|weights"):
            found[training] = fit(
                training, factory=broken_factory(2), members=4, folder=tmp_path / training
            )
    assert len(found["together"].members) == 3
    assert found["together"].history[-1]["together"]
    assert_same(found["together"], found["in_turn"])
    # And the checkpoint, which holds only numbers, can be gone on from.
    again = fit(
        "together", factory=broken_factory(2), members=4, epochs=6, folder=tmp_path / "together"
    )
    assert len(again.members) == 3


def test_where_all_but_one_are_lost_that_one_goes_on_and_where_all_are_it_is_an_error() -> None:
    with pytest.warns(UserWarning, match="member 1 of the ensemble diverged"):
        posterior = fit("together", factory=broken_factory(1), members=2)
    alone = fit("in_turn", members=1)
    torch.testing.assert_close(posterior.members[0].mean, alone.members[0].mean, rtol=0, atol=1e-12)
    diverged = pytest.warns(UserWarning, match="diverged")
    with diverged, pytest.raises(NonFiniteError, match="all 2 members"):
        fit("together", method=credo.MLE(lr=1e200), members=2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x.unsqueeze(1))[0][:, -1])


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(out.detach().sum()) > 0 else 2 * out


class Counts(nn.Linear):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Drops(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def hooked() -> nn.Module:
    net = layers()
    net[1].register_forward_hook(print)
    return net


REFUSED = {
    "running statistics": lambda: nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
    ),
    "drops at random": lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)),
    "recurrent": Recurrent,
    "vmap": lambda: Chooses(4, 1),
    "changes its buffers": lambda: Counts(4, 1),
    "random numbers": lambda: Drops(4, 1),
    "hooks": hooked,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_not_be_stacked_is_trained_in_turn_and_refused_where_it_was_asked_for(
    reason: str, capsys
) -> None:
    net = REFUSED[reason]
    one, other = (fit(training, net, epochs=1) for training in ("auto", "in_turn"))
    assert not one.history[-1]["together"]
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(one.members, other.members, strict=True))
    with pytest.raises(UnsupportedError, match=rf"can't be trained together: .*{reason}.*in_turn"):
        fit("together", net, epochs=1)


def test_methods_and_optimizers_that_can_not_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"its method is VI; credo\.MAP"):
        fit("together", method=credo.VI())
    with pytest.raises(UnsupportedError, match="yellowfin, does not treat every weight"):
        fit("together", method=credo.MAP(optimizer="yellowfin"))
    with pytest.raises(UnsupportedError, match="not given by name"):
        fit("together", method=credo.MAP(optimizer=lambda groups: torch.optim.SGD(groups)))
    with pytest.raises(DataError, match="no common order"):
        credo.Ensemble(bootstrap=True, order="common")
    with pytest.raises(DataError, match="members must be"):
        credo.Ensemble(members=0)
    with pytest.raises(DataError, match="training must be one of"):
        credo.Ensemble(training="stacked")


def test_a_factory_that_builds_other_activations_is_refused() -> None:
    """Members predict on copies of the first network: a ReLU would become a Tanh."""

    def other() -> nn.Module:
        net = layers()
        net[1][1] = nn.ReLU()
        return net

    with pytest.raises(DataError, match=r"another architecture.*1\.1 is ReLU.*Tanh"):
        fit("auto", factory=other)


def test_linear_layers_that_see_sequences_are_mapped() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 3, 4, dtype=torch.float64)
    found = []
    for training in ("together", "in_turn"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        model = credo.Model(net, credo.likelihoods.Gaussian())
        method = credo.Ensemble(members=2, training=training)
        found.append(
            credo.fit(model, method, (x, x[..., :1]), epochs=3, batch_size=8, progress=False)
        )
    assert found[0].history[-1]["together"]
    assert_same(*found)


class Rows(Dataset):
    """Examples that are reached one by one."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return X[row], Y[row]


@pytest.mark.parametrize("data", [Rows(), DataLoader(Rows(), batch_size=16)], ids=["set", "loader"])
def test_datasets_give_every_member_its_order_and_loaders_one_to_all(data) -> None:
    found = []
    for training in ("together", "in_turn"):
        torch.manual_seed(0)
        model = credo.Model(layers().double(), credo.likelihoods.Gaussian())
        method = credo.Ensemble(members=2, training=training)
        found.append(credo.fit(model, method, data, epochs=2, batch_size=16, progress=False))
    assert found[0].history[-1]["together"]
    assert_same(*found)


def test_the_default_takes_tiny_networks_together_and_large_ones_in_turn() -> None:
    assert fit("auto").history[-1]["together"]
    assert not fit("auto", convolutions).history[-1]["together"]
    assert not fit("auto", method=credo.VI(), epochs=1).history[-1]["together"]
