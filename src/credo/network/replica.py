"""A network for one caller alone, at weights that nobody else may see.

Prediction tries many weights. Were they written into the user's network, a second thread that
predicts with it, trains it or just runs it would see them. So every prediction works on a copy of
its own, with its own modes and buffers, and the user's network is only read: nothing is to be put
back, whatever happens.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> with private(net, {}) as flat, flat.writing() as vector:
    ...     _ = vector.zero_()
    ...     bool(flat.module[0].weight.any()), bool(net[0].weight.any()), flat.module.training
    (False, True, False)

A copy shares nothing that can change, except frozen parameters, which may be large and are only
read. Hooks are copied too: functions fire as they do on the network itself, methods of an object
on a copy of it. What can't be copied (compiled modules, modules that hold locks or files, functions
that remember the network itself) is used in place: see `borrowed`.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from credo.network.flat import FlatParams
from credo.network.state import evaluating

Memo = dict[int, Any]
"""What `copy.deepcopy` has made so far, by the original's ``id``."""

_ATOMS = (
    type(None), bool, int, float, complex, str, type, torch.dtype, torch.device, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip
_ATTEMPTS = 3


@contextmanager
def private(net: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[FlatParams]:
    """A copy of the network in eval mode, bound, with these buffers.

    Args:
        net: The network; it is not changed, nor is its mode.
        buffers: Values for its buffers, by name; the others keep theirs.

    Yields:
        The copy's parameters, first at the network's values; ``module`` is the copy. Where no copy
        can be made it is the network itself, as `borrowed` gives it.
    """
    # What is made in inference mode can't be differentiated, as linearisation does.
    with torch.inference_mode(False):
        copied = replica(net)
    if copied is None:
        with borrowed(net, buffers) as flat:
            yield flat
        return
    copied.eval()
    with torch.no_grad():
        for name, buffer in copied.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    yield FlatParams(copied)


@contextmanager
def borrowed(net: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[FlatParams]:
    """The network itself in eval mode with these buffers, its parameters in a buffer of their own.

    On leaving, parameters, buffers and modes are what and where they were. One thread at a time
    may borrow a network; a thread that merely runs it sees what the borrower does.

    Args:
        net: The network.
        buffers: Values for its buffers, by name; the others keep theirs.

    Yields:
        Its parameters, first at the values they have.
    """
    live = dict(net.named_buffers())
    with _lock_of(net), evaluating(net):
        homes = [(parameter, parameter.data) for parameter in net.parameters()]
        values = {name: live[name].clone() for name in buffers if name in live}
        flat = None
        try:
            flat = FlatParams(net)
            with torch.no_grad():
                for name in values:
                    live[name].copy_(buffers[name])
            yield flat
        finally:
            for parameter, home in homes:
                parameter.data = home
            with torch.no_grad():
                for name, value in values.items():
                    live[name].copy_(value)
            if flat is not None:
                flat.tell()


def replica(net: nn.Module) -> nn.Module | None:
    """A copy whose trainable parameters still share the network's storage, or None if it can't be.

    `FlatParams` then gives them one of their own.
    """
    modules = list(net.modules())
    if any(_is_compiled(module) or _remembers(module) for module in modules):
        return None
    for _ in range(_ATTEMPTS):
        try:
            return _copied(net, modules)
        except Exception:  # any class may refuse to be copied, in its own way
            # Or a forward pass elsewhere has just set an attribute.
            continue
    return None


def _copied(net: nn.Module, modules: list[nn.Module]) -> nn.Module:
    memo: Memo = {}
    for parameter in net.parameters():
        trained = parameter.requires_grad and type(parameter) is nn.Parameter
        # Of ``data``, because a tensor from ``detach`` shares the counter of in-place changes.
        memo[id(parameter)] = nn.Parameter(parameter.data) if trained else parameter
    for buffer in net.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    for module in reversed(modules):  # children first
        if _is_plain(module):
            memo[id(module)] = _shell(module, memo)
        else:
            for value in module.__dict__.values():
                if isinstance(value, Tensor) and not value.is_leaf:  # kept from a forward pass
                    memo[id(value)] = value.detach().clone()
    copied: nn.Module = copy.deepcopy(net, memo)
    pairs = zip(net.parameters(), copied.parameters(), strict=True)
    if any(new is not memo[id(old)] or (new is old and old.requires_grad) for old, new in pairs):
        raise TypeError("the copy holds parameters of the network itself")
    return copied


def _is_plain(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers with nothing unusual: then a shell is a copy.

    `copy.deepcopy` would take as long as a small network's forward passes.
    """
    if not type(module).__module__.startswith("torch.nn.modules.") or isinstance(
        module, nn.RNNBase
    ):
        return False
    return all(
        name in ("_parameters", "_buffers", "_modules") or _is_simple(value)
        for name, value in module.__dict__.items()
    )


def _is_simple(value: Any) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, dict):
        return not value
    return isinstance(value, list | tuple | set) and all(isinstance(v, _ATOMS) for v in value)


def _shell(module: nn.Module, memo: Memo) -> nn.Module:
    """The module with other parameters, buffers and children, which the memo has."""
    new = type(module).__new__(type(module))
    new.__dict__.update(
        {
            name: value.copy() if isinstance(value, dict | list | set) else value
            for name, value in module.__dict__.items()
        }
    )
    for name in ("_parameters", "_buffers", "_modules"):
        parts = module.__dict__[name].items()
        new.__dict__[name] = {key: copy.deepcopy(part, memo) for key, part in parts}
    return new


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made it: a copy would be compiled again for every prediction."""
    return type(module).__name__ == "OptimizedModule"


def _remembers(module: nn.Module) -> bool:
    """Whether a function that the module holds would go on using the original network."""
    for value in module.__dict__.values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, FunctionType):
                remembered = inspect.getclosurevars(item).nonlocals.values()
                if any(isinstance(each, nn.Module | nn.Parameter) for each in remembered):
                    return True
    return False


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()


def _lock_of(net: nn.Module) -> threading.RLock:
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(net, threading.RLock())
