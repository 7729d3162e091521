"""Σ_i g_i∘g_i over the examples of a batch, harvested in the user's own forward and backward.

VOGN and its relatives need the squares of the gradients of *single* examples,

    h = (1/B) Σ_i (∂ℓ_i/∂w)²          ℓ_i: the loss of example i,  B: ``count``

which the ordinary backward pass never forms. `Squares` does not ask for the loss as a function of
one example, nor for other layers: while it is armed, the calls that use a watched parameter are
replaced by nodes that compute the same outputs and gradients, and the squares beside them.

    >>> import torch
    >>> from credo.network import bind, select
    >>> net, x = torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> flat = bind(net)
    >>> squares = Squares(flat, select(flat.segments))
    >>> with squares.armed():
    ...     net(x).mean().backward()
    >>> squares.mean(torch.empty(3)), squares.count      # of g = (x₁, x₂, 1)
    (tensor([ 5., 10.,  1.]), 2)
    >>> net.weight.grad
    tensor([[2., 3.]])

What is exact. Every parameter of linear, convolutional (plain, transposed), embedding and norm
layers and of multi-head attention, however often it is used: uses are summed before squaring.
Anything else (recurrent kernels, ``W.t()``, masked or normalised weights) is correct but slow: the
network's call is recorded and each example run again alone; a warning names those parameters once.

What it rests on. The loss is a sum (``loss_reduction="sum"``) or mean over the examples, which are
the first dimension of the network's inputs; a mean over tokens or pixels is one over examples if
each has equally many, and else needs weights that only the caller knows. Where examples are mixed
on the way, above all by batch normalisation in training mode, an example has no loss of its own;
g_i is then example i's share of the batch gradient at each layer's own place: what the backward
pass brings to position i of a layer's output, through the batch statistics, times row i of its
input. This is also the practice of Osawa et al. (2019, arXiv:1906.02506). It is *not* the gradient
with the statistics held constant. The gain and shift of such a norm layer have no share at all.

Two calls of the network in one backward pass are two parts of one example's loss, row by row.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from credo.autodiff.layer_calls import (
    LayerCall,
    Linear,
    NetworkCall,
    Watch,
    Watched,
    example_dims,
    tensors_in,
)
from credo.autodiff.layer_squares import (
    Accumulator,
    SquaringNode,
    accumulator,
    is_small,
    put_dense,
)
from credo.checks import checked
from credo.errors import DataError, UnsupportedError
from credo.network.selection import Selection
from credo.network.state import buffers_kept
from credo.types import Vector


class Bound(Protocol):
    """A network whose parameters live in a flat vector: `FlatParams`, or what stands for it."""

    @property
    def module(self) -> nn.Module:
        """The network whose calls are watched."""

    @property
    def vector(self) -> Vector:
        """The buffer."""

    @property
    def parameter_at(self) -> Mapping[int, nn.Parameter]:
        """Parameters by where their segments start."""

    def check(self) -> None:
        """Raise `BindingError` unless the parameters are views of the buffer."""


@checked
class Squares:
    """The squares of the selected segments, added up over backward passes until `reset`.

    Args:
        flat: The network's parameters as one vector.
        selection: The weights whose gradients are squared.
        loss_reduction: What the loss that is differentiated does with the examples' losses: under
            "mean" the backward pass sees g_i/B, and squares are multiplied by B² as they come.
    """

    def __init__(
        self,
        flat: Bound,
        selection: Selection,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if not selection.size:
            raise DataError("the selection is empty: there are no gradients to square")
        self._flat, self._selection, self._reduction = flat, selection, loss_reduction
        half = flat.vector.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else flat.vector.dtype
        self._total = torch.zeros(selection.size, dtype=dtype, device=flat.vector.device)
        places = selection.slices()
        self._by_id: dict[int, Accumulator] = {}
        for segment in selection.segments:
            parameter = flat.parameter_at[segment.start]
            view = self._total[places[segment.name]].view(segment.shape or (1,))
            self._by_id[id(parameter)] = Accumulator(segment, parameter, view)
        self._count = self._passes = 0
        self._armed = self._replaying = self._surveyed = False
        self._watch = Watch(self)
        self._depth = 0
        self._call: NetworkCall | None = None
        self._told: set[Accumulator] = set()
        self._grads_before: dict[Accumulator, tuple[int, int] | None] = {}
        self._pass_examples: int | None = None
        self._pass_calls: defaultdict[NetworkCall, dict[int, Tensor]] = defaultdict(dict)

    @property
    def count(self) -> int:
        """Number of examples harvested since `reset`; one drawn twice counts twice."""
        return self._count

    @property
    def passes(self) -> int:
        """Number of backward passes since `reset`."""
        return self._passes

    def reset(self) -> None:
        """Discard what was harvested: after a step, or when a GradScaler found infinities."""
        self._count = self._passes = 0
        for watched in self._by_id.values():
            watched.fresh = True

    def sum(self, out: Vector, grad_scale: float = 1.0) -> Vector:
        """Σ_i g_i∘g_i in the selection's order.

        Args:
            out: Where they go, (P,).
            grad_scale: Whatever the loss was multiplied by before ``backward``: a GradScaler's
                factor, or 1/k where micro-batches are averaged by hand. Squares are divided by its
                square.
        """
        return self._scaled(grad_scale**-2, out)

    def mean(self, out: Vector, grad_scale: float = 1.0) -> Vector:
        """(1/count) Σ_i g_i∘g_i, into ``out`` (P,).

        Args:
            out: Where it goes, (P,).
            grad_scale: As in `sum`.
        """
        if not self._count:
            raise UnsupportedError(
                "no per-example gradients were harvested: call both the network and "
                "loss.backward() inside armed()"
            )
        return self._scaled(grad_scale**-2 / self._count, out)

    def _scaled(self, factor: float, out: Vector) -> Vector:
        for watched in self._by_id.values():
            if watched.fresh:
                watched.squares.zero_()
                watched.fresh = False
        return torch.mul(self._total, factor, out=out)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Harvest from the forward and backward passes in this block.

        A backward pass that dies midway discards everything since `reset`. Outside the block
        nothing is installed, and a late ``backward`` harvests nothing.
        """
        if self._armed:
            raise UnsupportedError("these squares are armed already: leave the first block")
        self._flat.check()
        self._depth, self._call = 0, None
        for watched in self._by_id.values():
            self._grads_before[watched] = _grad_state(watched)
        handles: list[RemovableHandle] = []
        try:
            module = self._flat.module
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
            self._armed = True
            with self._watch:
                yield
        finally:
            self._armed = False
            for handle in handles:
                handle.remove()
            self._call = None
            self._drop_open_pass()
            for watched in self._by_id.values():
                watched.arm()

    # What the mode asks (`credo.autodiff.layer_calls.Observer`).

    @property
    def watched(self) -> Mapping[int, Accumulator]:
        """By the parameter's ``id``."""
        return self._by_id

    def is_idle(self) -> bool:
        """While single examples run, in backward passes, and where no gradient is asked for."""
        return self._replaying or not torch.is_grad_enabled() or _in_backward()

    def answer(self, call: LayerCall) -> Tensor:
        """Put a node into the graph, unless a parameter of the call has to be replayed."""
        layer, parts = call.layer, call.layer.parts
        self._drop_open_pass()
        known = [p.watched.example_dim for p in parts if p.watched.example_dim is not None]
        layer.example_dim = known[0] if known else layer.example_dim
        for part in parts:
            reason = self._why_not(call, part.watched)
            if reason is not None:
                self.exclude(part.watched, reason)
            else:
                accumulator(part).note_use(part.rows)
        if all(part.watched.excluded is not None for part in parts):
            return call.plain()
        x, weight, bias = call.inputs, call.weight, call.bias
        if isinstance(layer, Linear) and is_small(x, weight):
            return put_dense(self, layer, x, weight, bias)
        return SquaringNode.put(self, layer, x, weight, bias)

    def exclude(self, watched: Watched, reason: str) -> None:
        """From now on this parameter's gradients come from running each example alone."""
        if self._depth == 0:
            raise UnsupportedError(
                f"{watched.segment.name} is {reason}, outside the network's own call, where no "
                "per-example gradient can be found. If this is a penalty, leave it to the prior; "
                "if a diagnostic, wrap it in torch.no_grad(); otherwise do it in forward()."
            )
        self._by_id[id(watched.parameter)].used = True
        watched.excluded = watched.excluded or reason

    def begin(self, examples: int) -> float | None:
        """A backward pass reached a node: what its squares are multiplied by."""
        if not self._armed:
            return None
        if self._pass_examples is None:
            self._pass_examples = examples
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        elif self._pass_examples != examples:
            raise UnsupportedError(
                f"one backward pass met layers with {self._pass_examples} and {examples} examples: "
                "which of them belong together can't be known. Give every batch a backward pass of "
                "its own, and call the network itself rather than its parts."
            )
        return float(examples**2) if self._reduction == "mean" else 1.0

    def _why_not(self, call: LayerCall, watched: Watched) -> str | None:
        """Why this call's layer can't be squared here."""
        if watched.excluded is not None:
            return watched.excluded
        dim = call.layer.example_dim
        if watched.example_dim not in (None, dim) or not call.layer.allows(dim, call.inputs):
            return f"used where dimension {dim} holds the examples"
        known = None if self._call is None else self._call.examples
        if known is not None and call.inputs.shape[dim] != known:
            return f"used with {call.inputs.shape[dim]} rows for {known} examples"
        return None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self._replaying or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():  # or the mode would see every look at a shape
            self._call = NetworkCall(module, args, kwargs)
        if not self._surveyed and self._call.examples:
            self._replaying = self._surveyed = True
            try:
                dims = example_dims(self._call, module, self._by_id)
            finally:
                self._replaying = False
            for watched, dim in dims.items():
                watched.example_dim = dim
                if dim is None:
                    watched.excluded = "used with another number of rows than there are examples"

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1
        call = self._call
        if self._depth or self._replaying or call is None:
            return
        self._call = None
        slow = [watched for watched in self._by_id.values() if watched.excluded is not None]
        if not slow or result is None:
            return
        self._tell(slow)
        outputs = [t for t in tensors_in(result) if t.requires_grad]
        call.keep(outputs)
        for place, output in enumerate(outputs):
            output.register_hook(partial(self._reached, call, place))

    def _tell(self, slow: list[Accumulator]) -> None:
        new = [watched for watched in slow if watched not in self._told]
        if new:
            self._told.update(new)
            listed = "; ".join(f"{watched.segment.name}: {watched.excluded}" for watched in new)
            warnings.warn(
                "per-example gradients of these parameters are found by running each example alone "
                f"through the network, which is slow: {listed}.",
                UserWarning,
                stacklevel=2,
            )

    def _reached(self, call: NetworkCall, place: int, grad: Tensor) -> None:
        """A backward pass has the gradient of an output of a recorded call."""
        if not self._armed:
            return
        if call.examples is None:
            raise UnsupportedError(
                "some parameters need each example to run alone through the network, but its "
                "inputs hold no tensor with the examples along the first dimension. Give it "
                "tensors, or tuples or dicts of them; or take those parameters out of the selection"
            )
        self.begin(call.examples)
        self._pass_calls[call][place] = grad.detach()

    def _end_pass(self) -> None:
        """All gradients are there: square what had to wait, and count."""
        if not self._armed or self._pass_examples is None:
            return
        factor = self.begin(self._pass_examples) or 1.0
        for watched in self._by_id.values():
            if watched.excluded is None:
                watched.finish(self._pass_examples, factor)
        slow = [watched for watched in self._by_id.values() if watched.excluded is not None]
        if slow and self._pass_calls:
            self._replaying = True
            try:
                _replay(self._pass_calls, self._flat.module, slow, factor)
            finally:
                self._replaying = False
        self._check_all_used()
        self._count += self._pass_examples
        self._passes += 1
        self._close_pass()

    def _check_all_used(self) -> None:
        """Refuse a parameter that got a gradient by a way that was not seen."""
        for watched in self._by_id.values():
            if watched.used:
                continue
            now = _grad_state(watched)
            if now is not None and now != self._grads_before[watched]:
                raise UnsupportedError(
                    f"{watched.segment.name} got a gradient, but no use of it was seen while "
                    "armed: it was used before arming, in compiled or scripted code, or under "
                    "re-entrant checkpointing. Run the plain forward pass inside armed()."
                )

    def _drop_open_pass(self) -> None:
        """A pass that never ended leaves half of its squares behind."""
        if self._pass_examples is not None:
            self.reset()
            self._close_pass()

    def _close_pass(self) -> None:
        self._pass_examples = None
        self._pass_calls.clear()
        for watched in self._by_id.values():
            watched.end_pass()


def _in_backward() -> bool:
    """Whether a backward pass is under way: checkpointing calls layers in there."""
    return bool(torch._C._current_graph_task_id() != -1)


def _grad_state(watched: Accumulator) -> tuple[int, int] | None:
    grad = watched.parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _replay(
    calls: Mapping[NetworkCall, Mapping[int, Tensor]],
    module: nn.Module,
    slow: Sequence[Accumulator],
    factor: float,
) -> None:
    """Add the squares of the gradients of single examples, each summed over the calls.

    ``calls`` holds the gradients of those outputs that the backward pass reached, by place.
    """
    parameters = [watched.parameter for watched in slow]
    accumulators = [watched.open(range(len(watched.squares)))[0] for watched in slow]
    device = parameters[0].device
    with (
        torch.enable_grad(),
        buffers_kept(module),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        for index in range(next(iter(calls)).examples or 0):
            of_calls = [
                call.gradients(index, parameters, by_output) for call, by_output in calls.items()
            ]
            for squares, parts in zip(accumulators, zip(*of_calls, strict=True), strict=True):
                given = [part.to(squares.dtype) for part in parts if part is not None]
                if given:
                    total = sum(given[1:], start=given[0])
                    squares.addcmul_(total, total, value=factor)
