"""What keeps the ranks of one run alike: the same start, the same settings, the same buffers.

Weights never have to be exchanged after the start, because every rank makes the same update of the
same sums; that they are the same bit by bit is checked at the end of each epoch. Buffers, such as
the statistics of batch norm, follow each rank's own examples. They are replaced by their mean over
ranks at the end of each epoch and before each checkpoint: a running mean of means is linear in
them, so it does not matter how often.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from credo.collectives import Ranks, copy_from_first, fingerprint
from credo.errors import DataError
from credo.model import Model
from credo.train.feed import Feed
from credo.types import Json


def begin(ranks: Ranks, model: Model, feed: Feed) -> None:
    """Give every rank the first one's network and noise; `RankError` where they can't be alike."""
    sizes = {
        "number of weights": sum(segment.size for segment in model.segments),
        "number of training examples": feed.num_data,
        "number of minibatches": feed.num_batches,
    }
    remedy = "build the same network and give the same data on every rank"
    ranks.refuse_differences(sizes, remedy, model.like.device)
    if feed.num_data < ranks.size:
        raise DataError(
            f"{feed.num_data} training examples can't be shared by {ranks.size} ranks: start fewer"
        )
    copy_from_first(model.net)
    with torch.no_grad():
        ranks.copy_from_first(model.noise_parameters())


def refuse_other_settings(ranks: Ranks, config: Json, goes_on: bool, device: torch.device) -> None:
    """Raise `RankError` if a rank was called with other settings, or sees another folder."""
    settings = zlib.crc32(json.dumps(config, sort_keys=True, default=str).encode())
    remedy = "make the same call of credo.fit on every rank"
    ranks.refuse_differences({"settings": settings}, remedy, device)
    remedy = "give a folder that every rank can read"
    ranks.refuse_differences({"view of the run's folder": int(goes_on)}, remedy, device)


def refuse_other_states(ranks: Ranks, stored: Iterable[Tensor], device: torch.device) -> None:
    """Raise `RankError` if ranks have come to differ in what a method stores."""
    marks = (fingerprint(tensor) for tensor in stored if tensor.is_floating_point())
    remedy = (
        "they made different updates of the same gradients. Are weights written, or settings "
        "changed, on some ranks only?"
    )
    ranks.refuse_differences({"state": sum(marks)}, remedy, device)


def average_buffers(ranks: Ranks, model: Model) -> None:
    """Replace buffers by their means over ranks.

    Whole numbers, such as counts of batches, become the first rank's.
    """
    with torch.no_grad():
        for buffer in model.buffers().values():
            if buffer.is_floating_point():
                mean = buffer.detach().clone().view(-1)
                ranks.average_([mean], 1.0)
                buffer.copy_(mean.view(buffer.shape))
            else:
                ranks.copy_from_first([buffer])
