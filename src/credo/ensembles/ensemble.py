r"""Ensembles: the same method from several starts, mixed.

    p(y | x) = (1/K) Σ_k p_k(y | x),       p_k the predictive of member k

A method that finds one mode says nothing of the others; members that begin at other weights and see
the data in another order end in other modes, and disagree where the data leave it open. With
``credo.MAP()`` this is a deep ensemble (Lakshminarayanan et al., 2017), with ``credo.VI()`` or
``credo.Laplace()`` a mixture of their Gaussians.

The first member is the model's own network, from its current weights, in the order of a run without
an ensemble: it is that run. Member k is the run from its own weights with ``order_seed(seed, k)``
(`credo.train.feed`) in the place of the seed. `credo.fit` leaves the network at the first one's
mean.

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> method = credo.Ensemble(credo.MAP(lr=0.02), members=3)
    >>> posterior = credo.fit(model, method, (x, x**2), epochs=100, progress=False)
    >>> near, far = posterior.predict(torch.tensor([[0.5], [4.0]])).epistemic_std.flatten()
    >>> bool(near < far)
    True

Small networks trained by `credo.MAP` or `credo.MLE` are trained together, as one network: see
`credo.ensembles.stacked`. Others take a step each in turn. Both give the same result, up to
rounding, and write the same checkpoints.

Several ranks (under ``torchrun``) each train some of the members, on whole minibatches, and give
them to each other at the end of every epoch.

Lakshminarayanan, Pritzel & Blundell, "Simple and scalable predictive uncertainty estimation using
deep ensembles", 2017 (arXiv:1612.01474).
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo import packing
from credo.checks import Count, checked
from credo.collectives import Ranks, by_itself
from credo.ensembles import stacked, stacked_network
from credo.ensembles.apart import fit_apart
from credo.ensembles.members import (
    EnsembleState,
    Factory,
    MembersOptimizer,
    another,
    copy_network,
)
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.map import MAP
from credo.method import Info, Method, TemperedMethod
from credo.model import Model
from credo.network.batches import BatchStack
from credo.noise import key_to_seed
from credo.posterior.mixture import merge
from credo.posterior.posterior import Posterior
from credo.storage import under
from credo.temperature import Temperature
from credo.train.feed import order_seed
from credo.types import Batch, Json
from credo.workers import EngineName


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
        order: Whether each member sees the examples in an "own" order, or all in a "common" one,
            for which the data are read once.
        training: "together" trains small equal networks as one, "in_turn" one after the other, a
            step each; "auto" takes what is faster, as measured (see `credo.ensembles.stacked`).
        jobs: Train every member in a worker process of its own, so many at a time; None trains all
            in this process.
        engine: Where the workers are: "local" processes, "ray" or "dask".
    """

    method: Method[Any] = field(default_factory=MAP)
    members: Count = 5
    factory: Factory | None = None
    bootstrap: bool = False
    order: Literal["own", "common"] = "own"
    # How members are trained is no part of what a run is: it may go on in another way.
    training: Literal["auto", "together", "in_turn"] = field(default="auto", compare=False)
    jobs: Count | None = field(default=None, compare=False)
    engine: EngineName = field(default="local", compare=False)

    spreads: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.method, Ensemble):
            raise DataError("Ensemble: method must be that of a member, not another Ensemble")
        if self.bootstrap and self.order == "common":
            raise DataError(
                "Ensemble: with bootstrap=True every member has examples of its own, which have no "
                'common order: leave order="own"'
            )
        if self.jobs is None and self.engine != "local":
            raise DataError(
                f'Ensemble: engine="{self.engine}" is where workers are, and jobs=None starts '
                "none: say how many, such as jobs=2"
            )
        if self.jobs is not None and (self.order == "common" or self.training == "together"):
            asked = 'order="common"' if self.order == "common" else 'training="together"'
            raise DataError(
                f"Ensemble: with jobs={self.jobs} every member is a run of its own in a process of "
                f"its own, which {asked} contradicts: leave out one of them"
            )

    @property
    def takes_over(self) -> bool:
        """Whether members are trained by workers."""
        return self.jobs is not None

    def whole_run(
        self, fit: Callable[..., Posterior], model: Model, train_data: Any, **arguments: Any
    ) -> Posterior:
        """Every member in a worker of its own; see `credo.ensembles.apart`."""
        if arguments["epochs"] is None:
            arguments["epochs"] = self.default_epochs
        if arguments["device"] is not None:
            model.net.to(arguments["device"])
        alone = replace(self, members=1, factory=None, jobs=None, engine="local")
        method = alone if self.bootstrap else self.method  # a bootstrap is the ensemble's to draw
        models = self.models(model, arguments["seed"])
        assert self.jobs is not None  # `takes_over` said so
        return fit_apart(fit, method, models, train_data, self.jobs, self.engine, arguments)

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
        """One for each member, unless they have a common one."""
        return self.members if self.order == "own" else 1

    @property
    def resamples(self) -> bool:
        """As `bootstrap` says."""
        return self.bootstrap

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> EnsembleState:
        """The first member is the model itself; the others begin at weights of their own."""
        refused = self._why_in_turn(model) if self.training == "together" else None
        if refused is not None:
            raise _can_not_be_together(refused)
        first = generator or torch.Generator().manual_seed(torch.seed())
        seed, ranks = first.initial_seed(), Ranks()
        models, states = self.models(model, seed), []
        with by_itself():
            for k, own in enumerate(models):
                source = first if k == 0 else torch.Generator().manual_seed(order_seed(seed, k))
                states.append(self.method.init(own, num_data, source))
        return EnsembleState(models=models, members=states, ranks=ranks)

    def models(self, model: Model, seed: int) -> list[Model]:
        """The members' models, each at the start that belongs to the seed.

        Args:
            model: The first member's.
            seed: That of the run.
        """
        starts = [key_to_seed(seed, 5, k) for k in range(1, self.members)]
        return [model, *(another(model, self.factory, start) for start in starts)]

    def update(
        self, state: EnsembleState, batch: Batch | list[Batch] | BatchStack
    ) -> tuple[EnsembleState, Info]:
        """One step of each member, on a minibatch of its own or on one for all.

        Args:
            state: What `init` returned, or the update before.
            batch: Inputs and targets, or several of them, one for each member.
        """
        if state.in_turn is None:
            state.in_turn = not self._is_together(state)
        if state.in_turn:
            return self._in_turn(state, batch)
        try:
            return self._together(state, batch)
        except stacked.Diverged as diverged:
            places = state.own
            for place, error in diverged.errors.items():
                self._lose(state, places[place], error)
            # The others' step was not made either.
            state.stack = None
            state.in_turn = None if len(state.own) > 1 else True
        except UnsupportedError as error:
            if self.training == "together":
                raise _can_not_be_together(str(error)) from error
            state.settle()
            state.stack, state.in_turn = None, True
        return self.update(state, batch)

    def _is_together(self, state: EnsembleState) -> bool:
        """Whether the members are trained as one, from here on."""
        if self.training == "in_turn" or len(state.own) < 2 - (self.training == "together"):
            return False
        if self.training == "together":
            return True
        if self._why_in_turn(state.models[0]) is not None:
            return False
        size = -(-state.members[0].num_data // max(1, state.clock.num_batches))
        return stacked.is_faster(state.models[0], size)

    def _why_in_turn(self, model: Model) -> str | None:
        return stacked.why_not(self.method) or stacked_network.why_not(model.net)

    def _together(
        self, state: EnsembleState, batch: Batch | list[Batch] | BatchStack
    ) -> tuple[EnsembleState, Info]:
        members = len(state.own if state.stack is None else state.stack)
        if isinstance(batch, list) or (isinstance(batch, BatchStack) and len(batch) != members):
            batch = BatchStack.of([batch[k] for k in state.own])
        if state.stack is None:
            for k in state.own:
                state.members[k].clock.num_batches = state.clock.num_batches
                state.models[k].net.train(state.models[0].net.training)
            assert isinstance(self.method, MAP)  # `_why_in_turn` has looked
            own = [state.members[k] for k in state.own]
            state.stack = stacked.Stack(self.method, own, batch)
        nll = state.stack.step(batch)
        state.clock.tick()
        if state.ranks.several:
            nll = self._mean_nll(state, [nll] * members)
        return state, Info(nll)

    def _in_turn(
        self, state: EnsembleState, batch: Batch | list[Batch] | BatchStack
    ) -> tuple[EnsembleState, Info]:
        infos: list[Info] = []
        for k in state.own:
            member = state.members[k]
            member.clock.num_batches = state.clock.num_batches
            member.clock.epochs = state.clock.epochs
            state.models[k].net.train(state.models[0].net.training)
            try:
                own = batch[k] if isinstance(batch, list | BatchStack) else batch
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
        state.settle()
        with by_itself():
            for k in state.kept:
                state.members[k] = self.method.finish(state.members[k], data)
        return state

    def posterior(self, state: EnsembleState) -> Posterior:
        """The mixture of the members' posteriors; the network is left at the first one's mean."""
        state.settle()
        kept = state.kept or [0]  # where all diverged, `update` has said so
        found = [self.method.posterior(state.members[k]) for k in kept]
        if kept[0]:
            copy_network(state.models[kept[0]], state.models[0])
        # A method may have its own form of the network (with dropout layers): the first member's.
        net = self.method.posterior(state.members[0]).model.net
        for posterior in found:
            posterior.model = posterior.model.replace(net=net)
        return merge(found)

    def summary(self, state: EnsembleState, nll: float = math.nan) -> dict[str, Any]:
        """The members' numbers, averaged, and how many members there are."""
        state.settle()
        found = [self.method.summary(state.members[k], nll) for k in state.kept]
        return {
            **{
                name: statistics.fmean(float(each[name]) for each in found)
                for name, value in found[0].items()
                if isinstance(value, int | float)
            },
            "members": len(found),
            "together": state.in_turn is False,
        }

    def meet(self, state: EnsembleState) -> None:
        """Every rank gets the members that the others trained."""
        ranks = state.ranks
        if not ranks.several:
            return
        state.settle()
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
        state.settle()
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
        state.stack, state.in_turn = None, None
        for k in range(self.members):
            self._unpack_member(state, k, under(f"{k}.", tensors), meta["members"][k])
        return state

    def _pack_member(self, state: EnsembleState, k: int) -> tuple[dict[str, Tensor], Json]:
        own, meta = self.method.pack(state.members[k])
        model = state.models[k]
        tensors = {f"method.{name}": tensor for name, tensor in own.items()}
        tensors |= {f"buffer.{name}": buffer for name, buffer in model.buffers().items()}
        tensors |= {f"noise.{i}": noise for i, noise in enumerate(model.noise_parameters())}
        if k in state.lost:
            # Nobody goes on from it, and a checkpoint with numbers that are none is refused.
            tensors = {name: t.nan_to_num() for name, t in tensors.items()}
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


def _can_not_be_together(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f'the ensemble can\'t be trained together: {reason}. training="in_turn" trains its members '
        'one after the other, and training="auto" chooses'
    )
