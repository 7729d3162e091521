"""Where an optimizer's weights live: one flat buffer, random weights first, each group a slice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credo.errors import BindingError, UnsupportedError
from credo.network import FlatParams, bind
from credo.network.flat import Buffer
from credo.optim.groups import Group, Params, holder_of
from credo.types import Segment, Vector


class Layout:
    """The binding of the groups' parameters, by the network or by a private module that holds them.

    ``slices`` are the groups' places in the buffer, ``num_random`` the length of its random part.
    Somebody else may bind the same parameters to another buffer; `bound` then binds them anew, in
    the same order.
    """

    def __init__(self, params: Params, groups: list[Group]) -> None:
        # Random weights first: then they are one run, and nothing has to be scattered.
        ordered = sorted(groups, key=lambda group: bool(group["deterministic"]))
        wanted = [id(p) for group in ordered for p in group["params"]]
        self._owner: nn.Module = (
            params
            if isinstance(params, nn.Module) and [id(p) for p in bind(params).parameters] == wanted
            else holder_of(ordered)
        )
        self._flat = bind(self._owner)
        self.parameters = self._flat.parameters
        self._places = {id(p): s for p, s in zip(self.parameters, self._flat.segments, strict=True)}
        self.slices = [self._slice_of(group) for group in groups]
        self.num_random = sum(
            where.stop - where.start
            for where, group in zip(self.slices, groups, strict=True)
            if not group["deterministic"]
        )
        self._like = self._flat.vector.new_empty(0)
        self._spares: dict[int, Buffer] = {}
        self._mean: Buffer | None = None

    def bound(self) -> FlatParams:
        """The buffer of which the parameters are views now."""
        if self._flat.is_bound():
            return self._flat
        flat = bind(self._owner)
        same = [id(p) for p in flat.parameters] == [id(p) for p in self.parameters]
        now, then = flat.vector, self._like
        if not same or (now.dtype, now.device) != (then.dtype, then.device):
            raise BindingError(
                "the network's parameters were replaced, frozen, moved or re-typed after the "
                "optimizer was built: do that first, then build the optimizer (and load its state)"
            )
        self._flat, self._spares = flat, {}
        return flat

    def room_for_draw(self, index: int) -> tuple[Vector, Buffer]:
        """The mean, in the network, and a buffer beside it, one of several, for a draw."""
        flat = self.bound()
        if index not in self._spares:
            self._spares[index] = flat.spare()
        return flat.vector, self._spares[index]

    def show_draw(self, draw: Buffer) -> None:
        """Let the network look at the draw. The mean stays where it is, so nothing is copied."""
        # First, because from here on an interrupt leaves some parameters at the draw.
        self._mean = self._flat.shown
        draw.vector[self.num_random :].copy_(self._flat.vector[self.num_random :])
        self._flat.show(draw)

    def show_mean(self) -> None:
        """Make the random weights what they were before `show_draw`, if it was called."""
        mean, self._mean = self._mean, None
        if mean is None:
            return
        with torch.no_grad():
            if self._flat.is_bound():
                # What the block did to deterministic weights stays.
                mean.vector[self.num_random :].copy_(self._flat.vector[self.num_random :])
                self._flat.show(mean)
                return
            # Bound elsewhere or re-typed in the meantime: into each parameter, where it is now,
            # which may be a spare buffer.
            self._spares = {}
            for parameter in self.parameters:
                if self.place(parameter).stop <= self.num_random:
                    parameter.copy_(self.part(mean.vector, parameter))
        torch.clear_autocast_cache()

    def place(self, parameter: Tensor) -> Segment:
        """Where a parameter lies in the buffer and in every vector of its length."""
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

    def _slice_of(self, group: Group) -> slice:
        places = [self.place(p) for p in group["params"]]
        starts, stops = [p.start for p in places], [p.stop for p in places]
        return slice(min(starts, default=0), max(stops, default=0))
