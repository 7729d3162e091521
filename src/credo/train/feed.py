"""Where batches come from: tensors, datasets or loaders, in an order that can be resumed.

`credo.fit` owns the order wherever it can: epoch e visits the examples in the permutation drawn
from (seed, e), so any step of any epoch can be reached again. A user's own shuffling DataLoader is
taken as it is, and its runs resume exactly at epoch boundaries only.

Several ranks share every minibatch of that order: each takes its part of it, equal but for one
example. So what a step learns from does not depend on the number of ranks. At the end of an epoch
there may be fewer examples left than ranks; those that get none are given one that stands in, which
must count nothing. A DataLoader is given to each rank by the user, with a `DistributedSampler`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from credo.collectives import Ranks
from credo.errors import DataError, RankError
from credo.model import Model
from credo.network.batches import (
    BatchStack,
    input_rows,
    is_array,
    named_parts,
    training_tensors,
    unpack_batch,
)
from credo.network.state import evaluating
from credo.noise import key_to_seed
from credo.types import Batch, Inputs

MOST_BATCHES = 256
NUMBERS_AT_ONCE = 1 << 18
"""A megabyte in float32, which stays in cache until it is used."""


class Feed(ABC):
    """An epoch's batches, again and again."""

    num_data: int
    num_batches: int
    exact: bool
    """Whether the same (seed, epoch) always gives the same batches."""
    ranks: Ranks
    """Who shares the batches."""

    resample: int | None = None
    """The seed of the sample with replacement that stands for the data; None for all of them."""

    @abstractmethod
    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """This rank's parts of an epoch's batches, without the first ``skip``."""

    def in_orders(
        self, orders: int, resamples: bool, seed: int, epoch: int, skip: int = 0
    ) -> Iterator[list[Batch] | BatchStack]:
        """As many batches at a time as there are orders; order k is that of `order_seed`."""
        each = [
            feed.batches(own, epoch, skip) for own, feed in self._in_order(orders, resamples, seed)
        ]
        return map(list, zip(*each, strict=True))

    def _in_order(self, orders: int, resamples: bool, seed: int) -> Iterator[tuple[int, Self]]:
        """For each order its seed, and the feed that is of its examples."""
        for order in range(orders):
            own, feed = order_seed(seed, order), copy.copy(self)
            feed.resample = key_to_seed(own, 4) if resamples else None
            yield own, feed

    def stands_in(self, batch: int) -> bool:
        """Whether this rank has no part of the epoch's batch of this number, but a stand-in."""
        return False

    def own_batches(self, seed: int, epoch: int) -> Iterator[Batch]:
        """Those of `batches` that are this rank's: all ranks together have every example once."""
        for number, batch in enumerate(self.batches(seed, epoch)):
            if not self.stands_in(number):
                yield batch

    @abstractmethod
    def check(self, model: Model) -> None:
        """Raise `DataError` if training on this can't be meant."""


class PermutedFeed(Feed):
    """Examples that can be reached by their numbers, in an order of ours."""

    exact = True

    def __init__(self, num_data: int, batch_size: int, ranks: Ranks) -> None:
        self.num_data, self.batch_size, self.ranks = num_data, batch_size, ranks
        self.num_batches = -(-num_data // batch_size)

    def stands_in(self, batch: int) -> bool:
        """At the end of an epoch, where there are fewer examples than ranks."""
        left = self.num_data - batch * self.batch_size
        return self.ranks.rank >= min(left, self.batch_size)

    def _order(self, seed: int, epoch: int) -> Tensor:
        """The examples in the permutation of (seed, epoch)."""
        order = permutation(self.num_data, seed, epoch)
        if self.resample is not None:
            generator = torch.Generator().manual_seed(self.resample)
            order = torch.randint(self.num_data, (self.num_data,), generator=generator)[order]
        return order

    def _rows(
        self, seed: int, epoch: int, skip: int, device: torch.device | str = "cpu"
    ) -> Iterator[Tensor]:
        """The examples of each batch, in the permutation of (seed, epoch); this rank's of them."""
        order = self._order(seed, epoch).to(device)
        for chosen in islice(order.split(self.batch_size), skip, None):
            if self.ranks.several:
                own = chosen.tensor_split(self.ranks.size)[self.ranks.rank]
                yield own if len(own) else chosen[:1]
            else:
                yield chosen


class TensorFeed(PermutedFeed):
    """Examples that are rows of tensors."""

    def __init__(self, inputs: Inputs, targets: Tensor, batch_size: int, ranks: Ranks) -> None:
        super().__init__(len(targets), batch_size, ranks)
        self.inputs, self.targets = inputs, targets

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Rows of the tensors."""
        rows = self._rows(seed, epoch, skip, self.targets.device)
        if self.ranks.several or not isinstance(self.inputs, Tensor):
            for chosen in rows:
                yield input_rows(self.inputs, chosen), self.targets[chosen]
            return
        at_once = self._at_once(self.inputs)
        while group := list(islice(rows, at_once)):
            chosen = group[0] if len(group) == 1 else torch.cat(group)
            inputs = self.inputs[chosen].split(self.batch_size)
            yield from zip(inputs, self.targets[chosen].split(self.batch_size), strict=True)

    def in_orders(
        self, orders: int, resamples: bool, seed: int, epoch: int, skip: int = 0
    ) -> Iterator[list[Batch] | BatchStack]:
        """Rows of the tensors, of all orders at once."""
        if self.ranks.several or not isinstance(self.inputs, Tensor):
            yield from super().in_orders(orders, resamples, seed, epoch, skip)
            return
        each = [feed._order(own, epoch) for own, feed in self._in_order(orders, resamples, seed)]
        steps = torch.stack(each).to(self.targets.device).split(self.batch_size, dim=1)
        rows: Iterator[Tensor] = islice(steps, skip, None)
        at_once = self._at_once(self.inputs, orders)
        while group := list(islice(rows, at_once)):
            if group[-1].shape != group[0].shape:  # the last one of the epoch is smaller
                rows, group = iter(group[-1:]), group[:-1]
            chosen = torch.stack(group)
            inputs, targets = self.inputs[chosen].unbind(), self.targets[chosen].unbind()
            yield from map(BatchStack, inputs, targets)

    def _at_once(self, inputs: Tensor, orders: int = 1) -> int:
        """Small minibatches are looked up many at a time, which takes as long as a small step."""
        numbers = orders * self.batch_size * (inputs[0].numel() + self.targets[0].numel())
        return max(1, min(MOST_BATCHES, NUMBERS_AT_ONCE // max(1, numbers)))

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


class DatasetFeed(PermutedFeed):
    """A map-style dataset, collated here so that the order is ours."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, ranks: Ranks) -> None:
        super().__init__(len(dataset), batch_size, ranks)  # type: ignore[arg-type]
        self.dataset = dataset

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Examples, one by one."""
        for chosen in self._rows(seed, epoch, skip):
            yield unpack_batch(default_collate([self.dataset[int(row)] for row in chosen]))

    def check(self, model: Model) -> None:
        """Look at the first few examples."""
        examples = [self.dataset[i] for i in range(min(8, self.num_data))]
        check_batch(model, unpack_batch(default_collate(examples)))


class LoaderFeed(Feed):
    """A user's DataLoader, in its own order; a `DistributedSampler` is told the epoch."""

    exact = False

    def __init__(self, loader: DataLoader[Any], num_data: int, ranks: Ranks) -> None:
        self.loader, self.num_data, self.ranks = loader, num_data, ranks
        try:
            self.num_batches = len(loader)
        except TypeError:
            self.num_batches = -(-num_data // (loader.batch_size or 1))

    def batches(self, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """What the loader yields, as many on every rank."""
        sampler = _sampler_of(self.loader)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        number = skip
        for batch in islice(self.loader, skip, None):
            if self.ranks.several:
                self._agree(number, goes_on=True)
            yield unpack_batch(batch)
            number += 1
        if self.ranks.several:
            self._agree(number, goes_on=False)

    def _agree(self, number: int, goes_on: bool) -> None:
        """Without this, ranks whose loaders end early would leave the others waiting for sums."""
        answers = [bool(row[0]) for row in self.ranks.gather([goes_on])]
        if any(answers) and not all(answers):
            done = [str(name) for name, on in zip(self.ranks.names, answers, strict=True) if not on]
            raise RankError(
                f"the DataLoader of rank{'s' if len(done) > 1 else ''} {', '.join(done)} ended "
                f"after {number} batches, others did not: give every rank as many batches, e.g. "
                "by sampler=DistributedSampler(dataset)"
            )

    def check(self, model: Model) -> None:
        """Look at the first batch, and at how ranks share the data."""
        if self.ranks.several:
            _refuse_unshared(self.loader, self.ranks)
        with torch.random.fork_rng(devices=[]):
            first = next(iter(self.loader), None)
        if first is None:
            raise DataError("the DataLoader yields no batches")
        check_batch(model, unpack_batch(first))


class Passes:
    """A pass over the data as often as it is asked for: every ``iter`` begins anew.

    Args:
        begin: From nothing to the batches of one pass.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Batch]:
        return self._begin()


def make_feed(
    data: Any,
    batch_size: int,
    model: Model,
    num_data: int | None = None,
    whole: bool = False,
    ranks: Ranks | None = None,
) -> Feed:
    """The feed for a tuple of tensors or arrays, a Dataset, or a DataLoader.

    ``whole`` puts all examples into one batch, which a DataLoader must do itself. A batch of
    ``batch_size`` examples is shared by the ``ranks``; without them this process has it all.
    """
    ranks = ranks or Ranks(alone=True)
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} must be at least 1")
    if isinstance(data, DataLoader):
        return LoaderFeed(data, num_data or _loader_size(data), ranks)
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
        size = len(data) if whole else batch_size  # type: ignore[arg-type]
        return DatasetFeed(data, size, ranks)
    inputs, targets = training_tensors(*unpack_batch(data), model.like)
    if targets.dim() == 0 or not len(targets):
        raise DataError("the training data is empty")
    return TensorFeed(inputs, targets, len(targets) if whole else batch_size, ranks)


def order_seed(seed: int, order: int) -> int:
    """The seed of one of several orders of a run; the first is the run's own."""
    return key_to_seed(seed, 3, order) if order else seed


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


UNSHARED = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that know nothing of ranks. Of others it can't be told."""


def _sampler_of(loader: DataLoader[Any]) -> object:
    """Who chooses the examples: None where the loader was not given one that says."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def _refuse_unshared(loader: DataLoader[Any], ranks: Ranks) -> None:
    sampler = _sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas != ranks.size:
        raise DataError(
            f"the DataLoader's DistributedSampler is for {sampler.num_replicas} ranks, but there "
            f"are {ranks.size}: make it after init_process_group, without num_replicas"
        )
    if type(sampler) in UNSHARED and not isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"{ranks.size} ranks would each train on all examples: a DataLoader with a "
            f"{type(sampler).__name__} knows nothing of ranks. Give it "
            "sampler=torch.utils.data.DistributedSampler(dataset) in the place of shuffle=True, or "
            "give credo.fit the dataset itself, which it shares out"
        )


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
