"""Networks as functions: the Gaussian process of a posterior, and the examples it rests on."""

from credo.functionspace.memorable import (
    Memory,
    leave_one_out,
    leverage,
    relevance,
    select,
    select_per_class,
)
from credo.functionspace.output_losses import trace_of_curvature

__all__ = [
    "Memory",
    "leave_one_out",
    "leverage",
    "relevance",
    "select",
    "select_per_class",
    "trace_of_curvature",
]
