"""The command line: quick help, one clear line for every mistake, and a demo that works."""

import json
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import credo
from credo.cli import command_line as cli
from credo.cli import demo_contest as demo
from credo.cli import papers
from credo.cli.options import writable
from credo.errors import DataError


def test_help_names_every_command_and_does_not_import_torch() -> None:
    # the package's own __init__ is left out: only what the command line itself imports counts
    package = Path(credo.__file__).parent
    script = (
        "import sys, types\n"
        f"stub = types.ModuleType('credo'); stub.__path__ = [{str(package)!r}]\n"
        "sys.modules['credo'] = stub\n"
        "import credo.cli\n"
        "code = credo.cli.main(['--help'])\n"
        "heavy = {'torch', 'matplotlib', 'sklearn', 'scipy'} & sys.modules.keys()\n"
        "sys.exit(code or ' '.join(heavy) or None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("demo", "list", "run", "claims"):
        assert f" {command} " in done.stdout


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Usage: credo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "No such option: --nonsense"),
        (["deom"], "'deom'"),
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--folder", f"{__file__}/inside"], "Not a directory"),
        (["run", "x", "--folder", __file__], "can't write to"),
        (["run"], "Missing argument"),
        (["run", "x", "--preset", "huge"], "'huge'"),
        (["run", "x", "--jobs", "0"], "--jobs"),
    ],
)
def test_a_mistyped_command_line_is_one_line_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("credo: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_checking_a_folder_makes_none(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert writable(folder) == folder
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        error = DataError("the [data] is empty; give some")
        error.add_note("A note.")
        raise error

    monkeypatch.setattr(demo, "run", refuse)
    assert cli.main(["demo", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "credo: the [data] is empty; give some A note.\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo", "--folder", str(tmp_path)])


def test_ctrl_c_is_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo", "--folder", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "credo: interrupted\n"


def test_ctrl_c_says_that_a_run_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(papers, "papers", lambda: types.SimpleNamespace(run=interrupt))
    assert cli.main(["run", "x", "--folder", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "credo: interrupted: run again to resume\n"


@pytest.mark.parametrize(
    "arguments", [["list"], ["list", "--short"], ["run", "x"], ["claims"], ["sweep", "x"]]
)
def test_without_the_papers_a_command_says_in_one_line_how_to_get_them(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(papers, "entry_points", lambda **_: ())
    assert cli.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("credo: the experiments")
    assert "pip install credo-papers" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_shows_no_value_beside_a_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"] if command else ["--help"]) == 0
    printed = capsys.readouterr().out
    assert "<bool>" not in printed
    assert "BOOLEAN" not in printed
    assert "Args:" not in printed


def test_warnings_are_one_line_without_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def warn(*_: object) -> None:
        warnings.warn("the scales [collapsed]", stacklevel=1)

    monkeypatch.setattr(demo, "run", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["demo", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "warning: the scales [collapsed]\n"


def test_experiment_commands_reach_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def recorder(name: str):
        return lambda **given: calls.append((name, given))

    commands = types.SimpleNamespace(
        **{name: recorder(name) for name in ("list_experiments", "run", "claims")}
    )
    monkeypatch.setattr(papers, "papers", lambda: commands)
    assert cli.main(["list", "--json"]) == 0
    assert cli.main(["run", "x", "--preset", "paper", "--seeds", "5", "--folder", "r"]) == 0
    assert cli.main(["claims"]) == 0
    assert calls == [
        ("list_experiments", {"short": False, "json": True}),
        (
            "run",
            {"name": "x", "preset": "paper", "seeds": 5, "folder": Path("r"), "jobs": 2},
        ),
        ("claims", {"json": False, "folder": Path("runs")}),
    ]
    assert type(calls[1][1]["preset"]) is str


def test_python_dash_m_is_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["credo", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(Path(credo.__file__).with_name("__main__.py")), run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"credo {credo.__version__}\n"


@pytest.mark.slow
def test_demo_writes_everything_its_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    folder = tmp_path / "new" / "demo"
    assert cli.main(["demo", "--folder", str(folder), "--epochs", "1", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    results = json.loads((folder / "results.json").read_text())
    page = (folder / "index.html").read_text()
    assert str(folder / "index.html") in printed
    assert len(demo.CONTESTANTS) == 8
    assert [row["method"] for row in results["methods"]] == list(demo.CONTESTANTS)
    for row in results["methods"]:
        assert row["status"] == "finished", row
        assert row["method"] in printed
        assert row["method"] in page
        assert 0 <= row["ood_auroc"] <= 1
    for name in results.get("figures", ()):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f'src="{name}"' in page
    assert all(len(line) <= 80 for line in printed.splitlines()[:-1])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    kept = credo.tools.load_comparison(folder / "comparison")
    assert [row["nll"] for row in kept.table] == [row["nll"] for row in results["methods"]]
