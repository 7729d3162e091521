"""The one training loop.

On several ranks, which `torchrun` starts, every rank runs it: on its own part of each minibatch,
with the same steps and the same records. What must happen on all of them at once (a checkpoint in
the middle of an epoch, the end after Ctrl-C) is agreed upon after each step. The first rank alone
writes the folder; all of them read it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from torch import Tensor

from credo.checks import Count, Index, Remedy, checked
from credo.collectives import Ranks
from credo.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    RankError,
    UnsupportedError,
)
from credo.families import Delta
from credo.method import Info, Method
from credo.metrics import accuracy
from credo.model import Model
from credo.network.batches import BatchStack, to_device
from credo.noise import key_to_seed
from credo.packing import as_json
from credo.posterior.posterior import Posterior
from credo.schedules import ScheduleSpec
from credo.storage import under
from credo.train import alike
from credo.train.feed import Feed, Passes, make_feed
from credo.train.folder import RunFolder
from credo.train.progress import Reporter, reporter
from credo.train.rates import Rates
from credo.train.start import Start
from credo.types import Batch, Json

SECONDS_BETWEEN_CHECKPOINTS = 10.0
VALIDATION_SAMPLES = 16


def _how_to_make_a_model(given: object) -> str:
    if isinstance(given, torch.nn.Module):
        return "Wrap the network: credo.Model(net, credo.likelihoods.Categorical())"
    return "It is made of a network and a likelihood: credo.Model(net, likelihood)"


def _how_to_make_a_method(given: object) -> str:
    if isinstance(given, type) and issubclass(given, Method):
        return f"Call it: {given.__name__}()"
    return "Such are credo.MAP(), credo.VI() and credo.Laplace()"


@checked
def fit(
    model: Annotated[Model, Remedy(_how_to_make_a_model)],
    method: Annotated[Method[Any], Remedy(_how_to_make_a_method)],
    train_data: Any,
    epochs: Index | None = None,
    batch_size: Count = 128,
    seed: int = 0,
    val_data: Any = None,
    folder: str | Path | None = None,
    resume: bool = True,
    device: str | torch.device | None = None,
    progress: bool | Reporter = True,
    *,
    num_data: Count | None = None,
    schedule: ScheduleSpec = "constant",
    keep: Literal["last", "best"] = "last",
) -> Posterior:
    """Train ``model`` by ``method`` and return the posterior.

    Training starts from the network's current weights and leaves it at the posterior mean. With a
    ``folder`` the run can be killed at any moment and called again: it resumes bit for bit from its
    last checkpoint (with a DataLoader of your own, from the last epoch boundary), and a finished
    run is not repeated. Ctrl-C stops after the current step with a checkpoint.

    Under ``torchrun``, after ``init_process_group``, all ranks make the same call and train one
    network together: each takes its part of every minibatch, the step is that of the whole, and
    every rank returns the same posterior. The network starts as the first rank has it. A run may be
    resumed on another number of ranks by the same call.

    Args:
        model: A `credo.Model`: network, likelihood and prior.
        method: How to train it: `credo.MAP`, `credo.VI`, `credo.Laplace`, ….
        train_data: A tuple (inputs, targets) of tensors or arrays, a Dataset, or a DataLoader.
        epochs: Passes over the data; None is the method's default.
        batch_size: Examples in a minibatch, on each rank where there are several. Methods whose
            step takes all data (`credo.HMC`) get them whole, whatever it says; a DataLoader has its
            own.
        seed: Of the order of the data and of all noise.
        val_data: Scored after each epoch.
        folder: Where the run is kept.
        resume: Whether to go on from what the folder has.
        device: Where to move network and likelihood first.
        progress: A bar, silence, or a reporter of your own; of several ranks the first has it.
        num_data: Training examples, where the data does not know its own length.
        schedule: How the learning rates change on the way: "cosine", "linear", a function of the
            fraction of training done, one of `credo.schedules`, or a mapping from "mean" and
            "scale" to such.
        keep: "best" returns the epoch with the lowest ``val_nll``: early stopping without having
            to say when.

    Returns:
        The posterior; the records of all epochs are its ``history``.

    Raises:
        DataError: An argument or the data can't be meant.
        NonFiniteError: The loss is not a number; the last good checkpoint is kept.
        CheckpointError: The folder holds another run, or one of another version of Credo.
        RankError: A rank died, or differs from the others in what must be the same.
    """
    if method.takes_over:
        return method.whole_run(
            fit, model, train_data, epochs=epochs, batch_size=batch_size, seed=seed,
            val_data=val_data, folder=folder, resume=resume, device=device, progress=progress,
            num_data=num_data, schedule=schedule, keep=keep,
        )  # fmt: skip
    ranks = Ranks()
    if ranks.several and not method.spreads:
        raise UnsupportedError(
            f"{type(method).__name__} can't be trained by {ranks.size} ranks together: start it in "
            "one process, without torchrun, or take a method that can, such as credo.MAP, "
            "credo.VI, credo.IVON, credo.VOGN and credo.Laplace"
        )
    if device is not None:
        model.net.to(device)
        if isinstance(model.likelihood, torch.nn.Module):
            model.likelihood.to(device)
    run_folder = None if folder is None else RunFolder(folder)
    sharers = ranks if method.splits_batches else Ranks(alone=True)
    size = batch_size * sharers.size
    if run_folder is not None and resume and method.splits_batches:
        size = run_folder.batch_size(batch_size, ranks.size)
    feed = make_feed(train_data, size, model, num_data, method.needs_all_data, sharers)
    feed.check(model)
    if method.resamples and not feed.exact:
        raise DataError(
            f"{type(method).__name__} draws examples with replacement, which a DataLoader's order "
            "does not allow: give credo.fit the dataset itself, or bootstrap=False"
        )
    epochs = method.default_epochs if epochs is None else epochs
    if keep == "best" and val_data is None:
        raise DataError('keep="best" chooses an epoch by its NLL on val_data, and there is none')
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        reporter(progress if ranks.rank == 0 else False, epochs, feed.num_batches) as report,
    ):
        torch.manual_seed(key_to_seed(seed, 2))
        if ranks.several:
            alike.begin(ranks, model, feed)
        run = _Run(model, method, feed, ranks, epochs, seed, val_data, report, schedule, keep)
        run.batch_size = batch_size
        if run_folder is not None:
            run.attach(run_folder, resume)
        return run.to_the_end()


@final
@dataclass
class _Best:
    """The lowest validation NLL so far and the state that had it."""

    nll: float = math.inf
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Json = field(default_factory=dict)


@final
class _Run:
    """The state of one call of `fit`: what was done, and what is on disk."""

    def __init__(
        self,
        model: Model,
        method: Method[Any],
        feed: Feed,
        ranks: Ranks,
        epochs: int,
        seed: int,
        val_data: Any,
        report: Reporter,
        schedule: ScheduleSpec,
        keep: Literal["last", "best"],
    ) -> None:
        self.model, self.method, self.feed, self.epochs, self.seed = (
            model, method, feed, epochs, seed
        )  # fmt: skip
        self.ranks, self.batch_size = ranks, 0
        self.val_data, self.report = val_data, report
        self.state = method.init(model, feed.num_data, torch.Generator().manual_seed(seed))
        self.state.clock.num_batches, self.state.clock.epochs = feed.num_batches, epochs
        self.schedule = schedule
        self.rates = Rates(schedule, method.optimizer_of(self.state))
        self.epoch, self.batch, self.seconds = 0, 0, 0.0
        self.sums: dict[str, float] = {"nll": 0.0}
        self.history: list[Json] = []
        self.keep, self.best = keep, _Best()
        self.folder: RunFolder | None = None
        self.start = Start(feed.num_batches) if method.looks_at_start else None
        self.saved_at = time.monotonic()
        if self.rates.watching:
            validated = {} if val_data is None else {"val_nll": 0.0, "val_accuracy": 0.0}
            self.rates.check(self._numbers({"nll": 0.0}) | validated)

    def attach(self, folder: RunFolder, resume: bool) -> None:
        """Keep checkpoints in this folder, starting from the one it has."""
        self.folder = folder
        config = self._config()
        goes_on = resume and folder.holds(config)
        if self.ranks.several:
            alike.refuse_other_settings(self.ranks, config, goes_on, self.model.like.device)
        if goes_on:
            self._restore(*folder.restore())
            self.start = None
            self.history = folder.records_before(self.epoch)
            if self.ranks.rank == 0:
                folder.keep_records(self.history)
            if self.keep == "best" and self.history:
                self.best = _Best(min(r["val_nll"] for r in self.history), *folder.best())
        else:
            if self.ranks.rank == 0:
                folder.begin(config)
            self.checkpoint()

    def to_the_end(self) -> Posterior:
        """All remaining epochs, then the posterior."""
        try:
            with _gentle_interrupt() as interrupted:
                while self.epoch < self.epochs:
                    self._one_epoch(interrupted)
            self.checkpoint()
            if self.best.tensors:
                self._restore_state(self.best.tensors, self.best.meta)
            batches = Passes(lambda: self.feed.own_batches(self.seed, 0))
            self.state = self.method.finish(self.state, batches)
        except (NonFiniteError, RankError) as error:
            if self.folder is not None:
                error.add_note(f"The last good state is in {self.folder.state_path}.")
            raise
        finally:
            # Whatever happened, the network is left at the mean and not at a sample.
            posterior: Posterior = self.method.posterior(self.state)
        posterior.history = self.history
        return posterior

    def _one_epoch(self, interrupted: threading.Event) -> None:
        self.model.net.train()
        device = self.model.like.device
        started = time.monotonic()
        for batch in self._batches(device):
            if not self.rates.constant:
                self.rates.set(self.epoch + self.batch / self.feed.num_batches, self.epochs)
            if self.ranks.several:
                self._prepare_rank(len(batch[-1]))
            self.state, info = self.method.update(self.state, batch)
            self._add(info)
            if self.start is not None and self.start.is_over(info.nll):
                self._look_at_start()
            self.report.step(self.epoch, self.batch, self.sums["nll"] / self.batch)
            stop, due = self._agreed(interrupted.is_set(), self.feed.exact and self._is_due())
            if stop:
                self._stop()
            if due:
                self.checkpoint()
        if not self.batch:
            raise DataError("the training data yielded no batches")
        self.seconds += time.monotonic() - started
        if self.ranks.several:
            self._make_alike()
        self._record()
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, {"nll": 0.0}
        if self._agreed(not self.feed.exact or self._is_due())[0]:
            self.checkpoint()

    def _batches(self, device: torch.device) -> Iterator[Any]:
        """What is left of the epoch, as the method takes it."""
        feed, orders = self.feed, self.method.orders
        # A loader's order is its own, and reading it once for each order would multiply its price.
        if feed.exact and (orders > 1 or self.method.resamples):
            several = feed.in_orders(
                orders, self.method.resamples, self.seed, self.epoch, self.batch
            )
            return (_orders_to_device(batches, device) for batches in several)
        return (to_device(b, device) for b in feed.batches(self.seed, self.epoch, self.batch))

    def _look_at_start(self) -> None:
        start, self.start = self.start, None
        if start is not None and self.ranks.rank == 0:
            start.look(self.method, self.state, self.model, self.feed, self.seed)

    def _prepare_rank(self, examples: int) -> None:
        """What counts for the next step here, and random numbers (of dropout) of this rank's own.

        Being a function of the step they need not be stored for each rank.
        """
        clock = self.state.clock
        clock.weight = 0.0 if self.feed.stands_in(self.batch) else float(examples)
        torch.manual_seed(key_to_seed(self.seed, 2, clock.step, self.ranks.rank))

    def _make_alike(self) -> None:
        self.method.meet(self.state)
        stored = self.method.pack(self.state)[0].values()
        alike.refuse_other_states(self.ranks, stored, self.model.like.device)
        if self.method.splits_batches:
            alike.average_buffers(self.ranks, self.model)

    def _is_due(self) -> bool:
        return time.monotonic() - self.saved_at > SECONDS_BETWEEN_CHECKPOINTS

    def _agreed(self, *wishes: bool) -> tuple[bool, ...]:
        """Of each wish, whether some rank has it: the same answer on every rank."""
        if not self.ranks.several:
            return wishes
        table = self.ranks.gather([int(wish) for wish in wishes], self.model.like.device)
        return tuple(any(column) for column in zip(*table, strict=True))

    def _add(self, info: Info) -> None:
        """Count one batch towards the epoch's means."""
        self.batch += 1
        self.sums["nll"] += info.nll
        for name, value in info.extra.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def _numbers(self, means: Json) -> Json:
        """What is known of the state, given the means over the epoch's batches."""
        return {
            "epoch": self.epoch,
            "step": self.state.clock.step,
            **means,
            **self.method.summary(self.state, means["nll"]),
            "seconds": self.seconds,
            **self.rates.summary(),
        }

    def _record(self) -> None:
        record = self._numbers({name: total / self.batch for name, total in self.sums.items()})
        if self.val_data is not None:
            record |= self._validate()
        self.rates.learn(record)
        self.history.append(record)
        if self.keep == "best" and record["val_nll"] < self.best.nll:
            self._remember(record["val_nll"])
        if self.folder is not None and self.ranks.rank == 0:
            self.folder.append(record)
        self.report.epoch(record)

    def _validate(self) -> Json:
        posterior: Posterior = self.method.posterior(self.state)
        feed = make_feed(self.val_data, 1024, self.model, ranks=self.ranks)
        # A point has nothing to average over.
        samples = 1 if isinstance(posterior.q, Delta) else VALIDATION_SAMPLES
        likelihood = self.model.likelihood
        classifies, ignored = likelihood.kind == "classification", likelihood.ignore_index
        log_prob, examples, correct, labels = 0.0, 0, 0.0, 0
        for inputs, targets in feed.own_batches(self.seed, 0):
            predictive = posterior.predict(inputs, samples=samples)
            log_probs = predictive.log_prob(targets.to(predictive.outputs.device))
            log_prob += float(log_probs.double().sum())
            examples += len(log_probs)
            if classifies:
                count = targets.numel() if ignored is None else int((targets != ignored).sum())
                correct += accuracy(predictive.probs, targets, ignored) * count if count else 0.0
                labels += count
        device = self.model.like.device
        sums = torch.tensor([log_prob, examples, correct, labels], dtype=torch.float64)
        sums = sums.to(device) if self.ranks.several else sums
        self.ranks.sum_([sums])
        log_prob, examples, correct, labels = sums.tolist()
        scores = {"val_nll": -log_prob / examples}
        if classifies:
            scores["val_accuracy"] = correct / labels
        return scores

    def _stop(self) -> None:
        if self.folder is None:
            raise KeyboardInterrupt
        if self.feed.exact:
            self.checkpoint()
        raise KeyboardInterrupt(f"stopped; call fit again with folder={str(self.folder.path)!r}")

    def checkpoint(self) -> None:
        """Write everything that resuming needs, if there is a folder."""
        if self.folder is None:
            return
        if self.ranks.several:
            self._make_alike()
        self.saved_at = time.monotonic()
        if self.ranks.rank:
            return
        tensors, meta = self._pack_state()
        tensors["torch_rng"] = torch.get_rng_state()
        place: Json = {"epoch": self.epoch, "batch": self.batch, "sums": self.sums}
        place |= {"seconds": self.seconds, "rates": self.rates.pack()}
        self.folder.checkpoint(tensors, {**place, "method": meta})

    def _remember(self, nll: float) -> None:
        tensors, meta = self._pack_state()
        self.best = _Best(nll, {name: t.detach().clone() for name, t in tensors.items()}, meta)
        if self.folder is not None and self.ranks.rank == 0:
            self.folder.keep_best(self.best.tensors, meta)

    def _pack_state(self) -> tuple[dict[str, Tensor], Json]:
        own, meta = self.method.pack(self.state)
        tensors: dict[str, Tensor] = {f"method.{name}": tensor for name, tensor in own.items()}
        tensors |= {f"buffer.{name}": b for name, b in self.model.buffers().items()}
        tensors |= {f"noise.{index}": p for index, p in enumerate(self.model.noise_parameters())}
        return tensors, meta

    def _restore_state(self, tensors: dict[str, Tensor], meta: Json) -> None:
        self.state = self.method.unpack(self.state, under("method.", tensors), meta)
        with torch.no_grad():
            for name, buffer in self.model.buffers().items():
                buffer.copy_(tensors[f"buffer.{name}"])
            for index, parameter in enumerate(self.model.noise_parameters()):
                parameter.copy_(tensors[f"noise.{index}"])

    def _restore(self, tensors: dict[str, Tensor], meta: Json) -> None:
        try:
            self._restore_state(tensors, meta["method"])
            torch.set_rng_state(tensors["torch_rng"])
            self.epoch, self.batch = meta["epoch"], meta["batch"]
            self.sums, self.seconds = meta["sums"], meta["seconds"]
            self.rates.unpack(meta["rates"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this model and method ({error}); use another folder, "
                "or resume=False to start anew"
            ) from error

    def _config(self) -> Json:
        changing = self.schedule != "constant"
        return {
            **({"schedule": as_json(self.schedule)} if changing else {}),
            **({"epochs": self.epochs} if changing or self.method.plans else {}),
            **({} if self.keep == "last" else {"keep": self.keep}),
            "method": self.method.config(),
            "likelihood": {"type": type(self.model.likelihood).__name__},
            "prior": self.model.prior.config(),
            "network": [[s.name, list(s.shape)] for s in self.model.segments],
            "random": [s.name for s in self.model.random.segments],
            "num_data": self.feed.num_data,
            "num_batches": self.feed.num_batches,
            "seed": self.seed,
            "resumes": "exactly" if self.feed.exact else "exactly at epoch boundaries",
            "ranks": {"number": self.ranks.size, "batch_size": self.batch_size},
        }


def _orders_to_device(
    batches: list[Batch] | BatchStack, device: torch.device
) -> list[Batch] | BatchStack:
    if isinstance(batches, BatchStack):
        return BatchStack(*to_device((batches.inputs, batches.targets), device))
    return [to_device(batch, device) for batch in batches]


@contextmanager
def _gentle_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C finish the step it falls into; the second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
