"""Temperatures and KL weights."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.errors import DataError, UnsupportedError
from credo.network import bind
from credo.temperature import Balanced, hidden_units, temperature_at
from credo.variational import kl_weights


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 0.97, 1.03, "uniform"])
def test_kl_weights_sum_to_one_over_five_hundred_batches(ratio) -> None:
    """Also in float32, where 2⁵⁰⁰ is infinite."""
    weights = kl_weights(ratio, 500).astype(np.float32)
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1, abs=1e-6)


def test_kl_weights_of_the_sheet() -> None:
    """λ = ½ or 2 over 500 batches: 8 exceed 1/M, 17 exceed 1/M²; λ = 0 has no KL."""
    for ratio in (0.5, 2.0):
        weights = kl_weights(ratio, 500)
        assert (weights > 1 / 500).sum() == 8
        assert (weights > 1 / 500**2).sum() == 17
    np.testing.assert_allclose(kl_weights(2.0, 9), kl_weights(0.5, 9)[::-1], rtol=1e-12)
    assert not kl_weights(0.0, 7).any()
    assert (kl_weights("uniform", 8) == 1 / 8).all()


def test_balanced_temperature_is_tau_n_over_p() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
    segments = bind(net).segments
    size = 10 * 20 + 20 + 20 * 2 + 2
    assert Balanced(0.01).resolve(segments, 1000) == pytest.approx(0.01 * 1000 / size)
    assert hidden_units(segments) == 20
    units = Balanced(0.001, per="units", max_temperature=10.0)
    assert units.resolve(segments, 1000) == pytest.approx(0.001 * 1000 / 20)
    assert Balanced(1.0).resolve(segments, 10**9) == 1.0
    assert Balanced(1.0, max_temperature=5.0).resolve(segments, 10**9) == 5.0


@pytest.mark.parametrize(
    ("net", "units"),
    [
        (nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 2)), 20),
        (nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 7), nn.Linear(7, 2)), 30 + 7),
        (nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2)), 8),
        (nn.Linear(10, 3), 1),
        (nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 4), nn.Linear(4, 2)), 6 + 4),
        (nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.Flatten(), nn.Linear(20, 2)), 5),
    ],
)
def test_units_are_what_the_hidden_layers_put_out(net: nn.Module, units: int) -> None:
    """Neither inputs, nor outputs, nor biases and norm layers; a linear model counts as one."""
    segments = bind(net).segments
    assert hidden_units(segments) == units
    free = Balanced(0.01, per="units", max_temperature=math.inf)
    assert free.resolve(segments, 600) == pytest.approx(0.01 * 600 / units)
    assert Balanced(0.01, per="units").resolve(segments, 10**9) == 1.0


def test_per_units_is_the_temperature_of_document_000() -> None:
    """η = τp/N with N neurons, whatever the number of inputs and outputs."""
    for inputs, outputs in ((1, 1), (784, 10)):
        segments = bind(nn.Sequential(nn.Linear(inputs, 50), nn.Linear(50, outputs))).segments
        found = temperature_at(Balanced(0.3, per="units"), segments, 100, epoch=0.0)
        assert found == pytest.approx(0.3 * 100 / 50)


def test_balanced_loss_is_mean_nll_plus_tau_over_n_kl() -> None:
    """η = τ·p/N makes the KL's weight η/p = τ/N: the number of examples cancels."""
    net = nn.Linear(10, 20)
    segments = bind(net).segments
    for num_data in (100, 100_000):
        eta = Balanced(0.01, max_temperature=math.inf).resolve(segments, num_data)
        assert eta / num_data == pytest.approx(0.01 / 220)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, lambda epoch: -epoch - 1])
def test_bad_temperatures_are_refused(bad) -> None:
    with pytest.raises(DataError, match="temperature is"):
        temperature_at(bad, bind(nn.Linear(1, 1)).segments, 10, 0.5)


def test_schedules_and_warm_up_are_functions_of_the_epoch() -> None:
    x, y = torch.randn(64, 2), torch.randint(2, (64,))
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    schedule = credo.VI(temperature=lambda epoch: 0.5 if epoch < 1 else 0.1, lr=0.1)
    posterior = credo.fit(model, schedule, (x, y), epochs=2, batch_size=16, progress=False)
    assert [r["temperature"] for r in posterior.history] == [0.1, 0.1]
    method = credo.VI(warmup=2.0, temperature=1.0)
    state = method.init(model, 64)
    weights = []
    for _ in range(10):
        weights.append(method._kl_weight(state) * 64)
        method.update(state, (x[:16], y[:16]))
    assert weights == pytest.approx([0, *[min(1, k / 8) for k in range(1, 10)]])


def test_kl_weights_reach_the_update() -> None:
    x, y = torch.randn(64, 2), torch.randint(2, (64,))
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    method = credo.VI(kl_weights=0.5)
    state = method.init(model, 64)
    found = []
    for _ in range(4):
        state.clock.begin(64, 16)
        found.append(method._kl_weight(state) * 64 / 4)
        method.update(state, (x[:16], y[:16]))
    np.testing.assert_allclose(found, kl_weights(0.5, 4), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"estimator": "magic"}, DataError, "estimator must be one of"),
        ({"noise": "pink"}, DataError, "noise must be one of"),
        ({"noise": "local", "estimator": "path"}, UnsupportedError, "never draws the weights"),
        ({"samples": 0}, DataError, "samples must be"),
        ({"lr": -1.0}, DataError, "must be a positive"),
        ({"link": "cube"}, DataError, "link must be one of"),
        ({"warmup": -1.0}, DataError, "warmup must be 0 or"),
        ({"scale_lr": -0.1}, DataError, "scale_lr must be 0 or"),
    ],
)
def test_nonsense_settings_are_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        credo.VI(**settings)


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [("adm", DataError), ("muon", UnsupportedError), (lambda groups: None, DataError)],
)
def test_optimizers_that_cannot_work_are_refused(optimizer, error) -> None:
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    with pytest.raises(error, match="optimizer="):
        credo.VI(optimizer=optimizer).init(model, 10)


@pytest.mark.parametrize("name", ["adam", "adamw", "adamax", "nadam", "radam", "rmsprop",
                                  "adagrad", "adadelta", "asgd", "sgd"])  # fmt: skip
def test_optimizers_by_name_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 2)
    y = (x[:, 0] > 0).long()
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    lr = 1.0 if name == "adadelta" else 0.02
    method = credo.VI(optimizer=name, lr=lr, scale_lr=lr, temperature=0.1)
    posterior = credo.fit(model, method, (x, y), epochs=10, batch_size=8, progress=False)
    assert posterior.history[-1]["nll"] < posterior.history[0]["nll"]


def test_a_callable_gets_groups_named_mean_and_scale() -> None:
    seen = []

    def build(groups):
        seen.extend((g["name"], g["lr"]) for g in groups)
        return torch.optim.SGD(groups)

    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    credo.VI(optimizer=build, lr=0.1, scale_lr=0.03).init(model, 10)
    assert seen == [("mean", 0.1), ("scale", 0.03)]


@pytest.mark.parametrize(
    "method",
    [credo.MAP, credo.VI, credo.VariationalLaplace, credo.VOGN, credo.IVON, credo.Vadam,
     credo.Laplace, credo.HMC, credo.SGLD],
)  # fmt: skip
def test_every_method_refuses_a_negative_temperature_where_it_is_given(method) -> None:
    with pytest.raises(DataError, match=r"temperature must be .* -1\.0"):
        method(temperature=-1.0)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_positive_is_refused(cap: float) -> None:
    with pytest.raises(DataError, match="max_temperature"):
        Balanced(0.1, max_temperature=cap)
