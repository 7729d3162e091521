"""Where an optimizer's weights live: in the buffers of the networks they belong to.

The optimizer's own vectors (momentum, curvature, gradient, noise) have an order of their own:
random weights first, and each group one slice. Its means stay where the network has them, so a
group is one or several runs, stretches that are contiguous in both orders. A module's own groups
are one run each.

Groups that differ by layer only are computed as one where a step is nothing but calls. The prior by
layer (`credo.optim.by_layer`) parts the weights into a group for every fan-in, and a tiny network
then pays each vector operation several times, though lr, betas and the rest are the same in all
groups. As long as they are, and the groups lie side by side, one operation over all of them takes a
vector of δ in place of the number. For large networks that vector is one more to be read, which
costs more than the calls: they stay apart. ``param_groups`` remain what they are. They are compared
whenever something is computed, so whoever changes a setting of one group has the groups apart from
then on, and together again when the settings are equal again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from credo.errors import BindingError, UnsupportedError
from credo.network import FlatParams, bind
from credo.network.flat import Draw, owner_of
from credo.optim.groups import Group
from credo.types import Segment, Vector

Shift: TypeAlias = Any
"""What is added to h: a number, or one for every weight.

Not their union, because an optimizer whose groups are never merged may take numbers only."""

LARGEST = 2**14
"""Random weights up to which groups are merged.

Draw and step of two groups then take 0.62 of the time with IVON and 0.82 with Vadam at 600 weights,
0.78 and 0.93 at 14,400; Vadam, which gives up a fused kernel for it, loses from 29,000 on."""

_BY_LAYER = ("params", "param_names", "name", "prior_precision", "hess_init")
"""What groups that are merged may differ in."""

_REMEMBERED = 8
"""Vectors of δ that are kept: several for a step, and more only while N changes."""


def _refuse_mixtures(parameters: Sequence[Tensor]) -> None:
    """One vector needs one dtype and device."""
    for fact in ("dtype", "device"):
        kinds = {str(getattr(parameter, fact)) for parameter in parameters}
        if len(kinds) > 1:
            raise BindingError(
                f"parameters of mixed {fact}: {', '.join(sorted(kinds))}. One flat vector needs "
                f"one {fact}: convert the network with .to(...), or give an optimizer to each kind"
            )


@dataclass(frozen=True, eq=False)
class Run:
    """A stretch of weights: ``where`` in the optimizer's vectors, ``mean`` in the network's."""

    where: slice
    mean: Vector


def part_of(vector: Vector, where: slice) -> Vector:
    """``vector[where]``; no view of it if that is all, because one takes as long as an addition."""
    return vector if where.stop - where.start == vector.numel() else vector[where]


class Layout:
    """The groups' parameters, in the networks' buffers and in the optimizer's order.

    Parameters that no network has bound are bound here; those of a bound network stay in its
    buffer. Where somebody binds them anew later on, the optimizer follows.

    ``runs`` are those of every group, ``random_runs`` those of all random weights, ``size`` and
    ``num_random`` the numbers of all weights and of those; ``like`` has their dtype and device.
    """

    runs: list[list[Run]]
    random_runs: list[Run]

    def __init__(self, module: nn.Module | None, groups: list[Group]) -> None:
        # Random weights first: then they are one slice, and nothing has to be scattered.
        ordered = sorted(groups, key=lambda group: bool(group["deterministic"]))
        self._module = module
        self._groups: list[list[nn.Parameter]] = [group["params"] for group in groups]
        self.parameters: list[nn.Parameter] = [p for group in ordered for p in group["params"]]
        self._names = [
            name
            for group in ordered
            for name in group.get("param_names") or [None] * len(group["params"])
        ]
        random = [p for group in groups if not group["deterministic"] for p in group["params"]]
        self.num_random = sum(parameter.numel() for parameter in random)
        self._holder: nn.Module | None = None
        _refuse_mixtures(self.parameters)
        self._flats = self._owners()
        self.like: Vector = self._flats[0].vector.new_empty(0)
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.segments = self._own_segments()
        self._places = {id(p): s for p, s in zip(self.parameters, self.segments, strict=True)}
        self._find_runs()
        self._draws: dict[int, Draw] = {}
        self._shown: Draw | None = None
        self._noted: list[Tensor | None] = []
        self._versions: list[int] = []

    def check(self) -> None:
        """Follow the parameters if they were bound anew; `BindingError` if they are others now."""
        if all(flat.is_bound() for flat in self._flats):
            return
        flats = self._owners()
        kinds = {(flat.vector.dtype, flat.vector.device) for flat in flats}
        if kinds != {(self.like.dtype, self.like.device)}:
            raise _changed()
        self._flats = flats
        self._find_runs()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While entered, the runs' means may be written; then autograd and autocast learn of it."""
        if not all(flat.is_in_place() for flat in self._flats):
            self.check()
        try:
            yield
        finally:
            for flat in self._flats:
                flat.tell()

    def room_for_draw(self, index: int) -> Draw:
        """Memory for a draw of the random weights, one of several."""
        self.check()
        if index not in self._draws:
            random = self.segments[: sum(s.stop <= self.num_random for s in self.segments)]
            vector = self.like.new_empty(self.num_random)
            self._draws[index] = Draw(vector, random, self.parameters[: len(random)])
        return self._draws[index]

    def show_draw(self, draw: Draw) -> None:
        """Let the network look at the draw. The means stay where they are: nothing is copied."""
        # First, because from here on an interrupt leaves some parameters at the draw.
        self._shown = draw
        for flat in self._flats:
            flat.show(draw)

    def show_mean(self) -> None:
        """Make the random weights what they were before `show_draw`, if it was called."""
        draw, self._shown = self._shown, None
        if draw is not None:
            for flat in self._flats:
                flat.show_home(draw)

    def place(self, parameter: Tensor) -> Segment:
        """Where a parameter lies in the optimizer's vectors."""
        return self._places[id(parameter)]

    def part(self, vector: Vector, parameter: Tensor) -> Tensor:
        """The parameter's own part of a vector, as a view in its shape."""
        place = self.place(parameter)
        return vector[place.slice].view(place.shape)

    def gather(self, out: Vector) -> Vector:
        """A copy of all gradients; one that is None counts as zero, none at all is an error."""
        pieces: list[Tensor] = []
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is None:
                pieces.append(out.new_zeros(parameter.numel()))
                continue
            if grad.is_sparse:
                raise BindingError(
                    f"{self.place(parameter).name} has a sparse gradient, which a flat vector "
                    "can't hold: build the embedding with sparse=False"
                )
            pieces.append(grad.reshape(-1))
        if all(parameter.grad is None for parameter in self.parameters):
            raise UnsupportedError(
                "no gradient arrived in this sampled() block: call loss.backward() inside of it, "
                "on a loss of these parameters. To predict with draws use posterior(...).predict"
            )
        return torch.cat(pieces, out=out)

    def note_gradients(self) -> None:
        """Remember which gradients the parameters have now, and in which state they are."""
        self._noted = [parameter.grad for parameter in self.parameters]
        self._versions = [-1 if grad is None else grad._version for grad in self._noted]

    def forget_gradients(self) -> None:
        """Whatever they are now, it says nothing: they were cleared, or used."""
        self._noted, self._versions = [], []

    def put_gradients_back(self) -> None:
        """Those that were noted, if any were."""
        for parameter, grad in zip(self.parameters, self._noted, strict=False):
            parameter.grad = grad

    def gradients_were_edited(self) -> bool:
        """Whether somebody wrote or replaced them since they were noted; to clear all is no edit.

        `torch.amp.GradScaler.unscale_` leaves the counters alone, and is not seen here.
        """
        if not self._noted or all(parameter.grad is None for parameter in self.parameters):
            return False
        noted = zip(self.parameters, self._noted, self._versions, strict=True)
        return any(
            p.grad is not grad or (grad is not None and grad._version != version)
            for p, grad, version in noted
        )

    def show_gradients(self, gradient: Vector, share: float) -> None:
        """Let the parameters' gradients be their parts of a vector, times ``share``."""
        for parameter in self.parameters:
            part = self.part(gradient, parameter)
            if parameter.grad is None:
                parameter.grad = part * share
            else:
                torch.mul(part, share, out=parameter.grad)

    def holds(self, gradient: Vector) -> bool:
        """Whether these are the gradients that the parameters have now."""
        return all(
            p.grad is None or torch.equal(p.grad, self.part(gradient, p)) for p in self.parameters
        )

    def first_nonfinite(self, vector: Vector) -> str | None:
        """The name of the first parameter whose part is not finite."""
        for parameter in self.parameters:
            if not bool(self.part(vector, parameter).isfinite().all()):
                return self.place(parameter).name
        return None

    # --- inside -----------------------------------------------------------------------------------

    def _owners(self) -> list[FlatParams]:
        """The bindings that hold the parameters, after binding those that nobody holds."""
        owners = self._found()
        if None in owners:
            if self._module is not None:
                bind(self._module)
            else:
                self._holder = self._holder_of([p is None for p in owners])
                bind(self._holder)
            owners = self._found()
        if None in owners:
            raise _changed()
        return list({id(owner): owner for owner in owners if owner is not None}.values())

    def _found(self) -> list[FlatParams | None]:
        owners: list[FlatParams | None] = []
        for parameter in self.parameters:
            # Mostly that of the parameter before, of which it is known to hold.
            last = owners[-1] if owners else None
            owners.append(last if last is not None and last.has(parameter) else owner_of(parameter))
        return owners

    def _holder_of(self, wanted: Sequence[bool]) -> nn.Module:
        """A module that holds these very parameters, which have no network as far as we know."""
        holder = nn.Module()
        for index, (name, parameter) in enumerate(zip(self._names, self.parameters, strict=True)):
            if wanted[index]:
                # Into the dictionary, because names such as "0.weight" can't be attributes.
                holder._parameters[name or f"parameter {index}"] = parameter
        return holder

    def _own_segments(self) -> list[Segment]:
        theirs = {id(p): s for flat in self._flats for s, p in flat.pairs()}
        segments, start = [], 0
        for name, parameter in zip(self._names, self.parameters, strict=True):
            there = theirs[id(parameter)]
            stop = start + there.size
            segments.append(replace(there, name=name or there.name, start=start, stop=stop))
            start = stop
        return segments

    def _find_runs(self) -> None:
        theirs = {id(p): (flat, s.start) for flat in self._flats for s, p in flat.pairs()}

        def runs_of(parameters: Sequence[nn.Parameter]) -> list[Run]:
            found: list[tuple[FlatParams, int, int, int]] = []  # flat, start here, there, length
            for parameter in parameters:
                here, (flat, there) = self.place(parameter), theirs[id(parameter)]
                if found:
                    last, start, start_there, length = found[-1]
                    if last is flat and (start + length, start_there + length) == (
                        here.start,
                        there,
                    ):
                        found[-1] = (flat, start, start_there, length + here.size)
                        continue
                found.append((flat, here.start, there, here.size))
            return [
                Run(slice(start, start + length), flat.vector[there : there + length])
                for flat, start, there, length in found
            ]

        self.runs = [runs_of(parameters) for parameters in self._groups]
        count = sum(segment.stop <= self.num_random for segment in self.segments)
        self.random_runs = runs_of(self.parameters[:count])


class Parcel(NamedTuple):
    """Groups of the same N that are computed together, and where their weights are."""

    groups: list[Group]
    runs: list[Run]
    n: float

    @property
    def is_random(self) -> bool:
        """Whether they have noise."""
        return not self.groups[0]["deterministic"]


class Merger:
    """Says at any time which groups are computed together.

    Args:
        layout: Where the groups' weights are.
        groups: The optimizer's groups, all options set.
        can_merge: Whether the optimizer can merge groups of these options.
    """

    def __init__(
        self, layout: Layout, groups: list[Group], can_merge: Callable[[Group], bool]
    ) -> None:
        self._layout, self._can_merge = layout, can_merge
        self._random = [i for i, group in enumerate(groups) if not group["deterministic"]]
        self._sizes = [sum(p.numel() for p in groups[i]["params"]) for i in self._random]
        self._shared = itemgetter(*(name for name in groups[0] if name not in _BY_LAYER))
        self._spread: dict[tuple[float, ...], Vector] = {}
        self._is_merged = self.has_changed = False

    def parcels(self, groups: list[Group], data: Sequence[float]) -> list[Parcel]:
        """All groups, together or apart; ``has_changed`` says if it was the other way before.

        Args:
            groups: The optimizer's, which are other dictionaries after a state was loaded.
            data: N of each of them.
        """
        is_merged = self._are_alike(groups, data)
        self.has_changed, self._is_merged = is_merged != self._is_merged, is_merged
        parcels = [
            Parcel([group], runs, n)
            for group, runs, n in zip(groups, self._layout.runs, data, strict=True)
            if not (is_merged and not group["deterministic"])
        ]
        if is_merged:
            merged = [groups[i] for i in self._random]
            parcels.insert(0, Parcel(merged, self._layout.random_runs, data[self._random[0]]))
        return parcels

    def spread(self, values: Sequence[float]) -> Shift:
        """A parcel's numbers, one for each group, as one number or one for each weight.

        Args:
            values: Of its groups, in their order.

        Returns:
            The same vector for the same numbers, as long as they come again and again.
        """
        first, key = values[0], tuple(values)
        if all(value == first for value in key):
            return first
        if key not in self._spread:
            if len(self._spread) == _REMEMBERED:
                self._spread.clear()
            like = self._layout.like
            numbers = torch.tensor(key, dtype=like.dtype, device=like.device)
            sizes = torch.tensor(self._sizes, device=like.device)
            self._spread[key] = numbers.repeat_interleave(sizes)
        return self._spread[key]

    def _are_alike(self, groups: list[Group], data: Sequence[float]) -> bool:
        if len(self._random) < 2 or self._layout.num_random > LARGEST:
            return False
        first, *others = self._random
        options, n = self._shared(groups[first]), data[first]
        return (
            all(data[i] == n and self._shared(groups[i]) == options for i in others)
            and len(self._layout.random_runs) == 1
            and self._can_merge(groups[first])
        )


def add_pull(to: Vector, mean: Vector, delta: Shift, weight: float = 1.0, *, out: Vector) -> Vector:
    """to + weight·δm.

    Args:
        to: What the prior's pull is added to.
        mean: The weights m.
        delta: δ.
        weight: A factor.
        out: Where it goes; may be ``to``.
    """
    if isinstance(delta, Tensor):
        return torch.addcmul(to, mean, delta, value=weight, out=out)
    return torch.add(to, mean, alpha=weight * delta, out=out)


def _changed() -> BindingError:
    return BindingError(
        "the network's parameters were replaced, frozen, moved or re-typed after the optimizer was "
        "built: do that first, then build the optimizer (and load its state)"
    )
