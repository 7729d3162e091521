r"""Sums over the processes that train one network together; on one process, nothing at all.

Under ``torchrun`` every process, a *rank*, computes on its own part of the data or its own draw of
the weights. A sum that all of them get is the only thing they have to exchange:

    >>> import torch
    >>> ranks = Ranks()
    >>> ranks.size, ranks.rank, ranks.several
    (1, 0, False)
    >>> gradient = torch.tensor([1.0, 2.0])
    >>> ranks.sum_([gradient], notes=[3.0])      # the notes of every rank; the vector is the sum
    tensor([[3.]])
    >>> ranks.average_([gradient], weight=8, numbers=[0.5])    # a mean, here over 8 examples
    [0.5]

A rank that dies. The others find its connections closed, or hear nothing until the process group's
own timeout ends (``init_process_group(timeout=...)``). Whoever notices leaves a note in the group's
store, where all ranks that wait look every second; those that leave no note of their own within
``ROLL_CALL`` seconds are named in the `RankError` that every survivor raises.

`DistributedDataParallel` averages gradients in ``backward``, before anybody can take their products
with a rank's own noise. `unaveraged` is a context in which it does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from credo.errors import RankError, UnsupportedError
from credo.types import Vector

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

POLL = timedelta(seconds=1)
"""How often a rank that waits looks for the notes of those that gave up."""

ROLL_CALL = 5.0
"""Seconds that ranks have to answer after a sum failed."""

_MASK = (1 << 56) - 1


class Ranks:
    """The processes of a group: by default all of them, and one where none was initialised.

    ``size`` is their number, ``rank`` this one's place among them, ``several`` whether there is
    anybody to exchange sums with. ``alone`` is this process by itself, whoever else there is.
    """

    def __init__(self, group: ProcessGroup | None = None, alone: bool = False) -> None:
        self._group, self._alone = group, alone or _BY_ITSELF.get()
        self.size, self.rank = 1, 0
        self.names, self._name = [0], ""
        members = (group or dist.group.WORLD) if _initialised() and not self._alone else None
        if members is not None:
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            if self.rank < 0:
                raise RankError(
                    f"rank {dist.get_rank()} is not in the process group it was given: build the "
                    "optimizer on the group's ranks only"
                )
            self.names, self._name = dist.get_process_group_ranks(members), members.group_name
        self.several = self.size > 1
        self._buffer = torch.empty(0)

    def refuse_newcomers(self) -> None:
        """Raise `RankError` if processes were joined after this was made."""
        if not (self.several or self._alone) and self._group is None and _initialised():
            size = dist.get_world_size()
            if size > 1:
                raise RankError(
                    f"{size} ranks were joined after this optimizer was built, which knows of one: "
                    "call init_process_group first. To train a network on each rank for itself, "
                    "give each optimizer a process group of its one rank"
                )

    def sum_(self, vectors: Sequence[Vector], notes: Sequence[float] = ()) -> Tensor:
        """Make each vector its sum over ranks, in one all-reduce; every rank has the same bits.

        ``notes`` are a few numbers of this rank: those of all ranks come back, (size, notes).
        Half precision is summed in float32.
        """
        if not self.several:
            return torch.tensor([list(notes)])
        like = vectors[0]
        dtype = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        table = torch.zeros(self.size, len(notes), dtype=dtype)
        table[self.rank] = torch.tensor(notes, dtype=dtype)
        pieces = [*vectors, table.view(-1).to(like.device)]
        sizes = [piece.numel() for piece in pieces]
        if (self._buffer.numel(), self._buffer.dtype) != (sum(sizes), dtype):
            self._buffer = torch.empty(sum(sizes), dtype=dtype, device=like.device)
        self._reduce(torch.cat(pieces, out=self._buffer))
        *sums, answers = self._buffer.split(sizes)
        for vector, total in zip(vectors, sums, strict=True):
            vector.copy_(total)
        return answers.view(table.shape).cpu()

    def average_(
        self, vectors: Sequence[Vector], weight: float, numbers: Sequence[float] = ()
    ) -> list[float]:
        """Make each vector its mean over ranks, and return the means of the numbers.

        Ranks count by their ``weight``, mostly the number of examples behind what they bring.
        """
        if not self.several:
            return list(numbers)
        for vector in vectors:
            vector.mul_(weight)
        weights, values = self.sum_(vectors, [weight, *numbers]).double().tensor_split([1], dim=1)
        total = float(weights.sum())
        for vector in vectors:
            vector.div_(total)
        means: list[float] = ((weights * values).sum(0) / total).tolist()
        return means

    def gather(self, numbers: Sequence[int], device: torch.device | str = "cpu") -> list[list[int]]:
        """The whole numbers that every rank gave, by rank."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers)
        if self.several:
            table = table.to(device)
            self._reduce(table)
        rows: list[list[int]] = table.tolist()
        return rows

    def refuse_differences(
        self, numbers: Mapping[str, int], remedy: str, device: torch.device | str = "cpu"
    ) -> None:
        """Raise `RankError` on all ranks if one differs from the first in one of the numbers."""
        table = self.gather(list(numbers.values()), device)
        for column, name in enumerate(numbers):
            values = [row[column] for row in table]
            odd = [self.names[i] for i, value in enumerate(values) if value != values[0]]
            if odd:
                many = "s" if len(odd) > 1 else ""
                listed = ", ".join(str(rank) for rank in odd)
                raise RankError(
                    f"rank{many} {listed} and rank {self.names[0]} differ in their {name}, "
                    f"which must be the same on every rank: {remedy}"
                )

    def copy_from_first(self, tensors: Collection[Tensor]) -> None:
        """Overwrite the tensors of all ranks by those of the first."""
        self.copy_from(0, tensors)

    def copy_from(self, place: int, tensors: Collection[Tensor]) -> None:
        """Overwrite the tensors of all ranks by those of the one at this place among them."""
        if self.several:
            for tensor in tensors:
                self._start_and_wait(
                    tensor,
                    lambda data: dist.broadcast(
                        data, self.names[place], self._group, async_op=True
                    ),
                )

    def send(
        self, place: int, tensors: Mapping[str, Tensor], meta: Any, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Any]:
        """What the rank at this place gives, on every rank: tensors of any names, and JSON.

        The other ranks' arguments do not count. Tensors arrive on ``device``.
        """
        if not self.several:
            return dict(tensors), meta
        mine = self.rank == place
        kinds = {name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()}
        letter = json.dumps([kinds, meta]).encode() if mine else b""
        length = self.gather([len(letter)], device)[place][0]
        page = torch.zeros(length, dtype=torch.uint8, device=device)
        if mine:
            page.copy_(torch.frombuffer(bytearray(letter), dtype=torch.uint8))
        self.copy_from(place, [page])
        kinds, meta = json.loads(bytes(page.tolist()))
        found = {}
        for name, (shape, dtype) in kinds.items():
            kind = getattr(torch, dtype.removeprefix("torch."))
            found[name] = torch.empty(shape, dtype=kind, device=device)
            if mine:
                found[name].copy_(tensors[name].detach())
            self.copy_from(place, [found[name]])
        return found, meta

    def _reduce(self, tensor: Tensor) -> None:
        self._start_and_wait(
            tensor, lambda data: dist.all_reduce(data, group=self._group, async_op=True)
        )

    def _start_and_wait(self, tensor: Tensor, start: Callable[[Tensor], Work | None]) -> None:
        try:
            work = start(tensor.detach())
        except RuntimeError as error:
            self._give_up(error)
        if work is None:
            return
        while True:
            try:
                # On other devices waiting only orders streams, and the backend has its watchdog.
                work.wait(POLL) if tensor.device.type == "cpu" else work.wait()
                return
            except RuntimeError as error:
                if work.is_completed():
                    break
                if self._somebody_gave_up():
                    self._give_up(error)
        try:
            work.wait()  # it may have been done in the very moment
        except RuntimeError as error:
            self._give_up(error)

    def _key(self, what: object) -> str:
        return f"credo/{self._name}/{what}"

    def _somebody_gave_up(self) -> bool:
        try:
            return bool(_store().check([self._key("gave up")]))
        except NotImplementedError:  # a store that can't be asked tells nothing
            return False
        except RuntimeError:
            return True

    def _give_up(self, cause: RuntimeError) -> NoReturn:
        reason = str(cause).split(". ")[0].split("\n")[0] or type(cause).__name__
        raise RankError(
            f"rank {self.names[self.rank]} stops, because {self._absent()}: a sum over "
            f"{self.size} ranks was not completed ({reason}). Weights and state are those after "
            "the last step; a checkpoint can be resumed on any number of ranks"
        ) from cause

    def _absent(self) -> str:
        others = [place for place in range(self.size) if place != self.rank]
        missing, asked = others, "did not answer"
        try:
            store = _store()
            store.set(self._key(self.rank), "here")
            store.set(self._key("gave up"), "yes")
            end = time.monotonic() + ROLL_CALL
            # One is missing for certain, or there would be no roll call.
            while len(missing) > 1 and time.monotonic() < end:
                missing = [place for place in others if not store.check([self._key(place)])]
                time.sleep(0.02)
        except RuntimeError:
            asked = "did not answer, nor did the store in which ranks meet"
        if not missing:
            return "the connection between ranks was lost"
        named = ", ".join(str(self.names[place]) for place in missing)
        if len(missing) > 1 and asked != "did not answer":
            return f"one or more of the ranks {named} {asked}"
        return f"rank{'s' if len(missing) > 1 else ''} {named} {asked}"


_BY_ITSELF: ContextVar[bool] = ContextVar("by_itself", default=False)


@contextmanager
def by_itself() -> Iterator[None]:
    """A block in which every new `Ranks` is this process alone: it trains what is its own."""
    token = _BY_ITSELF.set(True)
    try:
        yield
    finally:
        _BY_ITSELF.reset(token)


def fingerprint(vector: Vector) -> int:
    """A number that differs where bits do, and is the same on every rank where they don't."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[vector.element_size()]
    return int(vector.view(whole).sum(dtype=torch.int64)) & _MASK


def copy_from_first(net: nn.Module, group: ProcessGroup | None = None) -> None:
    """Give the parameters and buffers of ``net`` on every rank the values of the first rank's.

    For networks that were built from different random numbers, and for the running statistics of
    batch norm, which every rank collects for itself.
    """
    with torch.no_grad():
        Ranks(group).copy_from_first([*net.parameters(), *net.buffers()])


# DistributedDataParallel inspects annotations and does not understand those that are strings.
def leave_alone(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that leaves every rank its own gradients.

    ``ddp.register_comm_hook(None, credo.collectives.leave_alone)``
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside of `DistributedDataParallel`, or the module itself."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def ddps_in(module: nn.Module) -> list[DistributedDataParallel]:
    """Every `DistributedDataParallel` in a module, itself included."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]


@contextmanager
def unaveraged(
    known: Sequence[DistributedDataParallel], parameters: Sequence[Tensor]
) -> Iterator[None]:
    """A block for forward and backward after which every rank has its own gradients.

    ``known`` ones are told not to average; another one that is called and holds some of the
    ``parameters`` is refused, unless it was told so by its owner.
    """
    ours = {id(parameter) for parameter in parameters}

    def refuse(module: nn.Module, args: Any) -> None:
        if (
            isinstance(module, DistributedDataParallel)
            and module.require_backward_grad_sync
            and torch.is_grad_enabled()
            and not _is_left_alone(module)
            and any(id(parameter) in ours for parameter in module.parameters())
        ):
            raise UnsupportedError(
                "DistributedDataParallel averages gradients before their products with each rank's "
                "noise are taken, and the curvature would come out too small. Give the optimizer "
                "the DistributedDataParallel itself, or call it under `with ddp.no_sync():`, or "
                "ddp.register_comm_hook(None, credo.collectives.leave_alone) once: the optimizer "
                "averages over ranks in step()"
            )

    with ExitStack() as stack:
        for ddp in known:
            stack.enter_context(ddp.no_sync())
        stack.callback(register_module_forward_pre_hook(refuse).remove)
        yield


def _is_left_alone(ddp: DistributedDataParallel) -> bool:
    return any(hook is leave_alone for hook, _ in getattr(ddp, "_comm_hooks", ()))


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()
