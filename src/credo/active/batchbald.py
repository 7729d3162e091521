r"""BatchBALD: the examples whose labels, taken together, say most about the weights.

    I(y_1 … y_n; θ) = Σ_i I(y_i; θ | y_1 … y_{i−1})
    I(y_i; θ | y_<i) = E_{y_<i} { H[ Σ_s r_s(y_<i) p_s(y_i) ] − Σ_s r_s(y_<i) H[p_s(y_i)] }
    r_s(y_<i) ∝ p_s(y_1) ⋯ p_s(y_{i−1}),   Σ_s r_s = 1

symbols: p_s(y_i) is ``sample_probs[s, i]`` (S, B, C), r the posterior over the S samples after the
labels so far. Each step takes the example with the largest gain, which reaches at least 1 − 1/e of
the best batch's information. BALD's own top n would be n times the same question if the pool
holds duplicates; here the second copy gains less.

The expectation over y_<i runs over all C^(i−1) outcomes while they are at most ``outcomes``, and
from there on over as many that are drawn: a sample s, then every label from p_s. Both are about the
S samples themselves, so no batch is worth more than ln S: a gain near zero may mean that the
samples are used up. Draws must be joint, one set of weights for all examples.

Memory is ``outcomes`` × S, plus at most `MAX_NUMBERS` at a time.

    >>> probs = torch.tensor([[[0.9, 0.1]] * 2 + [[0.8, 0.2]], [[0.1, 0.9]] * 2 + [[0.8, 0.2]]])
    >>> chosen, gains = batch_bald(probs, 3)             # two copies, and one on which all agree
    >>> chosen, [round(gain, 2) for gain in gains]
    ([0, 1, 2], [0.37, 0.15, 0.0])

Reference: Kirsch, van Amersfoort & Gal, "BatchBALD: efficient and diverse batch acquisition for
deep Bayesian active learning", 2019 (arXiv:1906.08158). There H[y_1 … y_n] is estimated with
importance weights; the chain rule needs none and does not underflow in large batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from credo.checks import Count, checked
from credo.errors import DataError

MAX_NUMBERS = 2**24
"""Of temporaries: 64 MB in float32."""


@dataclass
class _Outcomes:
    """Outcomes of the labels so far: ``log_joint`` (S, M) of each sample, ``weights`` (M,).

    ``drawn_by`` (M,) is the sample that drew each, None where all outcomes are listed.
    """

    log_joint: Tensor
    weights: Tensor
    drawn_by: Tensor | None = None

    @property
    def responsibilities(self) -> Tensor:
        """r_s of each outcome, (S, M)."""
        return self.log_joint.softmax(0)


@checked
def batch_bald(
    sample_probs: Tensor,
    count: int,
    outcomes: Count = 500,
    generator: Generator | None = None,
) -> tuple[list[int], list[float]]:
    """Rows of the chosen examples, best first, and what each adds, in nats.

    Args:
        sample_probs: Class probabilities of joint draws, (S, B, C).
        count: How many to choose.
        outcomes: Up to so many outcomes of the chosen labels are listed; beyond it so many are
            drawn.
        generator: Of the drawn outcomes.
    """
    if sample_probs.dim() != 3 or not 1 <= count <= sample_probs.shape[1]:
        raise DataError(
            f"batch_bald takes probabilities (S, B, C) and 1 to B examples, but it was given "
            f"{tuple(sample_probs.shape)} and count={count}"
        )
    probs = sample_probs.detach()
    entropies = torch.special.entr(probs).sum(-1)
    start = probs.new_zeros(len(probs), 1)
    known = _Outcomes(start, probs.new_ones(1))
    chosen: list[int] = []
    gains: list[float] = []
    for _ in range(count):
        gain = _gains(probs, entropies, known)
        gain[chosen] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(max(0.0, float(gain[best])))  # rounding may go below
        if len(chosen) < count:
            known = _extended(known, probs, chosen, outcomes, generator)
    return chosen, gains


def _gains(probs: Tensor, entropies: Tensor, known: _Outcomes) -> Tensor:
    """I(y_b; θ | y_<i) of every candidate b, (B,), given H[p_s(y_b)] (S, B)."""
    samples, candidates, classes = probs.shape
    weights = known.responsibilities.T.contiguous()  # (M, S)
    length = max(1, MAX_NUMBERS // (len(weights) * classes))
    expected = []
    for piece in probs.split(min(length, candidates), dim=1):
        predictive = weights @ piece.reshape(samples, -1)
        of_outcome = torch.special.entr(predictive).unflatten(1, (-1, classes)).sum(-1)
        expected.append(known.weights @ of_outcome)
    # Under the same outcomes: E r_s is 1/S, but subtracting what was drawn leaves less noise, and
    # none where the outcomes already tell which sample it is.
    return torch.cat(expected) - (known.weights @ weights) @ entropies


def _extended(
    known: _Outcomes, probs: Tensor, chosen: list[int], limit: int, generator: Generator | None
) -> _Outcomes:
    """The outcomes of all chosen labels, the last one included: all of them, or a draw."""
    samples, _, classes = probs.shape
    if known.drawn_by is None and known.log_joint.shape[1] * classes <= limit:
        log_joint = known.log_joint.unsqueeze(2) + probs[:, chosen[-1]].log().unsqueeze(1)
        log_joint = log_joint.flatten(1)
        weights = log_joint.exp().mean(0)
        possible = weights > 0
        return _Outcomes(log_joint[:, possible], weights[possible])
    if known.drawn_by is not None:
        return _drawn(known, probs, chosen[-1], generator)
    drawn_by = torch.randint(samples, (limit,), generator=generator, device=probs.device)
    blank = probs.new_zeros(samples, limit)
    drawn = _Outcomes(blank, probs.new_full((limit,), 1 / limit), drawn_by)
    for example in chosen:
        drawn = _drawn(drawn, probs, example, generator)
    return drawn


def _drawn(known: _Outcomes, probs: Tensor, example: int, generator: Generator | None) -> _Outcomes:
    """Each outcome with one more label, from the sample that drew the others."""
    assert known.drawn_by is not None
    of_example = probs[:, example]
    labels = torch.multinomial(of_example[known.drawn_by], 1, generator=generator).squeeze(1)
    return _Outcomes(known.log_joint + of_example[:, labels].log(), known.weights, known.drawn_by)
