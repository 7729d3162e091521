"""Which public parameters no docstring explains: ``python tests/support/documented.py [room …]``.

A parameter is documented by a line ``name: …`` under ``Args:`` (Google style) of its function; a
constructor's by one of its class or of ``__init__``. What a parent, or a protocol that the class
fulfils, says of a parameter holds for the class too: a contract is explained once, where it stands.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import credo

Parameter = inspect.Parameter


class Gap(NamedTuple):
    """A parameter without a word, or a word without a parameter."""

    room: str
    owner: str
    parameter: str
    complaint: str

    def __str__(self) -> str:
        return f"{self.owner}: {self.parameter} {self.complaint}"


def public_rooms() -> dict[str, ModuleType]:
    """The package itself and every public module of it, by name."""
    modules = [credo, *(getattr(credo, name) for name in credo.__all__)]
    rooms = {m.__name__: m for m in modules if isinstance(m, ModuleType)}
    # Public by its names at the top level, not as a module.
    rooms["credo.temperature"] = importlib.import_module("credo.temperature")
    return rooms


def gaps(rooms: dict[str, ModuleType] | None = None) -> list[Gap]:
    """All gaps of the rooms, each thing once, under the room where its code stands."""
    things: dict[str, Any] = {}
    for module in (public_rooms() if rooms is None else rooms).values():
        for thing in _public(module):
            things.setdefault(f"{thing.__module__}.{thing.__qualname__}", thing)
    return sorted(
        {
            gap
            for thing in things.values()
            for gap in (class_gaps(thing) if isinstance(thing, type) else _function_gaps(thing))
        }
    )


def _public(module: ModuleType) -> Iterator[Any]:
    """The classes and functions of credo that a module gives as its own."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        thing = getattr(module, name)
        is_code = inspect.isclass(thing) or inspect.isfunction(thing)
        if is_code and thing.__module__.split(".")[0] == "credo":
            yield thing


def _function_gaps(function: Any) -> Iterator[Gap]:
    yield from _compare(function, function.__qualname__, _parameters(function), [function.__doc__])


def class_gaps(cls: type) -> Iterator[Gap]:
    """Of one class: its constructor and its methods, inherited ones included."""
    if not _is_protocol(cls) and not issubclass(cls, BaseException):
        texts = [text for c in cls.__mro__ for text in (c.__doc__, _own_doc(c, "__init__"))]
        yield from _compare(cls, cls.__qualname__, _parameters(cls), texts)
    for owner in cls.__mro__:
        if owner.__module__.split(".")[0] == "credo":
            yield from _method_gaps(owner, cls)


def _method_gaps(owner: type, cls: type) -> Iterator[Gap]:
    """Of the methods that one class of credo states itself; contracts are looked for around cls."""
    for name, member in list(vars(owner).items()):
        function = inspect.unwrap(getattr(member, "__func__", member))
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        parameters = _parameters(function, bound=not isinstance(member, staticmethod))
        contracts = [*owner.__mro__, *_contracts(owner), *cls.__mro__, *_contracts(cls)]
        texts = [_own_doc(c, name) for c in contracts]
        yield from _compare(owner, f"{owner.__qualname__}.{name}", parameters, texts)


def _compare(
    home: Any, owner: str, parameters: dict[str, Parameter], texts: list[str | None]
) -> Iterator[Gap]:
    room = ".".join(home.__module__.split(".")[:2])
    explained = {name for text in texts for name in arguments_of(text)}
    for name in parameters:
        if name not in explained:
            yield Gap(room, owner, name, "is not documented")
    if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        for name in arguments_of(texts[0]):
            if name not in parameters:
                yield Gap(room, owner, name, "is documented, but is no parameter")


def arguments_of(text: str | None) -> list[str]:
    """The names that a docstring explains under ``Args:``.

    >>> arguments_of('''Say it.
    ...
    ...     Args:
    ...         word: What is said,
    ...             in full: two lines.
    ...         *rest: More.
    ...
    ...     Returns:
    ...         nothing: at all.
    ...     ''')
    ['word', 'rest']
    """
    lines = inspect.cleandoc(text or "").splitlines()
    if "Args:" not in lines:
        return []
    names: list[str] = []
    for line in lines[lines.index("Args:") + 1 :]:
        if line and not line.startswith(" "):
            break
        entry = re.match(r" {4}\*{0,2}(\w+)(?: \([^)]*\))?:", line)
        if entry:
            names.append(entry[1])
    return names


def _parameters(target: Any, bound: bool = False) -> dict[str, Parameter]:
    try:
        items = list(inspect.signature(target).parameters.items())
    except ValueError:  # builtins' constructors
        return {}
    return {name: p for name, p in items[bound:] if not name.startswith("_")}


def _own_doc(cls: type, name: str) -> str | None:
    """The docstring of a method, if this very class states it."""
    member = vars(cls).get(name)
    return getattr(getattr(member, "__func__", member), "__doc__", None)


def _is_protocol(cls: type) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


@functools.cache
def _protocols() -> list[type]:
    """Every protocol of the library."""
    protocols = []
    for info in pkgutil.walk_packages(credo.__path__, "credo."):
        if info.name == "credo.__main__":
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, type) and value.__module__ == info.name and _is_protocol(value):
                protocols.append(value)
    return protocols


@functools.cache
def _contracts(cls: type) -> list[type]:
    """The protocols whose every member this class has."""
    fields = set(dir(cls)) | {n for c in cls.__mro__ for n in getattr(c, "__annotations__", {})}
    return [p for p in _protocols() if _members(p) and _members(p) <= fields]


def _members(protocol: type) -> set[str]:
    own = [c for c in protocol.__mro__ if _is_protocol(c)]
    return {
        name
        for c in own
        for name in (*vars(c), *getattr(c, "__annotations__", {}))
        if not name.startswith("_")
    }


def main(wanted: list[str]) -> int:
    """Print the gaps, of all rooms or the wanted ones, and how many there are in each."""
    names = {f"credo.{w.removeprefix('credo.')}" for w in wanted}
    listed = [gap for gap in gaps() if not names or gap.room in names]
    for gap in listed:
        print(f"{gap.room:24} {gap}")
    for room in sorted({gap.room for gap in listed}):
        print(f"{sum(gap.room == room for gap in listed):5} in {room}")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
