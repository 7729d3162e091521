"""The posterior over a network's weights: predict, sample, save, load.

A posterior owns its tensors: the distribution q over the random weights, the point estimates of the
others, and the buffers (batch-norm statistics). It writes them into the network only while it
predicts, and puts back what was there, whatever happens in between.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor, nn

from credo import likelihoods, priors, storage
from credo.display import Display, Displayed
from credo.errors import BindingError, DataError, FileFormatError
from credo.families import FAMILIES, Delta, Family, unpack
from credo.model import Model
from credo.network import FlatParams, bind
from credo.network.batches import (
    BATCH_SIZE,
    as_inputs,
    chunks,
    inputs_alone,
    is_loader,
    like_weights,
)
from credo.network.state import evaluating
from credo.noise import Draws, source
from credo.posterior.link import Link, check_link, predictive
from credo.posterior.outputs import Linearisation, OutputGaussian
from credo.posterior.predictive import Predictive
from credo.storage import under
from credo.types import Inputs, Json, Likelihood, Prior, Vector

At: TypeAlias = Literal["samples", "mean", "linearised"]
WAYS: tuple[At, ...] = get_args(At)


class Posterior(Displayed):
    """A model with a distribution over its weights.

    ``mean`` is the flat mean (P,); ``sample(n)`` flat draws (n, P); ``predict(x)`` a `Predictive`.
    ``predicts`` is how ``predict`` works unless it is told: by drawn weights, but for Laplace's
    approximation, which holds for the linearised network.
    """

    predicts: At = "samples"

    def __init__(
        self,
        model: Model,
        q: Family,
        point: Vector,
        buffers: Mapping[str, Tensor],
        draws: Draws = "table",
    ) -> None:
        self.model, self.q, self.draws = model, q, draws
        self.point, self.buffers = point, dict(buffers)
        self.history: list[Json] = []

    @classmethod
    def at_network(cls, model: Model, q: Family, draws: Draws = "table") -> Posterior:
        """q with the point parameters, buffers and learned noise that the network has now."""
        owned = Model(model.net, copy.deepcopy(model.likelihood), model.prior, model.selector)
        buffers = {name: b.detach().clone() for name, b in model.net.named_buffers()}
        return cls(owned, q, model.deterministic.read(model.flat.vector), buffers, draws)

    @property
    def mean(self) -> Vector:
        """E_q[w], (P,)."""
        return self.q.mean

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Weights drawn from q, (n, P)."""
        return self.q.sample(n, generator)

    def predict(
        self,
        x: Inputs | Any,
        samples: int = 64,
        batch_size: int | None = None,
        generator: Generator | None = None,
        *,
        at: At | None = None,
        link: Link | None = None,
        keep_samples: bool = True,
    ) -> Predictive:
        """The predictive distribution at ``x``: a tensor, an array, or a loader of batches.

        Repeatable: without a ``generator`` the same weights are drawn every time. ``at`` is
        "samples", "mean" or "linearised", and ``predicts`` if it isn't given.

        ``at="samples"`` draws the weights once per sample and passes the inputs in batches, so
        memory is that of one batch plus the result, (S, B, ...); ``keep_samples=False`` keeps only
        averages over the samples, (B, ...), whatever S is. ``at="mean"`` runs the network once, at
        q's mean. A loader's batches may be inputs alone or (inputs, targets).

        ``at="linearised"`` makes the network linear in its weights around q's mean, so that a
        Gaussian q makes its outputs Gaussian (see `credo.posterior.outputs`): exact for a
        Gaussian likelihood; else ``samples`` draws of the outputs, or with ``link="probit"`` a
        formula.

        >>> import torch, credo
        >>> net = torch.nn.Linear(2, 3)
        >>> model = credo.Model(net, credo.likelihoods.Categorical())
        >>> data = torch.randn(30, 2), torch.randint(3, (30,))
        >>> posterior = credo.fit(model, credo.VI(lr=0.1), data, epochs=5, progress=False)
        >>> posterior.predict(data[0], samples=16).outputs.shape
        torch.Size([16, 30, 3])
        """
        if samples < 1:
            raise DataError(f"samples={samples} must be at least 1")
        at = at or self.predicts
        if at not in WAYS:
            raise DataError(f'at={at!r} must be "samples", "mean" or "linearised"')
        if link is not None and at != "linearised":
            raise DataError(f'link={link!r} is for at="linearised", not for at={at!r}')
        drawn = Delta(self.q.mean) if at == "mean" else self.q
        seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
        with self.in_network() as flat:
            if at == "linearised":
                check_link(link, self.model.likelihood)
                outputs = self._linearised(flat, x, batch_size)
                return predictive(outputs, self.model.likelihood, link, samples, seed, keep_samples)
            if is_loader(x):
                parts = [
                    self._predict(flat, drawn, inputs_alone(b), samples, None, seed, keep_samples)
                    for b in x
                ]
                if not parts:
                    raise DataError("the loader yields no batches: there is nothing to predict")
                return Predictive.concatenate(parts)
            return self._predict(flat, drawn, as_inputs(x), samples, batch_size, seed, keep_samples)

    @contextmanager
    def in_network(self) -> Iterator[FlatParams]:
        """The network in eval mode with this posterior's point parameters and buffers.

        On leaving, its weights, buffers and modes are what they were.
        """
        flat = self.model.flat
        self._follow(flat)
        before = flat.vector.clone()
        live = dict(self.model.net.named_buffers())
        buffers_before = {name: live[name].clone() for name in self.buffers if name in live}
        try:
            with torch.no_grad():
                for name in buffers_before:
                    live[name].copy_(self.buffers[name])
            with flat.writing() as vector:
                self.model.random.write(vector, self.q.mean)
                self.model.deterministic.write(vector, self.point)
            with evaluating(self.model.net):
                yield flat
        finally:
            with torch.no_grad():
                for name, value in buffers_before.items():
                    live[name].copy_(value)
            with flat.writing() as vector:
                vector.copy_(before)

    def save(self, path: str | Path) -> None:
        """Write q, point parameters, buffers and configuration to one safetensors file."""
        q_tensors, q_meta = self.q.pack()
        tensors = {f"q.{name}": tensor for name, tensor in q_tensors.items()}
        tensors["point"] = self.point
        tensors |= {f"buffer.{name}": tensor for name, tensor in self.buffers.items()}
        prior_meta: Json | None = None
        if isinstance(self.model.prior, Family):
            prior_tensors, prior_meta = self.model.prior.pack()
            tensors |= {f"prior.{name}": tensor for name, tensor in prior_tensors.items()}
        random, fixed = self.model.random, self.model.deterministic
        meta = {
            "kind": "posterior",
            "version": 1,
            "q": q_meta,
            "draws": self.draws,
            "predicts": self.predicts,
            "likelihood": self.model.likelihood.config(),
            "prior": prior_meta or self.model.prior.config(),
            "random": [[s.name, list(s.shape)] for s in random.segments],
            "deterministic": [[s.name, list(s.shape)] for s in fixed.segments],
        }
        storage.write_tensors(Path(path), tensors, meta)

    def _display(self) -> Display:
        model, last = self.model, self.history[-1] if self.history else {}
        net, likelihood = type(model.net).__name__, type(model.likelihood).__name__
        family = type(self.q).__name__
        return Display(
            f"{type(self).__name__}: {family} over {self.q.size:,} weights of {net}, "
            f"{likelihood} likelihood",
            'pred = posterior.predict(x); posterior.save("p.safetensors")',
            rows=[
                ("distribution", family, f"over {self.q.size:,} weights of {net}"),
                ("points", f"{self.point.numel():,}", "other weights, without a distribution"),
                ("likelihood", likelihood, "how targets follow from outputs"),
                ("prior", type(model.prior).__name__, "what was believed of the weights"),
                ("predicts by", self.predicts, "unless predict(at=…) says otherwise"),
                *(
                    (name, f"{last[name]:.4g}", "in the last epoch")
                    for name in last
                    if isinstance(last[name], int | float)
                ),
            ],
        )

    def _predict(
        self,
        flat: FlatParams,
        q: Family,
        inputs: Inputs,
        samples: int,
        batch_size: int | None,
        seed: int,
        keep_samples: bool,
    ) -> Predictive:
        parts = list(chunks(like_weights(inputs, flat.vector), batch_size or BATCH_SIZE))
        stream = (self._forward(parts) for _ in self._weights_in_place(flat, q, samples, seed))
        with torch.no_grad():
            if keep_samples:
                return Predictive(torch.stack(list(stream)), self.model.likelihood)
            return Predictive.from_stream(stream, self.model.likelihood)

    def _linearised(self, flat: FlatParams, x: Any, batch_size: int | None) -> OutputGaussian:
        linear = Linearisation(self.model, flat, self.q)
        parts = []
        for batch in (inputs_alone(b) for b in x) if is_loader(x) else (as_inputs(x),):
            inputs = like_weights(batch, flat.vector)
            size = batch_size or linear.batch_size(inputs)
            parts += [linear.at(chunk) for chunk in chunks(inputs, size)]
        if not parts:
            raise DataError("the loader yields no batches: there is nothing to predict")
        return OutputGaussian.concatenate(parts)

    def _weights_in_place(
        self, flat: FlatParams, q: Family, samples: int, seed: int
    ) -> Iterator[None]:
        """Put one draw after the other into the network."""
        random = self.model.random
        # With one run a draw can be written where it will be read; `writing` then only tells torch.
        out = random.view(flat.vector) if random.is_one_run else torch.empty_like(q.mean)
        for weights in q.walk(samples, source(self.draws, seed), out):
            with flat.writing() as vector:
                random.write(vector, weights)
            yield

    def _forward(self, parts: list[Inputs]) -> Tensor:
        pieces = [self.model.outputs(part) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _follow(self, flat: FlatParams) -> None:
        """Move to where the network is now, if it was moved or re-typed after training."""
        if self.q.size != self.model.random.size:
            raise BindingError(
                f"this posterior is over {self.q.size} weights, but the network now has "
                f"{self.model.random.size} random ones: layers were added, removed or frozen. "
                "Fit again, or undo the change."
            )
        if (self.q.mean.dtype, self.q.mean.device) == (flat.vector.dtype, flat.vector.device):
            return
        self.q = self.q.on(self.model.random.segments, flat.vector)
        self.point = self.point.to(flat.vector)
        if isinstance(self.model.likelihood, nn.Module):
            self.model.likelihood.to(flat.vector.device, flat.vector.dtype)


def load(
    path: str | Path,
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Posterior:
    """The posterior that `Posterior.save` wrote, on a network of the same architecture.

    The network's own weights don't matter and stay as they are. ``likelihood`` is needed only where
    it can't be stored (`FromLoss`).
    """
    path = Path(path)
    tensors, meta = storage.read_tensors(path)
    kind, q_meta, lik, prior_meta, random, fixed, draws = storage.require(
        path, meta, ("kind", "q", "likelihood", "prior", "random", "deterministic", "draws")
    )
    if kind != "posterior":
        raise FileFormatError(f"{path} holds a {kind}, not a posterior")
    names = [str(name) for name, _ in random]
    chosen = frozenset(names)
    flat = bind(net)
    here = {s.name: list(s.shape) for s in flat.segments}
    for name, shape in [*random, *fixed]:
        if here.get(name) != shape:
            found = f"has shape {tuple(here[name])} there" if name in here else "is not in it"
            raise FileFormatError(
                f"{path} is a posterior of another network: parameter {name} of shape "
                f"{tuple(shape)} {found}. Build the network the posterior was fitted to."
            )
    if prior is None and prior_meta.get("type") in FAMILIES:
        prior = unpack(under("prior.", tensors), prior_meta)
    model = Model(
        net,
        likelihood or likelihoods.from_config(lik),
        prior or priors.from_config(prior_meta),
        random=lambda segment: segment.name in chosen,
    )
    q = unpack(under("q.", tensors), q_meta)
    point = tensors.get("point", torch.empty(0))
    if q.size != model.random.size or point.numel() != model.deterministic.size:
        raise FileFormatError(
            f"{path} promises {model.random.size} random and {model.deterministic.size} other "
            f"parameters but holds {q.size} and {point.numel()}: it is damaged"
        )
    buffers = under("buffer.", tensors)
    live = dict(net.named_buffers())
    for name, buffer in buffers.items():
        if name in live and live[name].shape != buffer.shape:
            raise FileFormatError(
                f"{path}: buffer {name} has shape {tuple(buffer.shape)}, the network's "
                f"{tuple(live[name].shape)}"
            )
    posterior = Posterior(model, q, point, buffers, draws)
    posterior.predicts = meta.get("predicts", Posterior.predicts)
    return posterior
