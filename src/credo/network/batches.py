"""Examples as networks take them, tensors or tuples and mappings of them: cut, joined, converted.

Everything that cuts, joins, moves or converts inputs and targets does it with the functions here.
Inputs are a tensor, a sequence of tensors or a mapping of tensors, and the first dimension of each
counts examples; a batch is a pair of inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from credo.errors import DataError
from credo.types import Batch, Inputs, Vector

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
BATCH_SIZE = 1024
"""Examples at once where nothing is learned from them."""

# --- what users and data loaders bring ------------------------------------------------------------


def as_tensor(value: Any, name: str = "the data") -> Tensor:
    """A tensor of a tensor, an array, a table of numbers or nested lists.

    Memory is shared where torch can share it. Arrays that it can't, or must not, write to are
    copied: read-only ones, and those with negative strides.

    Args:
        value: What to convert.
        name: What an error calls it.

    Raises:
        DataError: If there are values that are no numbers.

    >>> as_tensor([[1.0, 2.0]])
    tensor([[1., 2.]])
    """
    if isinstance(value, Tensor):
        return value
    if _is_table(value):
        value = _numbers_of(value, name)
    if isinstance(value, np.ndarray) and (
        not value.flags.writeable or any(stride < 0 for stride in value.strides)
    ):
        value = value.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"can't make a tensor of {name}, a {_kind(value)}: {error}") from error


def as_inputs(value: Any, name: str = "the inputs") -> Inputs:
    """Inputs as tensors, whatever they came as: one array, several, or a mapping of them.

    A list or tuple of tensors or arrays is several inputs, any other list the numbers of one.

    Args:
        value: What to convert.
        name: What an error calls it.

    >>> as_inputs({"pixels": np.ones(2)})
    {'pixels': tensor([1., 1.], dtype=torch.float64)}
    """
    if isinstance(value, Mapping):
        return {key: as_tensor(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple) and value and all(map(is_array, value)):
        return tuple(as_tensor(part, f"{name}[{place}]") for place, part in enumerate(value))
    return as_tensor(value, name)


def unpack_batch(batch: Any) -> Batch:
    """Inputs and targets of what a data loader yields.

    A pair (x, y); a longer tuple, whose last entry is the targets; or a mapping with one of the
    usual target keys, the rest being keyword arguments of the network.

    Args:
        batch: A list, a tuple or a mapping.

    Raises:
        DataError: If there are no targets in it.

    >>> x, y = unpack_batch({"pixels": torch.ones(2, 3), "labels": torch.tensor([0, 1])})
    >>> sorted(x), y.tolist()
    (['pixels'], [0, 1])
    """
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {k: v for k, v in batch.items() if k != key}, batch[key]
        raise DataError(
            f"a mapping batch needs its targets under one of {TARGET_KEYS}, not {sorted(batch)}"
        )
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, list | tuple) and len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    raise DataError(
        f"a batch must be (inputs, targets) or a mapping, not a {_kind(batch)}; "
        "does the dataset yield inputs alone?"
    )


def inputs_alone(batch: Any) -> Inputs:
    """The inputs of what a data loader yields, with or without targets beside them.

    Args:
        batch: Inputs, or a list or tuple of them whose last entry, if it has several, is targets.

    >>> inputs_alone([torch.ones(2, 1)])
    tensor([[1.],
            [1.]])
    """
    if isinstance(batch, Mapping):
        return as_inputs({k: v for k, v in batch.items() if k not in TARGET_KEYS})
    if isinstance(batch, list | tuple) and batch:
        inputs = batch[0] if len(batch) <= 2 else tuple(batch[:-1])
        return as_inputs(inputs)
    return as_inputs(batch)


def is_array(value: Any) -> bool:
    """Whether it is a tensor, an array, a data frame or a column of one.

    Args:
        value: Anything.
    """
    return isinstance(value, Tensor | np.ndarray) or _is_table(value)


def is_loader(data: Any) -> bool:
    """Whether these are batches to iterate over rather than the examples themselves.

    Args:
        data: What `Posterior.predict` and others are given.
    """
    return isinstance(data, Iterable) and not (
        isinstance(data, Mapping | list | tuple) or is_array(data)
    )


def batches(data: Any, batch_size: int = BATCH_SIZE) -> Iterator[Batch]:
    """Inputs and targets in the data's order, one batch at a time.

    Args:
        data: A tuple of tensors or arrays, a dataset, a loader or any iterable of batches.
        batch_size: Examples in a batch, unless the data comes in batches of its own.

    >>> x, y = torch.zeros(5, 2), torch.arange(5)
    >>> [part[1].tolist() for part in batches((x, y), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    if isinstance(data, tuple):
        inputs, targets = unpack_batch(data)
        yield from pieces((as_inputs(inputs), as_tensor(targets, "the targets")), batch_size)
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        for batch in DataLoader(data, batch_size, shuffle=False):
            yield unpack_batch(batch)
    elif is_loader(data) or isinstance(data, list):
        for batch in data:
            yield unpack_batch(batch)
    else:
        raise DataError(
            f"data must be (inputs, targets), a Dataset or a loader of batches, not a {_kind(data)}"
        )


def number_of_batches(data: Any, batch_size: int = BATCH_SIZE) -> int | None:
    """How many `batches` there will be, where that can be known.

    Args:
        data: What `batches` is given.
        batch_size: The same.
    """
    if isinstance(data, tuple):
        return -(-len(data[-1]) // batch_size)
    if not isinstance(data, Sized):
        return None
    try:
        length = len(data)
    except TypeError:  # a loader of an iterable dataset
        return None
    return -(-length // batch_size) if isinstance(data, Dataset) else length


# --- parts, rows and joins ------------------------------------------------------------------------


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same inputs with every tensor of theirs changed.

    Args:
        function: From the old tensor to the new one.
        inputs: A tensor, a sequence or a mapping of them.

    >>> map_inputs(lambda x: x[:1], {"pixels": torch.arange(3)})
    {'pixels': tensor([0])}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def named_parts(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors that inputs are made of, by the names that errors call them.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
    """
    if isinstance(inputs, Tensor):
        return {"the input": inputs}
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {f"input {index}": tensor for index, tensor in enumerate(inputs)}


def parts_of(inputs: Inputs) -> list[Tensor]:
    """The tensors that inputs are made of.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
    """
    return list(named_parts(inputs).values())


def number_of_examples(inputs: Inputs, what: str = "the inputs") -> int:
    """How many examples there are: the length of every tensor's first dimension.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
        what: What an error calls them.

    Raises:
        DataError: If there are none, or the tensors have different numbers of them.

    >>> number_of_examples({"left": torch.zeros(3, 2), "right": torch.zeros(3)})
    3
    """
    parts = parts_of(inputs)
    if any(not part.dim() for part in parts):
        raise DataError(f"{what} have a tensor without dimensions: the first one counts examples")
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise DataError(
            f"{what} have different numbers of examples: their first dimensions are "
            f"{sorted(lengths)}"
        )
    if not lengths or not max(lengths):
        raise DataError(f"{what} are empty: the first dimension has length 0")
    return lengths.pop()


def input_rows(inputs: Inputs, chosen: Tensor | slice) -> Inputs:
    """Some of the examples, in the order in which they are asked for.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
        chosen: Their numbers, a mask, or a slice.
    """
    if isinstance(chosen, slice):
        return map_inputs(lambda x: x[chosen], inputs)
    return map_inputs(lambda x: x[chosen.to(x.device)], inputs)


def batch_rows(batch: Batch, chosen: Tensor | slice) -> Batch:
    """Some examples of a batch, targets and all.

    Args:
        batch: Inputs and targets.
        chosen: Their numbers, a mask, or a slice.
    """
    inputs, targets = batch
    where = chosen if isinstance(chosen, slice) else chosen.to(targets.device)
    return input_rows(inputs, chosen), targets[where]


class BatchStack:
    """Minibatches of one size, one for each order of the data, as tensors (K, B, ...).

    Args:
        inputs: A tensor, a sequence or a mapping of them.
        targets: Of the same examples.

    >>> stack = BatchStack(torch.zeros(2, 3, 1), torch.arange(6).view(2, 3))
    >>> len(stack), stack[1][1].tolist()
    (2, [3, 4, 5])
    """

    __slots__ = ("inputs", "targets")

    def __init__(self, inputs: Inputs, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> BatchStack:
        """Put batches of one size on top of each other.

        Args:
            batches: One for each order.
        """
        columns = [torch.stack(c) for c in zip(*(parts_of(i) for i, _ in batches), strict=True)]
        inputs: Inputs = tuple(columns)
        if isinstance(batches[0][0], Tensor):
            (inputs,) = columns
        elif isinstance(batches[0][0], Mapping):
            inputs = dict(zip(batches[0][0], columns, strict=True))
        return cls(inputs, torch.stack([targets for _, targets in batches]))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, order: int) -> Batch:
        return map_inputs(lambda x: x[order], self.inputs), self.targets[order]


def chunks(inputs: Inputs, size: int, weights: Vector | None = None) -> Iterator[Inputs]:
    """All examples, so many at a time.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
        size: The most examples of a chunk.
        weights: Each chunk is made `like_weights`, when it is its turn.
    """
    for start in range(0, number_of_examples(inputs), size):
        chunk = input_rows(inputs, slice(start, start + size))
        yield chunk if weights is None else like_weights(chunk, weights)


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """A batch cut into parts.

    Args:
        batch: Inputs and targets.
        size: The most examples of a part.
    """
    for start in range(0, len(batch[1]), size):
        yield batch_rows(batch, slice(start, start + size))


def joined(parts: Sequence[Batch]) -> Batch:
    """The examples of several batches as one.

    Args:
        parts: Batches whose inputs are made of the same tensors.

    >>> first, second = (torch.zeros(2, 1), torch.zeros(2)), (torch.ones(1, 1), torch.ones(1))
    >>> joined([first, second])[1]
    tensor([0., 0., 1.])
    """
    if len(parts) == 1:
        return parts[0]
    targets = torch.cat([targets for _, targets in parts])
    inputs = [inputs for inputs, _ in parts]
    columns = [torch.cat(column) for column in zip(*map(parts_of, inputs), strict=True)]
    if isinstance(inputs[0], Tensor):
        return columns[0], targets
    if isinstance(inputs[0], Mapping):
        return dict(zip(inputs[0], columns, strict=True)), targets
    return tuple(columns), targets


def example_shapes(batch: Batch) -> list[torch.Size]:
    """The shapes that one example's tensors have: equal for batches that can be joined.

    Args:
        batch: Inputs and targets.
    """
    inputs, targets = batch
    return [tensor.shape[1:] for tensor in (*parts_of(inputs), targets)]


# --- devices and precisions -----------------------------------------------------------------------


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the network is.

    Args:
        batch: Inputs and targets.
        device: Where to.
    """
    inputs, targets = batch
    if isinstance(inputs, Tensor) and inputs.device == targets.device == device:
        return batch
    return map_inputs(lambda x: x.to(device), inputs), targets.to(device)


def like_weights(inputs: Inputs, weights: Vector) -> Inputs:
    """Inputs on the weights' device, floating ones in their precision.

    Args:
        inputs: A tensor, a sequence or a mapping of them.
        weights: The flat vector of the network's parameters.
    """
    return map_inputs(partial(_like, weights=weights), inputs)


def training_tensors(inputs: Any, targets: Any, weights: Vector) -> Batch:
    """Data to train on, converted once: `like_weights`, with small integers as int64.

    Args:
        inputs: What `as_inputs` takes.
        targets: What `as_tensor` takes.
        weights: The flat vector of the network's parameters.
    """
    convert = partial(_for_training, weights=weights)
    return map_inputs(convert, as_inputs(inputs)), convert(as_tensor(targets, "the targets"))


# --- inside ---------------------------------------------------------------------------------------


def _like(x: Tensor, weights: Vector) -> Tensor:
    return x.to(weights.device, weights.dtype if x.is_floating_point() else x.dtype)


def _for_training(x: Tensor, weights: Vector) -> Tensor:
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
        x = x.long()
    return _like(x, weights)


def _is_table(value: Any) -> bool:
    """Whether it is a data frame or one of its columns: of pandas, polars and their like."""
    return hasattr(value, "to_numpy") and hasattr(value, "__len__")


def _numbers_of(table: Any, name: str) -> np.ndarray[Any, Any]:
    values = np.asarray(table.to_numpy())
    if values.dtype != object and values.dtype.kind in "biuf":
        return values
    columns = list(getattr(table, "columns", []))
    words = [str(c) for c in columns if np.asarray(table[c].to_numpy()).dtype.kind not in "biuf"]
    if columns and not words:  # numbers of several types, which pandas holds as objects
        return np.stack([np.asarray(table[c].to_numpy(), dtype=float) for c in columns], 1)
    where = f" in {', '.join(words[:5])}{' …' if len(words) > 5 else ''}" if words else ""
    raise DataError(
        f"{name}, a {_kind(table)}, has values that are no numbers{where}: encode categories and "
        "dates as numbers first"
    )


def _kind(value: Any) -> str:
    return type(value).__name__
