"""How an optimizer works on many ranks: own noise or the same, sums, and checks that all agree.

K ranks that draw one sample each make the step of one rank that draws K: the sums over ranks and
over blocks are one sum, and draw number s of rank r is draw s·K + r of the run. With
``shared_noise=True`` draw s is the same everywhere, so that K ranks with a part of a batch each
make the step of one rank with all of it.

Every rank then makes the same update of the same numbers, so weights stay equal bit by bit and are
never exchanged. That they are equal is checked at the first step, after ``load_state_dict``, and
every ``CHECK_EVERY`` steps.

Gradients must not be averaged before ``step()``. A `DistributedDataParallel` that is called inside
of ``sampled()`` is seen; averages by other means (in a compiled graph, by hooks, by hand) are
noticed at those same checks, by gradients that are the same on all ranks. With ``shared_noise``,
and where only some ranks or some parameters are averaged, they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from credo.collectives import Ranks, ddps_in, fingerprint, unaveraged
from credo.errors import RankError, UnsupportedError
from credo.types import Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHECK_EVERY = 1000

NOTHING: AbstractContextManager[None] = nullcontext()
"""The context that need not be entered."""


class Tally(NamedTuple):
    """What a harvest consists of, on one rank or on all."""

    blocks: int
    weight: float
    """What the sums are divided by to be means: blocks, or examples where they are counted."""
    overflow: bool


class Team:
    """The ranks, as one optimizer sees them; ``several`` is whether there is more than one."""

    def __init__(
        self, params: object, process_group: ProcessGroup | None, shared_noise: bool
    ) -> None:
        self._ranks = Ranks(process_group)
        self.several = self._ranks.several
        self._shared_noise = shared_noise
        self._ddps = ddps_in(params) if isinstance(params, nn.Module) else []
        self._is_unsure = True
        self._num_random = 0

    def doubt(self) -> None:
        """Check at the next step that all ranks have the same weights."""
        self._is_unsure = True

    def draw_number(self, block: int) -> int:
        """Which of the run's draws at this step belongs to this rank's block."""
        if self._shared_noise:
            return block
        return block * self._ranks.size + self._ranks.rank

    def block(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context in which nobody averages gradients over ranks before we see them."""
        if self.several:
            return unaveraged(self._ddps, parameters)
        if dist.is_available() and dist.is_initialized():
            self._ranks.refuse_newcomers()
        return NOTHING

    def agree_on_layout(self, like: Vector, num_random: int) -> None:
        """Refuse ranks that train networks of different sizes, whose sums would not fit."""
        self._num_random = num_random
        if self.several:
            sizes = {"number of weights": like.numel(), "number of random weights": num_random}
            remedy = "build the same network on every rank"
            self._ranks.refuse_differences(sizes, remedy, like.device)

    def add_up(
        self, sums: Sequence[Vector], tally: Tally, step: int, state: Mapping[str, Sequence[Vector]]
    ) -> Tally:
        """Make ``sums`` those of all ranks, the first of them the gradient; give the tally of all.

        ``state`` holds what has to be equal on every rank; nothing of it is changed.
        """
        unsure = self._is_unsure or step % CHECK_EVERY == 0
        own = sums[0][: self._num_random].clone() if unsure else sums[0].new_zeros(0)
        notes = self._ranks.sum_(sums, [tally.blocks, tally.weight, tally.overflow, unsure])
        blocks, weights, overflows, unsures = notes.unbind(1)
        if bool((blocks != blocks[0]).any()) or not blocks[0]:
            self._refuse_blocks([int(number) for number in blocks])
        overflow = bool(overflows.any())
        # Of several ranks one may have loaded a state, so all check if one wants to.
        if bool(unsures.any()) and not overflow:
            self._check(step, state, own)
        return Tally(int(blocks.sum()), float(weights.sum()), overflow)

    def _check(self, step: int, state: Mapping[str, Sequence[Vector]], gradient: Vector) -> None:
        fingerprints = {"step": step, "shared_noise": int(self._shared_noise)}
        for name, vectors in state.items():
            fingerprints[name] = sum(fingerprint(vector) for vector in vectors)
        self._ranks.refuse_differences(
            fingerprints,
            "seed torch alike on every rank before the network is built, load the same checkpoint "
            "on every rank, or call credo.collectives.copy_from_first(net)",
            gradient.device,
        )
        self._refuse_averages(gradient)
        self._is_unsure = False

    def _refuse_averages(self, gradient: Vector) -> None:
        """Different draws with the very same gradients: somebody averaged them."""
        mark = fingerprint(gradient) if bool(gradient.isfinite().all()) else 0
        marks = [row[0] for row in self._ranks.gather([mark], gradient.device)]
        if not self._shared_noise and marks[0] and len(set(marks)) == 1:
            raise UnsupportedError(
                "all ranks have the very same gradients, though each drew weights of its own: they "
                "were averaged over ranks inside of sampled(), and the curvature would come out "
                "too small. Leave that to step(). (A loss that is linear in the weights, on the "
                "same data everywhere, looks the same: take shared_noise=True for it)"
            )

    def _refuse_blocks(self, blocks: list[int]) -> None:
        if not any(blocks):
            raise UnsupportedError(
                "step() without a draw on any rank: compute the loss and call backward inside "
                "`with optimizer.sampled():`, or give step() a closure"
            )
        listed = ", ".join(
            f"rank {name}: {number}" for name, number in zip(self._ranks.names, blocks, strict=True)
        )
        raise RankError(
            f"the ranks made different numbers of sampled() blocks before step() ({listed}). Give "
            "every rank as many batches as the others, e.g. by a DistributedSampler; nothing was "
            "changed"
        )
