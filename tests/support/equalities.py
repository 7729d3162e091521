"""A pytest plugin that measures how well each equality of the gallery holds.

    python -m pytest -p equalities tests/theorems tests/unit/test_policy_search.py

prints, for the test that each row of `credo rule` names, the largest difference that its
comparisons saw (relative to the larger of 1 and the expected value) next to what they tolerate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

_differences: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)


def _difference(actual: Any, expected: Any, rtol: float, atol: float) -> tuple[float, float]:
    actual, expected = (
        np.asarray(torch.as_tensor(v).detach().double()) for v in (actual, expected)
    )
    size = np.maximum(1.0, np.abs(expected))
    gap = np.abs(actual - expected) / size
    return float(gap.max(initial=0.0)), max(rtol, atol)


def _watching(original: Callable[..., None], test: str) -> Callable[..., None]:
    def compare(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
        names = {"rtol": 1e-7, "atol": 0.0} | {k: v for k, v in kwargs.items() if v is not None}
        if isinstance(actual, torch.Tensor | np.ndarray | float):
            _differences[test].append(_difference(actual, expected, names["rtol"], names["atol"]))
        original(actual, expected, *args, **kwargs)

    return compare


@pytest.fixture(autouse=True)
def _measure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    test = request.node.nodeid.split("[")[0]
    for module, name in ((torch.testing, "assert_close"), (np.testing, "assert_allclose")):
        monkeypatch.setattr(module, name, _watching(getattr(module, name), test))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each algorithm."""
    from credo.gallery.table import entries

    terminalreporter.section("equalities")
    for entry in entries():
        seen = _differences.get(entry.test, [])
        error = f"{max(gap for gap, _ in seen):.1e}" if seen else "by assertion"
        allowed = f"{max(limit for _, limit in seen):.0e}" if seen else ""
        terminalreporter.write_line(f"{entry.algorithm} | {error} | {allowed} | {entry.test}")
