"""One row of the table that `credo rule` prints: the choices that make an algorithm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """family × expectation × curvature × step → algorithm.

    ``test`` names the test that holds the equality, as ``tests/…/test_file.py::test_name``;
    ``approximates`` says in a few words what the algorithm gives up of the rule, "nothing" if it
    is exact.
    """

    algorithm: str
    family: str
    expectation: str
    curvature: str
    step: str
    approximates: str
    test: str
