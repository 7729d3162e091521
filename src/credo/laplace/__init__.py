"""Laplace's approximation: a Gaussian with the loss's curvature at a mode."""

from credo.laplace.laplace import Laplace

__all__ = ["Laplace"]
