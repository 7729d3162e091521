"""Studies: sampling, failures, resumption, two sweeps at once, and the table of trials."""

import csv
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from credo.errors import CredoError, DataError, FileFormatError, MissingExtraError
from credo.sweep import Choice, LogUniform, Space, Study, Uniform, run_study, table
from credo.sweep.samplers import make_sampler
from credo.trials.attempt import claimed, is_running
from credo_papers import studies, sweep_command, vi_digits

SPACE = Space({"x": Uniform(-3, 3), "kind": Choice(("a", "b"))})


def bowl(settings, seed, folder):
    return {"loss": (settings["x"] - 1) ** 2, "curve": [1, 2], "x": "mine"}


BOWL = Study("bowl", "A parabola.", SPACE, bowl, objective="loss")


def sweep(study, trials, folder, **more):
    more = {"jobs": 1, "isolated": False, "progress": False, **more}
    return run_study(study, trials, folder, **more)


def counting(log, fails=lambda settings: False):
    def run(settings, seed, folder):
        with log.open("a") as file:
            file.write(f"{settings['x']}\n")
        if fails(settings):
            raise ValueError("on purpose")
        return bowl(settings, seed, folder)

    return Study("bowl", "A parabola.", SPACE, run, objective="loss")


def test_random_trials_depend_on_seed_and_number_alone(tmp_path) -> None:
    few, many = sweep(BOWL, 3, tmp_path / "a"), sweep(BOWL, 5, tmp_path / "b")
    assert [o.trial for o in few.outcomes] == [o.trial for o in many.outcomes][:3]
    other = sweep(BOWL, 3, tmp_path / "a", seed=1)
    assert all(
        a.trial["settings"] != b.trial["settings"]
        for a, b in zip(few.outcomes, other.outcomes, strict=True)
    )


@pytest.mark.parametrize("sampler", ["random", "grid", "optuna"])
def test_finished_trials_are_not_repeated_and_failed_ones_are(tmp_path, sampler) -> None:
    if sampler == "optuna":
        pytest.importorskip("optuna")
    log = tmp_path / "log"
    # optuna's later proposals depend on what came of the earlier ones
    failing = counting(log, fails=lambda settings: settings["kind"] == "a")
    first = sweep(failing, 6, tmp_path / "runs", sampler=sampler)
    runs = len(log.read_text().split())
    again = sweep(failing, 6, tmp_path / "runs", sampler=sampler)
    failures = len(first.failed)
    assert 0 < failures < runs
    assert len(log.read_text().split()) == runs + failures
    assert [o.trial for o in again.outcomes] == [o.trial for o in first.outcomes]
    assert first.best.result["loss"] == min(o.result["loss"] for o in first.ranked())


def test_optuna_learns_and_repeats_itself(tmp_path) -> None:
    pytest.importorskip("optuna")
    space = Space({"lr": LogUniform(1e-6, 1.0)})

    def values(count, seed):
        sampler = make_sampler("optuna", space, "maximize", count, seed)
        found = []
        while asked := sampler.ask(2):
            found += [settings["lr"] for settings in asked]
            sampler.tell([None if lr < 1e-5 else -abs(torch.tensor(lr / 1e-3).log10().item())
                          for lr in found[-len(asked):]])  # fmt: skip
        return found

    found = values(40, seed=0)
    assert found == values(40, seed=0)

    def distance(lrs):
        return torch.tensor(lrs).log10().add(3).abs().median()

    assert distance(found[30:]) < distance(found[:10])


def test_what_is_not_installed_is_named(tmp_path, monkeypatch) -> None:
    for module in ("optuna", "ray", "distributed"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"credo-bayes\[sweep\]"):
        sweep(BOWL, 2, tmp_path, sampler="optuna")
    for engine in ("ray", "dask"):
        with pytest.raises(MissingExtraError, match=rf"credo-bayes\[{engine}\]"):
            sweep(BOWL, 2, tmp_path, engine=engine)
    for name in ("engine", "sampler"):
        with pytest.raises(DataError, match=f"{name} must be one of .*'moon'"):
            sweep(BOWL, 2, tmp_path, **{name: "moon"})


def test_the_table_tells_all_that_happened(tmp_path) -> None:
    def mixed(settings, seed, folder):
        if settings["x"] < -0.5:
            raise ValueError("on purpose, with a comma\nand a second line")
        return {"loss": float("nan")} if settings["x"] < 0.5 else bowl(settings, seed, folder)

    study = Study("mixed", "", Space({"x": Uniform(-1, 2)}), mixed, objective="loss")
    findings = sweep(study, 4, tmp_path, sampler="grid")
    assert [o.error is None for o in findings.outcomes] == [False, False, True, True]
    killed = tmp_path / "trial-0004-dead"
    killed.mkdir()
    trial = {"study": "mixed", "number": 4, "seed": 0, "settings": {"x": 9}}
    (killed / "config.json").write_text(json.dumps(trial))
    (tmp_path / "trial-0005-damaged").mkdir()
    (tmp_path / "trial-0005-damaged" / "config.json").write_text("{cut off")
    with claimed(killed):
        assert "running" in [row["status"] for row in table.collect(tmp_path)]
    rows = table.rebuild(tmp_path)
    statuses = {row["folder"][:10]: row["status"] for row in rows}
    assert statuses == {
        "trial-0000": "failed", "trial-0001": "failed", "trial-0002": "finished",
        "trial-0003": "finished", "trial-0004": "unfinished", "trial-0005": "damaged",
    }  # fmt: skip
    with (tmp_path / "trials.csv").open() as file:
        stored = {row["folder"][:10]: row for row in csv.DictReader(file)}
    assert "comma" not in stored["trial-0001"]["error"]
    assert "is nan" in stored["trial-0001"]["error"]
    last = stored["trial-0003"]
    assert (last["x"], last["loss"], last["result.x"]) == ("2.0", "1.0", "mine")
    assert "curve" not in last
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert any(row.get("curve") == [1, 2] for row in rows)


def test_a_result_without_the_objective_is_a_failure(tmp_path) -> None:
    study = Study("none", "", SPACE, lambda s, seed, f: {"other": 1.0}, objective="loss")
    assert "no number 'loss'" in sweep(study, 1, tmp_path).outcomes[0].error


@pytest.mark.slow
def test_a_trial_that_kills_its_worker_costs_only_itself(tmp_path) -> None:
    """One dies always, one only once; it is one job at a time, so which is which is certain."""

    def deadly(settings, seed, folder):
        mark = tmp_path / f"died-at-{settings['x']}"
        if settings["x"] == 0 or (settings["x"] == 1 and not mark.exists()):
            mark.touch()
            os._exit(3)
        return bowl(settings, seed, folder)

    study = Study("deadly", "", Space({"x": Uniform(-1, 3)}), deadly, objective="loss")
    findings = sweep(study, 5, tmp_path, sampler="grid", jobs=1, isolated=True)
    assert [o.trial["settings"]["x"] for o in findings.outcomes] == [-1, 0, 1, 2, 3]
    assert [o.error is None for o in findings.outcomes] == [True, False, True, True, True]
    assert "a worker process died" in findings.outcomes[1].error
    assert [row["status"] for row in table.collect(tmp_path)].count("failed") == 1


CHILD = """
import sys, time
from pathlib import Path
from credo.sweep import run_many

def slow(trial, folder):
    log = Path(sys.argv[1]) / "log"
    running = folder / "running"
    running.touch(exist_ok=False)       # two at once would fail here
    with log.open("a") as file:
        file.write(f"{trial['n']}\\n")
    time.sleep(0.1)
    running.unlink()
    return {"n": trial["n"]}

outcomes = run_many(slow, [{"n": n} for n in range(12)], 1, Path(sys.argv[1]) / "runs",
                    progress=False)
assert [o.result for o in outcomes] == [{"n": n} for n in range(12)], outcomes
"""


@pytest.mark.slow
def test_two_sweeps_share_a_folder(tmp_path) -> None:
    """Both end with all results, and every trial was run once."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    sweeps = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    messages = [process.communicate(timeout=120)[1] for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], messages
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(12))


@pytest.mark.slow
def test_a_claim_dies_with_its_process(tmp_path) -> None:
    place = tmp_path / "trial"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from credo.trials.attempt import claimed\n"
        "with claimed(Path(sys.argv[1])) as free:\n"
        "    print(free, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(place)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n"
    assert is_running(place)
    child.kill()
    child.wait()
    child.stdout.close()
    until = time.monotonic() + 10
    while is_running(place) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(place)


def on_engine(engine, folder):
    findings = sweep(BOWL, 4, folder, engine=engine, jobs=2, sampler="grid", isolated=True)
    assert [round(o.result["loss"], 6) for o in findings.outcomes] == [16.0, 16.0, 4.0, 4.0]
    assert len(table.collect(folder)) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_on_this_machine(tmp_path) -> None:
    pytest.importorskip("ray")
    on_engine("ray", tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_on_this_machine(tmp_path) -> None:
    pytest.importorskip("distributed")
    on_engine("dask", tmp_path)


def test_the_command_prints_the_best(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(studies.STUDIES, "bowl", lambda: BOWL)
    monkeypatch.setattr(
        sweep_command, "run_study", lambda *args, **more: sweep(args[0], *args[1:], sampler="grid")
    )
    narrow = tmp_path / "space.json"
    narrow.write_text('{"x": {"uniform": [0.5, 1.5]}}')
    findings = sweep_command.sweep("bowl", 6, folder=tmp_path, space=narrow)
    assert findings.best.trial["settings"]["x"] == 1.0
    printed = capsys.readouterr().out
    assert "best of 6 trials" in printed
    assert (tmp_path / "bowl" / "trials.csv").exists()
    assert json.loads((tmp_path / "bowl" / "space.json").read_text())["x"] == {
        "uniform": [0.5, 1.5]
    }
    narrow.write_text('{"y": {"uniform": [0, 1]}}')
    with pytest.raises(DataError, match=r"bowl does not: y\. It has x, kind"):
        sweep_command.sweep("bowl", 6, folder=tmp_path, space=narrow)
    narrow.write_text("{cut off")
    with pytest.raises(FileFormatError, match="can't be read as JSON"):
        sweep_command.sweep("bowl", 6, folder=tmp_path, space=narrow)
    with pytest.raises(DataError, match=r"no study is called 'bow'\. Did you mean bowl"):
        sweep_command.sweep("bow", 1)


def test_a_sweep_of_failures_says_why(tmp_path, monkeypatch) -> None:
    broken = counting(tmp_path / "log", fails=lambda settings: True)
    monkeypatch.setitem(studies.STUDIES, "bowl", lambda: broken)
    monkeypatch.setattr(sweep_command, "run_study", lambda *args, **more: sweep(*args))
    with pytest.raises(CredoError, match="failed in every trial; the first: ValueError"):
        sweep_command.sweep("bowl", 2, folder=tmp_path)


def test_the_built_in_study_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(vi_digits, "EPOCHS", 1)
    study = studies.find_study("vi-digits")
    findings = sweep(study, 1, tmp_path)
    (outcome,) = findings.outcomes
    assert outcome.error is None
    assert {"val_nll", "val_accuracy", "val_ece", "kl", "seconds"} <= outcome.result.keys()
    place = next(Path(tmp_path).glob("trial-0000-*"))
    assert (place / "run" / "state.safetensors").exists()


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_study_has_the_name_it_is_found_by(name) -> None:
    study = studies.find_study(name)
    assert study.name == name
    assert study.about.endswith(".")
