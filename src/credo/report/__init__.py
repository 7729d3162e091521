"""Figures and pages from arrays and files on disk: numpy in, matplotlib and HTML out, no torch."""

from credo.report.html import Picture, page
from credo.report.plots import (
    curves,
    entropy_histograms,
    image_grid,
    regression_band,
    reliability_diagrams,
)
from credo.report.style import COLOURS, save

__all__ = [
    "COLOURS",
    "Picture",
    "curves",
    "entropy_histograms",
    "image_grid",
    "page",
    "regression_band",
    "reliability_diagrams",
    "save",
]
