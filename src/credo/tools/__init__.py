"""Helpers around training: choosing what a method can't know by itself."""

from credo.tools.compare_methods import compare, load_comparison
from credo.tools.compare_result import Comparison
from credo.tools.compare_rows import Rows
from credo.tools.diagnosis import Diagnosis, diagnose
from credo.tools.distil import distil
from credo.tools.rate_range import RateRange, lr_range_test
from credo.tools.robust_region import RobustRegion, robust_region
from credo.tools.robust_sgd import RobustRates, robust_rates
from credo.tools.spectrum import ExtremeEigenvalues, extreme_eigenvalues
from credo.tools.temperature_tuning import tune_temperature

__all__ = [
    "Comparison",
    "Diagnosis",
    "ExtremeEigenvalues",
    "RateRange",
    "RobustRates",
    "RobustRegion",
    "Rows",
    "compare",
    "diagnose",
    "distil",
    "extreme_eigenvalues",
    "load_comparison",
    "lr_range_test",
    "robust_rates",
    "robust_region",
    "tune_temperature",
]
