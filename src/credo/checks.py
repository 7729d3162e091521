"""Checks of the numbers that things are constructed with."""

from __future__ import annotations

import math
from numbers import Real

from credo.errors import DataError


def positive(name: str, value: object) -> float:
    """The value as a float, or a `DataError` if it is not a positive finite number.

    >>> positive("scale", 2)
    2.0
    """
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise DataError(f"{name} must be a positive finite number, but it is {value!r}")
    return float(value)


def finite(name: str, value: object) -> float:
    """The value as a float, or a `DataError` if it is not a finite number."""
    if not isinstance(value, Real) or not math.isfinite(float(value)):
        raise DataError(f"{name} must be a finite number, but it is {value!r}")
    return float(value)
