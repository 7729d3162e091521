"""A module's parameters as ONE vector, of which they are views.

Random numbers, memory traffic and per-tensor Python are what a Bayesian training step adds to an
ordinary one. So the floating, trainable parameters of a module are moved into one contiguous
buffer once, and each `nn.Parameter` becomes a view of its segment: writing the buffer *is* writing
the network, and nothing in the user's module is rewritten.

    >>> import torch, credo
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    >>> flat = credo.network.bind(net)
    >>> [(s.name, s.shape, s.fan_in) for s in flat.segments][:2]
    [('0.weight', (2, 3), 3), ('0.bias', (2,), 3)]
    >>> with flat.writing() as vector:
    ...     _ = vector.zero_()
    >>> float(net[0].weight.detach().abs().sum())
    0.0
    >>> credo.network.unbind(net)

Three facts about PyTorch shape this file (each held by a test in ``tests/contract``):

* writing the buffer does not bump the parameters' version counters, so a backward pass that
  belongs to earlier values would be silently wrong: `FlatParams.writing` bumps them;
* inside one ``autocast`` block the cast copy of a weight is cached: `writing` clears that cache;
* ``.to``, ``load_state_dict(assign=True)`` and ``deepcopy`` break identity or storage but not
  both: `FlatParams.check` compares both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from credo.errors import BindingError
from credo.network.execution import NORM_LAYERS
from credo.network.selection import Selection
from credo.types import Segment, Vector


class FlatParams:
    """The flat buffer of one module; made by `bind`, one per module.

    ``vector`` is the buffer (T,), ``gradient`` gathers what a backward pass left in ``.grad``.
    Norm layers' segments come last, so that the default random parameters form one run. The
    parameters' own ``.grad`` stay what they were.

    Parameters that look at other weights for a while need no copies: `show` makes them views of a
    `Draw`, `show_home` of the buffer again, whose content nobody touched.

    Args:
        module: Whose parameters to move.
        reuse: Stay in a buffer of another binding where the parameters lie in it as they
            would here; else the buffer is new.
    """

    def __init__(self, module: nn.Module, reuse: bool = False) -> None:
        self._module = ref(module)
        self._places = _places(module)
        if not self._places:
            raise BindingError(
                f"{type(module).__name__} has no floating parameters with requires_grad=True: "
                "there is nothing to be Bayesian about. Unfreeze the layers that should be random."
            )
        self.parameters = [place.parameter for place in self._places]
        self._ids = frozenset(id(parameter) for parameter in self.parameters)
        _refuse_mixtures(self._places)
        self.segments: tuple[Segment, ...] = _segments(self._places)
        self.parameter_at = {
            s.start: p for s, p in zip(self.segments, self.parameters, strict=True)
        }
        # Tensors that are made in inference mode could never be trained.
        with torch.inference_mode(False):
            stretch = _stretch(self.parameters, self.segments) if reuse else None
            self.vector: Vector = (
                torch.cat([p.detach().reshape(-1) for p in self.parameters])
                if stretch is None
                else stretch
            )
            self._home = [self.vector[s.slice].view(s.shape) for s in self.segments]
            for parameter, view in zip(self.parameters, self._home, strict=True):
                parameter.data = view
        self._homes = [view.data_ptr() for view in self._home]
        self._addresses = [*self._homes]

    @property
    def module(self) -> nn.Module:
        """The network, as long as somebody else keeps it alive."""
        module = self._module()
        if module is None:
            raise BindingError("the network that these parameters belonged to no longer exists")
        return module

    @property
    def size(self) -> int:
        """Number of scalars in the buffer."""
        return self.vector.numel()

    def has(self, parameter: Tensor) -> bool:
        """Whether it is one of ours.

        Args:
            parameter: Any tensor; its identity counts, not its values.
        """
        return id(parameter) in self._ids

    def pairs(self) -> Iterable[tuple[Segment, nn.Parameter]]:
        """Every segment with its parameter."""
        return zip(self.segments, self.parameters, strict=True)

    @contextmanager
    def writing(self) -> Iterator[Vector]:
        """The buffer, to be written in place; autograd and autocast learn of it on leaving."""
        self.check()
        try:
            with torch.no_grad():
                yield self.vector
        finally:
            self.tell()

    def tell(self) -> None:
        """Autograd and autocast must not go on with the weights they know."""
        torch.autograd.graph.increment_version(self.parameters)
        torch.clear_autocast_cache()

    def show(self, draw: Draw) -> None:
        """Make the draw's parameters, as far as they are ours, views of it.

        Args:
            draw: Other weights for some of them.
        """
        for index, parameter in enumerate(self.parameters):
            view = draw.views.get(id(parameter))
            if view is not None:
                parameter.data = view
                self._addresses[index] = draw.addresses[id(parameter)]
        self.tell()

    def show_home(self, draw: Draw) -> None:
        """Make the draw's parameters views of the buffer again, also after half a `show`.

        One that was moved or re-typed in the meantime stays where it is and gets the numbers.

        Args:
            draw: What was shown.
        """
        dtype = self.vector.dtype
        for index, parameter in enumerate(self.parameters):
            shown = draw.addresses.get(id(parameter))
            if shown is None:
                continue
            address = self._addresses[index] = self._homes[index]
            if parameter.dtype == dtype and parameter.data_ptr() in (shown, address):
                parameter.data = self._home[index]
            else:
                with torch.no_grad():
                    parameter.copy_(self._home[index])
        self.tell()

    def gradient(self, selection: Selection, out: Vector) -> Vector:
        """Move the gradients of the selected segments into ``out`` and clear them.

        A parameter the loss did not reach counts as zero.

        Args:
            selection: Whose gradients.
            out: Where to, (P,).

        Returns:
            ``out``.
        """
        pieces: list[Tensor] = []
        for segment in selection.segments:
            parameter = self.parameter_at[segment.start]
            if parameter.grad is None:
                pieces.append(torch.zeros(segment.size, dtype=out.dtype, device=out.device))
                continue
            if parameter.grad.is_sparse:
                raise BindingError(
                    f"{segment.name} has a sparse gradient, which a flat vector can't hold: "
                    "build the embedding with sparse=False."
                )
            pieces.append(parameter.grad.reshape(-1))
            parameter.grad = None
        with torch.no_grad():
            return torch.cat(pieces, out=out)

    def is_in_place(self) -> bool:
        """Whether no parameter was moved or re-typed: what `check` costs least to see."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._addresses

    def forget_gradients(self) -> None:
        """Clear what earlier backward passes left, before a method adds up its own."""
        for parameter in self.parameters:
            parameter.grad = None

    def check(self) -> None:
        """Raise `BindingError` unless every parameter is still itself and still a view of us."""
        dtype = self.vector.dtype
        for place, segment, address in zip(
            self._places, self.segments, self._addresses, strict=True
        ):
            # Not by ``owner``, because this runs at every step.
            owner = place._owner()
            now = None if owner is None else owner._parameters.get(place.attribute)
            if (
                now is None
                or now is not place.parameter
                or now.data_ptr() != address
                or now.dtype != dtype
                or not now.requires_grad
            ):
                raise BindingError(
                    f"parameter {segment.name!r} was moved, re-typed, replaced or frozen after "
                    "Credo bound the network (by .to(), .double(), load_state_dict(assign=True), "
                    "requires_grad_(False), …). Do that before training; to go on from the new "
                    "weights, call credo.fit again: it binds anew."
                )

    def is_bound(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except BindingError:
            return False
        return True

    def release(self) -> None:
        """Give every parameter that is still a view of the buffer a storage of its own."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()


class Gathering:
    """`FlatParams.gradient` into the same vector again and again, for the steps of a training.

    A parameter that has no gradient may have been replaced or frozen: only then all is checked.
    """

    __slots__ = ("_flat", "_out", "_parameters", "_selection", "_views")

    def __init__(self, flat: FlatParams, selection: Selection, out: Vector) -> None:
        self._flat, self._selection, self._out = flat, selection, out
        self._parameters = [flat.parameter_at[s.start] for s in selection.segments]
        sizes = [s.size for s in selection.segments]
        self._views = [
            part.view(s.shape) for part, s in zip(out.split(sizes), selection.segments, strict=True)
        ]

    def take(self) -> Vector:
        """Move the gradients into the vector and clear them.

        Returns:
            The vector.
        """
        grads = []
        for parameter in self._parameters:
            grad = parameter.grad
            if grad is None or grad.is_sparse:
                self._flat.check()
                return self._flat.gradient(self._selection, self._out)
            grads.append(grad)
        for parameter in self._parameters:
            parameter.grad = None
        torch._foreach_copy_(self._views, grads)
        return self._out


class Draw:
    """Other weights for some parameters, of one binding or of several, to be shown for a while."""

    __slots__ = ("addresses", "vector", "views")

    def __init__(
        self, vector: Vector, segments: Iterable[Segment], parameters: Iterable[nn.Parameter]
    ) -> None:
        self.vector = vector
        self.views = {
            id(parameter): vector[segment.slice].view(segment.shape)
            for segment, parameter in zip(segments, parameters, strict=True)
        }
        self.addresses = {key: view.data_ptr() for key, view in self.views.items()}


_BINDINGS: WeakKeyDictionary[nn.Module, FlatParams] = WeakKeyDictionary()
_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of every parameter the latest binding, weakly: bindings hold parameters, not the reverse."""


def bind(module: nn.Module) -> FlatParams:
    """Move the module's parameters into one buffer, unless they are in it already.

    Values and gradients stay what they are; only the storage is another one. The module owns its
    buffer: methods and optimizers that train it all work there.

    Args:
        module: The network; its floating parameters with ``requires_grad=True`` are bound.

    Returns:
        The existing binding if it still holds, else a new one.

    Raises:
        BindingError: If there is nothing to bind, or it does not fit into one vector.
    """
    flat = _BINDINGS.get(module)
    if flat is not None and flat.is_bound() and _same_places(flat, module):
        return flat
    if flat is not None:
        flat.release()
    flat = FlatParams(module, reuse=True)
    _BINDINGS[module] = flat
    for parameter in flat.parameters:
        _OWNERS[parameter] = ref(flat)
    return flat


def unbind(module: nn.Module) -> None:
    """Give the module ordinary parameters back; their values and gradients stay.

    Args:
        module: A network that was bound; any other is left as it is.
    """
    flat = _BINDINGS.pop(module, None)
    if flat is not None:
        flat.release()


def owner_of(parameter: Tensor) -> FlatParams | None:
    """The binding in whose buffer the parameter lives, if there is one and it still holds."""
    flat: FlatParams | None = _OWNERS.get(parameter, lambda: None)()
    return flat if flat is not None and flat.is_bound() else None


def _stretch(parameters: list[nn.Parameter], segments: tuple[Segment, ...]) -> Vector | None:
    """The part of another binding's buffer that holds just these values in this order, if any.

    So a network whose optimizer was built first, or a part of a bound network, moves nothing.
    """
    owner = owner_of(parameters[0])
    if owner is None:
        return None
    (start,) = (s.start for s, p in owner.pairs() if p is parameters[0])
    stretch = owner.vector[start : start + segments[-1].stop]
    base, width = stretch.data_ptr(), stretch.element_size()
    lies_there = stretch.numel() == segments[-1].stop and all(
        p.data_ptr() == base + s.start * width for s, p in zip(segments, parameters, strict=True)
    )
    return stretch if lies_there else None


class _Place:
    """Where one parameter hangs in the module tree; weakly, so that networks can be freed."""

    __slots__ = ("_owner", "attribute", "name", "parameter", "path")

    def __init__(self, owner: nn.Module, path: str, attribute: str, parameter: nn.Parameter):
        self._owner, self.path, self.attribute, self.parameter = (
            ref(owner),
            path,
            attribute,
            parameter,
        )
        self.name = f"{path}.{attribute}" if path else attribute

    @property
    def owner(self) -> nn.Module:
        owner = self._owner()
        if owner is None:
            raise BindingError(f"the layer that held {self.name!r} was removed from the network")
        return owner


def segments_of(module: nn.Module) -> tuple[Segment, ...]:
    """The segments that binding the module would give, without binding it.

    Args:
        module: The network.
    """
    return _segments(_places(module))


def parameters_of(module: nn.Module) -> list[tuple[Segment, nn.Parameter]]:
    """The module's segments with their parameters, bound or not.

    Args:
        module: The network.
    """
    places = _places(module)
    return list(zip(_segments(places), (place.parameter for place in places), strict=True))


def _places(module: nn.Module) -> list[_Place]:
    """Trainable floating parameters, tied ones once, norm layers last."""
    seen: set[int] = set()
    ordinary: list[_Place] = []
    norms: list[_Place] = []
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in seen or not parameter.requires_grad:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise BindingError(
                    f"parameter {attribute!r} of {path or 'the network'} is lazy and has no shape "
                    "yet: run the network on one batch first."
                )
            if not parameter.is_floating_point():
                continue
            seen.add(id(parameter))
            place = _Place(owner, path, attribute, parameter)
            (norms if isinstance(owner, NORM_LAYERS) else ordinary).append(place)
    return ordinary + norms


def _same_places(flat: FlatParams, module: nn.Module) -> bool:
    now = [id(place.parameter) for place in _places(module)]
    return now == [id(parameter) for parameter in flat.parameters]


def _refuse_mixtures(places: list[_Place]) -> None:
    first = places[0]
    for place in places:
        if place.parameter.is_inference():
            raise BindingError(
                f"{place.name} was made inside torch.inference_mode(), so that it can't be "
                "trained: build the network outside of it"
            )
        for fact in ("dtype", "device"):
            here, there = getattr(place.parameter, fact), getattr(first.parameter, fact)
            if here != there:
                raise BindingError(
                    f"parameters of mixed {fact}: {first.name} is {there}, {place.name} is {here}. "
                    f"One flat vector needs one {fact}: convert the network with .to(...), or "
                    "freeze the odd ones with requires_grad_(False)."
                )
    spans = sorted(
        (p.parameter.data_ptr(), p.parameter.numel() * p.parameter.element_size(), p.name)
        for p in places
    )
    for (start, length, name), (following, _, other) in itertools.pairwise(spans):
        if following < start + length:
            raise BindingError(
                f"{name} and {other} are different Parameters over the same memory. Tie weights by "
                "sharing the Parameter object itself (b.weight = a.weight), not its data."
            )


def _segments(places: list[_Place]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for place in places:
        shape = tuple(place.parameter.shape)
        fan_in, fan_out = _fans(place)
        stop = start + math.prod(shape)
        owner_type = type(place.owner).__name__
        segments.append(
            Segment(place.name, shape, start, stop, fan_in, fan_out, place.path, owner_type)
        )
        start = stop
    return tuple(segments)


def _fans(place: _Place) -> tuple[int, int]:
    """Inputs that one output unit sums over, and outputs that one input reaches.

    A bias takes the fans of the weight beside it; a norm's gain and an embedding's entries each
    reach the output alone, so their fan-in is 1.
    """
    owner, shape = place.owner, tuple(place.parameter.shape)
    if isinstance(owner, NORM_LAYERS):
        return 1, 1
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return 1, shape[-1]
    if len(shape) < 2:
        weight = _weight_beside(place)
        if weight is None:
            return max(1, math.prod(shape)), max(1, math.prod(shape))
        owner_place = _Place(owner, place.path, weight, owner._parameters[weight])  # type: ignore[arg-type]
        return _fans(owner_place)
    receptive = math.prod(shape[2:])
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        # weight (C_in, C_out/groups, k…): one output sees C_in/groups channels.
        return shape[0] // owner.groups * receptive, shape[1] * receptive
    if isinstance(owner, nn.modules.conv._ConvNd):
        return shape[1] * receptive, shape[0] // owner.groups * receptive
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.LSTMCell: 4, nn.GRUCell: 3}.get(type(owner), 1)
    packed = 3 if place.attribute == "in_proj_weight" else 1
    return shape[1] * receptive, max(1, shape[0] // gates // packed) * receptive


def _weight_beside(place: _Place) -> str | None:
    """The name of the matrix that a vector parameter is the bias of."""
    candidates = (
        place.attribute.replace("bias", "weight"),
        "weight",
        "weight_ih",
        "in_proj_weight",
        "q_proj_weight",
    )
    for name in candidates:
        other = place.owner._parameters.get(name)
        if name != place.attribute and other is not None and other.dim() >= 2:
            return name
    return None
