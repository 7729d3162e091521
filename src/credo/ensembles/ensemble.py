r"""Ensembles: the same method from several starts, mixed.

    p(y | x) = (1/K) Σ_k p_k(y | x),       p_k the predictive of member k

A method that finds one mode says nothing of the others; members that begin at other weights and see
the data in another order end in other modes, and disagree where the data leave it open. With
``credo.MAP()`` this is a deep ensemble (Lakshminarayanan et al., 2017), with ``credo.VI()`` or
``credo.Laplace()`` a mixture of their Gaussians.

The first member is the model's own network, from its current weights, in the order of a run without
an ensemble: it is that run. `credo.fit` leaves the network at its mean.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> method = credo.Ensemble(credo.MAP(lr=0.02), members=3)
    >>> posterior = credo.fit(model, method, (x, x**2), epochs=100, progress=False)
    >>> near, far = posterior.predict(torch.tensor([[0.5], [4.0]])).epistemic_std.flatten()
    >>> bool(near < far)
    True

Several ranks (under ``torchrun``) each train some of the members, on whole minibatches, and give
them to each other at the end of every epoch.

Lakshminarayanan, Pritzel & Blundell, "Simple and scalable predictive uncertainty estimation using
deep ensembles", 2017 (arXiv:1612.01474).
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo import packing
from credo.checks import Count, checked
from credo.collectives import Ranks, by_itself
from credo.ensembles.members import Factory, another
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.map import MAP
from credo.method import Info, Method, State, TemperedMethod
from credo.model import Model
from credo.packing import STORED
from credo.posterior.mixture import merge
from credo.posterior.posterior import Posterior
from credo.storage import under
from credo.temperature import Temperature
from credo.types import Batch, Json


@final
class MembersOptimizer(Optimizer):
    """The groups of all members' optimizers, for schedules; it takes no steps."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._each = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Asked for anew: a restored optimizer has new groups."""
        return [group for optimizer in self._each for group in optimizer.param_groups]


@final
@dataclass
class EnsembleState(State):
    """Every member's model and state.

    ``lost`` are the numbers of those that diverged; ``ranks`` train members k, k + size, ….
    """

    models: list[Model]
    members: list[Any]
    ranks: Ranks
    lost: list[int] = field(default_factory=list, metadata=STORED)

    @property
    def kept(self) -> list[int]:
        """The members that did not diverge."""
        return [k for k in range(len(self.members)) if k not in self.lost]

    @property
    def own(self) -> list[int]:
        """Those of them that this rank trains."""
        return [k for k in self.kept if self.owner(k) == self.ranks.rank]

    def owner(self, k: int) -> int:
        """The place of the rank that trains member k."""
        return k % self.ranks.size


@final
@checked
@dataclass(frozen=True)
class Ensemble(TemperedMethod[EnsembleState]):
    """Several members, each trained by the same method from a start of its own.

    Their posteriors are mixed: see `credo.merge`. A member that diverges is named in a warning and
    left out.

    Args:
        method: How a member is trained: any method, such as ``credo.MAP()`` or ``credo.VI()``.
        members: How many.
        factory: Builds a network with a new random start. Without it the network is copied and its
            layers draw their weights anew, by ``reset_parameters``.
        bootstrap: Whether each member sees a sample of the examples with replacement, as many as
            there are, in place of all of them.
    """

    method: Method[Any] = field(default_factory=MAP)
    members: Count = 5
    factory: Factory | None = None
    bootstrap: bool = False

    spreads: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.method, Ensemble):
            raise DataError("Ensemble: method must be that of a member, not another Ensemble")

    @property
    def temperature(self) -> Temperature:  # type: ignore[override]
        """The members'."""
        return self._tempered().temperature

    def at(self, temperature: Temperature) -> Self:
        """The same ensemble of members at another temperature."""
        return replace(self, method=self._tempered().at(temperature))

    @property
    def needs_all_data(self) -> bool:  # type: ignore[override]
        """Whether a member's step takes all examples at once."""
        return self.method.needs_all_data

    @property
    def default_epochs(self) -> int:  # type: ignore[override]
        """A member's; at least some, because members begin untrained."""
        return self.method.default_epochs or Method.default_epochs

    @property
    def plans(self) -> bool:
        """Whether a member's steps depend on how many epochs there will be."""
        return self.method.plans

    @property
    def orders(self) -> int:
        """One for each member."""
        return self.members

    @property
    def resamples(self) -> bool:
        """As `bootstrap` says."""
        return self.bootstrap

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> EnsembleState:
        """The first member is the model itself; the others begin at weights of their own."""
        first = generator or torch.Generator().manual_seed(torch.seed())
        # A generator of their own, so that the first member draws what it would by itself.
        seeds = torch.Generator().manual_seed(first.initial_seed())
        ranks, models, states = Ranks(), [], []
        with by_itself():
            for k in range(self.members):
                start, noise = (int(n) for n in torch.randint(2**62, (2,), generator=seeds))
                own = model if k == 0 else another(model, self.factory, start)
                source = first if k == 0 else torch.Generator().manual_seed(noise)
                models.append(own)
                states.append(self.method.init(own, num_data, source))
        return EnsembleState(models=models, members=states, ranks=ranks)

    def update(
        self, state: EnsembleState, batch: Batch | list[Batch]
    ) -> tuple[EnsembleState, Info]:
        """One step of each member, on a minibatch of its own or on one for all.

        Args:
            state: What `init` returned, or the update before.
            batch: Inputs and targets, or a list of them, one for each member.
        """
        infos: list[Info] = []
        for k in state.own:
            member = state.members[k]
            member.clock.num_batches = state.clock.num_batches
            member.clock.epochs = state.clock.epochs
            state.models[k].net.train(state.models[0].net.training)
            try:
                own = batch[k] if isinstance(batch, list) else batch
                state.members[k], info = self.method.update(member, own)
                infos.append(info)
            except NonFiniteError as error:
                self._lose(state, k, error)
        state.clock.tick()
        names = infos[0].extra if infos else ()
        extra = {name: statistics.fmean(info.extra[name] for info in infos) for name in names}
        return state, Info(self._mean_nll(state, [info.nll for info in infos]), extra)

    def _mean_nll(self, state: EnsembleState, own: list[float]) -> float:
        nll = statistics.fmean(own) if own else 0.0
        if state.ranks.several:
            like = state.models[0].like.new_zeros(1)
            (nll,) = state.ranks.average_([like], float(len(own)), [nll])
        elif not own:
            nll = math.nan
        if not math.isfinite(nll):
            raise NonFiniteError(
                f"all {self.members} members of the ensemble diverged: lower the rate of their "
                f"method, {type(self.method).__name__}, or look at the inputs"
            )
        return nll

    def _lose(self, state: EnsembleState, k: int, error: NonFiniteError) -> None:
        state.lost.append(k)
        warnings.warn(
            f"member {k} of the ensemble diverged and is left out; the others go on. {error}",
            stacklevel=5,
        )

    def finish(self, state: EnsembleState, data: Iterable[Batch]) -> EnsembleState:
        """Each member's own last pass over the data, of every member on every rank.

        What it finds is not part of what is stored, so ranks could not give it to each other.
        """
        self.meet(state)
        with by_itself():
            for k in state.kept:
                state.members[k] = self.method.finish(state.members[k], data)
        return state

    def posterior(self, state: EnsembleState) -> Posterior:
        """The mixture of the members' posteriors; the network is left at the first one's mean."""
        kept = state.kept or [0]  # where all diverged, `update` has said so
        found = [self.method.posterior(state.members[k]) for k in kept]
        if kept[0]:
            _copy_network(state.models[kept[0]], state.models[0])
        # A method may have its own form of the network (with dropout layers): the first member's.
        net = self.method.posterior(state.members[0]).model.net
        for posterior in found:
            posterior.model = posterior.model.replace(net=net)
        return merge(found)

    def summary(self, state: EnsembleState, nll: float = math.nan) -> dict[str, Any]:
        """The members' numbers, averaged, and how many members there are."""
        found = [self.method.summary(state.members[k], nll) for k in state.kept]
        return {
            **{
                name: statistics.fmean(float(each[name]) for each in found)
                for name, value in found[0].items()
                if isinstance(value, int | float)
            },
            "members": len(found),
        }

    def meet(self, state: EnsembleState) -> None:
        """Every rank gets the members that the others trained."""
        ranks = state.ranks
        if not ranks.several:
            return
        device = state.models[0].like.device
        mine = [int(k in state.lost) for k in range(self.members)]
        table = ranks.gather(mine, device)
        state.lost = [k for k in range(self.members) if table[state.owner(k)][k]]
        for k in state.kept:
            tensors, meta = ranks.send(state.owner(k), *self._pack_member(state, k), device)
            if state.owner(k) != ranks.rank:
                self._unpack_member(state, k, tensors, meta)

    @property
    def looks_at_start(self) -> bool:
        """As a member is looked at."""
        return self.method.looks_at_start

    def when_stuck(self, state: EnsembleState) -> str:
        """What a member's method says."""
        return self.method.when_stuck(state.members[state.kept[0]])

    def optimizer_of(self, state: EnsembleState) -> Optimizer | None:
        """The groups of all members' optimizers."""
        each = [self.method.optimizer_of(member) for member in state.members]
        found = [optimizer for optimizer in each if optimizer is not None]
        return MembersOptimizer(found) if found else None

    def pack(self, state: EnsembleState) -> tuple[dict[str, Tensor], Json]:
        """Every member's state, buffers and noise, behind its number."""
        tensors, meta = packing.pack(state)
        meta["members"] = []
        for k in range(self.members):
            own, own_meta = self._pack_member(state, k)
            tensors |= {f"{k}.{name}": tensor for name, tensor in own.items()}
            meta["members"].append(own_meta)
        return tensors, meta

    def unpack(
        self, state: EnsembleState, tensors: Mapping[str, Tensor], meta: Json
    ) -> EnsembleState:
        """The inverse of ``pack``, into a state from ``init`` on the same model."""
        packing.unpack(state, tensors, meta)
        for k in range(self.members):
            self._unpack_member(state, k, under(f"{k}.", tensors), meta["members"][k])
        return state

    def _pack_member(self, state: EnsembleState, k: int) -> tuple[dict[str, Tensor], Json]:
        own, meta = self.method.pack(state.members[k])
        model = state.models[k]
        tensors = {f"method.{name}": tensor for name, tensor in own.items()}
        tensors |= {f"buffer.{name}": buffer for name, buffer in model.buffers().items()}
        tensors |= {f"noise.{i}": noise for i, noise in enumerate(model.noise_parameters())}
        return tensors, meta

    def _unpack_member(
        self, state: EnsembleState, k: int, tensors: Mapping[str, Tensor], meta: Json
    ) -> None:
        own = under("method.", tensors)
        state.members[k] = self.method.unpack(state.members[k], own, meta)
        with torch.no_grad():
            for name, buffer in state.models[k].buffers().items():
                buffer.copy_(tensors[f"buffer.{name}"])
            for i, noise in enumerate(state.models[k].noise_parameters()):
                noise.copy_(tensors[f"noise.{i}"])

    def _tempered(self) -> TemperedMethod[Any]:
        if not isinstance(self.method, TemperedMethod):
            raise UnsupportedError(
                f"{type(self.method).__name__}, the method of this ensemble, has no temperature"
            )
        return self.method


def _copy_network(source: Model, target: Model) -> None:
    """Give one network the weights and buffers of another of its architecture."""
    with target.bind().writing() as vector:
        vector.copy_(source.bind().vector)
    with torch.no_grad():
        for name, buffer in target.buffers().items():
            buffer.copy_(source.buffers()[name])
