"""Several orders of the data at once: each is the order of its own seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import credo
from credo.network.batches import BatchStack
from credo.train.feed import make_feed, order_seed

X = torch.arange(23.0)[:, None]
MODEL = credo.Model(nn.Linear(1, 1), credo.likelihoods.Gaussian())


@pytest.mark.parametrize("skip", [0, 2, 5])
def test_order_k_is_the_order_of_its_seed_however_it_is_looked_up(skip: int) -> None:
    tensors = make_feed((X, X), 4, MODEL)
    named = make_feed(({"x": X}, X), 4, MODEL)  # a mapping is looked up order by order
    stacks = list(tensors.in_orders(3, False, seed=7, epoch=1, skip=skip))
    lists = list(named.in_orders(3, False, seed=7, epoch=1, skip=skip))
    assert len(stacks) == len(lists) == 6 - skip
    for k in range(3):
        alone = list(tensors.batches(order_seed(7, k), epoch=1, skip=skip))
        for stack, several, (inputs, targets) in zip(stacks, lists, alone, strict=True):
            assert isinstance(stack, BatchStack)
            assert torch.equal(stack[k][0], inputs)
            assert torch.equal(stack[k][1], targets)
            assert torch.equal(several[k][0]["x"], inputs)
    assert order_seed(7, 0) == 7


def test_batches_on_top_of_each_other_keep_their_kind() -> None:
    one, two = torch.zeros(2, 3), torch.ones(2, 3)
    stack = BatchStack.of([({"a": one}, one[:, 0]), ({"a": two}, two[:, 0])])
    assert isinstance(stack.inputs, dict)
    assert torch.equal(stack[1][0]["a"], two)
    pairs = BatchStack.of([((one, two), one[:, 0]), ((two, one), two[:, 0])])
    assert torch.equal(pairs[1][0][0], two)
    assert len(pairs) == 2
