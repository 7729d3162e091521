"""Whether training has begun: one look, within the first epoch, at what was learned so far.

A network whose draws drown its weights, or whose rate is far off, predicts the average target
whatever the input, and may do so for hours. After `LOOK` steps (or the first epochs that have
`LEAST`) the loss is therefore compared with that of the best constant prediction, and the method
says which of its settings to change.
"""

from __future__ import annotations

import math
import statistics
import warnings
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor

from credo.method import Method
from credo.model import Model
from credo.network.batches import to_device
from credo.train.feed import Feed, trial_outputs
from credo.types import Likelihood

LOOK = 200
LEAST = 100
"""Steps after which to look: in the first epoch, if that has so many; else in one of the first."""

_BATCHES = 16
"""So many are asked for their targets."""

_ITERATIONS = 20

_MARGIN = 0.005
"""What a loss must be below a constant prediction's, in nats, besides its own noise."""


@final
class Start:
    """The losses of the first steps.

    Args:
        num_batches: Batches of an epoch.
    """

    def __init__(self, num_batches: int) -> None:
        self._losses: list[float] = []
        epochs = math.ceil(LEAST / num_batches)
        self._until = min(LOOK, epochs * num_batches)

    def is_over(self, nll: float) -> bool:
        """Take one more step's loss; whether it was the last that counts."""
        self._losses.append(nll)
        return len(self._losses) == self._until

    def look(self, method: Method[Any], state: Any, model: Model, feed: Feed, seed: int) -> None:
        """Warn if the last quarter of these steps is no better than a constant prediction."""
        recent = self._losses[-len(self._losses) // 4 :]
        device = model.like.device
        some = [to_device(batch, device) for batch in islice(feed.own_batches(seed, 0), _BATCHES)]
        targets = torch.cat([targets for _, targets in some])
        method.posterior(state)  # leaves the network at the mean
        outputs = torch.cat([trial_outputs(model, inputs) for inputs, _ in some])
        constant = constant_nll(model.likelihood, outputs, targets)
        error = statistics.stdev(recent) / math.sqrt(len(recent))
        # Draws of a wide posterior may be worse than a constant where their mean is not; at the
        # mean both are of the same examples, so that there is no noise between them.
        at_mean = float(model.likelihood.mean_nll(outputs, targets).detach())
        learned = statistics.fmean(recent) < constant - max(_MARGIN, 2 * error)
        if learned or at_mean < constant - _MARGIN:
            return
        warnings.warn(
            f"after {len(self._losses)} steps the loss, {statistics.fmean(recent):.3f}, is still "
            f"that of a constant prediction, {constant:.3f}: {method.when_stuck(state)}. (If there "
            "is nothing to be learned from these inputs, this is right.)",
            stacklevel=7,
        )


def constant_nll(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> float:
    """The mean NLL of the best outputs that are the same for all examples.

    Args:
        likelihood: With its noise as it is now.
        outputs: Those of some examples; only their shape counts.
        targets: Of many examples.

    >>> from credo.likelihoods import Categorical
    >>> round(constant_nll(Categorical(), torch.zeros(1, 2), torch.tensor([0, 1, 1, 1])), 4)
    0.5623
    """
    constant = outputs[:1].detach().clone().zero_().requires_grad_()
    optimizer = torch.optim.LBFGS([constant], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        nll = likelihood.mean_nll(constant.expand(len(targets), *constant.shape[1:]), targets)
        (constant.grad,) = torch.autograd.grad(nll, [constant])
        return nll.detach()

    optimizer.step(loss)
    return float(loss())
