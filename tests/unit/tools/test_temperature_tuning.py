"""`credo.tune_temperature`: the right value, for two trainings, said clearly."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError
from credo.tools import held_out

GRID = (0.1, 1.0, 10.0, 100.0, 10_000.0)


def orthogonal_problem(seed=0, features=4, noise=2.0):
    """Linear regression whose inputs are orthogonal, so that mean-field VI is exact.

    The likelihood believes in unit noise where there is twice as much.
    """
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(60, features)))[0] * math.sqrt(60)
    truth = rng.normal(size=(features, 1))
    x_new = rng.normal(size=(400, features))
    train, held = (
        (torch.tensor(x), torch.tensor(x @ truth + noise * rng.normal(size=(len(x), 1))))
        for x in (basis, x_new)
    )
    return train, held


def exact(train, eta):
    """Mean and precision of the tempered posterior, for unit noise and a unit prior."""
    x, y = (t.numpy() for t in train)
    precision = x.T @ x / eta + np.eye(x.shape[1])
    return np.linalg.solve(precision, x.T @ y / eta), precision


def exact_nll(train, held, eta):
    mean, precision = exact(train, eta)
    x, y = (t.numpy() for t in held)
    variance = 1 + np.sum(x * np.linalg.solve(precision, x.T).T, axis=1)
    return -stats.norm.logpdf(y[:, 0], (x @ mean)[:, 0], np.sqrt(variance)).mean()


def linear_model(features=4):
    torch.manual_seed(0)
    net = torch.nn.Linear(features, 1, bias=False).double()
    likelihood, prior = credo.likelihoods.Gaussian(scale=1.0), credo.priors.Normal(scale=1.0)
    return credo.Model(net, likelihood, prior)


# Here its expansion to second order is exact, and nothing is sampled.
METHOD = credo.VariationalLaplace(curvature="hessian", lr=0.15, scale_lr=0.2)


def linear_search(**changes):
    train, held = orthogonal_problem()
    settings = {
        "values": GRID, "kind": "temperature", "epochs": 240, "batch_size": 60, "samples": 200,
        "val_data": held, "schedule": "cosine", "progress": False,
    } | changes  # fmt: skip
    return credo.tune_temperature(linear_model(), METHOD, train, **settings)


@pytest.fixture(scope="module")
def search():
    return linear_search()


def digits_model(likelihood=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, 10))
    return credo.Model(net, likelihood or credo.likelihoods.Categorical())


def digits(count=160):
    images = credo.data.digits()
    return images.train[0][:count].flatten(1), images.train[1][:count]


def quietly(*args, **settings):
    """A short search, whose doubts about itself are not what is tested."""
    with pytest.warns(UserWarning, match="best|training NLL"):
        return credo.tune_temperature(*args, progress=False, **settings)


def test_it_picks_the_best_of_the_exact_posteriors_and_follows_them(search):
    train, held = orthogonal_problem()
    truth = [exact_nll(train, held, eta) for eta in GRID]
    assert 0 < int(np.argmin(truth)) < len(GRID) - 1
    assert search.best_index == int(np.argmin(truth))
    assert search.temperature == search.best.eta == GRID[search.best_index]
    # Sixty epochs at each value after the first, and 200 draws to score it.
    np.testing.assert_allclose([row.nll for row in search.rows], truth, rtol=0.03)
    assert search.doubts == ()


def test_warm_starts_end_where_a_training_of_its_own_does(search):
    train, _ = orthogonal_problem()
    alone = credo.fit(
        linear_model(), dataclasses.replace(METHOD, temperature=search.temperature), train,
        epochs=240, batch_size=60, schedule="cosine", progress=False,
    )  # fmt: skip
    mean, precision = exact(train, search.best.eta)
    for posterior in (alone, search.posterior):
        np.testing.assert_allclose(posterior.mean, mean[:, 0], atol=0.05)
        np.testing.assert_allclose(posterior.q.scale, np.diag(precision) ** -0.5, rtol=0.05)


@pytest.mark.parametrize("epochs", [7, 20, 50])
def test_eight_values_cost_at_most_two_trainings(epochs, monkeypatch):
    steps = 0
    update = credo.MAP.update

    def counted(self, state, batch):
        nonlocal steps
        steps += 1
        return update(self, state, batch)

    monkeypatch.setattr(credo.MAP, "update", counted)
    search = quietly(digits_model(), credo.MAP(), digits(), epochs=epochs, batch_size=32)
    assert len(search.rows) == 8
    one_training = epochs * 4  # 128 of 160 examples
    assert steps <= 2 * one_training
    assert search.cost == pytest.approx(steps / one_training)
    assert [row.epochs for row in search.rows] == [epochs, *[epochs // 7] * 7]


@pytest.mark.parametrize(
    "method", [credo.VI(), credo.VOGN(), credo.IVON(), credo.Vadam(), credo.MAP(),
               credo.VariationalLaplace()], ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_every_method_with_a_temperature_can_be_tuned(method):
    model, data = digits_model(), digits()
    before = model.weights()
    first = quietly(model, method, data, values=(0.01, 1.0), epochs=3)
    after = model.weights()
    torch.testing.assert_close(after, first.posterior.mean, rtol=0, atol=0)
    assert [row.tau for row in first.rows] == [0.01, 1.0]
    count, size = 128, first.posterior.mean.numel()
    assert first.rows[0].eta == pytest.approx(0.01 * count / size)
    assert all(math.isfinite(row.nll) and 0 <= row.accuracy <= 1 for row in first.rows)
    assert isinstance(first.temperature, credo.Balanced)
    # The same once more, from the same weights.
    with model.bind().writing() as vector:
        vector.copy_(before)
    again = quietly(model, method, data, values=(1.0, 0.01), epochs=3)
    assert torch.equal(model.bind().vector, after)
    assert [row.nll for row in again.rows] == [row.nll for row in first.rows]


def test_the_network_is_left_at_the_best_value_not_at_the_last():
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )
    model = credo.Model(net, credo.likelihoods.Categorical())
    with pytest.warns(UserWarning, match="smallest"):
        search = credo.tune_temperature(
            model, credo.VI(lr=0.03), digits(300), values=(1e-3, 1e3), kind="temperature",
            epochs=20, progress=False,
        )  # fmt: skip
    assert search.best_index == 0
    chosen, running = search.posterior, net[1].running_mean
    torch.testing.assert_close(model.weights(model.random), chosen.mean, rtol=0, atol=0)
    torch.testing.assert_close(running, chosen.buffers["1.running_mean"], rtol=0, atol=0)


def test_learned_noise_follows_the_choice():
    train, held = orthogonal_problem()
    net = torch.nn.Linear(4, 1, bias=False).double()
    model = credo.Model(net, credo.likelihoods.Gaussian(scale=1.0, learned=True))
    with pytest.warns(UserWarning, match="smallest"):
        search = credo.tune_temperature(
            model, credo.VI(lr=0.05), train, values=(0.1, 1e4), kind="temperature", epochs=60,
            val_data=held, progress=False,
        )  # fmt: skip
    assert model.likelihood.scale == pytest.approx(search.posterior.model.likelihood.scale)
    assert model.likelihood.scale == pytest.approx(2.0, rel=0.3)


def test_cross_validation_uses_every_example_once_and_trains_anew_on_all():
    data = digits(90)
    model = digits_model()
    parts = held_out.splits(model, data, 32, None, 0.2, 4, seed=0)
    assert [part.num_held_out for part in parts] == [23, 23, 22, 22]
    together = torch.cat([part.held_out[0] for part in parts])
    assert torch.equal(together.unique(dim=0), data[0].unique(dim=0))
    assert all(part.num_data + part.num_held_out == 90 for part in parts)
    start = model.weights()
    search = quietly(model, credo.VI(), data, values=(0.01, 0.1), epochs=4, folds=4)
    assert search.folds == 4
    assert search.refitted
    assert search.cost == 4 * 2 + 1
    with model.bind().writing() as vector:
        vector.copy_(start)
    alone = credo.fit(
        model, credo.VI(temperature=search.temperature), data, epochs=4, progress=False
    )
    assert torch.equal(alone.mean, search.posterior.mean)


def test_datasets_are_split_like_tensors():
    data = digits(100)
    from_tensors = quietly(digits_model(), credo.MAP(), data, values=(0.1, 1.0), epochs=2)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return data[0][index], data[1][index]

    for other in (TensorDataset(*data), Rows()):
        found = quietly(digits_model(), credo.MAP(), other, values=(0.1, 1.0), epochs=2)
        assert [row.nll for row in found.rows] == [row.nll for row in from_tensors.rows]


def test_laplace_takes_one_pass_for_each_value():
    data = digits(300)
    model = digits_model()
    credo.fit(model, credo.MAP(lr=0.03), data, epochs=100, progress=False)
    weights = model.weights()
    images = credo.data.digits()
    test = images.test[0][:300].flatten(1), images.test[1][:300]
    values = (0.003, 0.03, 0.3)
    search = quietly(model, credo.Laplace(), data, values=values, kind="temperature", val_data=test)
    assert search.cost == 0
    assert torch.equal(model.bind().vector, weights)
    for row in search.rows:
        alone = credo.fit(model, credo.Laplace(temperature=row.eta), data, progress=False)
        nll = -float(alone.predict(test[0], samples=32).log_prob(test[1]).mean())
        assert row.nll == pytest.approx(nll, rel=0.02)  # the pass has its own order of batches
    with pytest.raises(DataError, match="not held out: give val_data"):
        credo.tune_temperature(model, credo.Laplace(), data, progress=False)


# --- what it says ---------------------------------------------------------------------------------


def test_a_best_value_at_an_end_is_doubted():
    with pytest.warns(UserWarning, match="η = 100, is the smallest that was tried"):
        search = linear_search(values=(100.0, 10_000.0), epochs=80)
    assert "try smaller ones" in str(search)
    with pytest.warns(UserWarning, match="is the largest that was tried: try larger ones"):
        linear_search(values=(1.0, 10.0), epochs=80)


def test_the_cap_of_balanced_is_named_and_its_repetitions_are_not_trained():
    train, held = orthogonal_problem()
    with pytest.warns(UserWarning, match="η = 1, is the cap of credo.Balanced"):
        search = credo.tune_temperature(
            linear_model(), METHOD, train, values=(0.01, 0.1, 1.0, 10.0), epochs=60,
            batch_size=60, val_data=held, progress=False,
        )  # fmt: skip
    assert [row.eta for row in search.rows] == pytest.approx([0.15, 1.0])
    assert [row.tau for row in search.rows] == [0.01, 0.1]


def test_training_that_had_not_converged_is_doubted():
    data = digits(400)
    search = quietly(digits_model(), credo.VI(lr=1e-3), data, values=(0.01, 0.1, 0.5), epochs=4)
    assert "was not trained to the end" in search.doubts[0]
    assert search.rows[0].train_nll > search.best.train_nll


def test_it_prints_a_table_with_the_winner_marked_and_draws_it(search, tmp_path):
    found = quietly(digits_model(), credo.VI(), digits(), values=(0.01, 0.1, 0.5), epochs=4)
    lines = str(found).splitlines()
    assert lines[0].split() == ["τ", "η", "NLL", "ECE", "accuracy", "seconds"]
    assert [line.endswith("← best") for line in lines[1:4]].count(True) == 1
    assert lines[1 + found.best_index].endswith("← best")
    assert "cost 2 trainings" in str(found)
    for result in (found, search):
        assert result.plot(tmp_path / "deep" / "search.png").stat().st_size > 5_000


def test_progress_goes_to_standard_error(capfd):
    with pytest.warns(UserWarning, match="best|training NLL"):
        credo.tune_temperature(digits_model(), credo.MAP(), digits(), values=(0.1, 1.0), epochs=2)
    out, err = capfd.readouterr()
    assert out == ""
    assert "τ = 1" in err


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"values": (0.1, -1.0)}, "τ must be a positive finite number, but it is -1.0"),
        ({"values": (0.0, 1.0)}, "τ must be a positive finite number"),
        ({"values": (0.0, 1.0), "kind": "temperature"}, "the temperature must be a positive"),
        ({"values": ()}, "values has 0 different entries"),
        ({"values": (1.0, 1.0)}, "values has 1 different entries"),
        ({"kind": "cold"}, "kind must be one of"),
        ({"val_share": 0.001}, "160 examples are too few for val_share=0.001"),
        ({"val_share": 1.0}, "val_share must be a number from 0 to 1"),
        ({"folds": 1}, "folds must be a whole number of at least 2"),
        ({"folds": 161}, "160 examples are too few for folds=161"),
        ({"folds": 2, "val_data": 1}, "choose one"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"method": credo.VI(temperature=lambda epoch: 0.1)}, "temperature is a schedule"),
        ({"data": DataLoader(TensorDataset(*digits(20)))}, "a DataLoader can't be split"),
    ],
)  # fmt: skip
def test_bad_questions_get_a_named_error_before_any_training(settings, message):
    model = digits_model()
    before = model.weights()
    asked = {"method": credo.VI(), "data": digits(), "progress": False} | settings
    with pytest.raises(DataError, match=message):
        credo.tune_temperature(model, **asked)
    assert torch.equal(model.bind().vector, before)


def test_methods_without_a_temperature_are_refused_by_name():
    class Untempered:
        default_epochs = 3

    with pytest.raises(DataError, match="Untempered has no temperature to tune"):
        credo.tune_temperature(digits_model(), Untempered(), digits(), progress=False)
