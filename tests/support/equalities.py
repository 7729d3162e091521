"""A pytest plugin that measures how well each equality of the gallery holds.

    python -m pytest -p equalities tests/theorems papers/tests/test_policy_search.py

prints, for the test that each row of `credo rule` names, the largest difference that its
comparisons saw, relative to the larger of 1 and the expected value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

COMPARISONS = ("close", "largest_gap")
"""What tests call their own functions of (actual, expected)."""

_differences: defaultdict[str, list[float]] = defaultdict(list)


def _difference(actual: Any, expected: Any) -> float:
    actual, expected = (
        np.asarray(value.detach() if isinstance(value, torch.Tensor) else value, dtype=np.float64)
        for value in (actual, expected)
    )
    return float((np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0))


def _watching(original: Callable[..., Any], test: str) -> Callable[..., Any]:
    def compare(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(actual, torch.Tensor | np.ndarray | float):
            _differences[test].append(_difference(actual, expected))
        return original(actual, expected, *args, **kwargs)

    return compare


@pytest.fixture(autouse=True)
def _measure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    test = request.node.nodeid.split("[")[0]
    own = [(request.module, name) for name in COMPARISONS if hasattr(request.module, name)]
    for module, name in ((torch.testing, "assert_close"), (np.testing, "assert_allclose"), *own):
        monkeypatch.setattr(module, name, _watching(getattr(module, name), test))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each algorithm."""
    from credo.rule.gallery.table import entries

    terminalreporter.section("equalities")
    for entry in entries():
        seen = _differences.get(entry.test, [])
        error = f"{max(seen):.1e}" if seen else "by assertion"
        terminalreporter.write_line(f"{entry.algorithm} | {error} | {entry.test.split('::')[-1]}")
