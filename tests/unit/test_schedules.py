"""Learning rates over a run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import credo
from credo import schedules
from credo.errors import CheckpointError, DataError, UnsupportedError
from credo.optim.lean import LeanAdam
from credo.packing import pack_optimizer as pack
from credo.packing import unpack_optimizer as unpack
from credo.schedules import PlateauMemory
from credo.train.rates import START, Rates


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
    schedule = Rates("cosine", ours)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=12)
    for step in range(12):
        schedule.set(step, 12)
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
        Rates("cosine", None)


def test_the_given_rate_is_kept_where_torch_looks_for_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    Rates("cosine", optimizer).set(0.5, 1)
    (group,) = optimizer.param_groups
    assert group[START] == 0.3
    assert math.isclose(group["lr"], 0.15)


def torch_rates(make, epochs, lr=0.3):
    """The rates that a scheduler of torch's gives, epoch by epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedules.step(every=3, factor=0.5),
         lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5)),
        (schedules.step(at=(2, 7)),
         lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 7], gamma=0.1)),
        (schedules.cyclic(6, low=0.2),
         lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.06, 0.3, 3, cycle_momentum=False)),
        (schedules.warmup(4, start=0.25),
         lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, total_iters=4)),
    ],
    ids=["step", "milestones", "cyclic", "warmup"],
)  # fmt: skip
def test_schedules_by_epoch_are_torchs(ours, theirs) -> None:
    assert [0.3 * ours.factor(epoch, 10) for epoch in range(10)] == pytest.approx(
        torch_rates(theirs, 10), rel=1e-9
    )


def test_a_warm_up_hands_over_to_the_other_schedule() -> None:
    rising = schedules.warmup(2, then=schedules.warmup(2, then="cosine"))
    assert rising.factor(1, 12) == 0.5
    assert rising.factor(3, 12) == 0.5
    assert rising.factor(8, 12) == pytest.approx(schedules.cosine(0.5))


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.floats(0.01, 100), min_size=1, max_size=30),
    patience=st.integers(0, 3),
    factor=st.sampled_from([0.1, 0.5]),
)
def test_a_plateau_is_torchs(values, patience, factor) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=patience, factor=factor, min_lr=0.3e-3, eps=0.0
    )
    ours, memory = schedules.plateau("nll", patience, factor, lowest=1e-3), PlateauMemory()
    for value in values:
        torchs.step(value)
        memory = ours.after(memory, value)
        assert 0.3 * memory.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


def test_a_plateau_takes_what_is_not_a_number_for_no_improvement() -> None:
    ours = schedules.plateau("nll", patience=0, factor=0.5)
    memory = ours.after(ours.after(PlateauMemory(), math.nan), -1.0)
    assert memory == PlateauMemory(best=-1.0, waited=0, factor=0.5)
    # Below zero "lower by a margin" still means lower.
    assert ours.after(memory, -1.0).factor == 0.25
    assert ours.after(memory, -1.1).factor == 0.5


def test_means_watch_the_nll_and_scales_the_kl() -> None:
    rates = Rates(
        schedules.dual_plateau(patience=0, factor=0.5), two_groups := optimizer_of_two_groups()
    )
    rates.learn({"nll": 1.0, "kl": 9.0})
    rates.learn({"nll": 0.5, "kl": 9.0})
    rates.set(2, 10)
    assert [group["lr"] for group in two_groups.param_groups] == [0.1, 0.25]
    rates.learn({"nll": 0.5, "kl": 8.0})
    rates.set(3, 10)
    assert [group["lr"] for group in two_groups.param_groups] == [0.05, 0.25]


def optimizer_of_two_groups():
    mean, scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.SGD(
        [{"params": [mean], "lr": 0.1, "name": "mean"},
         {"params": [scale], "lr": 0.5, "name": "scale"}]
    )  # fmt: skip


def test_groups_at_rest_do_not_move() -> None:
    turns = schedules.alternate(mean_epochs=1, scale_epochs=2)
    history = fit(credo.VI(lr=0.1, scale_ratio=1.0), turns, epochs=3).history
    assert [r["rates"] for r in history] == [
        {"mean": 0.1, "scale": 0.0}, {"mean": 0.0, "scale": 0.1}, {"mean": 0.0, "scale": 0.1}
    ]  # fmt: skip
    assert history[0]["log_scale_moved"] == 0
    assert history[1]["log_scale_moved"] != 0


METHODS = {
    "MAP": credo.MAP(),
    "VI": credo.VI(),
    "VariationalLaplace": credo.VariationalLaplace(),
    "VOGN": credo.VOGN(),
    "IVON": credo.IVON(),
    "Vadam": credo.Vadam(),
}
WITH_SCALES = ("VI", "VariationalLaplace")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:the KL never moved")
def test_every_gradient_method_takes_every_schedule(name) -> None:
    plain = fit(METHODS[name], "constant", epochs=2).mean
    for schedule in ("linear", schedules.warmup(1), schedules.step(every=1), schedules.cyclic(1),
                     schedules.plateau(patience=0), lambda fraction: 0.0):  # fmt: skip
        scheduled = fit(METHODS[name], schedule, epochs=2).mean
        assert torch.isfinite(scheduled).all()
        assert not torch.equal(scheduled, plain) or isinstance(schedule, schedules.Plateau)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("make", [schedules.alternate, schedules.dual_plateau])
@pytest.mark.filterwarnings("ignore:the KL never moved")
def test_schedules_for_scales_need_a_method_that_has_a_rate_for_them(name, make) -> None:
    if name in WITH_SCALES:
        fit(METHODS[name], make(), epochs=2)
        return
    with pytest.raises(DataError, match=r"\['scale'\], but this method has \['mean'\]"):
        fit(METHODS[name], make(), epochs=2)


def test_a_run_with_a_plateau_resumes_exactly(tmp_path, monkeypatch) -> None:
    plan = schedules.dual_plateau(patience=0, factor=0.5)
    method = credo.VI(lr=2.0, scale_ratio=0.01)
    monkeypatch.setattr("credo.train.loop.SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    whole = fit(method, plan, epochs=8)
    assert whole.history[4]["rates"]["mean"] < 2.0, "the plateau must act before the crash"

    class Killed(Exception):
        pass

    def dies(self, record, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 5:
            raise Killed
        return learn(self, record)

    learn = Rates.learn
    with monkeypatch.context() as patch:
        patch.setattr(Rates, "learn", dies)
        with pytest.raises(Killed):
            fit(method, plan, epochs=8, folder=tmp_path)
    resumed = fit(method, plan, epochs=8, folder=tmp_path)
    assert torch.equal(resumed.mean, whole.mean)
    assert [r["rates"] for r in resumed.history] == [r["rates"] for r in whole.history]


def test_a_plateau_watches_only_what_is_recorded() -> None:
    with pytest.raises(DataError, match=r"watches 'kl'.*negative_log_prior, nll"):
        fit(credo.MAP(), schedules.plateau("kl"))
    with pytest.raises(DataError, match="watches 'val_nll'"):
        fit(credo.VI(), schedules.plateau("val_nll"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: schedules.step(), "either every"),
        (lambda: schedules.step(every=1, at=(2,)), "either every"),
        (lambda: schedules.cyclic(0), "period"),
        (lambda: schedules.warmup(2, then="plateau"), "can't be followed"),
        (lambda: schedules.plateau(factor=1.0), "factor must be"),
        (lambda: schedules.plateau(patience=-1), "patience"),
        (lambda: schedules.alternate(mean_epochs=0), "mean_epochs"),
    ],
)
def test_bad_arguments_are_named(make, match) -> None:
    with pytest.raises(DataError, match=match):
        make()


def test_scales_rate_by_ratio_or_by_itself_but_not_both() -> None:
    for method in (credo.VI, credo.VariationalLaplace):
        state = method(lr=0.02, scale_ratio=0.1).init(
            credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical()), 10
        )
        rates = {group["name"]: group["lr"] for group in state.optimizer.param_groups}
        assert rates == {"mean": 0.02, "scale": pytest.approx(0.002)}
        with pytest.raises(DataError, match="give one of them"):
            method(scale_lr=0.1, scale_ratio=0.1)
        with pytest.raises(DataError, match="scale_ratio must be"):
            method(scale_ratio=-1)


def test_means_and_scales_may_have_optimizers_of_their_own(tmp_path) -> None:
    apart = credo.VI(optimizer={"mean": "sgd", "scale": "adam"}, lr=0.05)
    state = apart.init(credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical()), 64)
    sgd, adam = state.optimizer.parts
    assert (type(sgd), type(adam)) == (torch.optim.SGD, LeanAdam)
    # Two of a kind are one of it, step for step; the schedule reaches both.
    both = credo.VI(optimizer={"mean": "adam", "scale": "adam"}, lr=0.05)
    one = credo.VI(optimizer="adam", lr=0.05)
    assert torch.equal(fit(both, "cosine").mean, fit(one, "cosine").mean)
    # A finished run, read back.
    done = fit(apart, "cosine", folder=tmp_path)
    assert torch.equal(fit(apart, "cosine", folder=tmp_path).mean, done.mean)
    with pytest.raises(DataError, match=r"\['mean'\].*\['mean', 'scale'\]"):
        fit(credo.VI(optimizer={"mean": "sgd"}), "constant")


def test_separate_optimizers_are_packed_and_unpacked_whole() -> None:
    def stepped(steps):
        torch.manual_seed(0)
        state = credo.VI(optimizer={"mean": "adam", "scale": "rmsprop"}).init(
            credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical()), 64
        )
        for _ in range(steps):
            for group in state.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.fill_(1.0)
            state.optimizer.step()
        return state.optimizer

    trained, fresh = stepped(3), stepped(0)
    trained.param_groups[1]["lr"] = 0.7
    tensors, meta = pack(trained)
    unpack(fresh, {name: t.clone() for name, t in tensors.items()}, meta)
    again, meta_again = pack(fresh)
    assert meta_again == meta
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert fresh.parts[1].param_groups[0]["lr"] == 0.7
