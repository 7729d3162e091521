r"""Exponential weights (Hedge): the rule without entropy for a categorical over K experts.

λ_k = ln(π_k/π_K) and μ_k = π_k, so a loss that is ℓ_k for expert k has E_q[ℓ] = Σ_k π_k ℓ_k with
∇_{μ_k} = ℓ_k − ℓ_K. Without entropy (τ = 0) the rule λ ← λ − ρ∇_μ is

    π_k ← π_k e^{−ρℓ_k} / Σ_j π_j e^{−ρℓ_j}

exactly: nothing is given up. Against losses in [0, 1] chosen by an adversary, T rounds from uniform
weights at ρ = √(8 ln K/T) cost at most √(T ln K/2) more than the best expert in hindsight. With
τ = 1 and the same losses in every round, the weights converge to Gibbs's π_k ∝ e^{−ℓ_k} instead.

    >>> import torch
    >>> q = Categorical(torch.zeros(2))
    >>> hedge_step(q, torch.tensor([0.0, 1.0, 1.0]), rate=1.0).probs
    tensor([0.5761, 0.2119, 0.2119])

Reference: Freund & Schapire, 1997; Cesa-Bianchi & Lugosi, "Prediction, learning, and games", 2006,
theorem 2.2.
"""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from credo.checks import Count, Range, checked
from credo.errors import DataError
from credo.rule.families import Categorical
from credo.rule.gallery.entry import Entry
from credo.rule.rule import step

ENTRY = Entry(
    algorithm="exponential weights (Hedge)",
    family="categorical",
    expectation="exact",
    curvature="none",
    step="τ = 0, ρ = √(8 ln K/T)",
    approximates="nothing",
    test="tests/theorems/test_gallery_search.py"
    "::test_a_hedge_step_multiplies_the_weights_by_the_exponentiated_losses",
)


def hedge_step(
    q: Categorical, losses: Tensor, rate: float, *, temperature: float = 0.0
) -> Categorical:
    """The weights after the experts' ``losses`` (..., K) of one round are known."""
    expected = (*q.logits.shape[:-1], q.logits.shape[-1] + 1)
    if losses.shape != expected:
        raise DataError(
            f"losses must be {expected}, one for each expert; got {tuple(losses.shape)}"
        )
    return step(q, (losses[..., :-1] - losses[..., -1:],), rate, temperature=temperature)


@checked
def hedge_rate(rounds: Count, experts: Annotated[int, Range(2)]) -> float:
    """ρ = √(8 ln K/T), for which the regret bound is smallest: √(T ln K/2).

    >>> round(hedge_rate(rounds=100, experts=2), 4)
    0.2355
    """
    return math.sqrt(8 * math.log(experts) / rounds)
