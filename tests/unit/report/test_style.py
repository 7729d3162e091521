"""Matplotlib is an extra: without it everything but drawing works."""

import subprocess
import sys

import pytest

from credo.errors import MissingExtraError
from credo.tools.rate_range import RateRange


def test_without_matplotlib_drawing_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    tried = RateRange((0.1, 1.0), (2.0, 1.0), None)
    with pytest.raises(MissingExtraError, match=r'pip install "credo-bayes\[plots\]"'):
        tried.plot(tmp_path / "rates.png")


def test_without_matplotlib_every_room_but_the_papers_imports():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import credo.active, credo.continual, credo.report, credo.sweep, credo.tools, credo.cli\n"
        "import credo.cli.demo"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
