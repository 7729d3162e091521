r"""The kernel JΣJ'ᵀ between any two sets of inputs, block by block.

    k(x, x') = J(x) Σ J(x')ᵀ

======  =======================================  ==================================================
symbol  argument                                 shape
======  =======================================  ==================================================
J(x)    the network at the weights it holds      (K, P)
Σ       ``q``, any Gaussian over the weights     (P, P), never formed
k       `Kernel.matrix`                          (n, K, m, K), (K, n, m) or (n, m): see ``outputs``
======  =======================================  ==================================================

Every input passes the network once if what the kernel needs of it fits ``max_memory``
(`credo.posterior.features`), in blocks otherwise: a block of rows is held, the columns' blocks
pass by. ``of="probs"`` is the kernel of the probabilities, ΛJΣJ'ᵀΛ'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.checks import Positive, checked
from credo.errors import UnsupportedError
from credo.families import Family
from credo.likelihoods.curvature import output_hessian
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import input_rows, like_weights, number_of_examples
from credo.posterior.covariance import weight_covariance
from credo.posterior.features import Features, Outputs
from credo.posterior.outputs import Linearisation
from credo.types import Inputs

Of: TypeAlias = Literal["outputs", "probs"]

MAX_MEMORY = 4e8
"""Bytes that the features of the inputs of a block of rows and one of columns may take."""
TILE = 256
"""Inputs on each side of a product: what it makes stays near the processor."""

Directions: TypeAlias = Callable[[Tensor, slice], Tensor]
"""Outputs, and which of the inputs they are of → cotangents (R, B, ...)."""


@dataclass(frozen=True)
class KernelBlock:
    """One tile of a kernel.

    Args:
        rows: Which inputs on the left.
        columns: Which inputs on the right.
        values: The kernel between them.
    """

    rows: slice
    columns: slice
    values: Tensor


@checked
class Kernel:
    """JΣJ'ᵀ of one network, at the weights that ``flat`` holds while it is used.

    Args:
        model: The network and its likelihood.
        flat: The network's parameters, at the weights that J is taken at.
        q: A Gaussian over the weights; Σ is its covariance.
        of: "outputs", or "probs" for the kernel of the probabilities, ΛJΣJ'ᵀΛ'.
        max_memory: Bytes that what is kept of the inputs may take.
    """

    def __init__(
        self,
        model: Model,
        flat: FlatParams,
        q: Family,
        of: Of = "outputs",
        max_memory: Positive = MAX_MEMORY,
    ) -> None:
        if of == "probs" and model.likelihood.kind != "classification":
            raise UnsupportedError(
                f'of="probs" is for classification; {type(model.likelihood).__name__} has no '
                'probabilities of labels. Use of="outputs"'
            )
        self._model, self._flat, self._of, self._max_memory = model, flat, of, max_memory
        self._covariance = weight_covariance(q)
        self._sizes = Linearisation(model, flat, q)

    def matrix(self, x: Inputs, other: Inputs | None = None, outputs: Outputs = "sum") -> Tensor:
        """The whole of it; ``other=None`` is x itself, and costs half.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum" adds up the K outputs with themselves, (n, m); "each" keeps them apart,
                (K, n, m); "joint" has every pair, (n, K, m, K).
        """
        rows = number_of_examples(x)
        columns = rows if other is None else number_of_examples(other)
        matrix: Tensor | None = None
        for block in self.blocks(x, other, outputs):
            if matrix is None:
                shape = {
                    "sum": (rows, columns),
                    "each": (*block.values.shape[:1], rows, columns),
                    "joint": (rows, block.values.shape[1], columns, block.values.shape[1]),
                }[outputs]
                matrix = block.values.new_empty(shape)
            _place(matrix, block, outputs)
            if other is None and block.rows != block.columns:
                mirrored = KernelBlock(
                    block.columns, block.rows, _transposed(block.values, outputs)
                )
                _place(matrix, mirrored, outputs)
        assert matrix is not None
        return matrix

    @checked
    def blocks(
        self,
        x: Inputs,
        other: Inputs | None = None,
        outputs: Outputs = "sum",
        directions: Directions | None = None,
    ) -> Iterator[KernelBlock]:
        """The kernel tile by tile; of one that is symmetric the tiles on and above the diagonal.

        Args:
            x: Inputs, examples first.
            other: Those on the other side; None for the same.
            outputs: "sum" adds up the K outputs with themselves, (n, m); "each" keeps them apart,
                (K, n, m); "joint" has every pair, (n, K, m, K).
            directions: Cotangents to take in place of all outputs.
        """
        x = like_weights(x, self._flat.vector)
        columns = x if other is None else like_weights(other, self._flat.vector)
        size = self._block_size(x, directions)
        theirs: Features | None = None
        for start in range(0, number_of_examples(x), size):
            mine = self.features(x, start, start + size, directions)
            for begin in range(start if other is None else 0, number_of_examples(columns), size):
                if other is None and begin == start:
                    against = mine
                elif theirs is not None and number_of_examples(columns) <= size:
                    against = theirs
                else:
                    against = self.features(columns, begin, begin + size, directions)
                if other is not None and number_of_examples(columns) <= size:
                    theirs = against  # one block of columns serves all rows
                yield from _tiles(mine, against, start, begin, outputs, other is None)

    def features(
        self, x: Inputs, start: int, stop: int, directions: Directions | None = None
    ) -> Features:
        """What is kept of inputs start to stop, in passes of a bounded size.

        Args:
            x: Inputs, examples first.
            start: The first of them.
            stop: The first that is left out again.
            directions: Cotangents to take in place of all outputs.
        """
        stop = min(stop, number_of_examples(x))
        step = self._sizes.batch_size(x)
        parts = []
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            inputs = input_rows(x, slice(begin, end))
            parts.append(self._of_inputs(inputs, slice(begin, end), directions))
        return Features.concatenate(parts)

    def _of_inputs(self, inputs: Inputs, places: slice, directions: Directions | None) -> Features:
        model = self._model
        jacobians = Jacobians.at(model.net, self._flat, model.random, inputs)
        if jacobians.outputs.dim() > 2:
            raise UnsupportedError(
                f"the network's outputs {tuple(jacobians.outputs.shape)} have positions; a kernel "
                'is taken between outputs (B,) or (B, K). posterior.predict(x, at="linearised") '
                "gives their variances"
            )
        with torch.no_grad():
            if directions is not None:
                return self._covariance.features(jacobians, directions(jacobians.outputs, places))
            if self._of == "probs":
                hessian = output_hessian(model.likelihood, jacobians.outputs)
                cotangents = hessian.movedim(1, 0).reshape(-1, *jacobians.outputs.shape)
                return self._covariance.features(jacobians, cotangents)
            return self._covariance.features(jacobians, None)

    def _block_size(self, x: Inputs, directions: Directions | None) -> int:
        one = self.features(x, 0, 1, directions)
        bytes_each = max(1, one.numbers) * self._flat.vector.element_size()
        return max(1, int(self._max_memory / 2 // bytes_each))


def _tiles(
    mine: Features, theirs: Features, start: int, begin: int, outputs: Outputs, half: bool
) -> Iterator[KernelBlock]:
    for i in range(0, mine.count, TILE):
        rows = mine.cut(slice(i, i + TILE))
        for j in range(i if half and mine is theirs else 0, theirs.count, TILE):
            columns = theirs.cut(slice(j, j + TILE))
            yield KernelBlock(
                slice(start + i, start + i + rows.count),
                slice(begin + j, begin + j + columns.count),
                rows.kernel(columns, outputs),
            )


def _place(matrix: Tensor, block: KernelBlock, outputs: Outputs) -> None:
    if outputs == "joint":
        matrix[block.rows, :, block.columns] = block.values
    else:
        matrix[..., block.rows, block.columns] = block.values


def _transposed(values: Tensor, outputs: Outputs) -> Tensor:
    return values.permute(2, 3, 0, 1) if outputs == "joint" else values.mT
