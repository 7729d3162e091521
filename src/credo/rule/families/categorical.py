"""The categorical distribution in minimal coordinates: log odds against the last class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from credo.errors import DataError
from credo.families.base import check_count, check_floating, refuse_unless
from credo.rule.families.exponential import (
    ExponentialFamily,
    Parameters,
    check_parameters,
)
from credo.rule.families.special import check_events, check_simplex


@dataclass(frozen=True, eq=False)
class Categorical(ExponentialFamily):
    """Labels 0, …, K−1 with probabilities π ∝ (exp logits, 1); ``logits`` is (..., K−1).

    λ_k = ln(π_k/π_K), T_k = [label is k], μ_k = π_k for k < K, and A = ln(1 + Σ exp λ_k). Events
    are integers (...); with leading dimensions of the logits, the labels are independent. Leaving
    out the last class makes the parameters unique, which the learning rule's ∇_μ needs.

    >>> q = Categorical(torch.tensor([0.0, 1.0]))
    >>> q.probs
    tensor([0.2119, 0.5761, 0.2119])
    >>> q.log_prob(torch.tensor(1))
    tensor(-0.5514)
    """

    logits: Tensor

    natural_names = ("log odds against the last class",)
    expectation_names = ("probabilities of all but the last class",)

    def __post_init__(self) -> None:
        check_floating(logits=self.logits)
        if self.logits.dim() == 0:
            raise DataError("Categorical: logits must be (..., K−1), got a number")
        logits = self.logits.detach()
        refuse_unless(torch.isfinite(logits), logits, "Categorical", "logits", "finite")

    @classmethod
    def from_probs(cls, probs: Tensor) -> Self:
        """From all K probabilities (..., K), each positive: a zero would have λ = −∞.

        >>> Categorical.from_probs(torch.tensor([0.5, 0.25, 0.25])).logits
        tensor([0.6931, 0.0000])
        """
        check_floating(probs=probs)
        if probs.dim() == 0 or probs.shape[-1] == 0:
            raise DataError(f"Categorical: probs must be (..., K), got {tuple(probs.shape)}")
        check_simplex(probs, "Categorical", "probs")
        return cls(probs[..., :-1].log() - probs[..., -1:].log())

    @property
    def natural(self) -> Parameters:
        """λ = logits."""
        return (self.logits,)

    @property
    def expectation(self) -> Parameters:
        """μ = all probabilities but the last."""
        return (self.probs[..., :-1],)

    def with_natural(self, natural: Parameters) -> Self:
        """The member with these log odds."""
        check_parameters(natural, self.natural, self.natural_names, "Categorical")
        return type(self)(*natural)

    def with_expectation(self, expectation: Parameters) -> Self:
        """λ_k = ln μ_k − ln(1 − Σμ); what is not inside the open simplex is refused."""
        name = self.expectation_names[0]
        check_parameters(expectation, self.expectation, self.expectation_names, "Categorical")
        (probs,) = expectation
        refuse_unless(probs.detach() > 0, probs, "Categorical", name, "positive")
        last = 1 - probs.sum(-1, keepdim=True)
        total = probs.detach().sum(-1)
        refuse_unless(total < 1, total, "Categorical", f"the sum of {name}", "less than 1")
        return type(self)(probs.log() - last.log())

    @property
    def all_logits(self) -> Tensor:
        """The logits with the last class's 0, (..., K)."""
        return F.pad(self.logits, (0, 1))

    @property
    def probs(self) -> Tensor:
        """π, (..., K)."""
        return self.all_logits.softmax(-1)

    @property
    def mean(self) -> Tensor:
        """The mean of the one-hot label, (..., K): π."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """The variance of the one-hot label, (..., K): π(1 − π)."""
        return self.probs * (1 - self.probs)

    def statistics(self, theta: Tensor) -> Parameters:
        """One-hot labels without the last class: integers (..., batch) → (..., batch, K−1)."""
        check_events(theta, tuple(self.logits.shape[:-1]), "Categorical")
        classes = self.logits.shape[-1] + 1
        if theta.is_floating_point() or theta.dtype == torch.bool:
            raise DataError(f"Categorical: events are integer labels, got {theta.dtype}")
        valid = (theta >= 0) & (theta < classes)
        refuse_unless(valid, theta, "Categorical", "the label", f"from 0 to {classes - 1}")
        one_hot = F.one_hot(theta.long(), classes)
        return (one_hot[..., :-1].to(self.logits.dtype),)

    def log_base(self, theta: Tensor) -> Tensor:
        """0, in the dtype of the logits and not of the labels."""
        return self.logits.new_zeros(())

    def log_partition(self) -> Tensor:
        """Σ ln(1 + Σ_k exp λ_k)."""
        return self.all_logits.logsumexp(-1).sum()

    def entropy(self) -> Tensor:
        """−Σ π_k ln π_k."""
        log_probs = self.all_logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Labels, (n, ...), integers."""
        check_count(n)
        batch = self.logits.shape[:-1]
        rows = self.probs.detach().reshape(-1, self.logits.shape[-1] + 1)
        labels = torch.multinomial(rows, n, replacement=True, generator=generator)
        return labels.T.reshape(n, *batch)
