"""Yes or no, once per example or for several independent labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from credo.errors import DataError
from credo.likelihoods.base import (
    Classification,
    first_index,
    match_shape,
    per_example_sum,
    require_examples,
    require_finite,
)
from credo.types import Json


class Bernoulli(Classification):
    """p(y_k = 1 | f) = σ(f_k), independently for every k.

    Shapes: outputs f (B,), (B, 1) or (B, K), as logits; targets y of the same shape holding 0 and 1
    as float, integer or bool. A last dimension of size one may be missing on either side.

    >>> import torch
    >>> likelihood = Bernoulli()
    >>> f = torch.tensor([[0.0], [-200.0]])
    >>> likelihood.log_prob(f, torch.tensor([1, 1]))
    tensor([  -0.6931, -200.0000])
    >>> likelihood.hessian(f).shape
    torch.Size([2, 1, 1])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ_k y_k log σ(f_k) + (1 − y_k) log σ(−f_k), (B,)."""
        targets = match_shape(outputs, targets).to(outputs.dtype)
        loss = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return -per_example_sum(loss)

    @torch.no_grad()
    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Zeros and ones in the outputs' shape and dtype."""
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    def hessian(self, outputs: Tensor) -> Tensor:
        """Λ = diag(σ(f)(1 − σ(f))), (B, K, K), K = 1 for outputs (B,): it doesn't depend on y."""
        # σ(−f) is 1 − σ(f) without the cancellation
        curvature = outputs.sigmoid() * (-outputs).sigmoid()
        return torch.diag_embed(curvature.reshape(len(outputs), -1))

    def probs(self, outputs: Tensor) -> Tensor:
        """P(y = 1) = σ(f)."""
        return outputs.sigmoid()

    def entropy(self, probs: Tensor) -> Tensor:
        """−p log p − (1 − p) log(1 − p) of every label."""
        return torch.special.entr(probs) + torch.special.entr(1 - probs)

    def confidence(self, probs: Tensor) -> Tensor:
        """max(p, 1 − p) of every label."""
        return torch.maximum(probs, 1 - probs)

    def labels(self, probs: Tensor) -> Tensor:
        """1 where p > ½, else 0."""
        return (probs > 0.5).long()

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Shapes agree and every target is 0 or 1."""
        require_examples(outputs)
        match_shape(outputs, targets)
        require_finite(targets)
        wrong = (targets != 0) & (targets != 1)
        if wrong.any():
            index = first_index(wrong)
            raise DataError(
                f"Target {targets[index].item()} at index {index} is neither 0 nor 1 "
                f"({int(wrong.sum())} of {targets.numel()} are not). Code the two classes as 0 "
                "and 1, or use credo.likelihoods.Categorical() for more than two."
            )

    def config(self) -> Json:
        """The type: there are no settings."""
        return {"type": "Bernoulli"}
