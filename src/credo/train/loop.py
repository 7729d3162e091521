"""The one training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from credo.collectives import Ranks
from credo.errors import CheckpointError, DataError, NonFiniteError, UnsupportedError
from credo.families import Delta
from credo.method import Method
from credo.metrics import accuracy
from credo.model import Model
from credo.network.batches import to_device
from credo.noise import key_to_seed
from credo.posterior.posterior import Posterior
from credo.schedules import ScheduleSpec, describe
from credo.storage import under
from credo.train.feed import Feed, make_feed
from credo.train.folder import RunFolder
from credo.train.progress import Reporter, reporter
from credo.train.rates import Rates
from credo.types import Json

SECONDS_BETWEEN_CHECKPOINTS = 10.0
VALIDATION_SAMPLES = 16


def fit(
    model: Model,
    method: Method,
    train_data: Any,
    epochs: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    val_data: Any = None,
    folder: str | Path | None = None,
    resume: bool = True,
    device: str | torch.device | None = None,
    progress: bool | Reporter = True,
    *,
    num_data: int | None = None,
    schedule: ScheduleSpec = "constant",
    keep: Literal["last", "best"] = "last",
) -> Posterior:
    """Train ``model`` by ``method`` and return the posterior.

    ``train_data`` is a tuple (inputs, targets) of tensors or arrays, a Dataset, or a DataLoader.
    Training starts from the network's current weights and leaves it at the posterior mean.
    Methods whose step takes all data (`HMC`) get them whole, whatever ``batch_size`` says.

    With a ``folder`` the run can be killed at any moment and called again: it resumes bit for bit
    from its last checkpoint (with a DataLoader of your own, from the last epoch boundary), and a
    finished run is not repeated. Ctrl-C stops after the current step with a checkpoint. A loss that
    is not finite raises `NonFiniteError` and keeps the last good checkpoint.

    ``val_data`` is scored after each epoch. ``num_data`` is only needed where the data does not
    know its own length. ``schedule`` changes the learning rates on the way: "cosine", "linear", a
    function of the fraction of training done, one of `credo.schedules`, or a mapping from "mean"
    and "scale" to such. ``keep="best"`` returns the epoch with the lowest ``val_nll``, early
    stopping without having to say when. The records of all epochs are ``posterior.history``.
    """
    if Ranks().several:
        raise UnsupportedError(
            "credo.fit runs in one process: every rank would train on the same batches and write "
            "the same folder. On several ranks use credo.optim in a loop of your own, as "
            "examples/train_cifar10_ranks.py does"
        )
    if device is not None:
        model.net.to(device)
        if isinstance(model.likelihood, torch.nn.Module):
            model.likelihood.to(device)
    whole = getattr(method, "needs_all_data", False)
    feed = make_feed(train_data, batch_size, model, num_data, whole)
    feed.check(model)
    epochs = method.default_epochs if epochs is None else epochs
    if epochs < 0:
        raise DataError(f"epochs={epochs} must be 0 or more")
    if keep not in ("last", "best"):
        raise DataError(f'keep={keep!r} must be "last" or "best"')
    if keep == "best" and val_data is None:
        raise DataError('keep="best" chooses an epoch by its NLL on val_data, and there is none')
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        reporter(progress, epochs, feed.num_batches) as report,
    ):
        torch.manual_seed(key_to_seed(seed, 2))
        run = _Run(model, method, feed, epochs, seed, val_data, report, schedule, keep)
        if folder is not None:
            run.attach(RunFolder(folder), resume)
        return run.to_the_end()


@dataclass
class _Best:
    """The lowest validation NLL so far and the state that had it."""

    nll: float = math.inf
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: Json = field(default_factory=dict)


class _Run:
    """The state of one call of `fit`: what was done, and what is on disk."""

    def __init__(
        self,
        model: Model,
        method: Method,
        feed: Feed,
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
        self.val_data, self.report = val_data, report
        self.state = method.init(model, feed.num_data, torch.Generator().manual_seed(seed))
        self.state.clock.num_batches = feed.num_batches
        self.schedule = schedule
        self.rates = Rates(schedule, getattr(self.state, "optimizer", None))
        self.epoch, self.batch, self.nll_sum, self.seconds = 0, 0, 0.0, 0.0
        self.history: list[Json] = []
        self.keep, self.best = keep, _Best()
        self.folder: RunFolder | None = None
        self.saved_at = time.monotonic()
        if self.rates.watching:
            validated = {} if val_data is None else {"val_nll": 0.0, "val_accuracy": 0.0}
            self.rates.check(self._numbers(nll=0.0) | validated)

    def attach(self, folder: RunFolder, resume: bool) -> None:
        """Keep checkpoints in this folder, starting from the one it has."""
        self.folder = folder
        if folder.begin(self._config(), resume):
            self._restore(*folder.restore())
            self.history = folder.records_before(self.epoch)
            if self.keep == "best" and self.history:
                self.best = _Best(min(r["val_nll"] for r in self.history), *folder.best())
        else:
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
            batches = self.feed.batches(self.seed, 0)
            self.state = self.method.finish(self.state, batches)
        except NonFiniteError as error:
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
        for batch in self.feed.batches(self.seed, self.epoch, skip=self.batch):
            self.rates.set(self.epoch + self.batch / self.feed.num_batches, self.epochs)
            self.state, info = self.method.update(self.state, to_device(batch, device))
            self.nll_sum += info.nll
            self.batch += 1
            self.report.step(self.epoch, self.batch, self.nll_sum / self.batch)
            if interrupted.is_set():
                self._stop()
            if self.feed.exact and time.monotonic() - self.saved_at > SECONDS_BETWEEN_CHECKPOINTS:
                self.checkpoint()
        if not self.batch:
            raise DataError("the training data yielded no batches")
        self.seconds += time.monotonic() - started
        self._record()
        self.epoch, self.batch, self.nll_sum = self.epoch + 1, 0, 0.0
        if time.monotonic() - self.saved_at > SECONDS_BETWEEN_CHECKPOINTS or not self.feed.exact:
            self.checkpoint()

    def _numbers(self, nll: float) -> Json:
        """What is known of the state, given the mean NLL of the epoch."""
        record: Json = {
            "epoch": self.epoch,
            "step": self.state.clock.step,
            "nll": nll,
            **self.method.summary(self.state),
            "seconds": self.seconds,
            **self.rates.summary(),
        }
        if "kl" in record:
            # ELBO_η of Huix et al. (2022), in nats over the whole data set.
            record["elbo"] = -nll * self.feed.num_data - record["temperature"] * record["kl"]
        return record

    def _record(self) -> None:
        record = self._numbers(self.nll_sum / self.batch)
        if self.val_data is not None:
            record |= self._validate()
        self.rates.learn(record)
        self.history.append(record)
        if self.keep == "best" and record["val_nll"] < self.best.nll:
            self._remember(record["val_nll"])
        if self.folder is not None:
            self.folder.append(record)
        self.report.epoch(record)

    def _validate(self) -> Json:
        posterior: Posterior = self.method.posterior(self.state)
        feed = make_feed(self.val_data, 1024, self.model)
        # A point has nothing to average over.
        samples = 1 if isinstance(posterior.q, Delta) else VALIDATION_SAMPLES
        log_probs, parts = [], []
        for inputs, targets in feed.batches(self.seed, 0):
            predictive = posterior.predict(inputs, samples=samples)
            log_probs.append(predictive.log_prob(targets.to(predictive.outputs.device)))
            parts.append((predictive, targets))
        scores = {"val_nll": -float(torch.cat(log_probs).mean())}
        if self.model.likelihood.kind == "classification":
            ignored = self.model.likelihood.ignore_index
            counts = [t.numel() if ignored is None else int((t != ignored).sum()) for _, t in parts]
            correct = sum(
                accuracy(p.probs, t, ignored) * count
                for (p, t), count in zip(parts, counts, strict=True)
                if count
            )
            scores["val_accuracy"] = correct / sum(counts)
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
        tensors, meta = self._pack_state()
        tensors["torch_rng"] = torch.get_rng_state()
        place: Json = {"epoch": self.epoch, "batch": self.batch, "nll_sum": self.nll_sum}
        place |= {"seconds": self.seconds, "rates": self.rates.pack()}
        self.folder.checkpoint(tensors, {**place, "method": meta})
        self.saved_at = time.monotonic()

    def _remember(self, nll: float) -> None:
        tensors, meta = self._pack_state()
        self.best = _Best(nll, {name: t.detach().clone() for name, t in tensors.items()}, meta)
        if self.folder is not None:
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
            self.nll_sum, self.seconds = meta["nll_sum"], meta["seconds"]
            self.rates.unpack(meta.get("rates"))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this model and method ({error}); use another folder, "
                "or resume=False to start anew"
            ) from error

    def _config(self) -> Json:
        changing = {} if self.schedule == "constant" else {
            "schedule": describe(self.schedule), "epochs": self.epochs
        }  # fmt: skip
        return {
            **changing,
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
        }


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
