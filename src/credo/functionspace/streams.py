"""Data as a stream of batches: whatever its size, one batch is held at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from credo.errors import DataError
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import map_inputs, unpack_batch
from credo.network.state import evaluating
from credo.posterior.posterior import Posterior
from credo.types import Batch, Inputs

BATCH_SIZE = 1024


def batches(data: Any, batch_size: int = BATCH_SIZE) -> Iterator[Batch]:
    """Inputs and targets in order: of tensors or arrays, a dataset, a loader or any iterable.

    >>> x, y = torch.zeros(5, 2), torch.arange(5)
    >>> [part[1].tolist() for part in batches((x, y), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    if isinstance(data, tuple):
        inputs, targets = unpack_batch(tuple(_as_tensor(part) for part in data))
        for start in range(0, len(targets), batch_size):
            cut = partial(rows_of, start=start, stop=start + batch_size)
            yield map_inputs(cut, inputs), cut(targets)
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        for batch in DataLoader(data, batch_size, shuffle=False):
            yield unpack_batch(batch)
    elif isinstance(data, Iterable) and not isinstance(data, Tensor | np.ndarray | Mapping):
        for batch in data:
            yield unpack_batch(batch)
    else:
        raise DataError(
            f"data must be (inputs, targets), a Dataset or a loader of batches, not "
            f"{type(data).__name__}"
        )


def _as_tensor(part: Any) -> Any:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def number_of_batches(data: Any, batch_size: int = BATCH_SIZE) -> int | None:
    """How many `batches` there will be, where that can be known."""
    if isinstance(data, tuple):
        return -(-len(data[-1]) // batch_size)
    if not isinstance(data, Sized):
        return None
    try:
        length = len(data)
    except TypeError:  # a loader of an iterable dataset
        return None
    return -(-length // batch_size) if isinstance(data, Dataset) else length


def rows_of(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop: `slice` for `map_inputs`."""
    return x[start:stop]


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """A batch cut into parts of at most ``size`` examples."""
    inputs, targets = batch
    for start in range(0, len(targets), size):
        cut = partial(rows_of, start=start, stop=start + size)
        yield map_inputs(cut, inputs), cut(targets)


def like_weights(inputs: Inputs, flat: FlatParams) -> Inputs:
    """On the network's device, floating ones in its dtype."""
    like = flat.vector
    return map_inputs(
        lambda x: x.to(like.device, like.dtype if x.is_floating_point() else x.dtype), inputs
    )


@contextmanager
def at_rest(subject: Posterior | Model) -> Iterator[FlatParams]:
    """The network in eval mode: at a posterior's mean, or at the weights that a model has now."""
    if isinstance(subject, Posterior):
        with subject.in_network() as flat:
            yield flat
    else:
        with evaluating(subject.net):
            yield subject.flat


def model_of(subject: Posterior | Model) -> Model:
    """The model itself."""
    return subject.model if isinstance(subject, Posterior) else subject


@contextmanager
def progress_bar(what: str, total: int | None, show: bool) -> Iterator[Any]:
    """A function to call after every step; a bar on stderr if a person is looking there."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
