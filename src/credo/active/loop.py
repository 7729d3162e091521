r"""Pool-based active learning: train, ask for the labels that would help most, train again.

    q_t = fit(D_t)        A_t = argmax a(A; q_t) over A ⊂ pool, |A| = n        D_{t+1} = D_t ∪ A_t

======  ==============  =====================================================================
symbol  argument        meaning
======  ==============  =====================================================================
D_0     ``start``       how many labels to begin with, drawn uniformly, or which ones
q_t     ``method``      anything that `credo.fit` takes
a       ``acquisition`` a name, an object, or a function: see `credo.active.acquisitions`
n       ``per_round``   labels asked for at a time
======  ==============  =====================================================================

The oracle is any callable: a person, a laboratory, or for an experiment the labels themselves.

    >>> import torch, credo
    >>> from credo import active
    >>> data = credo.data.digits()
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> history = active.learn(
    ...     model, credo.MAP(lr=0.03), data.train[0], data.train[1].__getitem__, "entropy",
    ...     start=20, per_round=10, rounds=2, test_data=data.test, progress=False,
    ... )
    >>> history.curve("accuracy")[0], len(set(history.indices.tolist()))
    ([20, 30, 40], 40)

With a ``folder`` every question is written down before it is asked, and every answer before it is
used. An oracle that raises, because it failed or because its labels come tomorrow, loses nothing:
the same call asks the same question again, without training again. A killed run resumes exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from credo.active import acquisitions
from credo.active.acquisitions import Acquisition, AcquisitionSpec
from credo.active.evaluation import evaluate
from credo.active.history import History
from credo.active.record import NetworkState, Record, Shelf, fingerprint
from credo.checks import Count, Index, checked
from credo.errors import DataError
from credo.method import Method
from credo.model import Model
from credo.network.batches import as_inputs, chunks, input_rows, number_of_examples
from credo.noise import key_to_seed
from credo.posterior.posterior import Posterior
from credo.schedules import ScheduleSpec
from credo.train import fit
from credo.train.feed import check_batch
from credo.train.progress import progress_bar
from credo.types import Inputs, Json

Oracle: TypeAlias = Callable[[Any], Any]
"""Pool indices (n,), or with ``ask="inputs"`` the inputs themselves, to n labels."""

# What the seed is mixed with, so that no two uses share random numbers.
_START, _CHOICE, _WEIGHTS, _TRAINING = range(4)


@checked
def learn(
    model: Model | Callable[[], Model],
    method: Method[Any],
    pool_inputs: Inputs | Any,
    oracle: Oracle,
    acquisition: AcquisitionSpec = "bald",
    *,
    start: int | Sequence[int] = 20,
    per_round: Count = 10,
    rounds: Index = 10,
    ask: Literal["indices", "inputs"] = "indices",
    candidates: Count | None = None,
    warm_start: bool = False,
    epochs: int | Callable[[int], int] | None = None,
    batch_size: Count = 32,
    schedule: ScheduleSpec = "constant",
    keep: Literal["last", "best"] = "last",
    val_data: Any = None,
    test_data: Any = None,
    prediction_samples: Count = 64,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = True,
    progress: bool = True,
) -> History:
    """Learn from a pool of inputs whose labels have to be asked for.

    When the pool has fewer than ``per_round`` examples left they are all asked for, and the run
    ends early. A run in a ``folder`` can be prolonged by calling it with more ``rounds``.

    Args:
        model: Every round starts from the weights that its network has now. A function is called
            for a new model in each round, with torch's seed set; with ``warm_start`` once.
        method: Anything that `credo.fit` takes.
        pool_inputs: A tensor, an array, or a mapping or tuple of them.
        oracle: From pool indices (n,), or with ``ask="inputs"`` from the inputs themselves, to n
            labels.
        acquisition: What is asked for: a name, an object or a function; see
            `credo.active.acquisitions`.
        start: How many labels to begin with, drawn uniformly, or which ones.
        per_round: Labels asked for at a time.
        rounds: How often, after the start.
        ask: Whether the oracle is given "indices" or "inputs".
        candidates: Score only so many examples of the pool, drawn anew in each round.
        warm_start: Whether a round starts from the weights of the one before.
        epochs: Of each training; a function of the number of labels, such as ``lambda n: 5000 //
            n``, makes about the same number of steps whatever there is to learn from.
        batch_size: That of `credo.fit`.
        schedule: That of `credo.fit`.
        keep: That of `credo.fit`.
        val_data: That of `credo.fit`.
        test_data: Scored after each training, and only reported.
        prediction_samples: Draws of the weights by which it is scored.
        seed: Of the start, the choices and the trainings.
        folder: Where questions, answers and trainings are kept.
        resume: Whether to go on from what the folder holds.
        progress: Whether to show a progress bar.

    Returns:
        Which labels were asked for, and the scores after each round.
    """
    inputs = as_inputs(pool_inputs)
    first = _first_question(start, number_of_examples(inputs), seed)
    rule = acquisitions.find(acquisition)
    networks = _Networks(model, warm_start, seed)
    config: Json = {
        "method": method.config(),
        "acquisition": rule.config(),
        "pool": fingerprint(inputs),
        "start": first,
        "per_round": per_round,
        "candidates": candidates,
        "warm_start": warm_start,
        "epochs": "function" if callable(epochs) else epochs,
        "batch_size": batch_size,
        "seed": seed,
    }
    shelf = Shelf(folder)
    record = shelf.open(config, resume)
    networks.begin(shelf)

    def train(number: int, labels: Tensor) -> Posterior:
        chosen = input_rows(inputs, record.asked[: len(labels)])
        return fit(
            networks.of_round(number),
            method,
            (*_unpacked(chosen), labels),
            epochs=epochs(len(labels)) if callable(epochs) else epochs,
            batch_size=batch_size,
            seed=key_to_seed(seed, _TRAINING, number),
            val_data=val_data,
            folder=shelf.training(number),
            progress=False,
            schedule=schedule,
            keep=keep,
        )

    def choose(posterior: Posterior | None, number: int) -> list[int]:
        if posterior is None:
            return first
        key = key_to_seed(seed, _CHOICE, number)
        return _question(rule, posterior, inputs, record.asked, per_round, candidates, key)

    posterior: Posterior | None = None
    if record.rounds:
        # A finished training is read back from its folder, not repeated.
        posterior = train(len(record.rounds) - 1, record.answers[: record.used])
    with progress_bar(progress, rounds + 1) as bar:
        bar.show(done=len(record.rounds))
        while len(record.rounds) <= rounds:
            number = len(record.rounds)
            if record.question is None and len(record.asked) == record.used:
                record.question = choose(posterior, number) or None
                if record.question is None:
                    break
                shelf.keep(record)
            if record.question is not None:
                _ask(oracle, ask, inputs, networks.model, record, shelf)
            started = time.monotonic()
            posterior = train(number, record.answers)
            record.rounds.append(
                {
                    "round": number,
                    "labels": len(record.asked),
                    "asked": record.asked[record.used :].tolist(),
                    "scores": evaluate(posterior, test_data, prediction_samples),
                    "seconds": time.monotonic() - started,
                }
            )
            shelf.keep(record)
            shelf.drop_training(keep=number)
            bar.advance(_in_words(record.rounds[-1]))
    assert posterior is not None
    exhausted = len(record.rounds) <= rounds
    return History(record.asked, record.answers, record.rounds, posterior, exhausted)


class _Networks:
    """The network that each round trains."""

    def __init__(self, model: Model | Callable[[], Model], warm_start: bool, seed: int) -> None:
        self.factory = None if isinstance(model, Model) else model
        self.warm_start, self.seed = warm_start, seed
        self.model = model if isinstance(model, Model) else self._new(0)
        self.start: NetworkState | None = None

    def begin(self, shelf: Shelf) -> None:
        """Remember the weights to start from, or bring those of the first call back."""
        self.start = shelf.keep_start(NetworkState.of(self.model))
        self.start.write(self.model)

    def of_round(self, number: int) -> Model:
        """The network as the training of this round finds it."""
        if self.warm_start:
            return self.model
        if self.factory is not None:
            self.model = self._new(number)
        elif self.start is not None:
            self.start.write(self.model)
        return self.model

    def _new(self, number: int) -> Model:
        assert self.factory is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_to_seed(self.seed, _WEIGHTS, number))
            made = self.factory()
        if not isinstance(made, Model):
            raise DataError(f"the function must return a credo.Model, not {type(made).__name__}")
        return made


def _first_question(start: int | Sequence[int], total: int, seed: int) -> list[int]:
    if isinstance(start, int):
        if not 1 <= start <= total:
            raise DataError(f"start={start} must be between 1 and the pool's size, {total}")
        generator = torch.Generator().manual_seed(key_to_seed(seed, _START))
        return torch.randperm(total, generator=generator)[:start].tolist()
    chosen = [int(index) for index in start]
    if not chosen or len(set(chosen)) < len(chosen) or not 0 <= min(chosen) <= max(chosen) < total:
        raise DataError(
            f"start needs at least one index, each once and from 0 to {total - 1}; it was {chosen}"
        )
    return chosen


def _ask(
    oracle: Oracle,
    ask: Literal["indices", "inputs"],
    inputs: Inputs,
    model: Model,
    record: Record,
    shelf: Shelf,
) -> None:
    """Ask the question of the record, and write its answer down."""
    chosen = torch.tensor(record.question, dtype=torch.int64)
    wanted = input_rows(inputs, chosen)
    try:
        labels = _labels(oracle(chosen if ask == "indices" else wanted), len(chosen))
        like = model.like
        moved = next(chunks(wanted, len(chosen), like))
        # What training would refuse must not get into the record.
        check_batch(model, (moved, labels.to(like.device)))
        record.answer(labels)
    except BaseException as error:
        if shelf.folder is not None:
            error.add_note(
                f"The question, {len(chosen)} indices, is kept in {shelf.folder}: the same call "
                "asks it again and goes on from there."
            )
        raise
    shelf.keep(record)


def _question(
    rule: Acquisition,
    posterior: Posterior,
    inputs: Inputs,
    asked: Tensor,
    per_round: int,
    candidates: int | None,
    seed: int,
) -> list[int]:
    """Pool indices to ask for next; none if the pool is empty."""
    free = torch.ones(number_of_examples(inputs), dtype=torch.bool)
    free[asked] = False
    left = free.nonzero().flatten()
    if not len(left):
        return []
    generator = torch.Generator().manual_seed(seed)
    count = min(per_round, len(left))
    if candidates is not None and candidates < len(left):
        subset = torch.randperm(len(left), generator=generator)[: max(candidates, count)]
        left = left[subset.sort().values]
    chosen = rule.choose(posterior, input_rows(inputs, left), count, generator)
    if chosen.shape != (count,) or len(set(chosen.tolist())) < count:
        raise DataError(
            f"{rule!r} was to choose {count} different examples, but it chose {chosen.tolist()}"
        )
    return left[chosen].tolist()


def _labels(answer: Any, count: int) -> Tensor:
    """The oracle's answer as a tensor, integers as int64."""
    try:
        labels = torch.as_tensor(answer).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the oracle's answer is not an array of labels: {error}") from error
    if labels.dim() == 0 or len(labels) != count:
        raise DataError(
            f"the oracle was asked for {count} labels and gave shape {tuple(labels.shape)}"
        )
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        labels = labels.long()
    return labels


def _unpacked(inputs: Inputs) -> tuple[Any, ...]:
    """As `credo.fit` wants inputs beside their targets."""
    return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def _in_words(round_: Json) -> str:
    scores = "".join(f" · {name} {value:.4g}" for name, value in round_["scores"].items())
    return f"{round_['labels']} labels{scores}"
