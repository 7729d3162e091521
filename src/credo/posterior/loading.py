"""Posteriors from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from credo import likelihoods, priors, storage
from credo.errors import DataError, FileFormatError
from credo.families import FAMILIES, Delta, unpack
from credo.model import Model
from credo.network import segments_of
from credo.network.dropout import with_dropout
from credo.posterior.distilled import DistilledPosterior, widened
from credo.posterior.dropout import DropoutPosterior
from credo.posterior.mixture import merge
from credo.posterior.posterior import Posterior
from credo.posterior.refreshed import RefreshedPosterior
from credo.storage import under
from credo.types import Json, Likelihood, Prior


def load(
    path: str | Path,
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Posterior:
    """The posterior that `Posterior.save` wrote, on a network of the same architecture.

    Args:
        path: The file.
        net: A network of that architecture; its own weights don't matter and stay as they are.
        likelihood: Needed only where it can't be stored (`FromLoss`).
        prior: In place of the stored one.

    Raises:
        FileFormatError: The file is damaged, or is a posterior of another network.
    """
    path = Path(path)
    tensors, meta = storage.read_tensors(path)
    if meta.get("kind") != "mixture":
        return _posterior(path, tensors, meta, net, likelihood, prior)
    metas = storage.require(path, meta, ("members",))[0]
    if not isinstance(metas, list) or not metas or not all(isinstance(m, dict) for m in metas):
        raise FileFormatError(f"{path} must list the members of its mixture: it is damaged")
    members = [
        _posterior(path, under(f"member.{k}.", tensors), own, net, likelihood, prior)
        for k, own in enumerate(metas)
    ]
    try:
        return merge(members)
    except DataError as error:
        raise FileFormatError(f"the members that {path} holds don't fit: {error}") from error


def _posterior(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Json,
    net: nn.Module,
    likelihood: Likelihood | None,
    prior: Prior | None,
) -> Posterior:
    """One posterior, of what a file holds of it."""
    kind, q_meta, lik, prior_meta, random, fixed, draws = storage.require(
        path, meta, ("kind", "q", "likelihood", "prior", "random", "deterministic", "draws")
    )
    if kind not in ("posterior", "dropout", "refreshed", "distilled"):
        raise FileFormatError(f"{path} holds a {kind}, not a posterior")
    head, outputs = _head_of(path, meta, net)
    if head is not None:
        net = widened(net, head, outputs)
    names = [str(name) for name, _ in random]
    chosen = frozenset(names)
    here = {s.name: list(s.shape) for s in segments_of(net)}
    for name, shape in [*random, *fixed]:
        if here.get(name) != shape:
            fault = f"has shape {tuple(here[name])} there" if name in here else "is not in it"
            raise FileFormatError(
                f"{path} is a posterior of another network: parameter {name} of shape "
                f"{tuple(shape)} {fault}. Build the network the posterior was fitted to."
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
    if kind == "refreshed":
        return _refreshed(path, posterior, tensors)
    if kind == "distilled":
        if not isinstance(q, Delta):
            raise FileFormatError(f"{path} is no distilled network: it is damaged")
        return DistilledPosterior.of(posterior, model.likelihood, head, outputs)
    return _with_dropout(path, posterior, meta) if kind == "dropout" else posterior


def _head_of(path: Path, meta: Json, net: nn.Module) -> tuple[str | None, int]:
    """The layer that a distilled network has more outputs in, and how many; None if none is."""
    head, outputs = meta.get("head"), meta.get("outputs", 0)
    if meta.get("kind") != "distilled" or head is None:
        return None, 0
    layer = dict(net.named_modules()).get(head) if isinstance(head, str) else None
    if not isinstance(layer, nn.Linear) or not isinstance(outputs, int) or not 0 < outputs < 2**20:
        raise FileFormatError(
            f"{path} is distilled from another network: it widens the nn.Linear {head!r} to "
            f"{outputs} outputs, which is not in this one. Build the network the posterior was "
            "fitted to."
        )
    return head, outputs


def _refreshed(path: Path, posterior: Posterior, tensors: Mapping[str, Tensor]) -> Posterior:
    try:
        return RefreshedPosterior.of(
            posterior, tensors.get("kept", torch.empty(0)), under("statistics.", tensors)
        )
    except DataError as error:
        raise FileFormatError(f"{path} is damaged: {error}") from error


def _with_dropout(path: Path, posterior: Posterior, meta: Json) -> Posterior:
    inserted = meta.get("inserted")
    if not isinstance(posterior.q, Delta) or not (
        inserted is None or (isinstance(inserted, float) and 0 < inserted < 1)
    ):
        raise FileFormatError(f"{path} is no posterior of MC dropout: it is damaged")
    if inserted is not None:
        posterior.model = posterior.model.replace(net=with_dropout(posterior.model.net, inserted))
    return DropoutPosterior.of(posterior, inserted)
