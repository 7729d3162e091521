"""Interleaved timing: all contestants run in every round, and ratios are taken round by round."""

from __future__ import annotations

import math
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

Contestants = dict[str, Callable[[], object]]

FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One line of results.json: the ratio's median and the quartiles of its rounds."""

    bench: str
    net: str
    contestant: str
    ratio: float
    iqr: tuple[float, float]
    baseline: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer, at its next line of Python."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds if math.isfinite(seconds) else 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def interleave(
    bench: str,
    net: str,
    contestants: Contestants,
    baselines: dict[str, str],
    rounds: int,
    steps: int,
    seconds: float = math.inf,
    long: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Median ratio of every contestant to every baseline (contestant name → printed name).

    The order changes every round; each contestant makes one unmeasured step first, so that it finds
    its own data in the cache and not its predecessor's; not if ``long``, where a step takes seconds
    and the cache no part of it. ``clock`` may be that of the processor, which others don't slow
    down. After ``seconds`` no new round is begun, except that there are
    `FEWEST_ROUNDS`.
    """
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for step in () if long else contestants.values():
        step()
        step()
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        shuffle(order)
        for name in order:
            step = contestants[name]
            if not long:
                step()
            start = clock()
            for _ in range(steps):
                step()
            took[name].append((clock() - start) / steps)
    rows = []
    for base, printed in baselines.items():
        for name, times in took.items():
            ratios = [t / b for t, b in zip(times, took[base], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append(
                Row(bench, net, name, round(middle, 3), (round(low, 3), round(high, 3)), printed)
            )
    return rows
