"""Real targets with normal noise of one scale for all."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.checks import Positive, checked
from credo.likelihoods.base import Regression, match_shape
from credo.types import Json


@checked
class Gaussian(Regression):
    """p(y | f) = N(y; f, scale² I).

    Shapes: outputs f and targets y (B,) or (B, D); a last dimension of size one may be missing on
    either side.

    >>> import torch
    >>> likelihood = Gaussian(scale=0.1)
    >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([0.0, 0.1]))
    tensor([1.3836, 0.8836])
    >>> [name for name, _ in Gaussian(learned=True).named_parameters()]
    ['log_scale']

    Args:
        scale: The noise's standard deviation.
        learned: Start from that scale and make ``log_scale``, one number, a ``Parameter`` that
            training fits as a point estimate.
    """

    log_scale: nn.Parameter | None

    def __init__(self, scale: Positive = 1.0, learned: bool = False) -> None:
        super().__init__()
        self._fixed_scale = float(scale)
        log_scale = nn.Parameter(torch.tensor(math.log(scale))) if learned else None
        self.register_parameter("log_scale", log_scale)

    @property
    def scale(self) -> float:
        """The noise's standard deviation, as it is now."""
        if self.log_scale is None:
            return self._fixed_scale
        return math.exp(self.log_scale.item())

    def mean_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and one scale for all of them."""
        if self.log_scale is None:
            # a fill on the device, not a copy to it, and exact in the outputs' dtype
            fixed = torch.full((), self._fixed_scale, dtype=outputs.dtype, device=outputs.device)
            return outputs, fixed
        return outputs, self.log_scale.exp().to(outputs.dtype)

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over examples of −log p(y | f), a scalar; with a fixed scale a mean square."""
        if self.log_scale is not None or outputs.dim() == 0 or not len(outputs):
            return super().mean_nll(outputs, targets)
        scale, numbers = self._fixed_scale, outputs.numel() // len(outputs)
        squares = F.mse_loss(outputs, match_shape(outputs, targets).to(outputs.dtype))
        constant = numbers * (math.log(scale) + 0.5 * math.log(2 * math.pi))
        return squares * (0.5 * numbers / scale**2) + constant

    def hessian(self, outputs: Tensor) -> Tensor:
        """Λ = I / scale², (B, D, D), D = 1 for outputs (B,): it doesn't depend on y."""
        precision = self.variance(outputs).reciprocal()
        return torch.diag_embed(precision.reshape(len(outputs), -1))

    def config(self) -> Json:
        """Type and settings; the scale is the current one."""
        return {"type": "Gaussian", "scale": self.scale, "learned": self.log_scale is not None}
