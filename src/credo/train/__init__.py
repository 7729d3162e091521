"""Training: the one loop, its data, its folder."""

from credo.train.loop import fit

__all__ = ["fit"]
