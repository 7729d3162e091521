"""A module's parameters as one flat vector, and which of them are random."""

from credo.network.flat import FlatParams, bind, segments_of, unbind
from credo.network.selection import Selection, Selector, select

__all__ = ["FlatParams", "Selection", "Selector", "bind", "segments_of", "select", "unbind"]
