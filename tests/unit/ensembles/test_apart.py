"""Members in worker processes: the same members, resumable; one that dies is one that is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import CheckpointError, DataError, NonFiniteError, UnsupportedError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * 2 - 1


class Net(nn.Module):
    """``deadly`` kills the process that runs the network."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.register_buffer("deadly", torch.tensor(0.0))
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if self.deadly > 0 and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.two(torch.tanh(self.norm(self.one(x))))


def fit(method=None, factory=None, folder=None, **settings):
    torch.manual_seed(0)
    model = credo.Model(Net(), credo.likelihoods.Gaussian(scale=0.5, learned=True))
    epochs = settings.pop("epochs", 2)
    ensemble = credo.Ensemble(method or credo.MAP(lr=0.02), members=2, factory=factory, **settings)
    posterior = credo.fit(
        model, ensemble, (X, Y), epochs=epochs, batch_size=16, seed=4, progress=False,
        schedule="cosine" if folder is None else "constant", folder=folder,
    )  # fmt: skip
    return posterior, model


@pytest.mark.slow
def test_a_worker_makes_the_member_that_one_process_makes() -> None:
    here, model = fit(credo.VI(lr=0.02), bootstrap=True)
    there, other = fit(credo.VI(lr=0.02), bootstrap=True, jobs=2)
    assert len(there.members) == 2
    for a, b in zip(here.members, there.members, strict=True):
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.q.scale, b.q.scale)
        assert torch.equal(a.point, b.point)
        assert all(torch.equal(a.buffers[k], b.buffers[k]) for k in a.buffers)
        assert a.model.likelihood.scale == b.model.likelihood.scale
    assert torch.equal(here.predict(X).mean, there.predict(X).mean)
    # The network is left where one process leaves it, batch statistics and noise included.
    assert torch.equal(model.weights(), other.weights())
    assert torch.equal(model.net.norm.running_mean, other.net.norm.running_mean)
    assert model.likelihood.scale == other.likelihood.scale
    assert there.history[-1]["nll"] == pytest.approx(here.history[-1]["nll"])


@pytest.mark.slow
def test_what_is_finished_is_not_repeated_and_a_dead_worker_is_a_lost_member(
    tmp_path: Path,
) -> None:
    whole, _ = fit(folder=tmp_path / "whole", epochs=4)
    fit(folder=tmp_path / "apart", epochs=2, jobs=2)
    begun = (tmp_path / "apart" / "member-1" / "metrics.jsonl").read_text().splitlines()
    rest, _ = fit(folder=tmp_path / "apart", epochs=4, jobs=2)
    lines = (tmp_path / "apart" / "member-1" / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == begun
    for a, b in zip(whole.members, rest.members, strict=True):
        assert torch.equal(a.mean, b.mean)
    with pytest.raises(CheckpointError, match="in one process: go on without jobs"):
        fit(folder=tmp_path / "whole", jobs=2)

    def deadly() -> nn.Module:
        net = Net()
        net.deadly.fill_(1.0)
        return net

    with pytest.warns(UserWarning, match=r"member 1 of the ensemble is lost.*worker process died"):
        posterior, _ = fit(factory=deadly, jobs=2)
    assert len(posterior.members) == 1
    assert torch.isfinite(posterior.predict(X).mean).all()


@pytest.mark.slow
def test_a_run_that_diverges_is_named_and_other_errors_are_those_of_one_process() -> None:
    def overflowing() -> nn.Module:
        net = Net()
        with torch.no_grad():
            net.two.weight.fill_(1e30)
        return net

    with pytest.warns(UserWarning, match=r"member 1 of the ensemble is lost.*loss is"):
        posterior, _ = fit(factory=overflowing, jobs=2)
    assert len(posterior.members) == 1
    with pytest.raises(DataError, match="mean") as caught:
        credo.fit(
            credo.Model(nn.Linear(3, 1), credo.likelihoods.Gaussian()),
            credo.Ensemble(credo.MAP(optimizer="adm"), members=2, jobs=2), (X, Y), progress=False,
        )  # fmt: skip
    assert "member 0 of the ensemble" in caught.value.__notes__[0]
    with (
        pytest.warns(UserWarning, match="is lost"),
        pytest.raises(NonFiniteError, match="all 2 members"),
    ):
        fit(credo.MAP(lr=1e30), jobs=2, epochs=4)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DataError, match=r"jobs=2.*order=\"common\""):
        credo.Ensemble(jobs=2, order="common")
    with pytest.raises(DataError, match=r"jobs=2.*training=\"together\""):
        credo.Ensemble(jobs=2, training="together")
    with pytest.raises(DataError, match=r"engine=\"ray\".*jobs=2"):
        credo.Ensemble(engine="ray")
    with pytest.raises(DataError, match="jobs must be"):
        credo.Ensemble(jobs=0)
    with pytest.raises(NotImplementedError, match="MAP takes no run over"):
        credo.MAP().whole_run(credo.fit, None, None)
    assert issubclass(UnsupportedError, NotImplementedError)
