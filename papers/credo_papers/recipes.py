"""How a network is trained in a published run: rates, their schedule, prior, samples."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of Adam, IVON or VOGN in one run.

    ``lr`` rises linearly from ``warmup_from``·lr over ``warmup`` epochs, then falls to a tenth at
    each of the ``milestones`` (in epochs), or without them along half a cosine to zero.

    ``weight_decay`` is δ = prior precision/N with N = ``augmentation``·num_data, the same for all
    methods: Adam then seeks the mode of the posterior whose spread the others learn. ``beta2`` is
    the share of the old curvature that an average keeps; ``samples`` are the draws in each step, on
    each rank; ``batch_size`` is that of all ranks together. Adam takes no notice of ``hess_init``,
    ``damping``, ``augmentation`` and ``samples``.
    """

    lr: float
    epochs: int
    batch_size: int
    weight_decay: float
    beta2: float = 0.999
    hess_init: float = 0.01
    damping: float = 1e-8
    augmentation: float = 1.0
    samples: int = 1
    warmup: float = 0.0
    warmup_from: float = 0.0
    milestones: tuple[float, ...] = ()

    def factor(self, fraction: float) -> float:
        """What ``lr`` is multiplied by when this fraction of all epochs is done.

        >>> recipe = Recipe(lr=1.0, epochs=10, batch_size=1, weight_decay=0.1, milestones=(5, 8))
        >>> [round(recipe.factor(fraction), 3) for fraction in (0.0, 0.49, 0.5, 0.9)]
        [1.0, 1.0, 0.1, 0.01]
        """
        epoch = fraction * self.epochs
        if epoch < self.warmup:
            return self.warmup_from + (1 - self.warmup_from) * epoch / self.warmup
        if self.milestones:
            return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        done = (epoch - self.warmup) / (self.epochs - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * done))

    def prior_precision(self, num_data: int) -> float:
        """That which makes ``weight_decay`` with this many training examples.

        >>> recipe = Recipe(lr=1.0, epochs=1, batch_size=1, weight_decay=1e-4, augmentation=10)
        >>> recipe.prior_precision(50_000)
        50.0
        """
        return self.weight_decay * self.augmentation * num_data
