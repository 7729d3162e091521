"""Doctests run on the modules that everybody imports, not on second copies of them.

pytest's importlib mode executes a module of a package afresh, under its own name, unless it is
loaded already; classes then exist twice and ``isinstance`` fails in whichever test comes later.
"""

import importlib
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = {HERE / "src" / "credo", HERE / "papers" / "credo_papers"}


def pytest_collect_file(file_path: Path) -> None:
    """Import a module of our packages by its dotted name before pytest imports it by its path."""
    for package in PACKAGES & set(file_path.parents):
        parts = file_path.relative_to(package.parent).with_suffix("").parts
        if file_path.suffix == ".py" and parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
