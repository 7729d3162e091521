"""Training: the one loop, its data, its folder."""

from credo.train.loop import fit
from credo.train.progress import Reporter

__all__ = ["Reporter", "fit"]
