"""Mutually exclusive classes, per example or per pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from credo.checks import checked
from credo.errors import DataError
from credo.likelihoods.base import Classification, first_index, per_example_sum, require_examples
from credo.types import Json

# torch silently skips the label -100 unless told otherwise; no label equals this one
_NO_LABEL = torch.iinfo(torch.int64).min


@checked
class Categorical(Classification):
    """p(y = c | f) = softmax(f)_c.

    Shapes: outputs f (B, C), or (B, C, *spatial) with one distribution per pixel; targets y int64,
    (B,) or (B, *spatial). An example's log-probability is the sum over its pixels, those labelled
    ``ignore_index`` left out.

    >>> import torch
    >>> likelihood = Categorical()
    >>> f = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    >>> likelihood.probs(f)
    tensor([[0.5000, 0.5000], [0.8808, 0.1192]])
    >>> likelihood.log_prob(f, torch.tensor([0, 1]))
    tensor([-0.6931, -2.1269])
    >>> likelihood.hessian(f)[0]
    tensor([[ 0.2500, -0.2500], [-0.2500,  0.2500]])

    Args:
        ignore_index: The label that marks pixels or examples to leave out; None if every label
            counts.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        super().__init__()
        self.ignore_index = None if ignore_index is None else int(ignore_index)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log softmax(f)_y, summed over the pixels that count: (B,)."""
        self._require_fit(outputs, targets)
        return -per_example_sum(self._cross_entropy(outputs, targets, "none"))

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over examples of −log p(y | f), a scalar."""
        if outputs.dim() > 2 or self.ignore_index is not None:
            return super().mean_nll(outputs, targets)
        self._require_fit(outputs, targets)
        return self._cross_entropy(outputs, targets, "mean")

    @torch.no_grad()
    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Labels int64, (B,) or (B, *spatial)."""
        probs = self.probs(outputs).movedim(1, -1)
        drawn = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
        return drawn.reshape(probs.shape[:-1])

    def hessian(self, outputs: Tensor) -> Tensor:
        """Λ = diag(p) − ppᵀ, (B, *spatial, C, C): it doesn't depend on y."""
        probs = self.probs(outputs).movedim(1, -1)
        pairs = probs.unsqueeze(-1) * probs.unsqueeze(-2)
        pairs.diagonal(dim1=-2, dim2=-1).zero_()
        # p_i (1 − p_i) as p_i Σ_{j≠i} p_j: no cancellation where the softmax saturates
        return torch.diag_embed(pairs.sum(-1)) - pairs

    def probs(self, outputs: Tensor) -> Tensor:
        """softmax(f) over the class dimension, which is the second."""
        self._require_logits(outputs)
        return outputs.softmax(1)

    def entropy(self, probs: Tensor) -> Tensor:
        """−Σ_c p_c log p_c: (B, C, *spatial) → (B, *spatial)."""
        return torch.special.entr(probs).sum(1)

    def confidence(self, probs: Tensor) -> Tensor:
        """max_c p_c: (B, C, *spatial) → (B, *spatial)."""
        return probs.amax(1)

    def labels(self, probs: Tensor) -> Tensor:
        """argmax_c p_c: (B, C, *spatial) → (B, *spatial)."""
        return probs.argmax(1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets are int64 labels in 0..C−1 (or ignored), one per distribution."""
        self._require_fit(outputs, targets)
        require_examples(outputs)
        classes = outputs.shape[1]
        if classes == 1:
            raise DataError(
                f"Outputs of shape {tuple(outputs.shape)} have one class, whose probability is "
                "always 1. For one logit per example use credo.likelihoods.Bernoulli()."
            )
        counted = targets != (_NO_LABEL if self.ignore_index is None else self.ignore_index)
        wrong = counted & ((targets < 0) | (targets >= classes))
        if wrong.any():
            index = first_index(wrong)
            label = int(targets[index])
            raise DataError(
                f"Label {label} at index {index} is not a class: outputs of shape "
                f"{tuple(outputs.shape)} give classes 0 to {classes - 1} ({int(wrong.sum())} of "
                f"{targets.numel()} labels are out of range). If {label} marks labels to leave "
                f"out, use Categorical(ignore_index={label})."
            )
        if not counted.any():
            raise DataError(
                f"All {targets.numel()} labels equal ignore_index={self.ignore_index}: "
                "nothing is left to learn from."
            )

    def config(self) -> Json:
        """Type and settings."""
        return {"type": "Categorical", "ignore_index": self.ignore_index}

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        ignored = _NO_LABEL if self.ignore_index is None else self.ignore_index
        return F.cross_entropy(outputs, targets, ignore_index=ignored, reduction=reduction)

    @staticmethod
    def _require_logits(outputs: Tensor) -> None:
        if outputs.dim() < 2:
            raise DataError(
                "Categorical needs logits of shape (B, C) or (B, C, *spatial), but the outputs "
                f"have shape {tuple(outputs.shape)}. For one logit per example use "
                "credo.likelihoods.Bernoulli()."
            )

    @classmethod
    def _require_fit(cls, outputs: Tensor, targets: Tensor) -> None:
        cls._require_logits(outputs)
        if targets.dtype != torch.int64:
            raise DataError(
                f"Categorical needs class labels of dtype torch.int64, but targets of shape "
                f"{tuple(targets.shape)} have dtype {targets.dtype}. Use targets.long() if they "
                "hold class numbers, targets.argmax(1) if they are one-hot."
            )
        expected = outputs.shape[:1] + outputs.shape[2:]
        if targets.shape != expected:
            raise DataError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: one label per distribution is {tuple(expected)}."
            )
