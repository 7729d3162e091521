"""A module's parameters as one flat vector, and which of them are random."""

from credo.params.flat import FlatParams, bind, unbind
from credo.params.selection import Selection, Selector, select

__all__ = ["FlatParams", "Selection", "Selector", "bind", "select", "unbind"]
