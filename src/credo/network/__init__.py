"""The user's module: its parameters as one flat vector, which of them are random, and copies."""

from credo.network.execution import last_layer
from credo.network.flat import FlatParams, bind, parameters_of, segments_of, unbind
from credo.network.selection import Selection, Selector, select

__all__ = [
    "FlatParams",
    "Selection",
    "Selector",
    "bind",
    "last_layer",
    "parameters_of",
    "segments_of",
    "select",
    "unbind",
]
