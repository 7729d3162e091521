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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from credo.autodiff.seam import tensors_in
from credo.autodiff.squares_calls import Use, Watch
from credo.autodiff.squares_replay import Recorded, example_dims, replay
from credo.autodiff.squares_routes import Node
from credo.autodiff.squares_sinks import Sink
from credo.errors import DataError, UnsupportedError
from credo.network.selection import Selection
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


class Squares:
    """The squares of the selected segments, added up over backward passes until `reset`.

    ``loss_reduction`` says what the loss that is differentiated does with the examples' losses:
    under "mean" the backward pass sees g_i/B, and squares are multiplied by B² as they come.
    """

    def __init__(
        self,
        flat: Bound,
        selection: Selection,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise DataError(
                f'loss_reduction is {loss_reduction!r}; it can be "mean" or "sum": what the loss '
                "does with the losses of the examples"
            )
        if not selection.size:
            raise DataError("the selection is empty: there are no gradients to square")
        self._flat, self._selection, self._reduction = flat, selection, loss_reduction
        half = flat.vector.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else flat.vector.dtype
        self._total = torch.zeros(selection.size, dtype=dtype, device=flat.vector.device)
        places = selection.slices()
        self._by_id: dict[int, Sink] = {}
        for segment in selection.segments:
            parameter = flat.parameter_at[segment.start]
            view = self._total[places[segment.name]].view(segment.shape or (1,))
            self._by_id[id(parameter)] = Sink(segment, parameter, view)
        self._count = 0
        self._armed = self._replaying = self._surveyed = False
        self._depth = 0
        self._call: Recorded | None = None
        self._told: set[Sink] = set()
        self._grads_before: dict[Sink, tuple[int, int] | None] = {}
        self._pass_examples: int | None = None
        self._pass_calls: defaultdict[Recorded, dict[int, Tensor]] = defaultdict(dict)

    @property
    def count(self) -> int:
        """Number of examples harvested since `reset`; one drawn twice counts twice."""
        return self._count

    def reset(self) -> None:
        """Discard what was harvested: after a step, or when a GradScaler found infinities."""
        self._count = 0
        for sink in self._by_id.values():
            sink.fresh = True

    def sum(self, out: Vector, grad_scale: float = 1.0) -> Vector:
        """Σ_i g_i∘g_i in the selection's order, into ``out`` (P,).

        ``grad_scale`` is whatever the loss was multiplied by before ``backward``: a GradScaler's
        factor, or 1/k where micro-batches are averaged by hand. Squares are divided by its square.
        """
        return self._scaled(grad_scale**-2, out)

    def mean(self, out: Vector, grad_scale: float = 1.0) -> Vector:
        """(1/count) Σ_i g_i∘g_i, into ``out`` (P,)."""
        if not self._count:
            raise UnsupportedError(
                "no per-example gradients were harvested: call both the network and "
                "loss.backward() inside armed()"
            )
        return self._scaled(grad_scale**-2 / self._count, out)

    def _scaled(self, factor: float, out: Vector) -> Vector:
        for sink in self._by_id.values():
            if sink.fresh:
                sink.squares.zero_()
                sink.fresh = False
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
        for sink in self._by_id.values():
            sink.arm()
            self._grads_before[sink] = _grad_state(sink)
        handles: list[RemovableHandle] = []
        try:
            module = self._flat.module
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
            self._armed = True
            with Watch(self):
                yield
        finally:
            self._armed = False
            for handle in handles:
                handle.remove()
            self._call = None
            self._drop_open_pass()
            for sink in self._by_id.values():
                sink.arm()

    # What the mode asks (`credo.autodiff.squares_calls.Observer`).

    @property
    def sinks(self) -> Mapping[int, Sink]:
        """By the parameter's ``id``."""
        return self._by_id

    def is_idle(self) -> bool:
        """While single examples run, in backward passes, and where no gradient is asked for."""
        return self._replaying or not torch.is_grad_enabled() or _in_backward()

    def use(self, use: Use) -> Tensor:
        """Put a node into the graph, unless a parameter of the call has to be replayed."""
        rule, parts = use.rule, use.rule.parts
        self._drop_open_pass()
        known = [p.sink.example_dim for p in parts if p.sink.example_dim is not None]
        rule.example_dim = known[0] if known else rule.example_dim
        for part in parts:
            reason = self._why_not(use, part.sink)
            if reason is not None:
                self.outside(part.sink, reason)
            else:
                part.sink.meet(part.rows)
        if all(part.sink.outside is not None for part in parts):
            return use.plain()
        return Node.apply(rule, use.inputs, use.weight, use.bias)  # type: ignore[no-untyped-call]

    def outside(self, sink: Sink, reason: str) -> None:
        """From now on this parameter's gradients come from running each example alone."""
        if self._depth == 0:
            raise UnsupportedError(
                f"{sink.segment.name} is {reason}, outside the network's own call, where no "
                "per-example gradient can be found. If this is a penalty, leave it to the prior; "
                "if a diagnostic, wrap it in torch.no_grad(); otherwise do it in forward()."
            )
        sink.met = True
        sink.outside = sink.outside or reason

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

    def _why_not(self, use: Use, sink: Sink) -> str | None:
        """Why this use can't be squared by its rule."""
        if sink.outside is not None:
            return sink.outside
        dim = use.rule.example_dim
        if sink.example_dim not in (None, dim) or not use.rule.allows(dim, use.inputs):
            return f"used where dimension {dim} holds the examples"
        known = None if self._call is None else self._call.examples
        if known is not None and use.inputs.shape[dim] != known:
            return f"used with {use.inputs.shape[dim]} rows for {known} examples"
        return None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self._replaying or not torch.is_grad_enabled():
            return
        self._call = Recorded(module, args, kwargs)
        if not self._surveyed and self._call.examples:
            self._replaying = self._surveyed = True
            try:
                found = example_dims(self._call, module, self._by_id)
            finally:
                self._replaying = False
            for sink, dim in found.items():
                sink.example_dim = dim
                if dim is None:
                    sink.outside = "used with another number of rows than there are examples"

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1
        call = self._call
        if self._depth or self._replaying or call is None:
            return
        self._call = None
        slow = [sink for sink in self._by_id.values() if sink.outside is not None]
        if not slow or result is None:
            return
        self._tell(slow)
        outputs = [t for t in tensors_in(result) if t.requires_grad]
        call.keep(outputs)
        for place, output in enumerate(outputs):
            output.register_hook(partial(self._reached, call, place))

    def _tell(self, slow: list[Sink]) -> None:
        new = [sink for sink in slow if sink not in self._told]
        if new:
            self._told.update(new)
            listed = "; ".join(f"{sink.segment.name}: {sink.outside}" for sink in new)
            warnings.warn(
                "per-example gradients of these parameters are found by running each example alone "
                f"through the network, which is slow: {listed}.",
                UserWarning,
                stacklevel=2,
            )

    def _reached(self, call: Recorded, place: int, grad: Tensor) -> None:
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
        for sink in self._by_id.values():
            if sink.outside is None:
                sink.finish(self._pass_examples, factor)
        slow = [sink for sink in self._by_id.values() if sink.outside is not None]
        if slow and self._pass_calls:
            self._replaying = True
            try:
                replay(self._pass_calls, self._flat.module, slow, factor)
            finally:
                self._replaying = False
        self._check_all_met()
        self._count += self._pass_examples
        self._close_pass()

    def _check_all_met(self) -> None:
        """Refuse a parameter that got a gradient by a way that was not seen."""
        for sink in self._by_id.values():
            now = _grad_state(sink)
            if not sink.met and now is not None and now != self._grads_before[sink]:
                raise UnsupportedError(
                    f"{sink.segment.name} got a gradient, but no use of it was seen while armed: "
                    "it was used before arming, in compiled or scripted code, or under re-entrant "
                    "checkpointing. Run the plain forward pass inside armed()."
                )

    def _drop_open_pass(self) -> None:
        """A pass that never ended leaves half of its squares behind."""
        if self._pass_examples is not None:
            self.reset()
            self._close_pass()

    def _close_pass(self) -> None:
        self._pass_examples = None
        self._pass_calls.clear()
        for sink in self._by_id.values():
            sink.end_pass()


def _in_backward() -> bool:
    """Whether a backward pass is under way: checkpointing calls layers in there."""
    return bool(torch._C._current_graph_task_id() != -1)


def _grad_state(sink: Sink) -> tuple[int, int] | None:
    grad = sink.parameter.grad
    return None if grad is None else (id(grad), grad._version)
