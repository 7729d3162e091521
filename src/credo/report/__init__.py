"""Figures and pages from arrays and files on disk: numpy in, matplotlib and HTML out, no torch."""

from credo.report.evidence import Evidence, Run, ShiftScores
from credo.report.pages import comparison_page, run_page
from credo.report.plots import (
    curves,
    entropy_histograms,
    image_grid,
    interval_calibration,
    predicted_against_true,
    regression_band,
    reliability_diagrams,
    retention_curves,
    shift_curves,
)
from credo.report.run_folders import read_runs
from credo.report.style import COLOURS, save

__all__ = [
    "COLOURS",
    "Evidence",
    "Run",
    "ShiftScores",
    "comparison_page",
    "curves",
    "entropy_histograms",
    "image_grid",
    "interval_calibration",
    "predicted_against_true",
    "read_runs",
    "regression_band",
    "reliability_diagrams",
    "retention_curves",
    "run_page",
    "save",
    "shift_curves",
]
