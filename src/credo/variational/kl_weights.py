r"""How the KL is shared out over the M minibatches of an epoch: π_i ∝ λ^i, Σπ_i = 1.

``"uniform"`` is λ = 1, π_i = 1/M. λ = ½ puts nearly all of the KL on the first few batches, λ = 2
on the last few; λ = 0 is the thesis's name for no KL at all. Computed as softmax(i·ln λ): 2⁵⁰⁰
overflows float32, this doesn't. Reference: Book, 2020, §5.2 (after Blundell et al.).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from credo.errors import DataError

KLWeights: TypeAlias = Literal["uniform"] | float


def kl_weights(rule: KLWeights, num_batches: int) -> NDArray[np.float64]:
    """π_i for every minibatch, (M,).

    >>> kl_weights("uniform", 4)
    array([0.25, 0.25, 0.25, 0.25])
    >>> kl_weights(0.5, 3).round(3)
    array([0.571, 0.286, 0.143])
    """
    if num_batches < 1:
        raise DataError(f"num_batches={num_batches} must be at least 1")
    ratio = 1.0 if rule == "uniform" else float(rule)
    if not 0 <= ratio < math.inf:
        raise DataError(f'kl_weights={rule!r} must be "uniform" or a finite ratio λ ≥ 0')
    if ratio == 0:
        return np.zeros(num_batches)
    logits = np.arange(num_batches) * math.log(ratio)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
