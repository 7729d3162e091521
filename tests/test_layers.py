"""The import direction of the architecture: a module imports only from layers below its own."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "credo"

LAYERS = [
    {"errors", "checks", "types", "version", "display"},
    {"noise", "collectives", "storage", "workers"},
    {"network", "packing"},
    {
        "autodiff",
        "families",
        "likelihoods",
        "metrics",
        "data",
        "schedules",
        "temperature",
    },
    {"priors", "report"},
    {"penalties", "kl", "model"},
    {"posterior"},
    {"method", "optim"},
    {"map", "train"},
    {"trials"},
    {"variational", "laplace", "sampling", "ensembles", "functionspace"},
    {"tools", "recipes", "conformal", "continual", "active", "sweep"},
    {"tables", "text", "integrations"},
    {"rule"},
    {"cli", "__main__"},
]
"""From the bottom up. Inside a layer only the chains of `WITHIN` are allowed."""

WITHIN = {("checks", "errors"), ("__main__", "cli")}

DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """The top-level parts of credo that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            parts = node.module.split(".")
            if parts[0] == "credo":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "credo" and len(parts) > 1:
                    found.add(parts[1])
    return found


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in DEPTH, f"{own} has no layer: put it into LAYERS (and DESIGN) deliberately"
    for other in imports_of(path) - {own}:
        assert other in DEPTH, (
            f"{path.name}: `from credo import {other}` hides a room; import it from its own module"
        )
        if DEPTH[other] == DEPTH[own]:
            assert (own, other) in WITHIN, f"{path.name}: {own} and {other} share a layer"
        assert DEPTH[other] <= DEPTH[own], f"{path.name}: {own} may not import {other} above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_command_line_imports_the_rule(path: Path) -> None:
    """The rule is theory as running code: the library is held equal to it, and works without it."""
    own = path.relative_to(SOURCE).parts[0]
    assert own in ("rule", "cli") or "rule" not in imports_of(path)
