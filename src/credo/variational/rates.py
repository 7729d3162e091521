"""The rate at which scales are learned."""

from __future__ import annotations

import math

from credo.errors import DataError


def scale_rate(
    lr: float, scale_lr: float | None, scale_ratio: float | None, default_ratio: float
) -> float:
    """The rate of the scales: given itself, as a multiple of ``lr``, or by the default multiple.

    >>> scale_rate(0.01, None, None, default_ratio=10.0)
    0.1
    """
    for name, value in (("scale_lr", scale_lr), ("scale_ratio", scale_ratio)):
        if value is not None and not 0 <= value < math.inf:
            raise DataError(f"{name}={value} must be 0 (scales fixed) or more")
    if scale_lr is not None and scale_ratio is not None:
        raise DataError(
            f"scale_lr={scale_lr} and scale_ratio={scale_ratio} both say what the scales' rate is; "
            "give one of them"
        )
    if scale_lr is not None:
        return scale_lr
    return lr * (default_ratio if scale_ratio is None else scale_ratio)
