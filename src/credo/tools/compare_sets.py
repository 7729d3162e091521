"""What a comparison is trained and tried on: the same examples for every method, checked first.

Everything is kept as arrays, because these reach worker processes by memory that they share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from credo.errors import DataError, UnsupportedError
from credo.model import Model
from credo.network.batches import (
    as_inputs,
    as_tensor,
    batches,
    example_shapes,
    inputs_alone,
    is_array,
    is_loader,
    joined,
    like_weights,
    map_inputs,
    named_parts,
    number_of_examples,
    parts_of,
    unpack_batch,
)
from credo.train.feed import make_feed, trial_outputs
from credo.types import Batch, Inputs, Json

Kind: TypeAlias = Literal["classification", "regression", "dense"]
Array: TypeAlias = NDArray[Any]
Shift: TypeAlias = Callable[[Tensor, int], Tensor]
"""``shift(inputs, severity)``: the same examples, shifted so far."""

SEVERITIES = (1, 2, 3, 4, 5)
LOOKED_AT = 8
"""Examples that a shift is tried on before anything is trained."""


@dataclass(frozen=True)
class Sets:
    """The examples of a comparison.

    Args:
        kind: What is predicted.
        train: What `credo.fit` is given.
        inputs: To be tested on.
        targets: What came true of them.
        ood: Foreign inputs by name.
        shifts: By name and severity: shifted inputs and their targets, or a function.
        ignored: The label that marks missing truth.
        num_train: Training examples.
    """

    kind: Kind
    train: Any
    inputs: Any
    targets: Array
    ood: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, Mapping[int, tuple[Any, Array] | Shift]] = field(default_factory=dict)
    ignored: int | None = None
    num_train: int = 0

    def shifted(self) -> Iterator[tuple[str, int, Inputs, Tensor]]:
        """Every shift at every severity: name, severity, inputs and targets."""
        for name, levels in self.shifts.items():
            for severity, found in levels.items():
                if callable(found):
                    x, y = found(as_tensor(self.inputs), severity), as_tensor(self.targets)
                    yield name, severity, x, y
                else:
                    yield name, severity, as_inputs(found[0]), as_tensor(found[1])


def gather(
    model: Model,
    train: Any,
    test: Any,
    ood: Any,
    shifts: Mapping[str, Any] | None,
    severities: Sequence[int],
    batch_size: int,
) -> Sets:
    """All sets, or the first thing that is wrong with them.

    Args:
        model: Such as the methods will train; it is not changed.
        train: What `credo.fit` takes.
        test: Examples with targets.
        ood: Foreign inputs, or several of them by name.
        shifts: By name a function or shifted test sets.
        severities: Those that functions are called with.
        batch_size: That of training.

    Raises:
        DataError: A set is empty, or does not fit the network or the test set.
    """
    if model.likelihood.kind == "loss":
        raise UnsupportedError(
            f"compare needs a likelihood that is a distribution, not the loss "
            f"{type(model.likelihood).__name__}: without one there is no score to compare by. Use "
            "Categorical, Bernoulli or Gaussian"
        )
    ready = _packed_train(train)
    feed = make_feed(ready, batch_size, model)
    feed.check(model)
    inputs, targets = _test_set(test)
    outputs = trial_outputs(model, like_weights(first_few(inputs), model.like))
    kind = _kind(model, outputs)
    make_feed((inputs, targets), batch_size, model).check(model)
    ignored = model.likelihood.ignore_index
    if kind == "classification" and ignored is not None:
        counted = targets != ignored
        inputs, targets = map_inputs(lambda x: x[counted], inputs), targets[counted]
        ignored = None
    return Sets(
        kind,
        ready,
        _packed(inputs),
        _array(targets),
        _foreign(ood, inputs),
        _shifts(shifts or {}, (inputs, targets), severities),
        ignored,
        feed.num_data,
    )


def fingerprint(sets: Sets) -> Json:
    """A short hash of each set, by which a later call knows whether it is the same.

    Of a Dataset or a loader only its length and its first examples are looked at; of a function
    what it makes of a few examples.

    Args:
        sets: To be told apart.
    """
    few: Any = first_few(as_inputs(sets.inputs))
    prints: Json = {"test": _hash(sets.inputs, sets.targets)}
    if isinstance(sets.train, tuple):
        prints["train"] = _hash(*sets.train)
    else:
        count = _length(sets.train) if isinstance(sets.train, Dataset) else 0
        examples = [sets.train[i] for i in range(min(LOOKED_AT, count or 0))]
        prints["train"] = f"{type(sets.train).__name__} of {_length(sets.train)}, " + _hash(
            *(part for example in examples for part in _numbers(example))
        )
    for name, foreign in sets.ood.items():
        prints[f"ood {name}"] = _hash(foreign)
    for name, levels in sets.shifts.items():
        prints[f"shift {name}"] = {
            str(severity): _hash(found(few, severity)) if callable(found) else _hash(*found)
            for severity, found in levels.items()
        }
    return prints


# --- inside ---------------------------------------------------------------------------------------


def _packed_train(train: Any) -> Any:
    if isinstance(train, TensorDataset):
        train = train.tensors
    if isinstance(train, tuple | list) and all(
        is_array(part) or isinstance(part, Mapping | tuple | list) for part in train
    ):
        inputs, targets = unpack_batch(train)
        return _packed(as_inputs(inputs)), _array(as_tensor(targets, "the targets"))
    return train


def _test_set(test: Any) -> Batch:
    if isinstance(test, TensorDataset):
        test = test.tensors
    if is_array(test):
        raise DataError(
            f"test is one {type(test).__name__}, which may be inputs or targets: give a tuple of "
            "both, (inputs, targets)"
        )
    parts = list(batches(tuple(test) if isinstance(test, list) else test))
    if not parts:
        raise DataError("the test set is empty: there is nothing to compare on")
    found = joined([(as_inputs(x), as_tensor(y, "the test targets")) for x, y in parts])
    number_of_examples(found[0], "the test inputs")
    return found


def _kind(model: Model, outputs: Tensor) -> Kind:
    if model.likelihood.kind == "regression":
        return "regression"
    with torch.random.fork_rng(devices=[]):
        target = model.likelihood.sample(outputs[:1])
    return "classification" if target.numel() == 1 else "dense"


def _foreign(ood: Any, inputs: Inputs) -> dict[str, Any]:
    if ood is None:
        return {}
    named = ood if _is_named(ood, inputs) else {"foreign": ood}
    if not named:
        raise DataError("ood is an empty mapping: give foreign inputs by name, or None")
    found = {}
    for name, given in named.items():
        x = _inputs_of(given, f"the foreign inputs {name!r}")
        _require_alike(x, inputs, f"the foreign inputs {name!r}")
        found[str(name)] = _packed(x)
    return found


def _is_named(ood: Any, inputs: Inputs) -> bool:
    """A mapping is of names to sets, unless the network itself takes mappings with these keys."""
    if not isinstance(ood, Mapping):
        return False
    return not (isinstance(inputs, Mapping) and ood.keys() == inputs.keys())


def _inputs_of(given: Any, what: str) -> Inputs:
    if isinstance(given, Dataset) and not is_array(given):
        given = [given[i] for i in range(_length(given) or 0)]
        if not given:
            raise DataError(f"{what} are empty: give some, or leave them out")
        rows = [parts_of(inputs_alone(row if isinstance(row, tuple | list) else [row]))[0]
                for row in given]  # fmt: skip
        return torch.stack(rows)
    if is_loader(given):
        parts = [(inputs_alone(batch), torch.zeros(0)) for batch in given]
        if not parts:
            raise DataError(f"{what} are empty: give some, or leave them out")
        return joined(parts)[0]
    if isinstance(given, tuple) and len(given) == 2 and _looks_labelled(given):
        given = given[0]
    found = as_inputs(given, what)
    number_of_examples(found, what)
    return found


def _looks_labelled(pair: tuple[Any, Any]) -> bool:
    """Whether these are inputs with targets beside them, which are not needed."""
    return all(map(is_array, pair)) and as_tensor(pair[1]).dim() < as_tensor(pair[0]).dim()


def _shifts(
    shifts: Mapping[str, Any], test: Batch, severities: Sequence[int]
) -> dict[str, dict[int, tuple[Any, Array] | Shift]]:
    found: dict[str, dict[int, tuple[Any, Array] | Shift]] = {}
    for name, given in shifts.items():
        if callable(given):
            found[str(name)] = _by_function(str(name), given, test, severities)
        elif isinstance(given, Mapping):
            levels = {int(severity): item for severity, item in given.items()}
            found[str(name)] = _by_sets(str(name), levels, test)
        elif isinstance(given, list | tuple):
            found[str(name)] = _by_sets(str(name), dict(enumerate(given, start=1)), test)
        else:
            raise DataError(
                f"the shift {name!r} is a {type(given).__name__}: give a function of inputs and "
                "severity, or a list of shifted test sets from the mildest to the strongest"
            )
    return found


def _by_function(
    name: str, shift: Shift, test: Batch, severities: Sequence[int]
) -> dict[int, tuple[Any, Array] | Shift]:
    inputs, _ = test
    if not isinstance(inputs, Tensor):
        raise DataError(
            f"the shift {name!r} is a function of one tensor, but the test inputs are several: "
            "give shifted test sets"
        )
    few = inputs[:LOOKED_AT]
    for severity in severities:
        try:
            shifted = shift(few, severity)
        except Exception as error:  # the user's own function, which may fail in any way
            raise DataError(
                f"the shift {name!r} failed at severity {severity} on {len(few)} test inputs of "
                f"shape {tuple(inputs.shape[1:])}: {type(error).__name__}: {error}"
            ) from error
        what = f"the inputs of shift {name!r} at severity {severity}"
        if not isinstance(shifted, Tensor):
            raise DataError(f"{what} are a {type(shifted).__name__}: a shift must return a tensor")
        _require_alike(shifted, few, what)
        _require_as_many(shifted, few, what)
    return dict.fromkeys(severities, shift)


def _by_sets(
    name: str, levels: Mapping[int, Any], test: Batch
) -> dict[int, tuple[Any, Array] | Shift]:
    if not levels:
        raise DataError(f"the shift {name!r} has no severities: give at least one test set")
    found: dict[int, tuple[Any, Array] | Shift] = {}
    for severity, given in levels.items():
        what = f"the inputs of shift {name!r} at severity {severity}"
        inputs, targets = given, test[1]
        if isinstance(given, tuple) and len(given) == 2 and _looks_labelled(given):
            inputs, targets = given[0], as_tensor(given[1])
        x = as_inputs(inputs, what)
        number_of_examples(x, what)
        _require_alike(x, test[0], what)
        _require_as_many(x, targets, what)
        found[severity] = (_packed(x), _array(targets))
    return found


def _require_alike(x: Inputs, inputs: Inputs, what: str) -> None:
    """The shape and type of one example must be that of the test set, and all numbers finite."""
    none = torch.zeros(0)
    here, there = example_shapes((x, none)), example_shapes((inputs, none))
    if here != there:
        raise DataError(
            f"{what} have examples of shape {_words(here)}, those of the test set are "
            f"{_words(there)}: bring them to one shape first"
        )
    kinds = [
        [part.is_floating_point() for part in parts_of(each)] for each in (x, inputs)
    ]  # fmt: skip
    if kinds[0] != kinds[1]:
        types = [", ".join(str(part.dtype) for part in parts_of(each)) for each in (x, inputs)]
        raise DataError(f"{what} are of {types[0]}, those of the test set of {types[1]}")
    for tensor in named_parts(x).values():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{what} have NaN or infinite values: impute or drop them first")


def _require_as_many(x: Inputs, like: Tensor, what: str) -> None:
    if number_of_examples(x, what) != len(like):
        raise DataError(
            f"{what} are {number_of_examples(x)} examples, but there are {len(like)} targets: "
            "every test example needs its shifted one, or give (inputs, targets)"
        )


def _words(shapes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes[:-1])


def first_few(inputs: Inputs) -> Inputs:
    """Enough of them to see what a network or a shift makes of them.

    Args:
        inputs: All of them.
    """
    return map_inputs(lambda x: x[:LOOKED_AT], inputs)


def _packed(inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return _array(inputs)
    if isinstance(inputs, Mapping):
        return {name: _array(part) for name, part in inputs.items()}
    return tuple(_array(part) for part in inputs)


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _numbers(value: Any) -> Iterator[Array]:
    """All arrays in nested tuples and mappings."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    else:
        yield np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for array in _numbers(parts):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
