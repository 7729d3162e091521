"""Runs that are killed, interrupted or fed nonsense lose nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from methods import METHODS, WARNINGS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import storage
from credo.errors import (
    BindingError,
    CheckpointError,
    DataError,
    FileFormatError,
    NonFiniteError,
)
from credo.method import Clock
from credo.train import loop
from credo.train.feed import make_feed

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]


def net(seed: int = 0, plain: bool = False) -> nn.Module:
    """Dropout and batch norm, so that the global generator and buffers matter; not if plain."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if plain:
            return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3))
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 3)
        )


def data(n: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fit(method, folder=None, epochs=4, network=None, train=None, **more) -> credo.Posterior:
    model = credo.Model(net() if network is None else network, credo.likelihoods.Categorical())
    return credo.fit(
        model, method, data() if train is None else train, epochs=epochs, batch_size=16, seed=3,
        folder=folder, progress=False, **more,
    )  # fmt: skip


def same(a: credo.Posterior, b: credo.Posterior) -> bool:
    tensors_a, tensors_b = a.q.pack()[0], b.q.pack()[0]
    return (
        all(torch.equal(tensors_a[k], tensors_b[k]) for k in tensors_a)
        and torch.equal(a.point, b.point)
        and all(torch.equal(a.buffers[k], b.buffers[k]) for k in a.buffers)
    )


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("at", [1, 9, 14])
def test_resume_is_bit_exact_from_any_step(name, at, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    method, plain = METHODS[name].make(), METHODS[name].plain
    schedule = "constant" if method.needs_all_data else "cosine"
    whole = fit(method, tmp_path / "whole", network=net(plain=plain), schedule=schedule)
    update = type(method).update
    monkeypatch.setattr(type(method), "update", _dies_after(update, _steps(method, at)))
    with pytest.raises(Killed):
        fit(method, tmp_path / "cut", network=net(plain=plain), schedule=schedule)
    monkeypatch.setattr(type(method), "update", update)
    resumed = fit(method, tmp_path / "cut", network=net(plain=plain), schedule=schedule)
    assert same(whole, resumed)
    strip = [{k: v for k, v in r.items() if k != "seconds"} for r in resumed.history]
    assert strip == [{k: v for k, v in r.items() if k != "seconds"} for r in whole.history]
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", METHODS)
def test_keeping_the_best_epoch_survives_a_death(name, tmp_path, monkeypatch) -> None:
    """Judged by wrong labels, the best epoch is one before the last."""
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    x, y = data()
    options = {"keep": "best", "val_data": (x, 2 - y)}
    method, plain = METHODS[name].make(), METHODS[name].plain
    network = net(plain=plain)
    best = fit(method, network=network, **options)
    scores = [record["val_nll"] for record in best.history]
    winner = scores.index(min(scores))
    assert winner < 3
    with monkeypatch.context() as patch:
        # To a method that plans, the shorter run is one of four epochs as well.
        patch.setattr(Clock, "epochs", property(lambda clock: 4, lambda clock, value: None))
        assert same(best, fit(method, network=net(plain=plain), epochs=winner + 1))
    random = best.model.weights(best.model.random)
    assert torch.equal(random, best.centre)

    monkeypatch.setattr(
        type(method), "update", _dies_after(type(method).update, _steps(method, 17))
    )
    with pytest.raises(Killed):
        fit(method, tmp_path / "cut", network=net(plain=plain), **options)
    monkeypatch.undo()
    assert same(best, fit(method, tmp_path / "cut", network=net(plain=plain), **options))


def _steps(method, minibatches: int) -> int:
    """After how many updates: a method that takes all data has one for seven minibatches."""
    return -(-minibatches // 7) if method.needs_all_data else minibatches


def _dies_after(update, steps: int):
    calls = iter(range(steps))

    def dying(self, state, batch):
        if next(calls, None) is None:
            raise Killed
        return update(self, state, batch)

    return dying


@pytest.mark.parametrize("name", METHODS)
def test_methods_keep_dtype_and_leave_the_net_at_the_mean(name) -> None:
    for dtype in (torch.float32, torch.float64):
        network = net(plain=METHODS[name].plain).to(dtype)
        network.train()
        x, y = data()
        posterior = fit(METHODS[name].make(), network=network, train=(x.to(dtype), y), epochs=1)
        assert posterior.q.mean.dtype == dtype
        assert posterior.predict(x.to(dtype), samples=3).probs.dtype == dtype
        flat = credo.network.bind(network)
        model = posterior.model
        assert torch.equal(model.random.read(flat.vector), posterior.centre)
        assert network.training


SCRIPT = """
import sys, torch
sys.path[:0] = [{tests!r}, {support!r}]
torch.set_num_threads(1)
import test_training_survives as t
from credo.train import loop
from credo.train.feed import make_feed
import credo
loop.SECONDS_BETWEEN_CHECKPOINTS = 0.02
t.fit(credo.VI(lr=0.01), sys.argv[1], epochs=80).save(sys.argv[1] + "/posterior.safetensors")
"""


@pytest.mark.slow
def test_kill_minus_nine_at_any_moment(tmp_path) -> None:
    """A real process, killed several times, ends with the very weights of one that was not."""
    script, here = tmp_path / "train.py", Path(__file__).parent
    script.write_text(SCRIPT.format(tests=str(here), support=str(here.parent / "support")))

    def start(folder: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, str(script), str(tmp_path / folder)])

    assert start("whole").wait(120) == 0
    metrics = tmp_path / "killed" / "metrics.jsonl"
    kills, target = 0, 5
    while kills < 4:
        process = start("killed")
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done >= target:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                target += 18
                break
            time.sleep(0.005)
        else:
            break
    assert kills >= 2, "the runs finished before they could be killed"
    assert start("killed").wait(120) == 0
    files = [(tmp_path / f / "posterior.safetensors").read_bytes() for f in ("whole", "killed")]
    assert files[0] == files[1]
    leftovers = [p.name for p in (tmp_path / "killed").iterdir() if p.name.startswith(".")]
    assert len(leftovers) <= kills


def test_ctrl_c_leaves_a_usable_checkpoint(tmp_path, monkeypatch) -> None:
    whole = fit(credo.VI(), tmp_path / "whole")
    update, calls = credo.VI.update, 0

    def interrupted(self, state, batch):
        nonlocal calls
        calls += 1
        if calls == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, state, batch)

    monkeypatch.setattr(credo.VI, "update", interrupted)
    with pytest.raises(KeyboardInterrupt, match="call fit again"):
        fit(credo.VI(), tmp_path / "run")
    monkeypatch.setattr(credo.VI, "update", update)
    assert same(whole, fit(credo.VI(), tmp_path / "run"))


def test_a_users_loader_resumes_exactly_at_epoch_boundaries(tmp_path, monkeypatch) -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)
    whole = fit(credo.VI(), tmp_path / "whole", train=loader)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["resumes"] == (
        "exactly at epoch boundaries"
    )
    fit(credo.VI(), tmp_path / "cut", train=loader, epochs=2)
    assert same(whole, fit(credo.VI(), tmp_path / "cut", train=loader))


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch) -> None:
    first = fit(credo.VI(), tmp_path / "run")
    monkeypatch.setattr(credo.VI, "update", lambda *_: pytest.fail("trained again"))
    assert same(first, fit(credo.VI(), tmp_path / "run"))


def test_another_configuration_is_refused_in_words(tmp_path) -> None:
    fit(credo.VI(), tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"method\.lr was 0\.003 and is now 0\.002"):
        fit(credo.VI(lr=0.002), tmp_path / "run")
    fit(credo.VI(lr=0.002), tmp_path / "run", epochs=1, resume=False)


def test_a_checkpoint_of_another_version_is_refused_by_name(tmp_path) -> None:
    """As those before version 2, which had no number."""
    fit(credo.VI(), tmp_path / "run", epochs=1)
    config = tmp_path / "run" / "config.json"
    settings = json.loads(config.read_text())
    assert settings.pop("checkpoint_version") == 2
    config.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"version 1, written by Credo .* resume=False"):
        fit(credo.VI(), tmp_path / "run")
    config.write_text(json.dumps({"checkpoint_version": 3, **settings}))
    with pytest.raises(CheckpointError, match="version 3"):
        fit(credo.VI(), tmp_path / "run")
    fit(credo.VI(), tmp_path / "run", epochs=1, resume=False)


def test_what_updates_report_is_averaged_into_the_record() -> None:
    record = fit(credo.VariationalLaplace(lr=0.01), epochs=1).history[0]
    assert record["penalty"] > 0
    assert record["nll"] == pytest.approx(record["nll_at_mean"] + record["penalty"])


def test_a_nonfinite_loss_stops_and_keeps_the_last_good_state(tmp_path) -> None:
    with pytest.raises(NonFiniteError, match=r"step \d+ \(epoch \d+, batch \d+\)") as caught:
        fit(credo.MAP(lr=1e30, optimizer="sgd"), tmp_path / "run")
    assert "the largest in 0.weight" in str(caught.value) or "weights of" in str(caught.value)
    assert "state.safetensors" in caught.value.__notes__[0]
    tensors, _ = storage.read_tensors(tmp_path / "run" / "state.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())


def test_damaged_checkpoints_are_named(tmp_path) -> None:
    fit(credo.VI(), tmp_path / "run", epochs=1)
    state = tmp_path / "run" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-7])
    with pytest.raises(FileFormatError, match="damaged"):
        fit(credo.VI(), tmp_path / "run", epochs=2)


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(*data(), strict=True))


X, Y = data()
BAD_DATA = {
    "empty": ((X[:0], Y[:0]), "empty"),
    "label range": ((X, Y + 2), "Label 3 at index"),
    "negative label": ((X, Y - 1), "-1"),
    "float labels": ((X, Y.float() + 0.5), "float"),
    "nan inputs": ((X.clone().fill_(float("nan")), Y), "NaN or infinite values in 100"),
    "lengths": ((X[:7], Y), "7 examples but the targets 100"),
    "input width": ((X[:, :3], Y), "can't take these inputs"),
    "no targets": ((X,), r"\(inputs, targets\)"),
    "targets shape": ((X, Y[:, None]), "shape"),
    "unknown size": (DataLoader(Unsized(), batch_size=16), "num_data"),
    "bare iterable": (Unsized(), "wrap it in a DataLoader"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_gets_a_named_error_and_nothing_is_lost(name, tmp_path) -> None:
    bad, message = BAD_DATA[name]
    network = net()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with pytest.raises(DataError, match=message):
        fit(credo.VI(), tmp_path / "run", network=network, train=bad)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert not (tmp_path / "run").exists()


def test_num_data_can_be_said_where_it_is_unknown() -> None:
    loader = DataLoader(Unsized(), batch_size=16)
    assert fit(credo.VI(), train=loader, num_data=100, epochs=1).history[0]["step"] == 7


def test_arrays_datasets_and_mappings_are_data() -> None:
    x, y = data()
    reference = fit(credo.VI(), train=(x, y), epochs=2)
    assert same(
        reference, fit(credo.VI(), train=(x.numpy().astype("float64"), y.numpy()), epochs=2)
    )
    assert same(reference, fit(credo.VI(), train=TensorDataset(x, y), epochs=2))
    pairs = torch.utils.data.Subset(TensorDataset(x, y), range(len(x)))
    assert same(reference, fit(credo.VI(), train=pairs, epochs=2))
    named = {"input": x, "labels": y}
    assert same(reference, fit(credo.VI(), train=named, epochs=2))


def test_the_run_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(credo.VI(), epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_records_tell_nll_kl_elbo_and_temperature() -> None:
    x, y = data()
    posterior = fit(credo.VI(temperature=credo.Balanced(0.5)), val_data=(x, y))
    record = posterior.history[-1]
    assert record["temperature"] == pytest.approx(min(1, 0.5 * 100 / posterior.q.size))
    assert record["elbo"] == pytest.approx(
        -100 * record["nll"] - record["temperature"] * record["kl"]
    )
    assert sum(record["kl_segments"].values()) == pytest.approx(record["kl"])
    assert set(record["gradient_norm"]) == set(record["kl_segments"])
    assert {"val_nll", "val_accuracy"} <= record.keys()


def test_degenerate_posteriors_are_told() -> None:
    with pytest.warns(UserWarning, match="scales collapsed"):
        fit(credo.VI(init_scale=1e-5), epochs=1)
    with pytest.warns(UserWarning, match="KL never moved"):
        fit(credo.VI(lr=1e-9), epochs=1)


def test_validation_leaves_out_labels_that_are_to_be_ignored() -> None:
    """Per-pixel labels, some void: the accuracy is over the others."""
    x = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    y[:6, 0] = 7
    model = credo.Model(nn.Conv2d(3, 2, 1), credo.likelihoods.Categorical(ignore_index=7))
    posterior = credo.fit(
        model, credo.MAP(lr=0.05), (x, y), epochs=30, val_data=(x, y), progress=False
    )
    predicted = posterior.predict(x).probs.argmax(1)
    expected = (predicted == y)[y != 7].double().mean().item()
    assert posterior.history[-1]["val_accuracy"] == pytest.approx(expected)
    assert expected > 0.9


@pytest.mark.parametrize("name", ["MAP", "VI"])
@pytest.mark.parametrize("change", ["double", "replace", "freeze"])
def test_a_network_that_is_changed_in_the_middle_of_an_epoch_is_noticed(name, change) -> None:
    """At the next step: not all is looked at in every step, but nothing is trained unseen."""
    network, steps = net(), []

    class Meddler(credo.train.Reporter):
        def step(self, epoch: int, batch: int, nll: float) -> None:
            steps.append(batch)
            if len(steps) != 3:
                return
            layer = network[4]
            if change == "double":
                layer.weight.data = layer.weight.data.clone()
            elif change == "replace":
                layer.weight = nn.Parameter(layer.weight.detach().clone())
            else:
                layer.weight.requires_grad_(False)

    model = credo.Model(network, credo.likelihoods.Categorical())
    with pytest.raises(BindingError, match=r"re-typed|replaced"):
        credo.fit(model, METHODS[name].make(), data(), 2, 16, progress=Meddler())
    assert len(steps) == 3


def test_small_minibatches_looked_up_together_are_those_looked_up_one_by_one() -> None:
    x, y = data(101)
    model = credo.Model(net(), credo.likelihoods.Categorical())
    together = list(make_feed((x, y), 7, model).batches(3, 1, skip=2))
    alone = list(make_feed(((x,), y), 7, model).batches(3, 1, skip=2))
    assert len(together) == 13
    for (inputs, targets), ((other,), other_targets) in zip(together, alone, strict=True):
        assert torch.equal(inputs, other)
        assert torch.equal(targets, other_targets)
