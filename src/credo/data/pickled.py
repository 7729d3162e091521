"""Reads the pickles CIFAR comes in without unpickling them: nothing in the file is ever called.

Python's `pickle` runs whatever a file names. Here a small interpreter knows only the opcodes that
build plain containers, and treats the four names that numpy's arrays need as symbols, not as
functions; a file that names anything else, or uses any other opcode, is refused. Steps are counted
and text is encoded at most once over, so a small file can't grow into a large object.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from credo.data.bounded import malformed
from credo.errors import FileFormatError


@dataclass(frozen=True)
class _Name:
    """A global the pickle mentions: a symbol here, never looked up."""

    module: str
    name: str


@dataclass
class _DType:
    value: np.dtype[Any]


@dataclass
class PickledArray:
    """A numpy array in a pickle.

    Args:
        values: It appears when the pickle has delivered the array's state.
    """

    values: NDArray[Any] | None = None


_ADMITTED = {
    _Name("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    _Name("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    _Name("numpy", "ndarray"): "ndarray",
    _Name("numpy", "dtype"): "dtype",
    _Name("_codecs", "encode"): "encode",
    _Name("__builtin__", "bytes"): "bytes",
    _Name("builtins", "bytes"): "bytes",
}
_NUMERIC = re.compile(r"[|<>=]?(?:b1|[ui][1248]|f[248])")
_MARK = object()
_MAX_STEPS = 1_000_000
"""CIFAR-100's training file takes about 300,000; each step makes at most one small object."""

_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_EMPTY: dict[bytes, type[Any]] = {b"}": dict, b"]": list, b")": tuple}
_BYTE_STRINGS = {b"U": "<B", b"T": "<i", b"C": "<B", b"B": "<I", b"\x8e": "<Q"}
_TEXT_STRINGS = {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}
_SHORT_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUTS = {b"q": "<B", b"r": "<I"}
_GETS = {b"h": "<B", b"j": "<I"}
_IGNORED = {b"\x80": "<B", b"\x95": "<Q"}  # protocol number, frame length


def read_pickle(data: bytes | bytearray, path: Path) -> Any:
    """The plain object in ``data``: dicts, lists, tuples, numbers, text, bytes, `PickledArray`.

    Python 2's ``str`` comes out as bytes.

    Args:
        data: The pickle.
        path: Where it comes from, for the error.

    Raises:
        FileFormatError: There is anything else in it; the global or the opcode is named.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"labels": [3, 8]}, protocol=2), Path("batch"))
    {'labels': [3, 8]}
    """
    return _Machine(memoryview(data), path).run()


@dataclass
class _Machine:
    data: memoryview
    path: Path
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    encoded: int = 0

    def run(self) -> Any:
        try:
            for _ in range(_MAX_STEPS):
                if (opcode := bytes(self._take(1))) == b".":
                    return self._pop()
                self._step(opcode)
        except FileFormatError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
            raise self._refusal(f"it makes no sense at byte {self.position:,} ({error})") from error
        raise self._refusal(f"it takes more than {_MAX_STEPS:,} steps to build")

    def _step(self, opcode: bytes) -> None:
        if opcode in _NUMBERS:
            self.stack.append(self._number(_NUMBERS[opcode]))
        elif opcode in _BYTE_STRINGS:
            self.stack.append(bytes(self._take(self._number(_BYTE_STRINGS[opcode]))))
        elif opcode in _TEXT_STRINGS:
            content = self._take(self._number(_TEXT_STRINGS[opcode]))
            self.stack.append(str(content, "utf-8", "surrogatepass"))
        elif opcode in _PUTS:
            self.memo[self._number(_PUTS[opcode])] = self.stack[-1]
        elif opcode == b"\x94":
            self.memo[len(self.memo)] = self.stack[-1]
        elif opcode in _GETS:
            self.stack.append(self.memo[self._number(_GETS[opcode])])
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            self.stack.append(_EMPTY[opcode]())
        elif opcode in _SHORT_TUPLES:
            items = [self._pop() for _ in range(_SHORT_TUPLES[opcode])]
            self.stack.append(tuple(reversed(items)))
        elif opcode in _IGNORED:
            self._number(_IGNORED[opcode])
        else:
            self._step_rarer(opcode)

    def _step_rarer(self, opcode: bytes) -> None:
        match opcode:
            case b"(":
                self.stack.append(_MARK)
            case b"t":
                self.stack.append(tuple(self._pop_to_mark()))
            case b"a":
                self._extend([self._pop()])
            case b"e":
                self._extend(self._pop_to_mark())
            case b"s":
                value, key = self._pop(), self._pop()
                self._set_items([key, value])
            case b"u":
                self._set_items(self._pop_to_mark())
            case b"\x8a":
                self.stack.append(
                    int.from_bytes(self._take(self._number("<B")), "little", signed=True)
                )
            case b"c":
                self._push_name(self._line(), self._line())
            case b"\x93":
                name, module = self._pop(), self._pop()
                self._push_name(module, name)
            case b"R":
                arguments, function = self._pop(), self._pop()
                self.stack.append(self._reduce(function, arguments))
            case b"b":
                state = self._pop()
                self._build(self.stack[-1], state)
            case _:
                raise self._refusal(f"it uses opcode {opcode!r} at byte {self.position - 1:,}")

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.data) - self.position:
            raise self._refusal(
                f"it asks for {size:,} bytes at byte {self.position:,} of {len(self.data):,}"
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        # Admitted names are short: a window keeps a file of many long "lines" linear to read.
        window = bytes(self.data[self.position : self.position + 256])
        end = window.index(b"\n")
        self.position += end + 1
        return window[:end].decode("ascii")

    def _pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise self._refusal(f"it takes a mark for a value at byte {self.position:,}")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise self._refusal(f"it appends to a {type(target).__name__}")
        target.extend(items)

    def _set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        keys = flat[::2]
        # Tuples as keys are refused because nested ones can take exponential time to hash.
        if not isinstance(target, dict) or not all(isinstance(k, str | bytes | int) for k in keys):
            raise self._refusal("it sets items other than by text, bytes or number in a dict")
        target.update(zip(keys, flat[1::2], strict=True))

    def _push_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self._refusal("it names a global by something that is not text")
        symbol = _Name(module, name)
        if symbol not in _ADMITTED:
            raise self._refusal(f"it names the global {module}.{name}")
        self.stack.append(symbol)

    def _reduce(self, function: Any, arguments: Any) -> Any:
        known = _ADMITTED.get(function) if isinstance(function, _Name) else None
        match known, arguments:
            case "reconstruct", (_Name() as kind, (0,), _) if _ADMITTED[kind] == "ndarray":
                return PickledArray()
            case "dtype", (bytes() | str() as code, *_) if _NUMERIC.fullmatch(_text(code)):
                return _DType(np.dtype(_text(code)))
            case "encode", (str() as text, "latin1") if self.encoded + len(text) <= len(self.data):
                self.encoded += len(text)
                return text.encode("latin1")
            case "bytes", ():
                return b""
        name = f"{function.module}.{function.name}" if known else type(function).__name__
        raise self._refusal(f"it calls {name} in a way that builds no numeric array")

    def _build(self, target: Any, state: Any) -> None:
        match target, state:
            case _DType(), (int(), bytes() | str() as order, *_) if _text(order) in "|<>=":
                target.value = target.value.newbyteorder(cast(Any, _text(order)))
            case PickledArray(), (int(), tuple(shape), _DType(value=dtype), by_column, bytes(raw)):
                target.values = self._array(shape, dtype, bool(by_column), raw)
            case _:
                raise self._refusal("it gives an object a state that no numeric array has")

    def _array(
        self, shape: tuple[Any, ...], dtype: np.dtype[Any], by_column: bool, raw: bytes
    ) -> NDArray[Any]:
        if not all(isinstance(n, int) and n > 0 for n in shape) or not 1 <= len(shape) <= 8:
            raise self._refusal("it promises an array whose shape is not 1 to 8 positive sizes")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise self._refusal(
                f"it promises an array of shape {shape} and {dtype}, and brings {len(raw):,} bytes"
            )
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if by_column else "C")

    def _refusal(self, actual: str) -> FileFormatError:
        return malformed(
            self.path,
            "a pickled batch holds plain containers and numeric arrays",
            actual,
            "If the file is from the CIFAR page, fetch it again; if not, do not trust it.",
        )


def _text(value: bytes | str) -> str:
    """Python 2 stored names as bytes, Python 3 stores them as text."""
    return value.decode("ascii") if isinstance(value, bytes) else value
