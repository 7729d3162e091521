"""Any differentiable loss in the place of a likelihood."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from credo.checks import checked
from credo.errors import DataError, UnsupportedError
from credo.likelihoods.base import BaseLikelihood, require_examples, require_finite
from credo.types import Json, Kind


@checked
class FromLoss(BaseLikelihood):
    """A loss as an unnormalised likelihood: log p(y | f) = −loss(f, y).

    The posterior ∝ exp(−Σ loss / temperature) · prior is then a generalised (Gibbs) posterior,
    which every learner here can aim at. Nothing says that exp(−loss) integrates to one over y, so
    there are no samples of y and no calibrated densities; predictions give outputs only.

    >>> import torch
    >>> def absolute(outputs, targets):
    ...     return (outputs - targets).abs()
    >>> likelihood = FromLoss(absolute)
    >>> likelihood.log_prob(torch.tensor([1.0, 2.0]), torch.zeros(2))
    tensor([-1., -2.])

    Bissiri, Holmes and Walker (2016), A general framework for updating belief distributions.

    Args:
        fn: ``fn(outputs, targets)`` returns one loss per example, (B,).
        name: What stands for it where it is printed or saved, by default the function's own name:
            code is never saved.
    """

    kind: Kind = "loss"

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor], name: str | None = None) -> None:
        super().__init__()
        if not callable(fn):
            raise DataError(f"FromLoss needs a function (outputs, targets) → losses, not {fn!r}.")
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−loss of each example, (B,)."""
        losses = self.fn(outputs, targets)
        if losses.shape != outputs.shape[:1]:
            raise DataError(
                f"The loss {self.name} returned shape {tuple(losses.shape)} for a batch of "
                f"{len(outputs)}, but must return one loss per example, ({len(outputs)},): use "
                'reduction="none", and sum over what belongs to one example.'
            )
        return -losses

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        """Not available: a loss says nothing about how targets arise."""
        raise UnsupportedError(
            f"Targets can't be drawn from the loss {self.name}: exp(−loss) need not be a density "
            "over them. Use a likelihood such as Categorical, Bernoulli or Gaussian."
        )

    def hessian(self, outputs: Tensor) -> Tensor:
        """Not available: the curvature of a loss depends on the targets, and has no expectation."""
        raise UnsupportedError(
            f"The loss {self.name} has no curvature that holds for every target, and no "
            "distribution of targets to average it over. Use curvature from per-example "
            "gradients, or a likelihood such as Categorical, Bernoulli or Gaussian."
        )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """As many targets as outputs, all finite, and losses of the right shape."""
        require_examples(outputs)
        if targets.shape[:1] != outputs.shape[:1]:
            raise DataError(
                f"Targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: both need the same number of examples first."
            )
        require_finite(targets)
        with torch.no_grad():
            self.log_prob(outputs, targets)

    def config(self) -> Json:
        """Type and name; `credo.likelihoods.from_config` asks for the function again."""
        return {"type": "FromLoss", "name": self.name}
