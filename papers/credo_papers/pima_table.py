"""The Pima diabetes table: who of 768 women has diabetes, with zeros for what was not measured."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from torch import Tensor

from credo.data.npz import read_npz
from credo.data.sets import data_root, first_existing
from credo.errors import FileFormatError

_FILE = "pima.npz"
_COLUMNS = 8
MEASURED = (1, 2, 3, 4, 5)
"""Glucose, blood pressure, skin thickness, insulin, body-mass index: nobody alive has 0 of them."""


def pima(root: str | PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """x (768, 8), float32 in original units with NaN where a value is missing, and y (768,).

    Args:
        root: The folder that has ``pima.npz``; by default the one that CREDO_DATA names.

    Raises:
        DataError: There is no file.
        FileFormatError: It is damaged, or another table.

    Reference: J. W. Smith et al., "Using the ADAP learning algorithm to forecast the onset of
    diabetes mellitus", 1988.
    """
    path = first_existing(data_root(root, "pima"), [_FILE], "pima")
    arrays = read_npz(path, ["pima_X", "pima_y"])
    x, y = arrays["pima_X"], arrays["pima_y"]
    if x.ndim != 2 or x.shape[1] != _COLUMNS or y.shape != x.shape[:1] or y.max() > 1:
        raise FileFormatError(
            f"{path}: pima should be X (N, 8) and y (N,) of 0 and 1, but it is X {x.shape} and y "
            f"{y.shape}. Fetch the file again."
        )
    inputs = x.astype(np.float32)
    missing = np.zeros_like(inputs, dtype=bool)
    missing[:, MEASURED] = inputs[:, MEASURED] == 0
    inputs[missing] = np.nan
    return torch.from_numpy(inputs), torch.from_numpy(y.astype(np.int64))


def filled(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Missing values filled with the training rows' means, and all scaled by these rows.

    >>> nan = float("nan")
    >>> filled(torch.tensor([[0.0], [2.0], [nan]]), torch.tensor([[nan], [1.0]]))[1]
    tensor([[0.], [0.]])
    """
    mean = train.nanmean(0)
    whole = [torch.where(x.isnan(), mean, x) for x in (train, *others)]
    scale = whole[0].std(0, correction=0).clamp_min(1e-6)
    return tuple((x - mean) / scale for x in whole)
