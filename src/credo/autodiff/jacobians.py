r"""Jacobians of a network's outputs with respect to its weights, without forming them.

    J_b = ∂f(x_b; θ)/∂θ,  (K, P) for each of B examples; K numbers come out, P weights are selected

is K·P numbers per example: 19 MB for the ten logits of a 784-400-400-10 network. What is asked of
it is smaller: sums of squares, Kronecker factors, JΣJᵀ. And for a dense layer J_bᵀc = g ⊗ a, with a
what comes in and g the gradient at what goes out. So `Jacobians.at` runs the network once and
remembers every layer's a; backward passes that stop at the layers' outputs give every g.

=====================  ============================  ============================================
method                 gives                         of
=====================  ============================  ============================================
``rows``               (B, K, P)                     J
``pull(roots)``        (R, B, P)                     J_bᵀ c_rb
``squares(roots)``     (P,)                          Σ_b Σ_r (J_bᵀ c_rb)²
``gram(roots)``        (P, P)                        Σ_b Σ_r (J_bᵀ c_rb)(J_bᵀ c_rb)ᵀ
``kron(roots)``        factors, layer by layer       the same, approximately
``variance_diag(v)``   (B, K, K)                     J diag(v) Jᵀ
``kron_variance(Σ)``   (B, K, K)                     JΣJᵀ, Σ Kronecker block by block
``times(U)``           (B, K, r)                     JU, U (P, r)
=====================  ============================  ============================================

``roots`` are cotangents c of the outputs, (R, B, *outputs.shape[1:]). Where Σ_r c_rb c_rbᵀ = Λ_b is
a likelihood's Hessian, ``squares`` is the diagonal of the generalised Gauss–Newton matrix.

    >>> import torch
    >>> from credo.network import bind, select
    >>> net, x = torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> flat = bind(net)
    >>> jacobians = Jacobians.at(net, flat, select(flat.segments), x)
    >>> jacobians.rows()
    tensor([[[1., 2., 1.]],
            [[3., 4., 1.]]])
    >>> jacobians.squares(torch.ones(1, 2, 1))
    tensor([10., 20.,  2.])
    >>> jacobians.variance_diag(torch.tensor([1.0, 1.0, 0.5])).flatten()
    tensor([ 5.5000, 25.5000])

Linear, convolutional, embedding and norm layers and multi-head attention are taken apart like this,
however often a parameter is used. Anything else (recurrent kernels, ``W.t()``) is correct but slow:
each example runs alone, and a warning names those parameters once per network.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from credo.autodiff.layer_calls import LayerCall, NetworkCall, Watch, Watched, chunks, example_dims
from credo.autodiff.layer_jacobians import (
    Block,
    Cotangents,
    DiagonalFactors,
    KronCovariance,
    KronFactors,
    MatrixBlock,
    MatrixTap,
    Role,
    SlowBlock,
    SlowRows,
    Tap,
    gram,
    layer_gram,
    one_dense_layer,
    tap_of,
)
from credo.errors import DataError, UnsupportedError
from credo.network.flat import FlatParams
from credo.network.selection import Selection
from credo.types import Inputs, Vector


class Jacobians:
    """J of every example of one batch, at the network's present weights; made by `at`.

    It keeps the graph of the forward pass, as long as it lives.

    Args:
        outputs: The network's outputs, with their graph.
        taps: The layers' calls.
        blocks: The parameters, in the selection's order.
        size: P.
    """

    def __init__(
        self, outputs: Tensor, taps: Sequence[Tap], blocks: Sequence[Block], size: int
    ) -> None:
        self._graph, self._taps, self._blocks, self._size = outputs, taps, blocks, size

    @classmethod
    def at(
        cls, net: nn.Module, flat: FlatParams, selection: Selection, inputs: Inputs
    ) -> Jacobians:
        """One forward pass of ``net``, whose parameters ``flat`` holds, over a batch of inputs.

        Columns follow the selection's order. The examples must not depend on each other: batch
        normalisation has to be in eval mode.

        Args:
            net: The network.
            flat: Its parameters as one vector.
            selection: The weights that J is taken of.
            inputs: Inputs, examples first.
        """
        flat.check()
        _refuse_batch_statistics(net)
        args, kwargs = _arguments(inputs)
        call = NetworkCall(net, args, kwargs)
        recorder = TapRecorder(flat, selection)
        others = [s for s in flat.segments if s not in set(selection.segments)]
        with torch.enable_grad(), _frozen([flat.parameter_at[s.start] for s in others]):
            dims = example_dims(call, net, recorder.watched)
            outputs = recorder.watch(lambda: net(*args, **kwargs), dims, call.examples)
        _check_outputs(outputs, call)
        slow = recorder.settle(outputs)
        _tell(net, slow)
        call.keep([outputs] if outputs.requires_grad else [])
        blocks = list(recorder.blocks(selection, call, slow))
        return cls(outputs, recorder.taps, blocks, selection.size)

    @cached_property
    def outputs(self) -> Tensor:
        """f, (B, ...), without its graph."""
        return self._graph.detach()

    @property
    def num_examples(self) -> int:
        """B."""
        return len(self.outputs)

    @property
    def num_outputs(self) -> int:
        """K, the numbers that come out for one example."""
        return self.outputs[0].numel()

    @property
    def blocks(self) -> Sequence[Block]:
        """The parameters, each with its columns of J, in the selection's order."""
        return self._blocks

    def cotangents(self, directions: Tensor | None = None) -> Cotangents:
        """The gradients at every layer of these cotangents (R, B, ...), or of all K outputs.

        Args:
            directions: Cotangents of the outputs, (R, B, ...); None for all outputs.
        """
        return self._basis if directions is None else self._cotangents(directions)

    def numbers(self, directions: int | None = None) -> int:
        """How many numbers one example takes while so many cotangents (K) are pulled back.

        Args:
            directions: How many cotangents; None for one of each output.
        """
        directions = self.num_outputs if directions is None else directions
        kept = sum(tap.numbers for tap in self._taps) + sum(block.held for block in self._blocks)
        return directions * (kept + self.num_outputs + directions)

    def pull(self, roots: Tensor) -> Tensor:
        """J_bᵀ c_rb, (R, B, P).

        Args:
            roots: Cotangents of the outputs, (R, B, ...).
        """
        cotangents = self._cotangents(roots)
        return self._pull(cotangents, slice(0, cotangents.examples), self._blocks)

    def rows(self) -> Tensor:
        """J, (B, K, P): the rows in the order of the flattened outputs."""
        whole = self._pull(self._basis, slice(0, self._basis.examples), self._blocks)
        return whole.movedim(0, 1)

    def squares(self, roots: Tensor) -> Vector:
        """Σ_b Σ_r (J_bᵀ c_rb)², (P,).

        Args:
            roots: Cotangents of the outputs, (R, B, ...).
        """
        roots = self._checked(roots)
        outer = {block: block.outer for block in self._blocks}
        if all(tap is not None for tap in outer.values()):
            # Of g only Σ_r g² is needed, so one root after the other is used up.
            summed: dict[Tap | None, Tensor] = {}
            for root in roots.split(1):
                for tap, g in self._cotangents(root).at.items():
                    if tap in summed:
                        summed[tap].addcmul_(g[0], g[0])
                    else:
                        summed[tap] = g[0].square()
            return torch.cat(
                [block.outer_squares(summed[tap].flatten(0, -2)) for block, tap in outer.items()]
            )
        cotangents = self._cotangents(roots)
        return torch.cat([block.squares(cotangents) for block in self._blocks])

    def gram(self, roots: Tensor) -> Tensor:
        """Σ_b Σ_r (J_bᵀ c_rb)(J_bᵀ c_rb)ᵀ, (P, P).

        For one dense layer it is Σ_b Λ_b ⊗ a_b a_bᵀ, Λ_b = Σ_r g_rb g_rbᵀ: no row is formed.

        Args:
            roots: Cotangents of the outputs, (R, B, ...).
        """
        cotangents = self._cotangents(roots)
        layer = one_dense_layer(self._blocks)
        if layer is not None:
            return layer_gram(layer, cotangents, len(self._blocks) > 1)
        return gram(
            self._pull(cotangents, slice(0, cotangents.examples), self._blocks).flatten(0, 1)
        )

    def kron(self, roots: Tensor) -> list[KronFactors | DiagonalFactors]:
        """Σ_b J_bᵀΛ_bJ_b in Kronecker factors, block by block in the selection's order.

        Weights of linear and convolutional layers have a pair for each group of channels, biases
        their left factor alone, with (1, 1) on the right; all else has its diagonal.

        Args:
            roots: Cotangents of the outputs, (R, B, ...).
        """
        cotangents = self._cotangents(roots)
        return [factors for block in self._blocks for factors in block.factors(cotangents)]

    def variance_diag(self, variance: Vector, directions: Tensor | None = None) -> Tensor:
        """J diag(v) Jᵀ, (B, K, K); or c_rᵀJ diag(v) Jᵀc_s, (B, R, R), for ``directions`` c.

        Args:
            variance: v, (P,).
            directions: Cotangents of the outputs, (R, B, ...); None for all outputs.
        """
        cotangents = self._basis if directions is None else self._cotangents(directions)
        return torch.stack(
            [block.covariance(cotangents, variance[block.place]) for block in self._blocks]
        ).sum(0)

    def kron_variance(
        self, tiles: Sequence[KronCovariance], directions: Tensor | None = None
    ) -> Tensor:
        """JΣJᵀ, (B, K, K), with Σ block-diagonal: the tiles follow each other and cover P.

        Tiles need not be those of the layers; where they are, J is not formed.

        Args:
            tiles: The blocks of Σ.
            directions: Cotangents of the outputs, (R, B, ...); None for all outputs.
        """
        covered = sum(tile.size for tile in tiles)
        if covered != self._size:
            raise DataError(f"the blocks cover {covered} weights, but {self._size} are selected")
        cotangents = self._basis if directions is None else self._cotangents(directions)
        total = self.outputs.new_zeros(())
        for blocks, group in aligned(self._blocks, tiles):
            part = blocks[0].kron_covariance(cotangents, group) if len(blocks) == 1 else None
            total = total + (self._tiled(cotangents, blocks, group) if part is None else part)
        return total

    def times(self, columns: Tensor, directions: Tensor | None = None) -> Tensor:
        """JU, (B, K, r), for ``columns`` U (P, r).

        Args:
            columns: U, (P, r).
            directions: Cotangents of the outputs, (R, B, ...); None for all outputs.
        """
        cotangents = self._basis if directions is None else self._cotangents(directions)
        return torch.stack(
            [block.times(cotangents, columns[block.place]) for block in self._blocks]
        ).sum(0)

    # --- inside -----------------------------------------------------------------------------------

    @cached_property
    def _basis(self) -> Cotangents:
        """One cotangent for each output."""
        shape, outputs = self.outputs.shape[1:], self.num_outputs
        one = torch.eye(outputs, dtype=self.outputs.dtype, device=self.outputs.device)
        one = one.view(outputs, 1, *shape).expand(-1, self.num_examples, *shape)
        return self._cotangents(one)

    def _cotangents(self, roots: Tensor) -> Cotangents:
        """The gradients at all taps, by one backward pass for each root.

        A loop: a batched backward pass (vmap) was measured at 0.8 to 1.3 times its time, and does
        not know every operation.
        """
        roots = self._checked(roots)
        by_root: list[Sequence[Tensor | None]] = []
        edges = [tap.edge for tap in self._taps]
        for root in roots if edges else ():
            by_root.append(
                torch.autograd.grad(self._graph, edges, root, retain_graph=True, allow_unused=True)
            )
        at = {}
        for tap, grads in zip(self._taps, zip(*by_root, strict=True), strict=True):
            given = [g if g is not None else roots.new_zeros(tap.shape) for g in grads]
            at[tap] = torch.stack(given) if len(given) > 1 else given[0].unsqueeze(0)
        return Cotangents(roots, at)

    def _checked(self, roots: Tensor) -> Tensor:
        if roots.dim() < 2 or roots.shape[1:] != self.outputs.shape:
            raise DataError(
                f"cotangents of outputs {tuple(self.outputs.shape)} have one more dimension before "
                f"them, but these have shape {tuple(roots.shape)}"
            )
        return roots.to(self.outputs)

    def _pull(self, cotangents: Cotangents, examples: slice, blocks: Sequence[Block]) -> Tensor:
        return torch.cat([block.pull(cotangents, examples) for block in blocks], dim=-1)

    def _tiled(
        self, cotangents: Cotangents, blocks: Sequence[Block], tiles: Sequence[KronCovariance]
    ) -> Tensor:
        """The part of JΣJᵀ of some parameters, from their rows."""
        size, pieces = sum(block.size for block in blocks), []
        for chunk in chunks(cotangents.examples, cotangents.directions * size):
            rows = self._pull(cotangents, chunk, blocks).movedim(1, 0)
            total = rows.new_zeros(())
            for tile, part in zip(tiles, rows.split([t.size for t in tiles], dim=-1), strict=True):
                turned = part.unflatten(-1, tile.variance.shape)
                if tile.left is not None:
                    turned = torch.einsum("brij,ik->brkj", turned, tile.left)
                if tile.right is not None:
                    turned = torch.einsum("brij,jk->brik", turned, tile.right)
                spread = (turned * tile.variance).flatten(2)
                total = total + spread @ turned.flatten(2).mT
            pieces.append(total)
        return torch.cat(pieces)


def aligned(
    blocks: Sequence[Block], tiles: Sequence[KronCovariance]
) -> Iterator[tuple[list[Block], list[KronCovariance]]]:
    """The smallest groups of parameters and tiles that cover the same weights."""
    waiting, behind = list(tiles), 0
    group: list[Block] = []
    given: list[KronCovariance] = []
    for block in blocks:
        group.append(block)
        behind += block.size
        while behind > 0:
            given.append(waiting.pop(0))
            behind -= given[-1].size
        if behind == 0:
            yield group, given
            group, given = [], []


# --- the forward pass -----------------------------------------------------------------------------

_TOLD: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The parameters that each network's user was warned of."""


class TapRecorder:
    """An observer (`credo.autodiff.layer_calls.Observer`) that taps every layer's call."""

    def __init__(self, flat: FlatParams, selection: Selection) -> None:
        selected = [(s, flat.parameter_at[s.start]) for s in selection.segments]
        self.watched = {id(p): Watched(s, p) for s, p in selected}
        self.taps: list[Tap] = []
        self._roles: defaultdict[Watched, list[Role]] = defaultdict(list)
        self._dims: Mapping[Watched, int | None] = {}
        self._examples: int | None = None

    def watch(
        self, forward: Callable[[], Any], dims: Mapping[Watched, int | None], examples: int | None
    ) -> Any:
        """Run ``forward`` and note its calls; ``dims`` says where each parameter sees examples."""
        self._dims, self._examples = dims, examples
        with Watch(self):
            return forward()

    def settle(self, outputs: Tensor) -> list[Watched]:
        """The parameters that have to be replayed: also those that reached the outputs unseen."""
        if not outputs.requires_grad:
            self.taps.clear()
            self._roles.clear()
        unseen = [
            watched
            for watched in self.watched.values()
            if watched.excluded is None and watched not in self._roles
        ]
        if unseen and outputs.requires_grad:
            grads = torch.autograd.grad(
                outputs.sum(), [s.parameter for s in unseen], retain_graph=True, allow_unused=True
            )
            for watched, grad in zip(unseen, grads, strict=True):
                if grad is not None:
                    watched.excluded = "used where calls can't be seen"
        return [watched for watched in self.watched.values() if watched.excluded is not None]

    def blocks(
        self, selection: Selection, call: NetworkCall, slow: list[Watched]
    ) -> Iterator[Block]:
        """One for each segment, in order."""
        places, slow_rows = selection.slices(), SlowRows(call, slow)
        for watched in self.watched.values():
            place, parts = places[watched.segment.name], self._roles[watched]
            if watched.excluded is not None:
                yield SlowBlock(watched, place, slow_rows)
            elif len(parts) == 1 and _is_whole_matrix(parts[0], watched):
                matrix = parts[0].tap
                assert isinstance(matrix, MatrixTap)
                yield MatrixBlock(watched, place, parts[0], matrix)
            else:
                yield Block(watched, place, parts)

    # What the mode asks.

    def is_idle(self) -> bool:
        """Where no gradient is asked for."""
        return not torch.is_grad_enabled()

    def answer(self, call: LayerCall) -> Tensor:
        """Note the call; it is answered as the layer would."""
        layer, output = call.layer, call.plain()
        for part in layer.parts:
            dim = self._dims.get(part.watched, layer.example_dim)
            if dim is None or not layer.allows(dim, call.inputs):
                self.exclude(
                    part.watched, "used with another number of rows than there are examples"
                )
            elif call.inputs.shape[dim] != self._examples:
                self.exclude(part.watched, f"used with {call.inputs.shape[dim]} rows")
            else:
                layer.example_dim = dim
        if not output.requires_grad or all(p.watched.excluded is not None for p in layer.parts):
            return output
        noted = tap_of(call, output)
        self.taps.append(noted)
        for part in layer.parts:
            self._roles[part.watched].append(Role(noted, part.rows, part is layer.bias))
        return output

    def exclude(self, watched: Watched, reason: str) -> None:
        """This parameter is used in a way that no layer explains."""
        watched.excluded = watched.excluded or reason


def _is_whole_matrix(part: Role, watched: Watched) -> bool:
    whole = len(part.rows) == len(watched.parameter)
    return isinstance(part.tap, MatrixTap) and whole and not part.is_bias


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With which the network is called."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Without gradients for parameters that nobody asked about: what precedes needs no graph."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _refuse_batch_statistics(net: nn.Module) -> None:
    """Raise `UnsupportedError` where batch normalisation would mix the examples."""
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        ):
            raise UnsupportedError(
                f"{name or 'the network'} normalises with the statistics of the batch, so no "
                "example has outputs, or a Jacobian, of its own. Call net.eval(), or use GroupNorm."
            )


def _check_outputs(outputs: Any, call: NetworkCall) -> None:
    """Raise `DataError` unless they are a tensor with the examples first."""
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"the network returned {type(outputs).__name__}, not a tensor; wrap it in a module "
            "whose forward returns the outputs that the likelihood needs"
        )
    if outputs.dim() == 0 or len(outputs) != call.examples:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} don't have the {call.examples} examples of "
            "the inputs along their first dimension"
        )


def _tell(net: nn.Module, slow: Sequence[Watched]) -> None:
    """Warn, once per network, of parameters that have to be replayed."""
    told = _TOLD.setdefault(net, set())
    new = [watched for watched in slow if watched.segment.name not in told]
    if new:
        told.update(watched.segment.name for watched in new)
        listed = "; ".join(f"{watched.segment.name}: {watched.excluded}" for watched in new)
        warnings.warn(
            "Jacobians of these parameters are found by running each example alone through the "
            f"network, which is slow: {listed}.",
            UserWarning,
            stacklevel=3,
        )
