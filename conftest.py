"""What makes a test's outcome its own, whatever ran before it.

- Doctests run on the modules that everybody imports. pytest's importlib mode executes a module of a
  package afresh, under its own name, unless it is loaded already; classes would then exist twice
  and ``isinstance`` fail in whichever test comes later.
- Every test, and every file as it is collected, starts from the same state of the global random
  generators. pytest-randomly shuffles the order and nothing else.
"""

import importlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
PACKAGES = {HERE / "src" / "credo", HERE / "papers" / "credo_papers"}


def pytest_collect_file(file_path: Path) -> None:
    """Import a module of our packages by its dotted name before pytest imports it by its path."""
    for package in PACKAGES & set(file_path.parents):
        parts = file_path.relative_to(package.parent).with_suffix("").parts
        if file_path.suffix == ".py" and parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly from seeding the generators by the seed of its order."""
    config.option.randomly_reset_seed = False


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report() -> None:
    """Before a file is imported, and with it whatever it draws at its top level."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before a test's fixtures, the module's among them."""
    _seed()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the legacy state is what is being reset
    torch.manual_seed(0)
