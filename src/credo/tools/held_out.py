"""Examples to train on and examples to judge by: given, one split, or folds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from credo.errors import DataError
from credo.model import Model
from credo.network.batches import batch_rows
from credo.noise import key_to_seed
from credo.train.feed import TensorFeed, make_feed

SPLIT_STREAM = 3
"""Keeps the split's random numbers apart from those of `fit`'s data order and dropout."""


@dataclass(frozen=True)
class Split:
    """Data to train on and data to judge by.

    Args:
        train: What `credo.fit` is given.
        held_out: What is scored.
        num_data: Examples to train on.
        num_held_out: Examples to judge by.
    """

    train: Any
    held_out: Any
    num_data: int
    num_held_out: int


def splits(
    model: Model,
    data: Any,
    batch_size: int,
    val_data: Any,
    val_share: float,
    folds: int | None,
    seed: int,
) -> list[Split]:
    """``val_data`` if there is any, else a share of the data, else each of the folds in turn.

    Args:
        model: What the data are for.
        data: What `credo.fit` takes.
        batch_size: That of `credo.fit`.
        val_data: Data to judge by, if there is any.
        val_share: Of the data that is held out otherwise.
        folds: Parts that are held out one after the other.
        seed: Of the choice.
    """
    feed = make_feed(data, batch_size, model)
    if val_data is not None:
        held_out = make_feed(val_data, batch_size, model)
        return [Split(data, val_data, feed.num_data, held_out.num_data)]
    if isinstance(data, DataLoader):
        raise DataError(
            "a DataLoader can't be split: give the dataset that it draws from, or val_data"
        )
    count = feed.num_data
    size = round(val_share * count) if folds is None else count // folds
    if size < 1 or count - size < 1:
        how = f"val_share={val_share}" if folds is None else f"folds={folds}"
        raise DataError(
            f"{count} examples are too few for {how}: a part would be empty. Give more, or val_data"
        )
    generator = torch.Generator().manual_seed(key_to_seed(seed, SPLIT_STREAM))
    order = torch.randperm(count, generator=generator)
    parts = [order[:size]] if folds is None else list(order.tensor_split(folds))
    chosen = []
    for part in parts:
        rest = order[~torch.isin(order, part)]
        train, held_out = (_rows(feed, data, rows) for rows in (rest, part))
        chosen.append(Split(train, held_out, len(rest), len(part)))
    return chosen


def _rows(feed: Any, data: Any, rows: Tensor) -> Any:
    if isinstance(feed, TensorFeed):
        return batch_rows((feed.inputs, feed.targets), rows)
    return Subset(data, rows.tolist())
