r"""Forward–backward for hidden Markov models: messages are natural parameters, and they add.

Let q be any distribution over paths z of K states. E_q[ℓ] with ℓ = −log p(y, z) is linear in its
expectation parameters, so one step of the rule at ρ = 1 finds the posterior of paths, whose natural
parameters are the model's log-potentials log π, log A and log p(y_t|z_t). What is left is to read
its marginals off, μ = ∇A(λ), without a sum over K^T paths: in log space,

    f_t = log Σ_i exp(f_{t−1,i} + log A_i) + log p(y_t|·)         what the past and now say of z_t
    b_t = log Σ_j exp(log A_·j + log p(y_{t+1}|j) + b_{t+1,j})    what the future says

up to constants, and z_t has the log-odds of f_t + b_t. The log-partition function is log p(y).
Exact.

    >>> import torch
    >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    >>> log_likelihood = torch.tensor([[0.0, -4.0], [0.0, 0.0], [0.0, -4.0]])
    >>> forward_backward(torch.tensor([0.5, 0.5]), sticky, log_likelihood).marginals.probs[1]
    tensor([0.9836, 0.0164])

Reference: Rabiner, "A tutorial on hidden Markov models", 1989; Khan & Rue, 2021 (arXiv:2107.04562).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating, refuse_unless
from credo.rule.families import Categorical
from credo.rule.gallery.entry import Entry

ENTRY = Entry(
    algorithm="forward–backward for hidden Markov models",
    family="Markov chain of categoricals",
    expectation="exact",
    curvature="none",
    step="ρ = 1, once",
    approximates="nothing",
    test="tests/theorems/test_gallery_sequential.py::"
    "test_one_step_of_the_rule_over_all_paths_is_forward_backward",
)


@dataclass(frozen=True)
class Chain:
    """Log-probabilities of each z_t, (T, K), and of each (z_t, z_{t+1}), (T−1, K, K); log p(y)."""

    log_marginals: Tensor
    log_pairs: Tensor
    log_evidence: Tensor

    @property
    def marginals(self) -> Categorical:
        """The posterior of each z_t by itself; refuses states that are impossible (λ = −∞)."""
        return Categorical(self.log_marginals[:, :-1] - self.log_marginals[:, -1:])


def forward_backward(initial: Tensor, transition: Tensor, log_likelihood: Tensor) -> Chain:
    """Marginals of z given y: π is (K,), A (K, K) from row to column, log p(y_t|z_t) (T, K).

    Zeros in π and A and −∞ in the likelihood are fine, as long as some path is possible.
    """
    _check(initial, transition, log_likelihood)
    log_transition = transition.log()
    steps = len(log_likelihood)
    totals, forward = [], []
    message = initial.log()
    for t in range(steps):
        if t:
            message = (message.unsqueeze(-1) + log_transition).logsumexp(0)
        message = message + log_likelihood[t]
        totals.append(message.logsumexp(0))
        message = message - totals[-1]
        forward.append(message)
    evidence = torch.stack(totals)
    if not bool(evidence.isfinite().all()):
        t = int(evidence.isfinite().to(torch.uint8).argmin())
        raise DataError(
            f"log_likelihood at time {t} is −∞ in every state that initial and transition can reach"
        )
    backward = [torch.zeros_like(initial)]
    for t in range(steps - 1, 0, -1):
        message = (log_transition + log_likelihood[t] + backward[-1]).logsumexp(1)
        backward.append(message - message.logsumexp(0))
    past, future = torch.stack(forward), torch.stack(backward[::-1])
    pairs = past[:-1].unsqueeze(-1) + log_transition + (log_likelihood + future)[1:].unsqueeze(1)
    return Chain(
        log_marginals=(past + future).log_softmax(-1),
        log_pairs=pairs.flatten(1).log_softmax(-1).view_as(pairs),
        log_evidence=evidence.sum(),
    )


def _check(initial: Tensor, transition: Tensor, log_likelihood: Tensor) -> None:
    check_floating(initial=initial, transition=transition, log_likelihood=log_likelihood)
    states = initial.shape[-1] if initial.dim() == 1 else 0
    if not states:
        raise DataError(f"initial must be (K,), a probability a state; got {tuple(initial.shape)}")
    if transition.shape != (states, states):
        raise DataError(f"transition must be ({states}, {states}), got {tuple(transition.shape)}")
    if log_likelihood.dim() != 2 or log_likelihood.shape[1] != states or not len(log_likelihood):
        raise DataError(f"log_likelihood must be (T, {states}), got {tuple(log_likelihood.shape)}")
    for name, probs in (("initial", initial.detach()), ("transition", transition.detach())):
        refuse_unless((probs >= 0) & (probs <= 1), probs, "a Markov chain", name, "from 0 to 1")
        total = probs.sum(-1)
        near = (total - 1).abs() <= 1e-6
        refuse_unless(near, total, "a Markov chain", f"the sum of each row of {name}", "1")
    given = log_likelihood.detach()
    refuse_unless(given < torch.inf, given, "a Markov chain", "log_likelihood", "less than ∞")
