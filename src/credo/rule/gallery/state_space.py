"""The linear-Gaussian state-space model, which the Kalman filter and the RTS smoother share.

x_{t+1} = A x_t + N(0, Q),      y_t = C x_t + N(0, R)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credo.errors import DataError
from credo.families.base import check_floating


@dataclass(frozen=True)
class LinearGaussianModel:
    """A is ``transition`` (D, D), Q ``transition_noise`` (D, D), C ``observation`` (M, D) and R
    ``observation_noise`` (M, M). Q may be singular, as long as no prediction is; R may not.
    """

    transition: Tensor
    transition_noise: Tensor
    observation: Tensor
    observation_noise: Tensor

    def __post_init__(self) -> None:
        check_floating(**vars(self))
        if self.observation.dim() != 2:
            raise DataError(f"observation must be (M, D), got {tuple(self.observation.shape)}")
        measured, states = self.observation.shape
        for name, rows, columns in (
            ("transition", states, states),
            ("transition_noise", states, states),
            ("observation", measured, states),
            ("observation_noise", measured, measured),
        ):
            matrix: Tensor = getattr(self, name)
            if matrix.shape != (rows, columns) or not bool(matrix.isfinite().all()):
                raise DataError(
                    f"{name} must be ({rows}, {columns}) and finite, got {tuple(matrix.shape)}: "
                    f"observation is ({measured}, {states})"
                )
        check_covariance("transition_noise", self.transition_noise, singular=True)
        check_covariance("observation_noise", self.observation_noise)


def check_covariance(name: str, matrix: Tensor, *, singular: bool = False) -> None:
    """Raise `DataError` unless symmetric and, in the units of its own diagonal, positive definite.

    ``singular=True`` also lets a semidefinite one pass.
    """
    matrix = matrix.detach()
    scale = matrix.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    correlation = matrix / torch.outer(scale, scale)
    floor = 8 * len(matrix) * torch.finfo(matrix.dtype).eps
    if float((correlation - correlation.mT).abs().max()) > floor**0.5:
        raise DataError(f"{name} must be symmetric")
    smallest = float(torch.linalg.eigvalsh(correlation)[0])
    if smallest < -floor or (smallest <= floor and not singular):
        wanted = "semidefinite" if singular else "definite: it is singular or indefinite"
        raise DataError(
            f"{name} must be positive {wanted}; in units of its diagonal, the smallest eigenvalue "
            f"is {smallest:.3g}"
        )
