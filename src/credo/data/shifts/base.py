"""What every shift is: a function of inputs, a severity from 0 to 5, and a seed."""

from __future__ import annotations

from numbers import Integral
from typing import Protocol

import torch
from torch import Generator, Tensor

from credo.errors import DataError

SEVERITIES = (1, 2, 3, 4, 5)
"""From the mildest to the hardest; 0 are the inputs as they are."""


class Shift(Protocol):
    """Inputs at a severity: 0 gives them back, 5 is the hardest."""

    def __call__(self, x: Tensor, severity: int, seed: int = 0) -> Tensor:
        """The shifted inputs.

        Args:
            x: The inputs.
            severity: 0 to 5.
            seed: Of whatever is drawn at random; the same seed draws the same at every severity.
        """
        ...


def check_severity(name: str, severity: int) -> int:
    """The severity as an int.

    Args:
        name: The shift, for the error.
        severity: What was given.

    Raises:
        DataError: It is no whole number from 0 to 5.
    """
    whole = isinstance(severity, Integral) and not isinstance(severity, bool)
    if not whole or not 0 <= int(severity) <= SEVERITIES[-1]:
        raise DataError(
            f"{name}: severity must be a whole number from 0 (no shift) to {SEVERITIES[-1]}, but "
            f"it is {severity!r}"
        )
    return int(severity)


def generator_of(seed: int) -> Generator:
    """A generator on the CPU, so that a shift is the same wherever the inputs are.

    Args:
        seed: Its seed.
    """
    return Generator().manual_seed(seed)


def check_floats(name: str, x: object) -> Tensor:
    """The inputs, if they are a floating-point tensor of finite numbers.

    Args:
        name: The shift, for the error.
        x: What was given.

    Raises:
        DataError: They are not.
    """
    if not isinstance(x, Tensor):
        raise DataError(
            f"{name} needs a torch tensor, but got {type(x).__name__}: torch.as_tensor(x) makes one"
        )
    if not x.is_floating_point():
        remedy = " (of uint8 pixels: x.float() / 255)" if x.dtype == torch.uint8 else ""
        raise DataError(f"{name} needs floating-point numbers, but got {x.dtype}{remedy}")
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{name} needs finite numbers, but some are nan or infinite: drop or fill")
    return x
