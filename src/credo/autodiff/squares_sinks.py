"""Where the squares of per-example gradients are added up, one `Sink` per parameter.

A layer hands over its examples' gradients as a function of a slice of examples, so that only a
chunk of them exists at a time. A parameter that is used several times in a pass (`Sink.shared`)
needs the sum over its uses before squaring: the functions of all uses are kept, and `Sink.finish`
adds and squares, again in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from credo.errors import UnsupportedError
from credo.types import Segment

CHUNK_NUMBERS = 2**20
"""How many per-example numbers are held at once: 4 MB in float32, about a cache."""

Examples = Callable[[slice], Tensor]
"""Examples i…j → their gradients of a parameter's part, (j − i, *shape)."""


class Sink:
    """Where the squares of one parameter are added up, and how this pass uses it."""

    def __init__(self, segment: Segment, parameter: nn.Parameter, squares: Tensor) -> None:
        self.segment, self.parameter, self.squares = segment, parameter, squares
        self.fresh = True
        self.outside: str | None = None
        self.example_dim: int | None = None
        self.arm()

    def arm(self) -> None:
        """Forget what earlier forward passes did."""
        self.met = self.shared = False
        self.end_pass()

    def end_pass(self) -> None:
        """Forget what this backward pass did."""
        self._uses: list[range] = []
        self._added: list[range] = []
        self._deferred: list[tuple[range, Examples]] = []
        self._numbers = 1

    def meet(self, rows: range) -> None:
        """A forward pass uses these rows."""
        self.met = True
        self.shared = self.shared or _any_overlap(self._uses, rows)
        self._uses.append(rows)

    def open(self, rows: range, overwrite: bool = False) -> tuple[Tensor, float]:
        """The accumulators of these rows, and 0 or 1: what to multiply their content by."""
        if _any_overlap(self._added, rows):
            raise UnsupportedError(
                f"{self.segment.name} was reached twice in one backward pass, once by a graph kept "
                "from an earlier pass (retain_graph=True): its per-example gradients can't be told "
                "apart any more. Run the forward pass again instead."
            )
        self._added.append(rows)
        if overwrite and self.fresh and len(rows) == len(self.squares):
            self.fresh = False
            return self.squares, 0.0
        if self.fresh:
            self.squares.zero_()
            self.fresh = False
        return self.squares[rows.start : rows.stop], 1.0

    def defer(self, rows: range, examples: Examples, numbers: int) -> None:
        """One of several uses; ``numbers`` is what one example of it holds while computed."""
        self._deferred.append((rows, examples))
        self._numbers = max(self._numbers, numbers)

    def finish(self, count: int, factor: float) -> None:
        """Square the sum over all uses."""
        if not self._deferred:
            return
        squares, _ = self.open(range(len(self.squares)))
        for chunk in _chunks(count, max(self._numbers, self.squares.numel())):
            total = squares.new_zeros(chunk.stop - chunk.start, *squares.shape)
            for rows, examples in self._deferred:
                total[:, rows.start : rows.stop] += examples(chunk)
            _add_squares(squares, total, factor)


class Part:
    """The rows of a parameter that one call works with."""

    def __init__(self, sink: Sink, rows: slice | None = None) -> None:
        self.sink = sink
        self.rows = range(len(sink.squares))[rows or slice(None)]

    def settle(
        self, factor: float | None, examples: Examples, count: int, numbers: int
    ) -> Tensor | None:
        """Add the squares; the sum of the gradients, unless somebody else must compute it."""
        if factor is None or self.sink.outside is not None:
            return None
        if self.sink.shared:
            self.sink.defer(self.rows, examples, numbers)
            return None
        squares, _ = self.sink.open(self.rows)
        gradient: Tensor | None = None
        for chunk in _chunks(count, numbers):
            found = examples(chunk).to(squares.dtype)
            total = found.sum(0)
            gradient = total if gradient is None else gradient.add_(total)
            _add_squares(squares, found, factor)
        return gradient

    def settle_whole(self, factor: float | None, found: Tensor) -> None:
        """The same for gradients (examples, *shape) that are there already, and few."""
        if factor is None or self.sink.outside is not None:
            return
        if self.sink.shared:
            self.sink.defer(self.rows, lambda chunk: found[chunk], found[0].numel())
            return
        squares, keep = self.sink.open(self.rows, overwrite=True)
        total = found.to(squares.dtype).square().sum(0)
        if keep:
            squares.add_(total, alpha=factor)
        else:
            torch.mul(total, factor, out=squares)


def _any_overlap(taken: list[range], rows: range) -> bool:
    return any(r.start < rows.stop and rows.start < r.stop for r in taken)


def _chunks(count: int, numbers: int) -> Iterator[slice]:
    step = max(1, CHUNK_NUMBERS // max(1, numbers))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _add_squares(squares: Tensor, found: Tensor, factor: float) -> None:
    """``found`` (examples, *shape) is overwritten."""
    if len(found) == 1:
        squares.addcmul_(found[0], found[0], value=factor)
    else:
        squares.add_(found.square_().sum(0), alpha=factor)
