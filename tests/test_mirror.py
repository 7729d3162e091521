"""``tests/unit`` mirrors ``src/credo`` path by path: a module's tests are where one looks for them.

A file is named after a module of its room or after the room itself, with an aspect behind it where
there are several: ``data/test_data_hostile_files.py``.
"""

from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"
SOURCE = Path(__file__).parents[1] / "src" / "credo"
FILES = sorted(UNIT.rglob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(UNIT)))
def test_a_unit_test_is_named_after_its_module_or_its_room(path: Path) -> None:
    room = SOURCE / path.parent.relative_to(UNIT)
    assert room.is_dir(), f"{path} tests the room {room}, which is not there"
    subject = path.stem.removeprefix("test_")
    modules = {p.stem for p in room.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    owners = [name for name in (room.name, *modules) if f"{subject}_".startswith(f"{name}_")]
    assert owners, f"{room} has no module that {subject!r} names, and is not called that itself"
