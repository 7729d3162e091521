"""What users pass, checked and converted once: float64 arrays, integer labels, one layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credo.errors import DataError

Values: TypeAlias = npt.ArrayLike | Tensor
"""Anything that holds numbers: a tensor on any device, an array, a nested list."""

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

SUM_TOLERANCE = 1e-3


def as_array(values: Values, name: str) -> npt.NDArray[np.generic]:
    """A real numpy array that shares memory where it can, so callers never write into it."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        # numpy has no bfloat16 and none of the 8-bit floats
        array = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise DataError(f"{name} is ragged ({error}); pass a rectangular array.") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} must hold real numbers, got dtype {array.dtype}.")
    if array.size == 0:
        raise DataError(f"{name} is empty, shape {array.shape}; a metric needs one example.")
    return array


def as_floats(values: Values, name: str, *, finite: bool = True) -> FloatArray:
    """Any numbers as float64; NaN is refused, and infinity too unless ``finite=False``."""
    array = as_array(values, name).astype(np.float64, copy=False)
    _refuse_non_finite(array, name, allow_infinity=not finite)
    return array


def require_same_shape(name: str, array: FloatArray, of: str, shape: tuple[int, ...]) -> None:
    """Refuse silent broadcasting: (B, 1) against (B,) would compare every pair."""
    if array.shape != shape:
        raise DataError(
            f"{name} has shape {array.shape} but {of} has shape {shape}; reshape one of them."
        )


def resolution_of(values: Values) -> float:
    """Relative spacing of the numbers as the user stored them."""
    if isinstance(values, Tensor):
        return torch.finfo(values.dtype if values.is_floating_point() else torch.float64).eps
    dtype = np.asarray(values).dtype
    return float(np.finfo(dtype if dtype.kind == "f" else np.float64).eps)


@dataclass(frozen=True)
class Labelled:
    """Predicted probabilities (n, C) beside the labels (n,) that came true.

    Layouts accepted by `labelled`, all turned into this one:

    - ``probs`` (B, C), ``y`` (B,)
    - ``probs`` (B,), ``y`` (B,): P(y = 1), read as the columns [1 − p, p]
    - ``probs`` (B, C, …), ``y`` (B, …): dense predictions, every pixel an example

    ``resolution`` is the precision the probabilities came in: a float32 0.2 counts as 0.2.
    """

    probs: FloatArray
    labels: IntArray
    resolution: float

    @property
    def of_label(self) -> FloatArray:
        """Probability given to what happened, (n,)."""
        return self.probs[np.arange(len(self.labels)), self.labels]

    def top(self) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """Confidence max_c p_c and whether that class was right, each (n,); first class on ties."""
        predicted = self.probs.argmax(axis=1)
        return self.probs[np.arange(len(predicted)), predicted], predicted == self.labels


def probabilities(probs: Values) -> FloatArray:
    """Checked probabilities without labels, (n, C)."""
    rows = _rows(as_array(probs, "probs"))
    _check_probabilities(rows, resolution_of(probs))
    return rows


def labelled(probs: Values, y: Values, ignore_index: int | None = None) -> Labelled:
    """Check and align predictions with labels; see `Labelled` for the layouts.

    Examples labelled ``ignore_index`` are dropped first, whatever was predicted there.
    """
    array, labels = as_array(probs, "probs"), _whole_numbers(as_array(y, "y"))
    expected = array.shape[:1] + array.shape[2:]
    if labels.shape != expected:
        raise DataError(
            f"probs of shape {array.shape} need labels of shape {expected}, got {labels.shape}; "
            "labels are class indices, so take argmax over the classes of one-hot labels."
        )
    rows, labels = _rows(array), labels.ravel()
    if ignore_index is not None:
        kept = labels != ignore_index
        rows, labels = rows[kept], labels[kept]
        if not len(labels):
            raise DataError(f"every label equals ignore_index={ignore_index}: nothing to score.")
    classes = rows.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"labels must lie in 0…{classes - 1} for {classes} classes, got {labels.min()}…"
            f"{labels.max()}; pass ignore_index to drop a label that marks missing truth."
        )
    resolution = resolution_of(probs)
    _check_probabilities(rows, resolution)
    return Labelled(rows, labels, resolution)


def _rows(array: npt.NDArray[np.generic]) -> FloatArray:
    """Probabilities in any accepted layout as float64 (n, C)."""
    floats = array.astype(np.float64, copy=False)
    if floats.ndim == 0:
        raise DataError("probs is a single number; pass an array with one row per example.")
    if floats.ndim == 1:
        return np.stack([1.0 - floats, floats], axis=1)
    return np.moveaxis(floats, 1, -1).reshape(-1, floats.shape[1])


def _check_probabilities(rows: FloatArray, resolution: float) -> None:
    _refuse_non_finite(rows, "probs")
    if rows.shape[1] == 1:
        raise DataError("probs has one class only; for P(y = 1) pass a one-dimensional array.")
    # 1 − p of a p that was averaged in float32 may lie a few roundings below zero
    if rows.min() < -10 * resolution:
        raise DataError(
            f"probabilities must lie in [0, 1], found {rows.min():.4g} (with 1 − p as the second "
            "column of a one-dimensional probs); apply softmax or sigmoid to the outputs first."
        )
    sums = rows.sum(axis=1)
    # rounding p to nearest moves a row's sum by at most resolution / 2, which bfloat16 needs
    if np.abs(sums - 1).max() > max(SUM_TOLERANCE, resolution):
        raise DataError(
            f"probabilities must sum to 1 over the classes, found sums from {sums.min():.4g} to "
            f"{sums.max():.4g}; classes are axis 1, and outputs need a softmax first."
        )


def _whole_numbers(array: npt.NDArray[np.generic]) -> IntArray:
    if array.dtype.kind == "f":
        floats = array.astype(np.float64, copy=False)
        _refuse_non_finite(floats, "y")
        fractional = floats != np.floor(floats)
        if fractional.any():
            raise DataError(
                f"labels must be integers, found {floats[fractional].flat[0]}; "
                "pass class indices, not probabilities."
            )
    return array.astype(np.int64, copy=False)


def _refuse_non_finite(array: FloatArray, name: str, *, allow_infinity: bool = False) -> None:
    bad = np.isnan(array) if allow_infinity else ~np.isfinite(array)
    if bad.any():
        raise DataError(
            f"{name} has {int(bad.sum())} of {array.size} entries that are "
            f"{'NaN' if allow_infinity else 'NaN or infinite'}, the first at flat index "
            f"{int(bad.argmax())}; find where they arise before scoring."
        )
