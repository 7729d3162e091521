"""The gallery is complete: every file has its row, every row its test, and nobody its own rule."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from credo.rule.gallery import table

ROOT = Path(__file__).parents[4]
GALLERY = ROOT / "src" / "credo" / "rule" / "gallery"
NOT_ALGORITHMS = {"__init__", "entry", "state_space", "table"}
MAX_CODE = 80
"""About 60 is the aim; the two longest carry a network and a corpus."""


def test_every_file_has_a_row() -> None:
    files = {path.stem for path in GALLERY.glob("*.py")} - NOT_ALGORITHMS
    assert files == set(table.MODULES)


@pytest.mark.parametrize("name", table.MODULES)
def test_the_row_names_a_test_that_exists(name: str) -> None:
    file, _, test = import_module(f"credo.rule.gallery.{name}").ENTRY.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", table.MODULES)
def test_files_are_short(name: str) -> None:
    """Lines of code without docstrings, comments, blank lines, imports and the row itself."""
    text = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            prose |= set(range(node.lineno, node.end_lineno + 1))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
            assert node.end_lineno is not None
            prose |= set(range(node.lineno, node.end_lineno + 1))
    lines = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in prose and line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) <= MAX_CODE, f"{name} has {len(lines)} lines of code"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_credo_rule_prints_the_table(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "credo", "rule", *arguments]
    environment = {"COLUMNS": "80", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    if arguments:
        rows = json.loads(done.stdout)
        assert len(rows) == len(table.MODULES)
        assert all(row["test"].startswith(("tests/", "papers/tests/")) for row in rows)
    else:
        assert "Newton's method" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
