"""Learning rates over a run."""

import math

import pytest
import torch
from torch import nn

import credo
from credo.errors import CheckpointError, DataError, UnsupportedError
from credo.train.schedules import START, RateSchedule


def fit(method, schedule, epochs=3, folder=None):
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    return credo.fit(
        model, method, (x, (x[:, 0] > 0).long()), epochs=epochs, batch_size=16, progress=False,
        schedule=schedule, folder=folder,
    )  # fmt: skip


def test_cosine_is_torchs_annealing_step_for_step() -> None:
    weight = nn.Parameter(torch.zeros(1))
    ours, theirs = torch.optim.SGD([weight], lr=0.3), torch.optim.SGD([weight], lr=0.3)
    schedule = RateSchedule("cosine", ours)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=12)
    for step in range(12):
        schedule.set(step / 12)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        theirs.step()
        reference.step()


def test_rates_follow_the_fraction_done_in_each_group() -> None:
    seen = []

    def watching(groups):
        class Watched(torch.optim.Adam):
            def step(self, closure=None):
                seen.append([group["lr"] for group in self.param_groups])
                return super().step(closure)

        return Watched(groups)

    method = credo.VI(lr=0.1, scale_lr=0.5, optimizer=watching)
    fit(method, {"mean": "linear", "scale": lambda fraction: 2 * fraction})
    assert len(seen) == 12
    for step, (mean, scale) in enumerate(seen):
        assert mean == pytest.approx(0.1 * (1 - step / 12))
        assert scale == pytest.approx(0.5 * 2 * step / 12)


def test_a_schedule_changes_the_result_and_constant_does_not() -> None:
    plain, constant, cosine = (
        fit(credo.MAP(lr=0.1), schedule).mean for schedule in ("constant", lambda _: 1.0, "cosine")
    )
    assert torch.equal(plain, constant)
    assert not torch.equal(plain, cosine)


def test_a_resumed_run_must_be_as_long_as_the_one_it_resumes(tmp_path) -> None:
    fit(credo.MAP(), "cosine", epochs=1, folder=tmp_path)
    with pytest.raises(CheckpointError, match="epochs"):
        fit(credo.MAP(), "cosine", epochs=2, folder=tmp_path)


def test_bad_schedules_are_named() -> None:
    with pytest.raises(DataError, match=r"'cosin' is unknown.*cosine"):
        fit(credo.MAP(), "cosin")
    with pytest.raises(DataError, match=r"\['sigma'\].*\['mean', 'scale'\]"):
        fit(credo.VI(), {"sigma": "cosine"})
    with pytest.raises(UnsupportedError, match="has none"):
        RateSchedule("cosine", None)


def test_the_given_rate_is_kept_where_torch_looks_for_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    RateSchedule("cosine", optimizer).set(0.5)
    (group,) = optimizer.param_groups
    assert group[START] == 0.3
    assert math.isclose(group["lr"], 0.15)
