"""`credo report` writes one page, or says in one line why not."""

import json
from pathlib import Path

import pytest
from evidences import classes

from credo.cli import command_line as cli


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"seed": 0, "method": {"type": "VI"}}))
    records = [{"epoch": epoch, "nll": 1 / (epoch + 1), "kl": 3.0} for epoch in range(3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def test_runs_become_a_page_in_their_folder(tmp_path: Path, capsys) -> None:
    a_run(tmp_path / "runs" / "one")
    a_run(tmp_path / "runs" / "two")
    assert cli.main(["report", str(tmp_path / "runs"), "--title", "My <runs>"]) == 0
    page = tmp_path / "runs" / "report.html"
    assert f"Open {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "<h1>My &lt;runs&gt;</h1>" in text
    assert "KL to the prior" in text


def test_the_page_goes_where_out_says(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()
    assert not (run / "report.html").exists()


def test_a_comparison_is_read_by_what_wrote_it(tmp_path: Path, monkeypatch) -> None:
    import credo.tools

    class Loaded:
        evidence = classes(("MAP", "VI"), seeds=1, examples=20)

    monkeypatch.setattr(credo.tools, "load_comparison", lambda folder: Loaded(), raising=False)
    (tmp_path / "comparison.json").write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Methods compared" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no run of credo.fit"),
        ([".", "--out", "."], "is a folder: name a file"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch, capsys, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
