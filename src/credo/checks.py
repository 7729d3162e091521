"""What a public argument may be, declared beside it and checked once, when it is given.

A parameter's annotation is its constraint. ``float``, ``int``, ``bool``, ``str``, ``Literal[...]``,
tuples and unions of them say it already; ``Annotated`` narrows it further, and `checked` holds a
class or function to what its annotations say:

    >>> from dataclasses import dataclass
    >>> from typing import Literal
    >>> @checked
    ... @dataclass(frozen=True)
    ... class Trainer:
    ...     lr: Positive = 1e-3
    ...     samples: Count = 1
    ...     noise: Literal["weight", "local"] = "weight"
    >>> Trainer(lr=0.0)
    Traceback (most recent call last):
        ...
    credo.errors.DataError: Trainer: lr must be a positive finite number, but it is 0.0
    >>> Trainer(noise="wieght")
    Traceback (most recent call last):
        ...
    credo.errors.DataError: Trainer: noise must be one of 'weight', 'local', but it is 'wieght'.
    Did you mean 'weight'?
    >>> Trainer(sample=2)
    Traceback (most recent call last):
        ...
    credo.errors.DataError: Trainer has no parameter 'sample'. Did you mean 'samples'?

Classes, ``Callable`` and ``Mapping`` are held to what they are; whatever an annotation says beyond
that (protocols, the items of generics) is left to the code that uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from credo.errors import DataError, MissingExtraError

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included unless they are said to be open.

    Args:
        low: The smallest number.
        high: The largest number; infinity itself is never meant unless ``infinite`` says so.
        open_low: Whether ``low`` itself is refused.
        open_high: Whether ``high`` itself is refused.
        infinite: Whether ±inf may be given.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    infinite: bool = False

    def allows(self, value: Any) -> bool:
        """Whether the value, a real number, lies in it."""
        number = float(value)
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            return False
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    @property
    def words(self) -> str:
        """As it stands in an error.

        >>> Range(0, 1, open_high=True).words
        'a number from 0 to 1, less than 1'
        """
        finite = "" if self.infinite else " finite"
        if (self.low, self.high) == (0, math.inf):
            return (
                f"a positive{finite} number" if self.open_low else f"0 or a positive{finite} number"
            )
        if math.isinf(self.low) and math.isinf(self.high):
            return f"a{finite} number" if finite else "a number"
        if math.isinf(self.high):
            edge = "greater than" if self.open_low else "of at least"
            return f"a{finite} number {edge} {self.low:g}"
        edges = [f"greater than {self.low:g}"] * self.open_low
        edges += [f"less than {self.high:g}"] * self.open_high
        return ", ".join([f"a number from {self.low:g} to {self.high:g}", *edges])


@dataclass(frozen=True)
class Remedy:
    """What to do instead, said after a refusal.

    >>> check("n", "3", Annotated[int, Remedy(lambda value: "Give a number, without quotes")])
    Traceback (most recent call last):
        ...
    credo.errors.DataError: n must be a whole number, but it is '3'. Give a number, without quotes.

    Args:
        words: From the value to a sentence without its full stop; empty if there is none.
    """

    words: Callable[[Any], str]


Finite: TypeAlias = Annotated[float, Range()]
Positive: TypeAlias = Annotated[float, Range(0, open_low=True)]
NotNegative: TypeAlias = Annotated[float, Range(0)]
Share: TypeAlias = Annotated[float, Range(0, 1)]
"""From 0 to 1, both included."""
Decay: TypeAlias = Annotated[float, Range(0, 1, open_high=True)]
"""From 0 to 1, without 1: the share that a running average keeps."""
Probability: TypeAlias = Annotated[float, Range(0, 1, open_low=True, open_high=True)]
"""Between 0 and 1, without both."""
Radius: TypeAlias = Annotated[float, Range(0, open_low=True, infinite=True)]
"""A positive number; infinity is no bound."""
Count: TypeAlias = Annotated[int, Range(1)]
"""1, 2, 3, …"""
Index: TypeAlias = Annotated[int, Range(0)]
"""0, 1, 2, …"""


def positive(name: str, value: object) -> float:
    """The value as a float, or a `DataError` if it is not a positive finite number.

    >>> positive("scale", 2)
    2.0
    """
    check(name, value, Positive)
    return float(cast(Any, value))


def finite(name: str, value: object) -> float:
    """The value as a float, or a `DataError` if it is not a finite number."""
    check(name, value, Finite)
    return float(cast(Any, value))


def check(name: str, value: object, annotation: Any) -> None:
    """Raise `DataError` unless the value is what the annotation says.

    >>> check("betas", (0.9, 2.0), tuple[Decay, Decay])
    Traceback (most recent call last):
        ...
    credo.errors.DataError: betas[1] must be a number from 0 to 1, less than 1, but it is 2.0
    """
    complaint = _complaint(name, value, annotation)
    if complaint is not None:
        raise DataError(complaint)


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean …?" with the known name that is most like this one, or nothing.

    >>> nearest("unifrm", ["uniform", "decaying"])
    " Did you mean 'uniform'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def import_extra(module: str, extra: str, purpose: str, otherwise: str = "") -> Any:
    """A module that only some features need, or an error that says how to install it.

    Args:
        module: Its dotted name.
        extra: The extra of this distribution that brings it.
        purpose: What needs it, as an error's subject.
        otherwise: What to do without it, if there is something.

    Raises:
        MissingExtraError: If it is not installed.

    >>> import_extra("no_such_module", extra="plots", purpose="drawing")
    Traceback (most recent call last):
        ...
    credo.errors.MissingExtraError: drawing needs no_such_module, which is not installed:
    pip install "credo-bayes[plots]"
    """
    try:
        return import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise MissingExtraError(
            f"{purpose} needs {missing}, which is not installed: "
            f'pip install "credo-bayes[{extra}]"' + (f", or {otherwise}" if otherwise else "")
        ) from error


def checked(target: T) -> T:
    """Hold a class's constructor, or a function, to the annotations of its parameters.

    Args:
        target: A class (a dataclass has its decorator below this one) or a function.

    Returns:
        The class itself, or the function with the checks before it.
    """
    if isinstance(target, type):
        construct = target.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            # A subclass that is checked itself has looked at its own arguments.
            if type(self) is target or type(self).__init__ is init:
                hints = _class_hints(target) if dataclasses.is_dataclass(target) else None
                _check_call(type(self).__name__, construct, (self, *args), kwargs, hints)
            construct(self, *args, **kwargs)

        init.__signature__ = _spelled_out(target, construct)  # type: ignore[attr-defined]
        target.__init__ = init  # type: ignore[misc]
        return target

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_call(target.__qualname__, target, args, kwargs)
        return target(*args, **kwargs)

    return cast(T, call)


def _spelled_out(owner: type, construct: Callable[..., Any]) -> inspect.Signature:
    """The constructor's signature with ``**options`` of a TypedDict as the parameters they are.

    For help and editors; their defaults are those of the base class that takes them.
    """
    signature = inspect.signature(construct)
    *others, rest = signature.parameters.values()
    if rest.kind is not rest.VAR_KEYWORD or "Unpack" not in str(rest.annotation):
        return signature
    base = inspect.signature(owner.__mro__[1].__init__)  # type: ignore[misc]
    names = _hints(construct).keys() - signature.parameters.keys()
    spelled = [parameter for name, parameter in base.parameters.items() if name in names]
    return signature.replace(parameters=[*others, *spelled])


def constraints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that a function's (or constructor's) parameters are checked by."""
    return _hints(inspect.unwrap(function))


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    for name, hint in list(hints.items()):
        if get_origin(hint) is Unpack:  # ``**options`` of a TypedDict: each is a parameter
            (options,) = get_args(hint)
            hints |= get_type_hints(options, include_extras=True)
            del hints[name]
    return hints


@functools.cache
def _class_hints(owner: type) -> dict[str, Any]:
    """Of a dataclass's fields, inherited ones read in the module that declares them."""
    return get_type_hints(owner, include_extras=True)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _check_call(
    what: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    hints: dict[str, Any] | None = None,
) -> None:
    signature = _signature(function)
    hints = _hints(inspect.unwrap(function)) if hints is None else hints
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    names = dict.fromkeys([*signature.parameters, *(hints if rest is not None else ())])
    known = [name for name in names if name not in ("self", rest)]
    # Where the rest is a TypedDict its names are known; other ``**kwargs`` may be anything.
    if rest is None or rest not in hints:
        for name in kwargs:
            if name not in known:
                hint = nearest(name, known) or f" It has {', '.join(known)}."
                raise DataError(f"{what} has no parameter {name!r}.{hint}")
    given = signature.bind(*args, **kwargs).arguments  # python's own TypeError if it does not fit
    given |= given.pop(rest, {}) if rest is not None else {}
    for name, value in given.items():
        if name in hints:
            complaint = _complaint(name, value, hints[name])
            if complaint is not None:
                raise DataError(f"{what}: {complaint}")


def _complaint(name: str, value: object, annotation: Any) -> str | None:
    """What is wrong with the value, or None."""
    words = _wanted(value, annotation)
    if words is None:
        return None
    origin = get_origin(annotation)
    if origin is tuple and isinstance(value, tuple | list):
        kinds = get_args(annotation)
        if Ellipsis not in kinds and len(kinds) == len(value):
            for index, (item, kind) in enumerate(zip(value, kinds, strict=True)):
                inner = _complaint(f"{name}[{index}]", item, kind)
                if inner is not None:
                    return inner
    hint = nearest(value, _choices(annotation)) if isinstance(value, str) else ""
    if origin is Annotated:
        remedies = [a.words(value) for a in get_args(annotation) if isinstance(a, Remedy)]
        hint += "".join(f" {remedy}." for remedy in remedies if remedy)
    return f"{name} must be {words}, but it is {_shown(value)}" + (f".{hint}" if hint else "")


def _wanted(value: object, annotation: Any) -> str | None:
    """What the annotation asks for, if the value is not that; None if it is, or can't be told."""
    if annotation is Any:
        return None
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        ranges = [a for a in args[1:] if isinstance(a, Range)]
        return _wanted_number(value, args[0], ranges or [Range()])
    if origin is Literal:
        several = "one of " if len(args) > 1 else ""
        return None if value in args else several + ", ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        answers = [_wanted(value, arg) for arg in args]
        if any(answer is None for answer in answers):
            return None
        return " or ".join(dict.fromkeys(a for a in answers if a is not None))
    if origin is tuple:
        return _wanted_tuple(value, args)
    if annotation is None or annotation is type(None):
        return None if value is None else "None"
    if annotation in (int, float):
        return _wanted_number(value, annotation, [Range()])
    if annotation is bool:
        return None if isinstance(value, bool) else "True or False"
    if annotation is str:
        return None if isinstance(value, str) else "a string"
    if origin is Callable or annotation is Callable:
        return None if callable(value) else "a function"
    kind = origin if origin is Mapping or _is_ours(origin) else annotation
    if not isinstance(kind, type) or _is_protocol(kind) or isinstance(value, kind):
        return None
    return f"a {kind.__name__}"


def _is_ours(origin: Any) -> bool:
    return isinstance(origin, type) and origin.__module__.startswith("credo")


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _wanted_number(value: object, kind: Any, ranges: list[Range]) -> str | None:
    if kind not in (int, float):
        return _wanted(value, kind)
    numbers = Integral if kind is int else Real
    is_number = isinstance(value, numbers) and not isinstance(value, bool)
    if is_number and all(r.allows(value) for r in ranges):
        return None
    words = " and ".join(r.words for r in ranges) or "a number"
    return (
        words.replace("finite number", "whole number").replace("a number", "a whole number")
        if kind is int
        else words
    )


def _wanted_tuple(value: object, kinds: tuple[Any, ...]) -> str | None:
    if Ellipsis in kinds:
        fits = isinstance(value, tuple | list) and all(_wanted(v, kinds[0]) is None for v in value)
        return None if fits else "a tuple"
    fits = (
        isinstance(value, tuple | list)
        and len(value) == len(kinds)
        and all(_wanted(v, kind) is None for v, kind in zip(value, kinds, strict=True))
    )
    return None if fits else f"a tuple of {len(kinds)}"


def _choices(annotation: Any) -> list[str]:
    """The strings that an annotation admits by name."""
    if get_origin(annotation) is Literal:
        return [a for a in get_args(annotation) if isinstance(a, str)]
    return [choice for arg in get_args(annotation) for choice in _choices(arg)]


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
