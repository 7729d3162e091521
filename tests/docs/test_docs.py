"""The README and the docs tell the truth: examples run, links lead somewhere, names exist."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
NAME = re.compile(r"(?<![\w./-])credo(?:\.[A-Za-z_]\w*)+")

RESOLVE = """
import json, sys
import credo
missing = []
for name in json.load(sys.stdin):
    value = credo
    for part in name.split(".")[1:]:
        try:
            value = getattr(value, part)
        except AttributeError:
            missing.append(name)
            break
print(json.dumps(missing))
"""


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page; those in tabs are indented."""
    return [dedent(code) for _, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=page_name)
def test_the_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page by page, top to bottom, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page_name(page)} links to {link}: nothing there"


def test_names_resolve_after_importing_credo_alone() -> None:
    """In a fresh interpreter: what other tests imported must not help."""
    pages_of: dict[str, list[str]] = {}
    for page in PAGES:
        for name in NAME.findall(page.read_text(encoding="utf-8")):
            pages_of.setdefault(name, []).append(page_name(page))
    answer = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(sorted(pages_of)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    missing = {name: sorted(set(pages_of[name])) for name in json.loads(answer.stdout)}
    assert not missing, f"no such names after `import credo`: {missing}"


def test_every_public_room_is_listed_and_reachable() -> None:
    """Every folder of the library but the command line is in ``dir(credo)``."""
    import credo

    folders = {p.parent.name for p in (ROOT / "src" / "credo").glob("*/__init__.py")}
    assert folders - {"cli"} <= set(dir(credo))
    for name in dir(credo):
        assert getattr(credo, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_works_are_cited_by_author_and_year(page: Path) -> None:
    """Numbers of works belong to experiment ids and to the bibliography that explains them."""
    if page.name in ("references.md", "changelog.md"):
        pytest.skip("explains the numbers")
    text = page.read_text(encoding="utf-8")
    for unknown in (r"[Dd]ocuments? 00\d", r"FORMULAS", r"\bDESIGN\b", r"\b[Tt]he slides?\b"):
        assert not re.search(unknown, text), f"{page_name(page)}: nobody can look up {unknown}"
