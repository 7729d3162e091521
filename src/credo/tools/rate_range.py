r"""Which learning rate? Raise it step by step through seven decades and watch the loss.

    α_t = start·(stop/start)^(t/(T−1)),        t = 0 … T−1

====== ============ ====================================================================
symbol argument     meaning
====== ============ ====================================================================
α      ``start``,   the rate of the means, or the only one; that of the scales keeps its
       ``stop``     ratio to it
T      ``steps``    steps at most; the test ends where training diverges
====== ============ ====================================================================

The loss is the batch's NLL, smoothed by a running mean that keeps 0.9 and is corrected for its
start. At rates too low it stays where it was, then it falls, then it rises again. It has diverged
when it is above its start by as much as it had fallen below, and by more than the noise of
batches explains; or when a step ends in numbers that are not finite. `RateRange.cause` names which.

The suggestion is a tenth of the rate where the smoothed loss is lowest, the rule of Book (2020).
On the embedded digits (64-64-10, 8 epochs, test NLL) it beat rates half a decade below and above
for SGD, VI, VariationalLaplace, IVON and Vadam, and was next to the best for Adam. The other rule
in use, `RateRange.steepest`, the rate at which the loss falls fastest for each decade, was too high
for most. VOGN's curvature needs more than a hundred steps to form: its rate came out more than
a decade too high. If the lowest loss is at ``stop``, the best rate lies beyond it: raise ``stop``.
If no rate lowered the loss by more than its noise, the lowest is an accident of batches and draws,
and there is no suggestion but an error that says so.

The network is left exactly as it was: weights, buffers, learned noise, mode, random numbers.

    >>> import torch, credo
    >>> x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> rates = credo.lr_range_test(model, credo.VI(), (x, y), progress=False)
    >>> 1e-4 < rates.suggestion < 1
    True

Reference: L. Smith, "Cyclical learning rates for training neural networks", 2017; Book,
thesis on training Bayesian neural networks, 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
from torch.optim import Optimizer

from credo.checks import Count, Positive, Range, checked
from credo.display import Display, Displayed
from credo.errors import ConvergenceError, DataError, NonFiniteError, UnsupportedError
from credo.method import Method
from credo.model import Model
from credo.network.batches import to_device
from credo.network.state import modes_kept
from credo.noise import key_to_seed
from credo.report.style import BLACK, BLUE, blank_figure, house_style, save
from credo.train.feed import Feed, make_feed
from credo.train.progress import reporter
from credo.types import Batch

KEPT = 0.9
"""What the running mean keeps: it looks back over ten steps, less than a decade of rates."""
FEWEST_STEPS = 20
"""Fewer are too few to see a curve."""
DIVERGENCES = (
    NonFiniteError,
    ConvergenceError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)
"""What methods raise when numbers overflow; decompositions of such matrices have their own."""


@dataclass(frozen=True, repr=False)
class RateRange(Displayed):
    """What `lr_range_test` saw.

    Args:
        rates: The rates that were tried, rising.
        losses: The smoothed loss after each.
        diverged: The last rate before training came apart, None if it held to the end.
        cause: How it came apart; empty if it held.
        noise: Standard deviation of the loss from batch to batch, before it moved.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: float | None
    cause: str = ""
    noise: float = 0.0

    @property
    def _lowest(self) -> int:
        """Where the loss is lowest, after the first tenth: a mean of few losses is low by luck."""
        return min(range(len(self.losses) // 10, len(self.losses)), key=self.losses.__getitem__)

    @property
    def lowest(self) -> float:
        """The rate where the smoothed loss is lowest."""
        return self.rates[self._lowest]

    @property
    def fell(self) -> bool:
        """Whether some rate lowered the loss by more than its noise explains.

        The running mean has a standard deviation of √(0.1/1.9) = 0.23 of a single loss's; the level
        at the beginning, a mean over a tenth of the steps, about as much. Half is 1.5 of both.
        """
        level = self.losses[max(len(self.losses) // 10 - 1, 0)]
        return self.losses[self._lowest] < level - self.noise / 2

    @property
    def steepest(self) -> float:
        """The rate, up to that of the lowest loss, where the loss falls fastest per decade."""
        end = self._lowest
        # Over a tenth of the run: neighbouring losses differ by less than their noise.
        width = max(1, len(self.losses) // 10)
        falls = {
            i: self.losses[max(0, i - width)] - self.losses[i] for i in range(1, max(2, end + 1))
        }
        return self.rates[max(falls, key=falls.__getitem__)]

    @property
    def suggestion(self) -> float:
        """A rate to train with: a tenth of `lowest`; an error if no rate lowered the loss."""
        if not self.fell:
            raise ConvergenceError(
                f"no rate from {self.rates[0]:.2g} to {self.rates[-1]:.2g} lowered the loss by "
                f"more than its noise from batch to batch, {self.noise:.2g}: take more steps, "
                "larger batches or less noise in the weights (a lower temperature), or raise stop"
            )
        return self.lowest / 10

    def _display(self) -> Display:
        end = "held to the end" if self.diverged is None else f"diverged at {self.diverged:.2g}"
        suggestion = f"{self.suggestion:.2g}" if self.fell else "none, the loss never fell"
        return Display(
            f"RateRange: {len(self.rates)} rates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}, "
            f"suggestion {suggestion}, {end}",
            "train with lr=rates.suggestion; rates.plot(path)",
            rows=[
                *([("diverged", f"{self.diverged:.2g}", self.cause)] if self.diverged else []),
                ("suggestion", suggestion, "a tenth of where the loss is lowest"),
                ("lowest", f"{self.lowest:.2g}", "where the smoothed loss is lowest"),
                ("steepest", f"{self.steepest:.2g}", "where it falls fastest"),
            ],
        )

    def plot(self, path: str | Path) -> Path:
        """Draw loss against rate, with the suggestion marked.

        Args:
            path: The file to write; its name says the format.
        """
        with house_style():
            figure = blank_figure(6, 3.6)
            axes = figure.subplots()
            axes.plot(self.rates, self.losses, color=BLUE)
            for rate, line, label in (
                (self.suggestion if self.fell else None, "-", "suggestion"),
                (self.steepest, "--", "steepest"),
                (self.diverged, ":", "diverged"),
            ):
                if rate is not None:
                    text = f"{label} {rate:.2g}"
                    axes.axvline(rate, color=BLACK, linestyle=line, linewidth=1, label=text)
            # What follows the divergence would press the rest of the curve flat.
            low, start = min(self.losses), self.losses[0]
            if start > low:
                axes.set_ylim(low - 0.1 * (start - low), start + 1.1 * (start - low))
            axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed NLL of a batch")
            axes.legend()
        return save(figure, path)


@checked
def lr_range_test(
    model: Model,
    method: Method[Any],
    data: Any,
    *,
    start: Positive = 1e-6,
    stop: Positive = 10.0,
    steps: Annotated[int, Range(FEWEST_STEPS)] = 100,
    batch_size: Count = 128,
    seed: int = 0,
    num_data: Count | None = None,
    progress: bool = True,
) -> RateRange:
    """Train for a hundred steps at rising rates, put everything back, and say what was seen.

    Args:
        model: It is left as it was.
        method: Any that trains by an optimizer (MAP, VI, VariationalLaplace, and the
            natural-gradient methods); its own ``lr`` only sets the ratio to the scales' rate.
        data: What `credo.fit` takes.
        start: The first rate.
        stop: The last rate.
        steps: At most; fewer where training diverges, which the result names.
        batch_size: That of `credo.fit`.
        seed: That of `credo.fit`.
        num_data: That of `credo.fit`.
        progress: Whether to show a progress bar.
    """
    if not start < stop:
        raise DataError(f"start={start} must be less than stop={stop}")
    feed = make_feed(data, batch_size, model, num_data)
    feed.check(model)
    rates = [start * (stop / start) ** (t / (steps - 1)) for t in range(steps)]
    with _left_as_it_was(model), reporter(progress, 1, steps) as report:
        torch.manual_seed(key_to_seed(seed, 2))
        state = method.init(model, feed.num_data, torch.Generator().manual_seed(seed))
        state.clock.num_batches = feed.num_batches
        optimizer = _optimizer(method, state)
        ratios = _ratios(optimizer)
        model.net.train()
        curve = _Curve(first=steps // 10)
        for rate, batch in zip(rates, _batches(model, feed, seed), strict=False):
            for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
                group["lr"] = rate * ratio
            try:
                state, info = method.update(state, batch)
            except DIVERGENCES as error:
                curve.cause = f"{type(error).__name__}: {error}"
            else:
                curve.add(info.nll)
            if curve.cause:
                break
            report.step(0, len(curve.smooth), curve.smooth[-1])
    if len(curve.smooth) < 2:
        raise ConvergenceError(
            f"training by {type(method).__name__} diverged at its first steps, at a rate of "
            f"{start} ({curve.cause}): lower start, and look at the scale of inputs and targets"
        )
    tried = rates[: len(curve.smooth)]
    diverged = tried[-1] if curve.cause else None
    return RateRange(tuple(tried), tuple(curve.smooth), diverged, curve.cause, curve.noise)


class _Curve:
    """The smoothed loss so far, and whether it has come apart."""

    def __init__(self, first: int) -> None:
        self.losses: list[float] = []
        self.smooth: list[float] = []
        self.cause = ""
        self._first = first
        self._sum = 0.0

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        self._sum = KEPT * self._sum + (1 - KEPT) * loss
        self.smooth.append(self._sum / (1 - KEPT ** len(self.losses)))
        if len(self.losses) <= self._first:
            return
        level = fmean(self.losses[: self._first])
        fallen = max(0.0, level - min(self.smooth))
        # NLLs of densities may be negative, so multiples of the lowest loss would mean nothing.
        if not self.smooth[-1] <= level + max(fallen, 4 * self.noise):
            self.cause = f"the loss rose from {level:.3g} at the beginning to {self.smooth[-1]:.3g}"

    @property
    def noise(self) -> float:
        """Of single losses, while rates are too low to change them."""
        beginning = self.losses[: self._first]
        return stdev(beginning) if len(beginning) > 1 else 0.0


def _optimizer(method: Method[Any], state: Any) -> Optimizer:
    optimizer = method.optimizer_of(state)
    if optimizer is None or "lr" not in optimizer.param_groups[0]:
        raise UnsupportedError(
            "a learning-rate range test needs a method that trains by an optimizer; this one does "
            "not. Use it with MAP, VI, VariationalLaplace or a natural-gradient method as IVON"
        )
    return optimizer


def _ratios(optimizer: Optimizer) -> list[float]:
    """Each group's rate as a multiple of that of the means."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return [rate / rates[0] for rate in rates]


def _batches(model: Model, feed: Feed, seed: int) -> Iterator[Batch]:
    device = model.like.device
    for epoch in count():
        empty = True
        for batch in feed.batches(seed, epoch):
            empty = False
            yield to_device(batch, device)
        if empty:
            raise DataError("the training data yielded no batches")


@contextmanager
def _left_as_it_was(model: Model) -> Iterator[None]:
    """Weights, buffers, learned noise, modes and torch's random numbers."""
    weights = model.weights()
    kept = [*model.buffers().values(), *model.noise_parameters()]
    copies = [tensor.detach().clone() for tensor in kept]
    try:
        with modes_kept(model.net), torch.random.fork_rng(devices=[]):
            yield
    finally:
        with model.bind().writing() as vector:
            vector.copy_(weights)
        with torch.no_grad():
            for tensor, copy in zip(kept, copies, strict=True):
                tensor.copy_(copy)
        for parameter in (*model.net.parameters(), *model.noise_parameters()):
            parameter.grad = None
