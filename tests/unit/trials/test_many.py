import json
import os

import joblib
import pytest
import torch

from credo.errors import DataError, FileFormatError
from credo.sweep import run_many
from credo.trials.many import trial_key


def counting(log):
    """A function of a trial that leaves a line in ``log`` whenever it really runs."""

    def function(trial, folder):
        with open(log, "a") as file:
            file.write(f"{trial['x']}\n")
        if trial["x"] < 0:
            raise ValueError(f"x={trial['x']} is negative")
        return {"root": trial["x"] ** 0.5}

    return function


def test_outcomes_come_in_the_order_of_the_trials(tmp_path):
    trials = [{"x": 9}, {"x": 1}, {"x": 4}]
    outcomes = run_many(counting(tmp_path / "log"), trials, jobs=1, progress=False)
    assert [o.result for o in outcomes] == [{"root": 3.0}, {"root": 1.0}, {"root": 2.0}]
    assert [o.trial for o in outcomes] == trials


def test_a_failed_trial_is_recorded_and_the_others_go_on(tmp_path):
    function, trials = counting(tmp_path / "log"), [{"x": 4}, {"x": -1}, {"x": 9}]
    outcomes = run_many(function, trials, 1, tmp_path / "runs", progress=False)
    assert [o.result and o.result["root"] for o in outcomes] == [2.0, None, 3.0]
    assert outcomes[1].error == "ValueError: x=-1 is negative"
    recorded = tmp_path / "runs" / f"trial-{trial_key({'x': -1})}" / "error.txt"
    assert "x=-1 is negative" in recorded.read_text()


def test_finished_trials_are_not_repeated_and_failed_ones_are(tmp_path):
    log, runs = tmp_path / "log", tmp_path / "runs"
    trials = [{"x": 4}, {"x": -1}]
    first = run_many(counting(log), trials, 1, runs, progress=False)
    again = run_many(counting(log), [*trials, {"x": 9}], 1, runs, progress=False)
    assert log.read_text().split() == ["4", "-1", "-1", "9"]
    assert again[0] == first[0]


def test_a_trial_folder_tells_what_was_run_and_where(tmp_path):
    run_many(
        counting(tmp_path / "log"), [{"x": 4}], 1, tmp_path, lambda t: f"x = {t['x']}/a", False
    )
    (place,) = (p for p in tmp_path.iterdir() if p.is_dir())
    assert place.name == f"x___4_a-{trial_key({'x': 4})}"
    assert json.loads((place / "config.json").read_text()) == {"x": 4}
    assert json.loads((place / "result.json").read_text()) == {"root": 2.0}
    assert "torch" in json.loads((place / "env.json").read_text())


def test_other_settings_are_another_trial(tmp_path):
    log = tmp_path / "log"
    for lr in (0.1, 0.2, 0.1):
        run_many(counting(log), [{"x": 4, "lr": lr}], 1, tmp_path / "runs", progress=False)
    assert len(log.read_text().split()) == 2


def test_workers_are_processes_that_share_the_cores_and_may_fail(tmp_path):
    def look(trial, folder):
        if trial["fail"]:
            raise RuntimeError("on purpose")
        return {"process": os.getpid(), "threads": torch.get_num_threads()}

    trials = [{"fail": False}, {"fail": True}]
    done, failed = run_many(look, trials, jobs=2, folder=tmp_path, progress=False)
    assert done.result["process"] != os.getpid()
    allowed = min(torch.get_num_threads(), joblib.cpu_count() // 2)
    assert done.result["threads"] == max(1, allowed)
    assert failed.error == "RuntimeError: on purpose"


def test_a_run_takes_no_more_threads_than_it_is_allowed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (done,) = run_many(
            lambda trial, folder: {"threads": torch.get_num_threads()}, [{}], 1, progress=False
        )
    finally:
        torch.set_num_threads(before)
    assert done.result == {"threads": 1}


def test_threads_are_put_back_after_running_in_this_process():
    before = torch.get_num_threads()
    run_many(lambda trial, folder: {}, [{"x": 1}], jobs=1, progress=False)
    assert torch.get_num_threads() == before


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(DataError, match="jobs must be a whole number of at least 1"):
        run_many(lambda trial, folder: {}, [{"x": 1}], jobs=0)
    place = tmp_path / f"trial-{trial_key({'x': 1})}"
    place.mkdir()
    (place / "result.json").write_text("{cut off")
    with pytest.raises(FileFormatError, match="delete it, and the trial will be run again"):
        run_many(lambda trial, folder: {}, [{"x": 1}], 1, tmp_path)


def test_no_trials_are_no_work():
    assert run_many(lambda trial, folder: {}, [], progress=False) == []
