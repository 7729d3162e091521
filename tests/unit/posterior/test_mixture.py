"""Several posteriors merged into one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import credo
from credo.errors import DataError, FileFormatError
from credo.posterior import MixturePosterior

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def posterior(seed: int, method=None, net=None, **more) -> credo.Posterior:
    torch.manual_seed(seed)
    model = credo.Model(net or nn.Linear(3, 2), credo.likelihoods.Categorical(), **more)
    return credo.fit(model, method or credo.VI(), (X, Y), epochs=2, seed=seed, progress=False)


def test_saved_posteriors_of_several_runs_become_one(tmp_path: Path) -> None:
    parts = [posterior(seed) for seed in range(3)]
    for k, part in enumerate(parts):
        part.save(tmp_path / f"{k}.safetensors")
    net = nn.Linear(3, 2)
    merged = credo.merge([credo.load(tmp_path / f"{k}.safetensors", net) for k in range(3)])
    each = [part.predict(X, at="mean").probs for part in parts]
    torch.testing.assert_close(merged.predict(X, at="mean").probs, torch.stack(each).mean(0))
    torch.testing.assert_close(merged.mean, torch.stack([p.mean for p in parts]).mean(0))
    merged.save(tmp_path / "all.safetensors")
    again = credo.load(tmp_path / "all.safetensors", nn.Linear(3, 2))
    assert isinstance(again, MixturePosterior)
    assert torch.equal(again.predict(X).probs, merged.predict(X).probs)


def test_mixtures_count_with_each_of_their_members() -> None:
    two, one = credo.merge([posterior(0), posterior(1)]), posterior(2)
    three = credo.merge([two, one])
    assert len(three.members) == 3
    assert three.sample(4).shape == (4, 8)


def test_what_can_not_be_merged_is_named() -> None:
    first = posterior(0)
    with pytest.raises(DataError, match="nothing to merge"):
        credo.merge([])
    with pytest.raises(DataError, match=r"number 1 is a str.*credo\.load"):
        credo.merge([first, "p.safetensors"])
    with pytest.raises(DataError, match=r"is of another architecture: parameter weight"):
        credo.merge([first, posterior(1, net=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))])
    with pytest.raises(DataError, match=r"other random weights.*bias"):
        credo.merge([first, posterior(1, random="weight")])
    model = credo.Model(nn.Linear(3, 2), credo.likelihoods.Gaussian())
    other = credo.fit(model, credo.VI(), (X, X[:, :2]), epochs=1, progress=False)
    with pytest.raises(DataError, match="likelihood Gaussian, the first Categorical"):
        credo.merge([first, other])


def test_a_damaged_mixture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    merged = credo.merge([posterior(0), posterior(1)])
    tensors, meta = merged.pack()
    for bad in ({**meta, "members": []}, {**meta, "members": 3}, {"kind": "mixture"}):
        credo.storage.write_tensors(path, tensors, bad)
        with pytest.raises(FileFormatError):
            credo.load(path, nn.Linear(3, 2))


def test_points_on_one_copy_predict_as_each_by_itself() -> None:
    """Each with its own weights, statistics and noise, in pieces or at once."""
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model = credo.Model(net, credo.likelihoods.Gaussian(learned=True))
    method = credo.Ensemble(credo.MAP(lr=0.05), members=3)
    posterior = credo.fit(model, method, (x, x[:, :1]), epochs=3, batch_size=8, progress=False)
    found = posterior.predict(x)
    each = [member.predict(x) for member in posterior.members]
    assert torch.equal(found.outputs, torch.cat([one.outputs for one in each]))
    torch.testing.assert_close(
        found.log_prob(x[:, :1]),
        torch.stack([one.log_prob(x[:, :1]) for one in each]).logsumexp(0) - math.log(3),
    )
    torch.testing.assert_close(posterior.predict(x, batch_size=7).outputs, found.outputs)
    streamed = posterior.predict(x, keep_samples=False)
    torch.testing.assert_close(streamed.mean, found.mean)
