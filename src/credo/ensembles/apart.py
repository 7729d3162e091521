"""Members in processes of their own: each is a whole run of `credo.fit` in a worker.

A run there is not made of steps that this process could take, so that `credo.fit` hands it over as
a whole (`Method.whole_run`). Member k is the run that it is in one process: from the same weights,
with ``order_seed(seed, k)``. Only what a network draws from torch's own generator, such as masks of
dropout, is another draw, because members in one process share that generator.

<folder>/member-<k>/    the run of member k, as `credo.fit` keeps it, and the posterior it ended in

A member whose loss is not a number, or whose worker dies twice, is named and left out.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import joblib
import torch
from torch import Tensor

from credo import storage, workers
from credo.collectives import Ranks
from credo.errors import CheckpointError, NonFiniteError, UnsupportedError
from credo.method import Method
from credo.model import Model
from credo.posterior.loading import load
from credo.posterior.mixture import merge
from credo.posterior.posterior import Posterior
from credo.train.feed import order_seed
from credo.train.folder import RunFolder
from credo.types import Json, Likelihood

POSTERIOR, NOISE = "posterior.safetensors", "noise.safetensors"

Fit = Callable[..., Posterior]
"""`credo.fit`."""


@final
@dataclass(frozen=True)
class Ended:
    """How a member's run ended in its worker.

    Args:
        said: The texts of its warnings.
        diverged: What there is to say of a loss that is not a number.
        error: Any other error: what one process would have raised.
    """

    said: Sequence[str] = ()
    diverged: str | None = None
    error: Exception | None = None


def fit_apart(
    fit: Fit,
    method: Method[Any],
    models: Sequence[Model],
    train_data: Any,
    jobs: int,
    engine: workers.EngineName,
    arguments: Mapping[str, Any],
) -> Posterior:
    """Train every model by the method in a worker, and mix what they end in.

    Args:
        fit: `credo.fit`.
        method: That of a member.
        models: The members', each at its start; the first one's network is left at its mean.
        train_data: As `credo.fit` takes it.
        jobs: Workers at a time.
        engine: Where they run.
        arguments: The others of `credo.fit`.
    """
    _refuse_ranks()
    options = dict(arguments)
    seed, folder = options.pop("seed"), options.pop("folder")
    options.pop("progress")  # bars of several processes would write over each other
    threads = max(1, min(torch.get_num_threads(), joblib.cpu_count() // jobs))
    data, sent = _as_arrays(train_data), [_for_sending(model) for model in models]
    with _root(folder) as root:
        places = [root / f"member-{k}" for k in range(len(models))]
        for place in places:
            (place / POSTERIOR).unlink(missing_ok=True)  # it is there once this call wrote it
        calls = [
            joblib.delayed(_train)(
                fit, model, method, data, order_seed(seed, k), place, threads, options
            )
            for k, (model, place) in enumerate(zip(sent, places, strict=True))
        ]
        ended = _run(calls, places, jobs, engine)
        kept = [k for k, each in enumerate(ended) if _is_kept(k, each)]
        if not kept:
            raise NonFiniteError(
                f"all {len(models)} members of the ensemble were lost; the warnings say how"
            )
        found = [_read(models[k], places[k], models[0]) for k in kept]
        records = [RunFolder(places[k]).records_before(2**62) for k in kept]
    merged = merge(found)
    _leave_at(models[0], merged, found[0])
    merged.history = _mean_history(records)
    return merged


def _train(
    fit: Fit,
    model: Model,
    method: Method[Any],
    data: Any,
    seed: int,
    place: Path,
    threads: int,
    options: Mapping[str, Any],
) -> Ended:
    """One member, in its worker. Errors are returned: what is raised there is the engine's."""
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            posterior = fit(model, method, data, seed=seed, folder=place, progress=False, **options)
            noise = posterior.model.noise_parameters()
            storage.write_tensors(
                place / NOISE, {str(i): p.detach() for i, p in enumerate(noise)}, {"kind": "noise"}
            )
            posterior.save(place / POSTERIOR)
        except NonFiniteError as error:
            return Ended(diverged=str(error))
        except Exception as error:
            return Ended(error=error)
    return Ended([str(each.message) for each in said if each.category is UserWarning])


def _run(
    calls: Sequence[Any], places: Sequence[Path], jobs: int, engine: workers.EngineName
) -> list[Ended]:
    """The end of every call; where a worker died, what it left undone is tried once more alone."""
    with workers.start(engine, jobs, isolated=True) as pool:
        try:
            return list(pool(calls, jobs))
        except Exception as error:
            _refuse_what_can_not_be_sent(error)
        ended = []
        for call, place in zip(calls, places, strict=True):
            if (place / POSTERIOR).exists():
                ended.append(Ended())
                continue
            try:
                ended += pool([call], 1)
            except Exception as again:
                ended.append(
                    Ended(diverged="its worker process died, and another one when it was tried "
                          f"again by itself, perhaps for want of memory ({again})")
                )  # fmt: skip
        return ended


def _is_kept(k: int, ended: Ended) -> bool:
    if ended.error is not None:
        ended.error.add_note(f"This was raised by member {k} of the ensemble, in its worker.")
        raise ended.error
    for text in ended.said:
        warnings.warn(f"member {k} of the ensemble: {text}", stacklevel=6)
    if ended.diverged is not None:
        warnings.warn(
            f"member {k} of the ensemble is lost and left out; the others go on. {ended.diverged}",
            stacklevel=6,
        )
    return ended.diverged is None


def _read(model: Model, place: Path, first: Model) -> Posterior:
    """What a worker wrote, as a posterior over the first member's network."""
    if not (place / POSTERIOR).exists():
        raise CheckpointError(
            f"a worker trained a member but {place / POSTERIOR} is not here: give credo.fit a "
            "folder that all machines share"
        )
    likelihood: Likelihood = copy.deepcopy(model.likelihood)
    posterior = load(place / POSTERIOR, first.net, likelihood=likelihood, prior=model.prior)
    noise, _ = storage.read_tensors(place / NOISE)
    posterior.model = first.replace(net=posterior.model.net, likelihood=likelihood)
    with torch.no_grad():
        for i, parameter in enumerate(posterior.model.noise_parameters()):
            parameter.copy_(noise[str(i)])
    return posterior


def _leave_at(model: Model, merged: Posterior, first: Posterior) -> None:
    """The user's network and likelihood at the first member's mean, as `credo.fit` leaves them."""
    flat, random, fixed = model.bind(), model.random, model.deterministic
    with flat.writing() as vector:
        random.write(vector, merged.centre.to(vector))
        if fixed.size:
            fixed.write(vector, first.point.to(vector))
    with torch.no_grad():
        for name, buffer in model.buffers().items():
            buffer.copy_(first.buffers[name])
        pairs = zip(model.noise_parameters(), first.model.noise_parameters(), strict=True)
        for ours, theirs in pairs:
            ours.copy_(theirs)


def _mean_history(each: Sequence[Sequence[Json]]) -> list[Json]:
    """The members' records, averaged epoch by epoch, for as many as all of them have."""
    history = []
    for records in zip(*each, strict=False):
        history.append(
            {
                name: statistics.fmean(float(record[name]) for record in records)
                if isinstance(value, float) or name == "seconds"
                else value
                for name, value in records[0].items()
                if isinstance(value, int | float)
                and all(math.isfinite(record.get(name, math.nan)) for record in records)
            }
            | {"members": len(records), "together": False}
        )
    return history


def _for_sending(model: Model) -> Model:
    """The model on a network whose parameters are no views: each would bring the whole buffer."""
    return model.replace(net=copy.deepcopy(model.net), likelihood=copy.deepcopy(model.likelihood))


def _as_arrays(data: Any) -> Any:
    """Tensors as arrays, which workers of this machine read from one file."""
    if isinstance(data, Tensor):
        plain = data.device.type == "cpu" and data.dtype is not torch.bfloat16
        return data.detach().numpy() if plain else data
    if type(data) in (tuple, list):
        return type(data)(_as_arrays(part) for part in data)
    if type(data) is dict:
        return {name: _as_arrays(part) for name, part in data.items()}
    return data


def _refuse_ranks() -> None:
    ranks = Ranks()
    if ranks.several:
        raise UnsupportedError(
            f"Ensemble(jobs=…) starts processes of its own, but there are {ranks.size} ranks "
            "already: leave jobs out, and each of them trains some of the members"
        )


def _refuse_what_can_not_be_sent(error: Exception) -> None:
    # Engines wrap it in errors of their own, of which this name is what they share.
    if "pickl" in f"{type(error).__name__}{error}".lower():
        raise UnsupportedError(
            f"the model, method or data can't be sent to a worker process ({error}): leave "
            "jobs=None, or define what it is made of at the top of a module"
        ) from error


@contextmanager
def _root(folder: str | Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory() as path:
            yield Path(path)
        return
    root = Path(folder)
    if (root / "config.json").exists():
        raise CheckpointError(
            f"{root} holds a run whose members were trained in one process: go on without jobs, "
            "or use another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    yield root
