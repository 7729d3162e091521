r"""Baum–Welch: EM for hidden Markov models, whose M-step sets expectation parameters.

Alternate the two halves of max log p(y|parameters). **E**: the rule's step over paths, which is
`forward_backward`. **M**: the parameters that maximise E_q[log p(y, z)]. In an exponential family
that is a weighted sum of ⟨λ, T(y_t)⟩ − A(λ), whose gradient Σ_t w_t(T(y_t) − μ) vanishes at

    μ = Σ_t w_t T(y_t) / Σ_t w_t,         w_t = q(z_t = k)

so that `with_expectation` of the averaged statistics is the whole M-step, whichever family the
emissions are. For π and A, μ are the probabilities themselves. What is given up: parameters are
points, not distributions, and the optimum is a local one. It may lie on the edge of the emissions'
family (a symbol never seen, a Gaussian on one point): the family then refuses it by name.

    >>> import torch
    >>> from credo.rule.families import Categorical
    >>> coins = Categorical(torch.tensor([0.5])), Categorical(torch.tensor([-0.5]))
    >>> model = HiddenMarkovModel(torch.full((2,), 0.5), torch.full((2, 2), 0.5), coins)
    >>> tosses = torch.tensor([0, 0, 1, 0, 0, 1, 1, 0, 1, 1])
    >>> model, before = em_step(model, tosses)
    >>> bool(infer(model, tosses).log_evidence > before)
    True

Reference: Baum, Petrie, Soules & Weiss, 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import DataError
from credo.rule.families import sufficient_statistics, with_expectation
from credo.rule.families.exponential import Member
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.hidden_markov import Chain, forward_backward

ENTRY = Entry(
    algorithm="Baum–Welch",
    family="Markov chain; any family emits",
    expectation="exact",
    curvature="none",
    step="ρ = 1 over paths, then parameters",
    approximates="parameters by a point",
    test="tests/theorems/test_gallery_sequential.py::test_baum_welch_never_lowers_the_evidence",
)


@dataclass(frozen=True)
class HiddenMarkovModel:
    """π is ``initial`` (K,), A ``transition`` (K, K); state k emits from ``emissions[k]``."""

    initial: Tensor
    transition: Tensor
    emissions: tuple[Member, ...]

    def __post_init__(self) -> None:
        if len(self.emissions) != len(self.initial):
            raise DataError(
                f"emissions must have one family for each of the {len(self.initial)} states of "
                f"initial, got {len(self.emissions)}"
            )
        for emission in self.emissions[1:]:
            self.emissions[0].check_same_family(emission)


def infer(model: HiddenMarkovModel, observations: Tensor) -> Chain:
    """The E-step: the states given y, (T, event)."""
    log_likelihood = torch.stack([e.log_prob(observations) for e in model.emissions], dim=-1)
    return forward_backward(model.initial, model.transition, log_likelihood)


def em_step(model: HiddenMarkovModel, observations: Tensor) -> tuple[HiddenMarkovModel, Tensor]:
    """The model after one step of EM, and log p(y) of the model before it."""
    chain = infer(model, observations)
    weights, jumps = chain.log_marginals.exp(), chain.log_pairs.exp().sum(0)
    leaving = jumps.sum(-1, keepdim=True)
    if bool((weights.sum(0) <= 0).any()):
        empty = int(weights.sum(0).argmin())
        raise DataError(f"no observation belongs to emissions[{empty}]: start it nearer to some")
    # A state that is never left in the data tells nothing about where it leads.
    transition = torch.where(leaving > 0, jumps / leaving, model.transition)
    emissions = tuple(
        _weighted(emission, weights[:, k], observations)
        for k, emission in enumerate(model.emissions)
    )
    return HiddenMarkovModel(weights[0], transition, emissions), chain.log_evidence


def _weighted(emission: Member, weights: Tensor, observations: Tensor) -> Member:
    """The member whose expectation parameters are the weighted averages of the statistics."""
    shares = weights / weights.sum()
    statistics = sufficient_statistics(emission, observations)
    return with_expectation(
        emission, tuple(torch.tensordot(shares, part, dims=1) for part in statistics)
    )
