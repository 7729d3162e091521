"""Targets drawn from the model itself, as the Fisher information asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Generator, Tensor

from credo.likelihoods.base import Regression
from credo.types import Likelihood

Labels: TypeAlias = Callable[[], Tensor]
"""Targets whose gradient is squared; called once for each graph that they are part of."""


def draw_labels(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, generator: Generator | None = None
) -> Labels:
    """Targets ỹ ~ p(· | outputs); those that the likelihood ignores stay ignored.

    A learned noise scale moves its draws along, ỹ = f + scale·ε: its gradient is then that of the
    expected penalty.

    >>> from credo.likelihoods import Categorical
    >>> labels = draw_labels(Categorical(), torch.tensor([[9.0, -9.0]]), torch.tensor([1]))
    >>> labels()
    tensor([0])

    Args:
        likelihood: p(y | f).
        outputs: The network's outputs f, examples first.
        targets: The true targets: they say which are ignored.
        generator: Where the randomness comes from.

    Returns:
        A function that gives the same draws whenever it is called.
    """
    fixed = outputs.detach()
    if isinstance(likelihood, Regression) and any(p.requires_grad for p in likelihood.parameters()):
        mean, _ = likelihood.mean_and_scale(fixed)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return lambda: mean + likelihood.mean_and_scale(fixed)[1] * noise
    drawn = likelihood.sample(fixed, generator)
    if likelihood.ignore_index is not None:
        drawn = torch.where(targets == likelihood.ignore_index, targets, drawn)
    return lambda: drawn
