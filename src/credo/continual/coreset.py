r"""Which few examples of a task are kept: where the network hesitates, spread out, or at random.

============== ===================================================================================
``choice``     the ``count`` examples kept
============== ===================================================================================
"relevance"    the largest tr Λ(x) of each class, as many of each; for a softmax it is 1 − Σ p_c²
"balanced"     a random choice, as many of each class
"random"       a random choice
"k-centre"     each the farthest from those before it, which covers the inputs
============== ===================================================================================

    >>> x = torch.tensor([[0.0], [0.1], [4.0], [4.1], [9.0]])
    >>> k_centres(x, 3, first=0).tolist()
    [0, 4, 3]

References: relevance, Pan et al., 2020 (arXiv:2004.14070); coresets of k centres, Nguyen et al.,
2018 (arXiv:1710.10628), by Gonzalez' greedy rule (1985), whose largest distance to the nearest
centre is at most twice the smallest possible.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from credo.checks import checked
from credo.continual.baselines import chosen_rows
from credo.functionspace import most_memorable, most_memorable_per_class, relevance
from credo.model import Model
from credo.network.batches import batch_rows, parts_of
from credo.types import Batch

Choice: TypeAlias = Literal["relevance", "balanced", "random", "k-centre"]


@checked
def choose(
    choice: Choice, model: Model, data: Batch, count: int, generator: Generator | None = None
) -> Tensor:
    """The rows of the examples that are kept, or all where there are fewer.

    Args:
        choice: The rule; see the table above.
        model: As it stands after the task.
        data: The task's examples.
        count: How many are kept.
        generator: Of random choices.
    """
    inputs, targets = data
    if choice == "relevance":
        scores = relevance(model, data, progress=False)
        labels = targets.cpu()
        # Of targets that are no classes there is one kind.
        labelled = model.likelihood.kind == "classification" and labels.dim() == 1
        if labelled:
            return most_memorable_per_class(scores, labels, count)
        return most_memorable(scores, count)
    if choice == "k-centre":
        return k_centres(parts_of(inputs)[0], count, generator)
    return chosen_rows(targets, count, choice, generator)


def k_centres(
    inputs: Tensor, count: int, generator: Generator | None = None, first: int | None = None
) -> Tensor:
    """Rows of inputs (N, …), each the farthest from those before it; the first is a random one.

    Args:
        inputs: (N, …).
        count: How many rows.
        generator: Of the first row.
        first: The first row, if it is not to be a random one.
    """
    points = inputs.flatten(1)
    if first is None:
        first = int(torch.randint(len(points), (), generator=generator))
    chosen = [first]
    nearest = (points - points[first]).square().sum(1)
    while len(chosen) < min(count, len(points)):
        # Not again, even where all that is left are copies.
        nearest[chosen[-1]] = -1.0
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).square().sum(1))
    return torch.tensor(chosen)


def divided(data: Batch, rows: Tensor) -> tuple[Batch, Batch]:
    """The examples of these rows, and all others in their order.

    Args:
        data: Inputs and targets.
        rows: The examples that come first.

    >>> kept, rest = divided((torch.arange(4.0), torch.arange(4)), torch.tensor([2]))
    >>> kept[1].tolist(), rest[1].tolist()
    ([2], [0, 1, 3])
    """
    others = torch.ones(len(data[1]), dtype=torch.bool)
    others[rows] = False
    return batch_rows(data, rows), batch_rows(data, others)
