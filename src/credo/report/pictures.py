"""Arrays as pictures inside a page: grey or coloured, in the layouts that networks take."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credo.checks import import_extra

LARGEST = 128
"""Pixels along a side: more are shown at every second, third, … one."""


def as_pictures(inputs: NDArray[Any]) -> NDArray[np.float64] | None:
    """Inputs as (N, H, W) or (N, H, W, 3) from 0 to 1, or None if they are no pictures.

    >>> as_pictures(np.zeros((5, 3, 8, 8))).shape
    (5, 8, 8, 3)
    >>> as_pictures(np.zeros((5, 4))) is None
    True
    """
    array = np.asarray(inputs)
    if array.dtype.kind not in "biuf":
        return None
    if array.ndim == 4 and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    if array.ndim == 4 and array.shape[-1] == 1:
        array = array[..., 0]
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[-1] == 3)) or array.size == 0:
        return None
    step = -(-max(array.shape[1:3]) // LARGEST)
    array = np.nan_to_num(array[:, ::step, ::step].astype(float))
    low, high = float(array.min()), float(array.max())
    return (array - low) / (high - low if high > low else 1.0)


def data_uri(picture: NDArray[np.float64], colours: str = "gray") -> str:
    """A picture (H, W) or (H, W, 3) from 0 to 1 as PNG inside an address.

    >>> data_uri(np.zeros((2, 2)))[:22]
    'data:image/png;base64,'
    """
    image = import_extra("matplotlib.image", extra="report", purpose="pictures on a page")
    stream = io.BytesIO()
    shades = {} if picture.ndim == 3 else {"cmap": colours, "vmin": 0.0, "vmax": 1.0}
    image.imsave(
        stream, np.clip(picture, 0, 1), format="png", metadata={"Software": None}, **shades
    )
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
