r"""At what rate scales are learned, and whether they have stopped moving far enough from the start.

Adam moves a parameter by about its rate per step and hardly more, so training lets ln σ go no
farther than

    r = Σ_t scale_lr_t        where the way from the start back to the prior's scale is |ln(σ₀/s)|

Unlu & Aitchison 2021 (§5.1) have 3 for the latter, and r = 4 after a hundred epochs of 390 steps at
1e-4. Training that ends before the scales have settled leaves them near their small start, which is
the MAP estimate with a little noise: early stopping.

What is watched is L, the mean over weights of ln(σ/s): q's entropy per weight but for a constant.
The common drift of the scales stands out in it, the jitter of single ones averages away. If L
changed by ΔL while the last quarter Δr of r was spent, then going on at that pace for as long
again, or for as long as the way to the prior asks if that is more, would change it by

    (ΔL/Δr) · max(r, |ln(σ₀/s)|)

The scales count as settled when that is less than ln 2, a factor of two in σ. Scales that come to
rest exponentially from 3 below, with a time constant of τ of r, settle so at r = 3τ, when a
twentieth of the way is left. Noise makes Adam's pace slower than its rate; the scales had room if
half of it would have taken them to the prior's: r ≥ 2·|ln(σ₀/s)|. Long training whose scales had
no room and did not settle ends with a warning. Anything else is for the user to ask:
``scale_convergence(posterior.history)``.

A run at the paper's rate, all of whose weights still want to go up after 20 epochs:

    >>> history = [
    ...     {"log_scale": -3 + 0.03 * epoch, "log_scale_moved": 0.03 * epoch,
    ...      "log_scale_reach": 0.039 * epoch}
    ...     for epoch in range(1, 21)
    ... ]
    >>> verdict = scale_convergence(history)
    >>> verdict.settled, verdict.had_room, round(verdict.to_come, 1)
    (False, False, 2.3)

Reference: Unlu & Aitchison 2021, §5.1 and fig. 2.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from credo.errors import DataError
from credo.packing import STORED
from credo.types import Json, Vector

SCALE_LR_RATIO = 10.0
"""``scale_lr`` / ``lr`` when only ``lr`` is given; see docs/concepts/defaults.md."""

FEWEST_EPOCHS = 8
"""Fewer ends of epochs don't divide a run finely enough to see its last quarter."""
FEWEST_STEPS = 1000
"""Nobody takes a shorter run for converged: Adam remembers as many squared gradients."""


def scale_rate(lr: float, scale_lr: float | None, scale_ratio: float | None) -> float:
    """The rate of the scales: given itself, as a multiple of ``lr``, or by the default multiple.

    >>> scale_rate(0.01, scale_lr=None, scale_ratio=None)
    0.1
    """
    if scale_lr is not None and scale_ratio is not None:
        raise DataError(
            f"scale_lr={scale_lr} and scale_ratio={scale_ratio} both say what the scales' rate is; "
            "give one of them"
        )
    if scale_lr is not None:
        return scale_lr
    return lr * (SCALE_LR_RATIO if scale_ratio is None else scale_ratio)


@final
@dataclass(frozen=True)
class ScaleConvergence:
    """What `scale_convergence` finds; all in units of ln σ, means over the weights.

    ``log_scale``: ln(σ/s), s the prior's scale, at the end; ``start``: the same before training.
    ``reach``: how far the rates let it go. ``moved_lately``: its change while about the last
    quarter of ``reach`` was spent, which is ``reach_lately``.
    """

    log_scale: float
    start: float
    reach: float
    moved_lately: float
    reach_lately: float

    @property
    def to_come(self) -> float:
        """The change that going on at the same pace would bring."""
        return self.moved_lately / self.reach_lately * max(self.reach, abs(self.start))

    @property
    def settled(self) -> bool:
        """Going on would change σ by less than a factor of two."""
        return abs(self.to_come) < math.log(2)

    @property
    def had_room(self) -> bool:
        """At half of Adam's fastest the scales could have gone from their start to the prior's."""
        return self.reach >= 2 * abs(self.start)


def scale_convergence(history: Sequence[Json]) -> ScaleConvergence | None:
    """Judge ``posterior.history``; None if it says too little: no trained scales, or few epochs.

    Args:
        history: The epochs' records, as ``posterior.history`` has them.
    """
    records = [record for record in history if "log_scale_reach" in record]
    if not records:
        return None
    first = records[0]
    start = (0.0, first["log_scale"] - first["log_scale_moved"])
    return _judge([start, *((r["log_scale_reach"], r["log_scale"]) for r in records)])


def _judge(path: Sequence[tuple[float, float]]) -> ScaleConvergence | None:
    """From (r, L) before training and after each epoch."""
    reach, log_scale = path[-1]
    if len(path) <= FEWEST_EPOCHS or not reach > 0:
        return None
    earlier, before = [point for point in path if point[0] <= 0.75 * reach][-1]
    return ScaleConvergence(
        log_scale, path[0][1], reach, moved_lately=log_scale - before, reach_lately=reach - earlier
    )


@final
@dataclass
class ScalePath:
    """Where the scales were after each epoch, and how far the rates would have let them go.

    ``points`` holds (r, L), that before training first; ``reach`` is r at this step.
    """

    points: list[tuple[float, float]] = field(metadata=STORED)
    reach: float = field(default=0.0, metadata=STORED)
    steps: int = field(default=0, metadata=STORED)

    @classmethod
    def starting_at(cls, scale: Vector, prior_scale: Tensor) -> ScalePath:
        """Before the first step."""
        return cls([(0.0, _mean_log(scale, prior_scale))])

    def step(self, optimizer: Optimizer) -> None:
        """A step was made, at the rate that the group named "scale" has now."""
        groups = (group for group in optimizer.param_groups if group.get("name") == "scale")
        self.reach += sum(float(group.get("lr", 0.0)) for group in groups)
        self.steps += 1

    def end_epoch(self, scale: Vector, prior_scale: Tensor) -> None:
        """Note where the scales are."""
        self.points.append((self.reach, _mean_log(scale, prior_scale)))

    def summary(self) -> dict[str, float]:
        """For the record of the epoch that has ended."""
        reach, log_scale = self.points[-1]
        return {
            "log_scale": log_scale,
            "log_scale_moved": log_scale - self.points[0][1],
            "log_scale_reach": reach,
        }

    def warn_if_stopped_early(self) -> None:
        """Say so if training was long and yet its rates too low for the scales to settle.

        For a method's ``finish`` to call: the line that is named is the one that called `fit`.
        """
        verdict = _judge(self.points)
        if verdict is None or verdict.settled or verdict.had_room or self.steps < FEWEST_STEPS:
            return
        warnings.warn(
            f"the posterior's scales had not settled: in the last quarter of training ln σ still "
            f"moved by {verdict.moved_lately:+.2g} (mean over the weights). It has come "
            f"{verdict.log_scale - verdict.start:+.2g} of the {-verdict.start:+.2g} to the "
            f"prior's; the rates let Adam go about {verdict.reach:.2g} at most. That is early "
            "stopping, and small scales make it much like MAP. Raise scale_lr or train longer, or "
            "keep it knowing that.",
            stacklevel=6,
        )


def _mean_log(scale: Vector, prior_scale: Tensor) -> float:
    return float((scale / prior_scale).log().mean())
