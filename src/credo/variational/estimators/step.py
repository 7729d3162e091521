"""What every estimator of E_q[loss] is given, and what it must fill in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from credo.network import FlatParams, Selection
from credo.types import Vector


@dataclass
class Step:
    """One estimate of ∇E_q[NLL] for q = N(mean, scale²) over the selected weights.

    ``energy`` runs the network as it stands and returns the mean negative log-likelihood of the
    batch. The estimator averages ``samples`` draws and leaves ∂/∂mean in ``grad_mean`` and ∂/∂scale
    in ``grad_scale``, both (P,); gradients of deterministic parameters stay in ``.grad``, averaged
    the same way.
    """

    flat: FlatParams
    random: Selection
    mean: Vector
    scale: Vector
    energy: Callable[[], Tensor]
    kl_weight: float
    samples: int
    key: tuple[int, ...]
    grad_mean: Vector
    grad_scale: Vector


class Estimator(Protocol):
    """A way to estimate the gradient of an expectation over q.

    ``integrates_kl`` says that the KL's gradient is part of what it fills in; otherwise the
    objective adds the closed form.
    """

    integrates_kl: bool

    def gradients(self, step: Step) -> float:
        """Fill in ``step.grad_mean`` and ``step.grad_scale``; return the mean NLL."""
        ...
