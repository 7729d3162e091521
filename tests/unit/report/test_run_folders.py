"""Folders of `credo.fit` are read as they are, damaged ones included."""

import json
from pathlib import Path

import pytest
import torch

import credo
from credo.errors import DataError
from credo.report import read_runs, run_page


def write(folder: Path, config: object, *lines: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_a_run_of_fit_is_read_with_its_records(tmp_path: Path) -> None:
    x = torch.randn(32, 2)
    model = credo.Model(torch.nn.Linear(2, 1), credo.likelihoods.Gaussian(scale=1.0))
    fitted = credo.fit(
        model, credo.VI(), (x, x[:, :1]), epochs=3, folder=tmp_path / "runs" / "vi", progress=False
    )
    (run,) = read_runs(tmp_path)
    assert (run.method, run.seed, run.error) == ("runs/vi", 0, None)
    assert [record["nll"] for record in run.history] == [r["nll"] for r in fitted.history]
    assert run.scores["epochs"] == 3
    assert run.scores["KL to the prior (nats)"] == fitted.history[-1]["kl"]
    assert run.settings["method"]["type"] == "VI"
    assert run.settings["environment"]["credo"] == credo.__version__
    assert "network" not in run.settings
    assert "runs/vi" in run_page([run])
    assert [r.method for r in read_runs(tmp_path / "runs" / "vi")] == ["vi"]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a", {"seed": 4}, '{"epoch": 0, "nll": 1.5}', '{"epoch": 1, "nl')
    (run,) = read_runs(tmp_path)
    assert run.seed == 4
    assert list(run.history) == [{"epoch": 0, "nll": 1.5}]


@pytest.mark.parametrize(
    ("config", "lines", "reason"),
    [
        ({"seed": 0}, [], "no epoch has ended yet"),
        ([1, 2], ["{}"], "config.json is no object"),
        ({"seed": 0}, ["[1]"], "a line that is no record"),
    ],
)
def test_what_is_not_a_run_says_why(tmp_path: Path, config, lines, reason: str) -> None:
    write(tmp_path / "odd", config, *lines)
    (run,) = read_runs(tmp_path)
    assert reason in str(run.error)
    assert reason in run_page([run])


def test_damaged_files_are_rows_beside_the_others(tmp_path: Path) -> None:
    write(tmp_path / "good", {"seed": 0}, '{"epoch": 0, "nll": 1.0}', '{"epoch": 1, "nll": 0.5}')
    write(tmp_path / "worse", {}, "{}")
    (tmp_path / "worse" / "config.json").write_bytes(b"\xff\xfe{")
    good, worse = read_runs(tmp_path)
    assert good.error is None
    assert "can't be read" in str(worse.error)


def test_no_folder_and_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no run of credo.fit"):
        read_runs(tmp_path)
