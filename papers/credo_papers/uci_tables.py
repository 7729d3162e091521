"""Regression tables of the BNN literature with their 20 standard splits."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from torch import Tensor

from credo.data.npz import read_npz
from credo.data.sets import data_root, first_existing
from credo.errors import DataError, FileFormatError

_FILE = "uci_yacht_concrete_wine.npz"
_NAMES = ("yacht", "concrete", "wine_red")
_SPLITS = 20


def uci(
    name: str, split: int = 0, root: str | PathLike[str] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_train (N, D), y_train (N, 1), x_test (M, D), y_test (M, 1), float32, in original units.

    Read from ``uci_yacht_concrete_wine.npz``, which ``papers/make_data.py`` makes from the tables
    and splits that were published. Scale the columns with `credo.data.standardise`.

    Args:
        name: yacht, concrete or wine_red.
        split: 0 to 19, the splits into training and test rows over which the literature averages.
        root: The folder that has the file; by default the one that CREDO_DATA names.

    Raises:
        DataError: There is no such table or split, or no file.
        FileFormatError: The file is damaged, or has other arrays.

    Reference: J. M. Hernández-Lobato, R. Adams, "Probabilistic backpropagation for scalable
    learning of Bayesian neural networks", 2015 (the splits).
    """
    if name not in _NAMES or not 0 <= split < _SPLITS:
        raise DataError(
            f"uci has the tables {', '.join(_NAMES)} with splits 0 to {_SPLITS - 1}, "
            f"not {name!r} with split {split}"
        )
    path = first_existing(data_root(root, name), [_FILE], name)
    arrays = read_npz(path, [f"{name}_{part}" for part in ("X", "y", "train_idx", "test_idx")])
    x, y, train, test = arrays.values()
    rows = x.shape[0] if x.ndim == 2 else -1
    if (
        y.shape != (rows,)
        or any(i.ndim != 2 or len(i) != _SPLITS or i.dtype.kind != "i" for i in (train, test))
        or any(i.min() < 0 or i.max() >= rows for i in (train, test))
    ):
        raise FileFormatError(
            f"{path}: {name} should be X (N, D), y (N,) and row numbers (20, n) below N, but it is "
            f"X {x.shape}, y {y.shape}, rows {train.shape} and {test.shape}. Fetch the file again."
        )
    inputs = torch.from_numpy(x.astype(np.float32, copy=False))
    targets = torch.from_numpy(y.astype(np.float32, copy=False)).unsqueeze(1)
    fit, held_out = (torch.from_numpy(i[split].astype(np.int64)) for i in (train, test))
    return inputs[fit], targets[fit], inputs[held_out], targets[held_out]
