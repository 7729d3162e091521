"""Several posteriors of one network as one: an ensemble, or what was saved of several runs.

    p(y | x) = (1/K) Σ_k p_k(y | x)

Members share the network's architecture and the kind of likelihood. Each has its own distribution
of weights, point parameters, buffers (batch-norm statistics) and learned noise.

    >>> import torch, credo
    >>> net = torch.nn.Linear(1, 1)
    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> def run(seed):
    ...     torch.manual_seed(seed)
    ...     net.reset_parameters()
    ...     model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    ...     return credo.fit(model, credo.MAP(), (x, 2 * x), epochs=2, progress=False)
    >>> both = credo.merge([run(0), run(1)])
    >>> both.predict(x).outputs.shape            # each point once, however many are asked for
    torch.Size([2, 32, 1])

Lakshminarayanan, Pritzel & Blundell, "Simple and scalable predictive uncertainty estimation using
deep ensembles", 2017 (arXiv:1612.01474).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families import Delta, Mixture
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import (
    BATCH_SIZE,
    as_inputs,
    chunks,
    inputs_alone,
    is_loader,
    like_weights,
)
from credo.posterior.link import Link
from credo.posterior.posterior import At, Posterior
from credo.posterior.predictive import Predictive
from credo.types import Inputs, Json, Vector


class MixturePosterior(Posterior):
    """The equal mixture of several posteriors over one network; `credo.merge` makes it.

    ``mean`` and ``sample`` are those of the mixture over the weights. The mean of several modes is
    no network that was trained, so nothing predicts with it: ``predict(at="mean")`` takes every
    member at its own mean, and ``centre``, where `credo.fit` leaves the network, is the first
    member's.

    Args:
        members: Posteriors of one architecture; `credo.merge` checks that they are.
    """

    def __init__(self, members: Sequence[Posterior]) -> None:
        first = members[0]
        q = Mixture(tuple(member.q for member in members))
        super().__init__(first.model, q, first.point, first.buffers, first.draws)
        self.members = tuple(members)
        self.predicts = first.predicts

    @property
    def centre(self) -> Vector:
        """The first member's mean, (P,)."""
        return self.members[0].centre

    def predict(
        self,
        x: Inputs | Any,
        samples: int | None = None,
        batch_size: int | None = None,
        generator: Generator | None = None,
        *,
        at: At | None = None,
        link: Link | None = None,
        keep_samples: bool = True,
    ) -> Predictive:
        """The predictive of all members, each with as many samples and with its own noise.

        Args:
            x: As `Posterior.predict` takes them.
            samples: How many draws in all, rounded up so that every member has as many; 64 by
                default, and of members that are bags all within memory. A member that is a point
                has one.
            batch_size: Inputs that pass at once.
            generator: Where the seeds of the members' draws come from; repeatable without it.
            at: "samples"; "mean", every member once at its own mean; "linearised", every member in
                its own linear form. By default what the members say.
            link: For "linearised": "samples" alone, because a mixture of Gaussians has no formula.
            keep_samples: Keep every sample, (S, B, ...); else only averages over them, (B, ...).
        """
        if link == "probit":
            raise DataError('link="probit" is a formula for one Gaussian: use link="samples"')
        if samples is not None and samples < 1:
            raise DataError(f"samples={samples} must be at least 1")
        at = at or self.predicts
        if at == "linearised":
            link = "samples"
        seeds = [
            k if generator is None else int(torch.randint(2**62, (), generator=generator))
            for k in range(len(self.members))
        ]
        if samples is None:
            samples = self.default_samples(x, keep_samples)
        each = -(-samples // len(self.members))

        once = at != "linearised" and keep_samples and all(map(_is_point, self.members))

        def of(inputs: Inputs) -> Predictive:
            if once:
                return self._predict_points(inputs, batch_size)
            return Predictive.merge(
                [
                    member.predict(
                        inputs, each, batch_size, torch.Generator().manual_seed(seed),
                        at=at, link=link, keep_samples=keep_samples,
                    )
                    for member, seed in zip(self.members, seeds, strict=True)
                ]
            )  # fmt: skip

        if not is_loader(x):
            return of(x)
        # Batch by batch: a loader that shuffles would show every member another order.
        parts = [of(inputs_alone(batch)) for batch in x]
        if not parts:
            raise DataError("the loader yields no batches: there is nothing to predict")
        return Predictive.concatenate(parts)

    @property
    def points(self) -> int | None:
        """As many of each member as the one with the fewest has; None if one can't be counted."""
        each = [member.points for member in self.members]
        return None if None in each else len(each) * min(number or 1 for number in each)

    def _predict_points(self, x: Any, batch_size: int | None) -> Predictive:
        """Each member once, all on one copy of the network, which takes longer than a small one."""
        outputs = []
        with torch.inference_mode(False), self.on_copy() as (model, flat), torch.no_grad():
            parts = list(chunks(like_weights(as_inputs(x), flat.vector), batch_size or BATCH_SIZE))
            buffers = dict(flat.module.named_buffers())
            for member in self.members:
                member._put_mean(member.model, flat)
                for name, buffer in buffers.items():
                    if name in member.buffers:
                        buffer.copy_(member.buffers[name])
                pieces = [model.outputs(part) for part in parts]
                outputs.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        own = [member.model.likelihood for member in self.members]
        return Predictive.of_members(torch.stack(outputs), own).out_of(len(own))

    @contextmanager
    def on_copy(self) -> Iterator[tuple[Model, FlatParams]]:
        """A copy of the model at the first member's mean; see `Posterior.on_copy`.

        Yields:
            The model whose ``net`` is the copy, and its parameters.
        """
        with self.members[0].on_copy() as found:
            yield found

    @contextmanager
    def in_network(self) -> Iterator[FlatParams]:
        """The user's network itself at the first member's mean; see `Posterior.in_network`.

        Yields:
            The network's parameters.
        """
        with self.members[0].in_network() as flat:
            yield flat

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that `save` writes: every member's, behind its number."""
        tensors: dict[str, Tensor] = {}
        metas = []
        for k, member in enumerate(self.members):
            own, meta = member.pack()
            tensors |= {f"member.{k}.{name}": tensor for name, tensor in own.items()}
            metas.append(meta)
        return tensors, {"kind": "mixture", "version": 1, "members": metas}


def _is_point(member: Posterior) -> bool:
    """Whether one pass of the network at the mean is all of its prediction."""
    return type(member) is Posterior and isinstance(member.q, Delta)


def merge(posteriors: Sequence[Posterior]) -> Posterior:
    """One posterior from several over networks of one architecture: their equal mixture.

    Mixtures among them count with each of their members. Predictions run on copies of the first
    one's network.

    Args:
        posteriors: Such as `credo.load` gives for the files of several runs.

    Raises:
        DataError: They are of different architectures, likelihoods or random weights.
    """
    members: list[Posterior] = []
    for posterior in posteriors:
        if not isinstance(posterior, Posterior):
            raise DataError(
                f"merge takes posteriors, but number {len(members)} is a "
                f"{type(posterior).__name__}: load a saved one first, credo.load(path, net)"
            )
        members += posterior.members if isinstance(posterior, MixturePosterior) else [posterior]
    if not members:
        raise DataError("there is nothing to merge: give at least one posterior")
    first = members[0].model
    for k, member in enumerate(members[1:], start=1):
        _refuse_other(first, member.model, k)
        member.model = member.model.replace(net=first.net)
    merged = MixturePosterior(members)
    merged.history = members[0].history
    return merged


def _refuse_other(first: Model, other: Model, k: int) -> None:
    """Raise `DataError` unless posterior k is over the same weights under the same likelihood."""
    here, there = ({s.name: s.shape for s in model.segments} for model in (first, other))
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise DataError(
                f"posterior {k} is of another architecture: parameter {name} has shape "
                f"{there.get(name, 'none')} there and {here.get(name, 'none')} in the first. Only "
                "posteriors of one architecture can be merged; average the predictions of others"
            )
    random = [[s.name for s in model.random.segments] for model in (first, other)]
    if random[0] != random[1]:
        odd = sorted(set(random[0]) ^ set(random[1]))
        raise DataError(
            f"posterior {k} has other random weights than the first: they differ in {odd[:3]}"
        )
    kinds = [type(model.likelihood).__name__ for model in (first, other)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"posterior {k} has the likelihood {kinds[1]}, the first {kinds[0]}: they predict "
            "different things"
        )
