"""A network with several heads: a body that all tasks share, outputs of its own for each task.

It is called as ``net(x, heads)`` with a head for each example, (B,): which is what `Task.inputs`
gives. A batch of one head runs that head alone; a mixed one runs them all and picks.

    >>> net = MultiHead(torch.nn.Linear(4, 8), features=8, sizes=(2, 3))
    >>> net(torch.zeros(5, 4), torch.tensor([0, 1, 1, 0, 1])).shape
    torch.Size([5, 3])

Heads narrower than the widest get impossible classes: their outputs are `IMPOSSIBLE`, whose
probability is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.errors import DataError

IMPOSSIBLE = -1e4
"""exp of it is 0 in any precision, and 0 · log p is still a number."""


class MultiHead(nn.Module):
    """One linear layer for each head, on the features (B, F) that a body makes of the inputs.

    Args:
        body: What all tasks share.
        features: How many numbers it makes of an example, F.
        sizes: Outputs of each head.
    """

    def __init__(self, body: nn.Module, features: int, sizes: Sequence[int]) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise DataError(f"sizes={tuple(sizes)} must give each head one output or more")
        self.body = body
        self.heads = nn.ModuleList(nn.Linear(features, size) for size in sizes)
        self.sizes, self.width = tuple(sizes), max(sizes)

    def forward(self, x: Tensor, heads: Tensor) -> Tensor:
        """(B, ...), (B,) → (B, widest head).

        Args:
            x: Inputs (B, ...).
            heads: The head of each example, (B,).
        """
        features = self.body(x)
        only = _only(heads, len(self.sizes))
        if only is not None:
            return self._one(features, only)
        every = torch.stack([self._one(features, head) for head in range(len(self.sizes))], 1)
        return every[torch.arange(len(x), device=x.device), heads]

    def _one(self, features: Tensor, head: int) -> Tensor:
        outputs: Tensor = self.heads[head](features)
        return F.pad(outputs, (0, self.width - self.sizes[head]), value=IMPOSSIBLE)


def _only(heads: Tensor, count: int) -> int | None:
    """The head of all examples, if it is one."""
    low, high = int(heads.min()), int(heads.max())
    if low < 0 or high >= count:
        raise DataError(f"the network has heads 0 to {count - 1}, but was asked for {low} … {high}")
    return low if low == high else None
