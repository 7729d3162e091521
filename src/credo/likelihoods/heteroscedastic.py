"""Real targets whose noise the network predicts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.checks import Positive, checked
from credo.errors import DataError
from credo.likelihoods.base import Regression
from credo.types import Json


@checked
class HeteroscedasticGaussian(Regression):
    """p(y | f) = N(y; m, diag(s²)) with f = (m, r) and s = min_scale + softplus(r).

    Shapes: outputs f (B, 2D), the D means m before the D raw scales r; targets y (B, D), or (B,) if
    D is 1.

    >>> import torch
    >>> likelihood = HeteroscedasticGaussian()
    >>> f = torch.tensor([[1.0, 0.0]])
    >>> likelihood.mean(f), likelihood.variance(f).sqrt()
    (tensor([[1.]]), tensor([[0.6941]]))

    Nix and Weigend (1994), Estimating the mean and variance of the target probability distribution.

    Args:
        min_scale: The smallest standard deviation. It keeps the density bounded: without it one
            example fitted exactly would have infinite likelihood.
    """

    def __init__(self, min_scale: Positive = 1e-3) -> None:
        super().__init__()
        self.min_scale = float(min_scale)

    def mean_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """m and s, both (B, D)."""
        mean, raw = self._split(outputs)
        return mean, self.min_scale + F.softplus(raw)

    def hessian(self, outputs: Tensor) -> Tensor:
        """The expected Hessian (Fisher information) diag(1/s², 2σ(r)²/s²), (B, 2D, 2D).

        −∂² log p / ∂f² itself depends on y, and is not positive for every y. Its expectation under
        p(y | f) is: in (m, s) it is diag(1/s², 2/s²), and ∂s/∂r = σ(r).
        """
        _, raw = self._split(outputs)
        _, scale = self.mean_and_scale(outputs)
        per_mean = scale.square().reciprocal()
        per_raw = 2 * raw.sigmoid().square() * per_mean
        return torch.diag_embed(torch.cat([per_mean, per_raw], dim=1))

    def config(self) -> Json:
        """Type and settings."""
        return {"type": "HeteroscedasticGaussian", "min_scale": self.min_scale}

    @staticmethod
    def _split(outputs: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.dim() != 2 or outputs.shape[1] % 2:
            raise DataError(
                "HeteroscedasticGaussian needs outputs of shape (B, 2D), a mean and a raw scale "
                f"for each of D targets, but they have shape {tuple(outputs.shape)}."
            )
        mean, raw = outputs.chunk(2, dim=1)
        return mean, raw
