"""Where batches come from: tensors, datasets or loaders, in an order that can be resumed.

`credo.fit` owns the order wherever it can: epoch e visits the examples in the permutation drawn
from (seed, e), so any step of any epoch can be reached again. A user's own shuffling DataLoader is
taken as it is, and its runs resume exactly at epoch boundaries only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from credo.errors import DataError
from credo.model import Model
from credo.network.batches import (
    input_rows,
    is_array,
    named_parts,
    training_tensors,
    unpack_batch,
)
from credo.network.state import evaluating
from credo.noise import key_to_seed
from credo.types import Batch, Inputs


class Feed(ABC):
    """An epoch's batches, again and again."""

    num_data: int
    num_batches: int
    exact: bool
    """Whether the same (seed, epoch) always gives the same batches."""

    @abstractmethod
    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without the first ``skip``."""

    @abstractmethod
    def check(self, model: Model) -> None:
        """Raise `DataError` if training on this can't be meant."""


class TensorFeed(Feed):
    """Examples that are rows of tensors."""

    exact = True

    def __init__(self, inputs: Inputs, targets: Tensor, batch_size: int) -> None:
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size
        self.num_data = len(targets)
        self.num_batches = -(-self.num_data // batch_size)

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Rows in the permutation of (seed, epoch)."""
        order = permutation(self.num_data, seed, epoch).to(self.targets.device)
        for chosen in islice(order.split(self.batch_size), skip, None):
            yield input_rows(self.inputs, chosen), self.targets[chosen]

    def check(self, model: Model) -> None:
        """Finite inputs; outputs that exist; targets that the likelihood takes, all of them."""
        for name, tensor in named_parts(self.inputs).items():
            if len(tensor) != self.num_data:
                raise DataError(
                    f"{name} has {len(tensor)} examples but the targets {self.num_data}"
                )
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()
                raise DataError(
                    f"{name} has NaN or infinite values in {len(bad)} of {self.num_data} examples "
                    f"(rows {bad[:5]}{' …' if len(bad) > 5 else ''}): impute or drop them first"
                )
        first = slice(0, min(8, self.num_data))
        outputs = trial_outputs(model, input_rows(self.inputs, first))
        for targets in self.targets.split(4096):
            template = outputs[:1].expand(len(targets), *outputs.shape[1:])
            model.likelihood.check(template, targets)


class DatasetFeed(Feed):
    """A map-style dataset, collated here so that the order is ours."""

    exact = True

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.num_data = len(dataset)  # type: ignore[arg-type]
        self.num_batches = -(-self.num_data // batch_size)

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Examples in the permutation of (seed, epoch)."""
        order = permutation(self.num_data, seed, epoch)
        for chosen in islice(order.split(self.batch_size), skip, None):
            yield unpack_batch(default_collate([self.dataset[int(row)] for row in chosen]))

    def check(self, model: Model) -> None:
        """Look at the first few examples."""
        examples = [self.dataset[i] for i in range(min(8, self.num_data))]
        check_batch(model, unpack_batch(default_collate(examples)))


class LoaderFeed(Feed):
    """A user's DataLoader, in its own order."""

    exact = False

    def __init__(self, loader: DataLoader[Any], num_data: int) -> None:
        self.loader, self.num_data = loader, num_data
        try:
            self.num_batches = len(loader)
        except TypeError:
            self.num_batches = -(-num_data // (loader.batch_size or 1))

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """What the loader yields."""
        for batch in islice(self.loader, skip, None):
            yield unpack_batch(batch)

    def check(self, model: Model) -> None:
        """Look at the first batch."""
        with torch.random.fork_rng(devices=[]):
            first = next(iter(self.loader), None)
        if first is None:
            raise DataError("the DataLoader yields no batches")
        check_batch(model, unpack_batch(first))


def make_feed(
    data: Any, batch_size: int, model: Model, num_data: int | None = None, whole: bool = False
) -> Feed:
    """The feed for a tuple of tensors or arrays, a Dataset, or a DataLoader.

    ``whole`` puts all examples into one batch, which a DataLoader must do itself.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} must be at least 1")
    if isinstance(data, DataLoader):
        return LoaderFeed(data, num_data or _loader_size(data))
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, IterableDataset):
        raise DataError(
            "an IterableDataset has no examples to permute: wrap it in a DataLoader and say how "
            "many there are with num_data=…"
        )
    if is_array(data):
        raise DataError(
            f"the training data is one {type(data).__name__}, which may be inputs or targets: give "
            "a tuple of both, (inputs, targets)"
        )
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")
                                     and not isinstance(data, list | tuple | Mapping)):  # fmt: skip
        if not len(data):  # type: ignore[arg-type]
            raise DataError("the training data is empty")
        return DatasetFeed(data, len(data) if whole else batch_size)  # type: ignore[arg-type]
    inputs, targets = training_tensors(*unpack_batch(data), model.like)
    if targets.dim() == 0 or not len(targets):
        raise DataError("the training data is empty")
    return TensorFeed(inputs, targets, len(targets) if whole else batch_size)


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order in which epoch ``epoch`` of the run ``seed`` visits n examples."""
    generator = torch.Generator().manual_seed(key_to_seed(seed, 1, epoch))
    return torch.randperm(n, generator=generator)


def check_batch(model: Model, batch: Batch) -> None:
    """Run one batch through network and likelihood, and refuse what can't be meant."""
    inputs, targets = batch
    for name, tensor in named_parts(inputs).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{name} has NaN or infinite values: impute or drop them first")
    model.likelihood.check(trial_outputs(model, inputs), targets)


def trial_outputs(model: Model, inputs: Inputs) -> Tensor:
    """The outputs of a forward pass that leaves no trace, with a clear error if it can't run."""
    try:
        with evaluating(model.net), torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model.observe(inputs)
    except (RuntimeError, TypeError, IndexError) as error:
        shapes = {name: tuple(tensor.shape) for name, tensor in named_parts(inputs).items()}
        raise DataError(
            f"the network can't take these inputs ({shapes}): {error}. The first dimension counts "
            "examples; the others must be what the network expects."
        ) from error


def _loader_size(loader: DataLoader[Any]) -> int:
    try:
        size = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            "the DataLoader's dataset has no length, so the number of training examples is "
            "unknown. The KL is weighted by it and it is never guessed from a batch: "
            "say it with num_data=…"
        ) from error
    if not size:
        raise DataError("the training data is empty")
    return size
