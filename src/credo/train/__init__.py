"""Training: the one loop, its data, its folder."""

from credo.train.fit import fit

__all__ = ["fit"]
